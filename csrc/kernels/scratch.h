// Working memory that a thread keeps from call to call: fresh pages would have to be faulted in
// each time.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

struct Scratch {
  int64_t capacity;
  float* data;
};

inline void release_scratch(void* memory) {
  free(static_cast<Scratch*>(memory)->data);
  free(memory);
}

// A pthread key rather than an array indexed by OpenMP's thread number: two Python threads have
// each a thread 0. Its destructor returns the memory when the thread pool shrinks.
inline pthread_key_t scratch_key() {
  static pthread_key_t key;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_key_create(&key, release_scratch); });
  return key;
}

// At least `count` floats of the calling thread's own, aligned to a cache line; whatever was last
// written.
inline float* thread_scratch(int64_t count) {
  const pthread_key_t key = scratch_key();
  Scratch* mine = static_cast<Scratch*>(pthread_getspecific(key));
  if (!mine) {
    mine = static_cast<Scratch*>(calloc(1, sizeof(Scratch)));
    pthread_setspecific(key, mine);
  }
  if (mine->capacity < count) {
    free(mine->data);
    mine->capacity = (count + 15) / 16 * 16;
    mine->data = static_cast<float*>(aligned_alloc(64, mine->capacity * sizeof(float)));
    if (!mine->data) {
      fprintf(stderr, "cputrain: no memory for %lld bytes of scratch\n",
              (long long)mine->capacity * 4);
      abort();
    }
  }
  return mine->data;
}

}  // namespace

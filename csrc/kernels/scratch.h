// A kernel's working memory, which the caller owns. Kernels allocate nothing: when memory ends, the
// caller's allocation fails, which Python reports as an error, and no kernel has to give up half
// way.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>

#include "api.h"

namespace {

// Cuts the caller's memory into arrays. A kernel first takes all arrays that it needs and asks
// whether there was `enough`; if not, it returns, and the caller calls again with more.
class Arena {
 public:
  explicit Arena(Scratch* scratch)
      : scratch_(scratch), begin_((uintptr_t)scratch->data), next_(begin_) {}
  Arena(const Arena&) = delete;

  // Aligned to a cache line; holds anything until the kernel has written it.
  template <class T>
  T* take(int64_t count) {
    const uintptr_t array = (next_ + kCacheLine - 1) / kCacheLine * kCacheLine;
    next_ = array + count * sizeof(T);
    return (T*)array;
  }

  bool enough() {
    scratch_->needed = next_ > begin_ ? (int64_t)(next_ - begin_) : 1;  // no array is null
    return scratch_->needed <= scratch_->bytes;
  }

 private:
  static constexpr uintptr_t kCacheLine = 64;
  Scratch* scratch_;
  const uintptr_t begin_;
  uintptr_t next_;
};

// As many floats for each thread of a team, which must not have more threads than this says.
class ThreadScratch {
 public:
  ThreadScratch(Arena& arena, int64_t threads, int64_t floats)
      : stride_((floats + kPageFloats - 1) / kPageFloats * kPageFloats),
        data_(arena.take<float>(threads * stride_)) {}

  float* mine() const { return data_ + omp_get_thread_num() * stride_; }

 private:
  static constexpr int64_t kPageFloats = 1024;  // a page lies at the node of its thread alone
  const int64_t stride_;
  float* const data_;
};

}  // namespace

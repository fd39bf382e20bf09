// What the drivers share: random sizes, memory between guard zones, and kernels of every
// instruction set that this CPU runs.
#pragma once

#include <dlfcn.h>
#include <sanitizer/asan_interface.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "api.h"  // compiled with CPUTRAIN_ISA=portable: the types are the same for every other
#include "api_collectives.h"

// Where the driver is, for its last words.
struct Position {
  uint64_t seed = 0;
  int64_t shape = 0;
  std::string isa = "portable", shape_text;
};
inline Position position;

[[noreturn]] inline void fail(const std::string& what) {
  fprintf(stderr, "%s\nin shape %lld of seed %llu, %s: %s\n", what.c_str(),
          (long long)position.shape, (unsigned long long)position.seed, position.isa.c_str(),
          position.shape_text.c_str());
  exit(1);
}
inline void expect(bool holds, const char* what) {
  if (!holds) fail(what);
}
template <class... Values>
void describe(const char* kernel, Values... values) {
  position.shape_text = kernel;
  ((position.shape_text += " " + std::to_string(values)), ...);
}

inline void* kernel_named(const char* name) {
  const std::string symbol = std::string("cputrain_") + name + "_" + position.isa;
  void* found = dlsym(RTLD_DEFAULT, symbol.c_str());
  if (!found) fail("no " + symbol);
  return found;
}
// CALL(dropout, x, y, …): the kernel of the instruction set that is being tested.
#define CALL(name, ...) ((decltype(&KERNEL(name)))kernel_named(#name))(__VA_ARGS__)

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int64_t below(int64_t limit) { return (int64_t)(engine_() % (uint64_t)limit); }
  bool coin() { return below(2) == 1; }
  bool seldom() { return below(8) == 0; }
  float normal() { return normal_(engine_); }
  // 0, 1, sizes around those of vectors, blocks and chunks, and any other.
  int64_t size(int64_t most) {
    static const int64_t odd[] = {0,   0,   1,   1,   2,   3,   4,   5,   7,   8,   9,   15,  16,
                                  17,  31,  32,  33,  48,  63,  64,  65,  96,  127, 128, 129, 191,
                                  192, 193, 255, 256, 257, 383, 384, 400, 511, 512, 513, 600};
    const int64_t found = coin() ? odd[below(sizeof odd / sizeof *odd)] : below(most + 1);
    return found <= most ? found : below(most + 1);
  }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[below((int64_t)from.size())];
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// `count` elements between two guard zones. The sanitizer stops whatever touches these; masked
// vector stores, which it doesn't see, are found by their bytes. All bits are set at first: as
// floats NaN, so that a result made of what was never written shows.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : size_(count) {
    const int64_t bytes = count * (int64_t)sizeof(T);
    memory_ = (unsigned char*)aligned_alloc(64, (2 * kZone + bytes + 63) / 64 * 64 + kZone);
    data_ = memory_ + kZone;
    memset(data_, 0xff, bytes);
    memset(memory_, kPattern, kZone);
    memset(data_ + bytes, kPattern, kZone);
    ASAN_POISON_MEMORY_REGION(memory_, kZone);
    ASAN_POISON_MEMORY_REGION(data_ + bytes, kZone);
  }
  Guarded(Random& random, int64_t count) : Guarded(count) {
    for (int64_t i = 0; i < count; i++) (*this)[i] = (T)random.normal();
  }
  ~Guarded() {
    const int64_t bytes = size_ * (int64_t)sizeof(T);
    ASAN_UNPOISON_MEMORY_REGION(memory_, kZone);
    ASAN_UNPOISON_MEMORY_REGION(data_ + bytes, kZone);
    for (int64_t i = 0; i < kZone; i++)
      expect(memory_[i] == kPattern && data_[bytes + i] == kPattern, "a guard zone was written");
    free(memory_);
  }
  Guarded(const Guarded&) = delete;

  operator T*() { return data(); }
  T* data() { return (T*)data_; }
  const T* data() const { return (const T*)data_; }
  int64_t size() const { return size_; }
  template <class I>
  T& operator[](I i) {
    return data()[i];
  }
  // For what may be null.
  T* if_wanted(bool wanted) { return wanted ? data() : nullptr; }
  void copy(const Guarded& other) { memcpy(data_, other.data(), size_ * sizeof(T)); }

 private:
  static constexpr int64_t kZone = 128;
  static constexpr unsigned char kPattern = 0xa5;
  const int64_t size_;
  unsigned char *memory_, *data_;
};
using Floats = Guarded<float>;

// Calls a kernel as cputrain.native does: without working memory it must say how much it needs and
// do nothing else; then it gets exactly that.
template <class Kernel>
void with_scratch(Kernel kernel) {
  Scratch none = {nullptr, 0, 0};
  kernel(&none);
  Guarded<char> memory(none.needed);
  Scratch given = {memory.data(), none.needed, 0};
  kernel(&given);
  expect(given.needed == none.needed, "a kernel doesn't know how much memory it needs");
}

inline bool near(double found, double expected, double tolerance, double scale = 1) {
  if (std::isnan(expected) || std::isinf(expected)) return !std::isfinite(found);
  return std::fabs(found - expected) <= tolerance * (std::fabs(expected) + scale);
}

// The results of the first instruction set, with which those of the others are compared.
class Same {
 public:
  explicit Same(double tolerance) : tolerance_(tolerance) {}
  void check(const Floats& found) {
    if (first_.size() < (size_t)(at_ + 1)) first_.resize(at_ + 1);
    std::vector<float>& before = first_[at_++];
    if (!complete_) before.assign(found.data(), found.data() + found.size());
    double largest = 1;  // as the inputs: what should be 0 is a rounding error of theirs
    for (float x : before) largest = std::fmax(largest, std::fabs(x));
    for (int64_t i = 0; i < found.size(); i++)
      if (!near(found.data()[i], before[i], tolerance_, largest))
        fail("result " + std::to_string(at_) + " differs between instruction sets at " +
             std::to_string(i));
  }
  void next() { complete_ = true, at_ = 0; }

 private:
  const double tolerance_;
  std::vector<std::vector<float>> first_;
  int at_ = 0;
  bool complete_ = false;
};

// Instruction sets that this program was linked with and this CPU has.
inline std::vector<std::string> runnable() {
  std::vector<std::string> found = {"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && dlsym(RTLD_DEFAULT, "cputrain_dropout_avx2")) found.push_back("avx2");
  if (has_avx512 && dlsym(RTLD_DEFAULT, "cputrain_dropout_avx512")) found.push_back("avx512");
#endif
  return found;
}
// body(same) for every instruction set, whose results `same` compares.
template <class Body>
void on_every_isa(double tolerance, Body body) {
  static const std::vector<std::string> sets = runnable();
  Same same(tolerance);
  for (const std::string& isa : sets) {
    position.isa = isa;
    body(same);
    same.next();
  }
}

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}
inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One random problem for each kernel of a family.
void check_rows(Random& random);
void check_embeddings(Random& random);
void check_optimizers(Random& random);
void check_attention(Random& random);
void check_products(Random& random);
void check_adapters(Random& random);
void check_reductions(Random& random);

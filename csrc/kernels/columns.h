// Loops over the columns of one row, and sums over the rows of each column.
//
// A body is a lambda that is written once and compiled twice: for whole vectors and for the part of
// one at the end of the row. It gets the first column, a number j (0 … 3, one chain of sums each:
// an addition takes four cycles, so that one chain alone would wait) and the way to load and store.
#pragma once

#include "bf16.h"
#include "random.h"
#include "scratch.h"

namespace {

#define INLINE_BODY \
  __attribute__((always_inline))  // a body that is called passes its sums through memory

constexpr int kChains = 4;

// A kernel at memory speed stays on one thread below this: 64 KB take about as long as waking the
// others.
constexpr int64_t kFewElements = 16384;

// T is float or Bf16.
struct Whole {
  template <class T>
  Vec load(const T* p) const {
    return ::load(p);
  }
  template <class T>
  void store(T* p, Vec v) const {
    ::store(p, v);
  }
  Vec only(Vec v) const { return v; }
  Vec padded(Vec v, float) const { return v; }
};

struct Part {
  int count;
  template <class T>
  Vec load(const T* p) const {
    return load_part(p, count);
  }
  template <class T>
  void store(T* p, Vec v) const {
    store_part(p, v, count);
  }
  // Zero beyond the row's end, for sums of what isn't zero for a zero.
  Vec only(Vec v) const { return padded(v, 0.f); }
  // `other` beyond the row's end.
  Vec padded(Vec v, float other) const {
    return select((VecI)lane_numbers() < count, v, splat(other));
  }
};

inline float sum_of_chains(const Vec* sums) {
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// body(first column, chain, Whole or Part)
template <class Body>
INLINE_BODY inline void for_columns(int64_t cols, Body body) {
  int64_t c = 0;
  for (; c + kChains * kWidth <= cols; c += kChains * kWidth)
#pragma GCC unroll 4
    for (int j = 0; j < kChains; j++) body(c + j * kWidth, j, Whole{});
  for (; c + kWidth <= cols; c += kWidth) body(c, 0, Whole{});
  if (c < cols) body(c, 0, Part{(int)(cols - c)});
}

// body(first column, chain, Whole or Part, dropout factor). Without dropout the factor is the
// constant 1, which costs nothing. The two vectors that share a hash are used at once: a whole
// block of 32 columns would be four registers of factors on AVX2.
template <bool kDropout, class Body>
INLINE_BODY inline void for_columns_dropped(int64_t cols, RowKey key, DropoutRate rate, Body body) {
  if constexpr (!kDropout) {
    for_columns(cols,
                [&](int64_t c, int j, auto part) INLINE_BODY { body(c, j, part, splat(1.f)); });
    return;
  }
  int64_t first = 0;
  for (; first + kDropoutBlock <= cols; first += kDropoutBlock)
#pragma GCC unroll 4
    for (int i = 0; i < kDropoutVecs / 2; i++) {
      Vec here, sixteen_on;
      const int64_t c = first + i * kWidth;
      dropout_factors(key, rate, c, &here, &sixteen_on);
      body(c, 2 * i % kChains, Whole{}, here);
      body(c + 16, (2 * i + 1) % kChains, Whole{}, sixteen_on);
    }
  if (first == cols) return;
  Vec factors[kDropoutVecs];
  dropout_block(key, rate, first, factors);
  for (int i = 0; i < kDropoutVecs; i++) {
    const int64_t c = first + i * kWidth, left = cols - c;
    if (left >= kWidth)
      body(c, 0, Whole{}, factors[i]);
    else if (left > 0)
      body(c, 0, Part{(int)left}, factors[i]);
  }
}

// Rows are cut into chunks that depend on nothing but their number, each chunk sums its rows, and
// the chunks' sums are added in order: the result doesn't depend on the number of threads. 64
// chunks keep 64 cores busy; fewer than 32 rows wouldn't repay a chunk's own row of sums.
struct RowChunks {
  int64_t rows, each, count;
  explicit RowChunks(int64_t rows, int64_t fewest = 32) : rows(rows) {
    each = (rows + 63) / 64 < fewest ? fewest : (rows + 63) / 64;
    count = (rows + each - 1) / each;
  }
  int64_t first(int64_t chunk) const { return chunk * each; }
  int64_t last(int64_t chunk) const {
    return (chunk + 1) * each < rows ? (chunk + 1) * each : rows;
  }
};

// `kinds` rows of sums for each chunk.
class ColumnSums {
 public:
  ColumnSums(Arena& arena, const RowChunks& chunks, int kinds, int64_t cols)
      : chunks_(chunks.count),
        kinds_(kinds),
        cols_(cols),
        stride_((cols + 15) / 16 * 16),  // whole cache lines, and whole vectors of any width
        data_(arena.take<float>(chunks_ * kinds_ * stride_)) {}

  float* row(int64_t chunk, int kind) const { return data_ + (chunk * kinds_ + kind) * stride_; }
  // Sets the first `kinds` rows of a chunk to zero.
  void clear(int64_t chunk, int kinds) const {
    memset(row(chunk, 0), 0, kinds * stride_ * sizeof(float));
  }

  // To be called by all threads, after all chunks are done: totals of one kind, unless out is null.
  void total(int kind, float* out) const {
    if (!out) return;
    constexpr int64_t kBlock = 64;  // columns; four cache lines, so that no two threads write one
#pragma omp for schedule(static) nowait  // each total is another memory
    for (int64_t first = 0; first < cols_; first += kBlock) {
      const int64_t width = cols_ - first < kBlock ? cols_ - first : kBlock;
      for_columns(width, [&](int64_t c, int, auto part) INLINE_BODY {
        Vec all = {};
        for (int64_t k = 0; k < chunks_; k++) all += part.load(row(k, kind) + first + c);
        part.store(out + first + c, all);
      });
    }
  }

 private:
  const int64_t chunks_, kinds_, cols_, stride_;
  float* const data_;
};

}  // namespace

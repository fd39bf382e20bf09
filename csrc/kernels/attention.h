// What the forward and the backward pass of attention share: tile sizes, layouts and the passes
// over a row of scores. Shapes in comments: L tokens of a sequence, d the size of a head.
#pragma once

#include <cmath>

#include "api.h"
#include "random.h"
#include "scratch.h"
#include "tile_product.h"

namespace {

// Keys to a tile: a multiple of 32 (the dropout generator's block) and of 12 and 6 (rows of a block
// product, in which keys are rows for the gradients of keys and values).
constexpr int64_t kKeyTile = 96;
// Queries to a tile, a multiple of 12 and 6 again. A tile of scores is then 21 KB: in the backward
// pass two of them are nearly a first-level cache (32 or 48 KB), and everything else streams from
// the second.
constexpr int64_t kQueryTile = 48;
constexpr int64_t kScoreStride = spread_stride(kKeyTile + 1);

// The log-sum-exp of a row without any key to attend to. exp(score - infinity) is 0, so the
// backward pass gives such rows zero gradients, as the forward pass gave them zero output.
constexpr float kNothing = __builtin_inff();

// Scores carry log2 e with their scale, so that the softmax is one of powers of 2, which need no
// division of the argument. A bias below -2.3e38, such as float's lowest value in masks, so becomes
// -infinity.
constexpr float kLog2e = 1.44269504089f, kLn2 = 0.693147180560f;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t longest(const AttentionProblem& problem) {
  int64_t length = 0;
  for (int64_t s = 0; s < problem.sequences; s++)
    if (problem.lengths[s] > length) length = problem.lengths[s];
  return length;
}

inline float* head_rows(const HeadTensor& x, int64_t token, int64_t head) {
  return x.data + token * x.token_stride + head * x.head_stride;
}

// One sequence of one query head: where its rows are, and how its tiles of scores are masked and
// dropped.
struct Head {
  int64_t start, length, number;
  bool causal;
  const float* bias;  // of this sequence and head, or null
  int64_t bias_stride;
  DropoutRate rate;
  uint64_t key;
  uint64_t first_row;  // the generator's number of the first query
};

inline Head head_of(const AttentionProblem& problem, int64_t sequence, int64_t head) {
  const BiasTensor& bias = problem.bias;
  const int64_t start = problem.starts[sequence];
  return {
      start,
      problem.lengths[sequence],
      head,
      problem.causal != 0,
      bias.data ? bias.data + sequence * bias.sequence_stride + head * bias.head_stride : nullptr,
      bias.row_stride,
      DropoutRate(problem.p),
      problem.key,
      (uint64_t)(head * problem.total + start)};
}

// How many of the keys first_key … first_key + keys the query attends to.
inline int64_t visible_keys(const Head& head, int64_t query, int64_t first_key, int64_t keys) {
  if (!head.causal) return keys;
  const int64_t visible = query + 1 - first_key;
  return visible < 0 ? 0 : least(visible, keys);
}

// Rows of one head are as far apart as the whole hidden size, too far for the hardware to foresee
// the next one.
constexpr int64_t kRowsAhead = 12;  // about a main memory's latency, at a dozen cycles a row
template <bool kWrite>
inline void prefetch_row(const float* row, int64_t size) {
  for (int64_t c = 0; c < size; c += kLine) __builtin_prefetch(row + c, kWrite);
}

// Copies rows × d times `factor` into rows of whole vectors; the rest of the last vector is zero.
inline void pack_rows(const float* from, int64_t from_stride, int64_t rows, int64_t size,
                      float factor, float* to, int64_t to_stride) {
  const int tail = (int)(size % kWidth);
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    int64_t c = 0;
    prefetch_row<false>(from + kRowsAhead * from_stride, size);
    for (; c + kWidth <= size; c += kWidth) store(to + c, load(from + c) * factor);
    if (tail) store(to + c, load_part(from + c, tail) * factor);
  }
}

inline void unpack_rows(const float* from, int64_t from_stride, int64_t rows, int64_t size,
                        float factor, float* to, int64_t to_stride) {
  const int tail = (int)(size % kWidth);
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    int64_t c = 0;
    prefetch_row<true>(to + kRowsAhead * to_stride, size);
    for (; c + kWidth <= size; c += kWidth) store(to + c, load(from + c) * factor);
    if (tail) store_part(to + c, load(from + c) * factor, tail);
  }
}

// kWidth vectors as rows of a square, transposed: squares of 1, 2, 4 … lanes off the diagonal
// change places.
inline void transpose(Vec* rows) {
#pragma GCC unroll 4
  for (int s = 1; s < kWidth; s *= 2) {
    VecI low, high;
    for (int lane = 0; lane < kWidth; lane++) {
      low[lane] = lane & s ? kWidth + lane - s : lane;
      high[lane] = lane & s ? kWidth + lane : lane + s;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i++) {
      if (i & s) continue;
      const Vec a = rows[i], b = rows[i + s];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + s] = __builtin_shuffle(a, b, high);
    }
  }
}

// Copies L × d into tiles of d × kKeyTile, each kScoreStride wide; keys beyond L up to a whole
// vector are zero.
inline void pack_transposed(const float* from, int64_t from_stride, int64_t length, int64_t size,
                            float* to) {
  for (int64_t first = 0; first < length; first += kWidth) {
    float* tile = to + first / kKeyTile * size * kScoreStride + first % kKeyTile;
    for (int r = 0; r < kWidth; r++)
      prefetch_row<false>(from + (first + kWidth + r) * from_stride, size);
    for (int64_t c = 0; c < size; c += kWidth) {
      const int columns = (int)least(kWidth, size - c);
      Vec square[kWidth];
      for (int r = 0; r < kWidth; r++) {
        const float* row = from + (first + r) * from_stride + c;
        square[r] = first + r >= length ? Vec{}
                    : columns == kWidth ? load(row)
                                        : load_part(row, columns);
      }
      transpose(square);
      for (int r = 0; r < columns; r++) store(tile + (c + r) * kScoreStride, square[r]);
    }
  }
}

inline int64_t transposed_floats(int64_t length, int64_t size) {
  return round_up(length, kKeyTile) / kKeyTile * size * kScoreStride;
}

// Adds the bias (scores are multiplied by log2 e already), and gives masked keys the score
// -infinity up to the next whole block of dropout columns.
inline void finish_scores(const Head& head, int64_t first_query, int64_t queries, int64_t first_key,
                          int64_t keys, float* scores) {
  const int64_t padded = round_up(keys, kDropoutBlock);
  for (int64_t r = 0; r < queries; r++) {
    float* row = scores + r * kScoreStride;
    const int64_t visible = visible_keys(head, first_query + r, first_key, keys);
    if (head.bias) {
      const float* bias = head.bias + (first_query + r) * head.bias_stride + first_key;
      for (int64_t c = 0; c < visible; c++) row[c] += bias[c] * kLog2e;
    }
    for (int64_t c = visible; c < padded; c++) row[c] = -__builtin_inff();
  }
}

// 2^x for x <= 0 or slightly above; exactly 0 below -126.5. NaN stays NaN: max() returns its second
// argument then. 2^x = 2^n · 2^r with n the nearest integer; 2^r by a polynomial of degree 5
// (minimax, relative error 1e-7).
inline Vec exp2_nonpositive(Vec x) {
  // Adding 1.5 · 2^23 leaves an integer in the low bits (see round_to_int); 127 more make it the
  // exponent of 2^n, and of 0 for n = -127.
  const Vec magic = splat(12582912.f + 127.f);
  const Vec clamped = max(splat(-127.f), x);
  const Vec shifted = clamped + magic;
  const Vec r = clamped - (shifted - magic);
  Vec y = splat(0.00015353362f);
  y = y * r + 0.0013398875f;
  y = y * r + 0.00961843692f;
  y = y * r + 0.0555033237f;
  y = y * r + 0.240226477f;
  y = y * r + 0.693147182f;
  y = y * r + 1.f;
  return y * (Vec)((VecI)shifted << 23);
}

// Which elements of a 32-column block are kept, all bits set, in order (dropout_block in random.h
// without the factor).
inline void kept_block(RowKey key, DropoutRate rate, int64_t first, VecI* kept) {
  const int32_t threshold = (int32_t)rate.threshold;
#pragma GCC unroll 4
  for (int i = 0; i < kDropoutVecs / 2; i++) {
    const VecU counter = lane_numbers() + (uint32_t)(first / 2 + i * kWidth);
    const VecU bits = hash<VecU>(counter, key);
    kept[i] = (VecI)(bits & 0xffffu) >= threshold;
    kept[i + kDropoutVecs / 2] = (VecI)(bits >> 16) >= threshold;
  }
}

inline Vec keep(VecI kept, Vec x) { return (Vec)((VecI)x & kept); }

}  // namespace

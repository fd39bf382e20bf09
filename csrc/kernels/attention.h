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

// Copies rows × d times `factor` into rows of whole vectors; the rest of the last vector is zero.
inline void pack_rows(const float* from, int64_t from_stride, int64_t rows, int64_t size,
                      float factor, float* to, int64_t to_stride) {
  const int tail = (int)(size % kWidth);
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    int64_t c = 0;
    for (; c + kWidth <= size; c += kWidth) store(to + c, load(from + c) * factor);
    if (tail) store(to + c, load_part(from + c, tail) * factor);
  }
}

inline void unpack_rows(const float* from, int64_t from_stride, int64_t rows, int64_t size,
                        float factor, float* to, int64_t to_stride) {
  const int tail = (int)(size % kWidth);
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    int64_t c = 0;
    for (; c + kWidth <= size; c += kWidth) store(to + c, load(from + c) * factor);
    if (tail) store_part(to + c, load(from + c) * factor, tail);
  }
}

// Copies L × d into tiles of d × kKeyTile, each kScoreStride wide; keys beyond L up to a whole
// vector are zero.
inline void pack_transposed(const float* from, int64_t from_stride, int64_t length, int64_t size,
                            float* to) {
  for (int64_t first = 0; first < length; first += kKeyTile, to += size * kScoreStride) {
    const int64_t keys = least(kKeyTile, length - first), padded = round_up(keys, kWidth);
    for (int64_t key = 0; key < padded; key++) {
      const float* row = from + (first + key) * from_stride;
      for (int64_t c = 0; c < size; c++) to[c * kScoreStride + key] = key < keys ? row[c] : 0.f;
    }
  }
}

inline int64_t transposed_floats(int64_t length, int64_t size) {
  return round_up(length, kKeyTile) / kKeyTile * size * kScoreStride;
}

// Adds the bias, and gives masked keys the score -infinity up to the next whole block of dropout
// columns.
inline void finish_scores(const Head& head, int64_t first_query, int64_t queries, int64_t first_key,
                          int64_t keys, float* scores) {
  const int64_t padded = round_up(keys, kDropoutBlock);
  for (int64_t r = 0; r < queries; r++) {
    float* row = scores + r * kScoreStride;
    const int64_t visible = visible_keys(head, first_query + r, first_key, keys);
    if (head.bias) {
      const float* bias = head.bias + (first_query + r) * head.bias_stride + first_key;
      for (int64_t c = 0; c < visible; c++) row[c] += bias[c];
    }
    for (int64_t c = visible; c < padded; c++) row[c] = -__builtin_inff();
  }
}

// e^x for x <= 0 or slightly above: as exp() in simd.h, without what large arguments need.
// NaN stays NaN, because max() returns its second argument then.
inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = splat(-87.3365447505f);
  // 1.5 · 2^23 leaves an integer in the low bits (see round_to_int); 127 more make it a float's
  // exponent.
  const Vec magic = splat(12582912.f + 127.f);
  const Vec clamped = max(lowest, x);
  const Vec shifted = clamped * 1.44269504089f + magic;
  const Vec n = shifted - magic;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec y = p * (r * r) + r + 1.f;
  const Vec scaled = y * (Vec)((VecI)shifted << 23);
  return select(x < lowest, Vec{}, scaled);
}

}  // namespace

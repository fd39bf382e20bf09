// What the forward and the backward pass of attention share: tile sizes, layouts and the passes
// over a row of scores. Shapes in comments: L tokens of a sequence, d the size of a head.
#pragma once

#include <cmath>
#include <utility>

#include "api.h"
#include "bf16.h"
#include "random.h"
#include "scratch.h"
#include "tanh.h"
#include "tile_product.h"

namespace {

// Keys to a tile: a multiple of 32 (the dropout generator's block) and of 12 and 6 (the rows of a
// block product, in which keys are rows for their gradients). Most text is one tile.
constexpr int64_t kKeyTile = 192;
// Queries to a tile, a multiple of 12 and 6 again. A tile of scores is then 40 KB; two of them and
// the rows that they are made of fit the smallest second-level cache of today's servers (512 KB)
// many times over, and the products read their columns from the first level.
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

// Below about 10 µs of arithmetic, waking the other threads costs more than they save.
inline int64_t team_size(const AttentionProblem& problem, int64_t max_length) {
  const bool worth_threads =
      problem.sequences * problem.heads * max_length * max_length * problem.size > 1 << 17;
  return worth_threads ? omp_get_max_threads() : 1;
}

// T is float, or Bf16 for what the forward pass has kept so.
template <class T = float>
inline T* head_rows(const HeadTensor& x, int64_t token, int64_t head) {
  return (T*)x.data + token * x.token_stride + head * x.head_stride;
}

// One sequence of one query head: where its rows are, and how its tiles of scores are masked and
// dropped.
struct Head {
  int64_t start, length, number;
  bool causal;
  int64_t window;     // or negative
  const float* bias;  // of this sequence and head, or null
  int64_t bias_stride;
  float cap;  // of scores that carry log2 e, or 0
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
      problem.window,
      bias.data ? bias.data + sequence * bias.sequence_stride + head * bias.head_stride : nullptr,
      bias.row_stride,
      problem.cap * kLog2e,
      DropoutRate(problem.p),
      problem.key,
      (uint64_t)(head * problem.total + start)};
}

// Tokens from … to - 1 of a sequence; none if to <= from.
struct Range {
  int64_t from, to;
};

inline Range overlap(Range a, Range b) {
  return {a.from > b.from ? a.from : b.from, least(a.to, b.to)};
}

// Which keys at least one of the queries attends to.
inline Range keys_of(const Head& head, Range queries) {
  Range keys{0, head.causal ? queries.to : head.length};
  if (head.window >= 0)
    keys = overlap(keys, {queries.from - head.window, queries.to + head.window});
  return keys;
}

// Which queries attend to at least one of the keys: causal attention seen from the other side.
inline Range queries_of(const Head& head, Range keys) {
  Range queries{head.causal ? keys.from : 0, head.length};
  if (head.window >= 0)
    queries = overlap(queries, {keys.from - head.window, keys.to + head.window});
  return queries;
}

// From the beginning of a block, as tiles must.
inline Range from_block(Range keys) { return {keys.from / kDropoutBlock * kDropoutBlock, keys.to}; }

// The keys of a tile that one query attends to, counted from the tile's first.
inline Range visible_keys(const Head& head, int64_t query, int64_t first_key, int64_t keys) {
  const Range seen = overlap(keys_of(head, {query, query + 1}), {first_key, first_key + keys});
  return seen.from < seen.to ? Range{seen.from - first_key, seen.to - first_key} : Range{0, 0};
}

// Where the tile of keys ends that begins at or behind a tile's first key.
inline int64_t tile_end(int64_t key, int64_t end) {
  return least((key / kKeyTile + 1) * kKeyTile, end);
}

// Rows of one head are as far apart as the whole hidden size, too far for the hardware to foresee
// the next one.
constexpr int64_t kRowsAhead = 12;  // about a main memory's latency, at a dozen cycles a row
template <bool kWrite, class T>
inline void prefetch_row(const T* row, int64_t size) {
  for (int64_t c = 0; c < size; c += 64 / sizeof(T)) __builtin_prefetch(row + c, kWrite);
}

// Copies rows × d times `factor` into rows of whole vectors; the rest of the last vector is zero.
template <class T>
inline void pack_rows(const T* from, int64_t from_stride, int64_t rows, int64_t size, float factor,
                      float* to, int64_t to_stride) {
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

// Of a 2s × 2s square, the s × s squares off the diagonal change places, as often as it fits the
// vectors' lanes.
template <int s, int... lane>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, lane...>) {
  const Vec before = a;
  a = __builtin_shuffle(before, b, VecI{(lane & s ? kWidth + lane - s : lane)...});
  b = __builtin_shuffle(before, b, VecI{(lane & s ? kWidth + lane : lane + s)...});
}

// kWidth vectors as the rows of a square, transposed.
template <int s = 1>
inline void transpose(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i++)
    if (!(i & s)) exchange<s>(rows[i], rows[i + s], std::make_integer_sequence<int, kWidth>());
  if constexpr (2 * s < kWidth) transpose<2 * s>(rows);
}

// A square of `rows` × `columns` (kWidth of both if kWhole) from rows to columns; missing rows are
// zero.
template <bool kWhole, class T>
inline void transpose_square(const T* from, int64_t from_stride, int64_t rows, int64_t columns,
                             float* to, int64_t to_stride) {
  Vec square[kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; r++)
    square[r] = kWhole     ? load(from + r * from_stride)
                : r < rows ? load_part(from + r * from_stride, (int)columns)
                           : Vec{};
  transpose(square);
#pragma GCC unroll 16
  for (int c = 0; c < kWidth; c++)
    if (kWhole || c < columns) store(to + c * to_stride, square[c]);
}

inline int64_t transposed_floats(int64_t length, int64_t size) {
  return round_up(length, kKeyTile) / kKeyTile * size * kScoreStride;
}

// Where pack_transposed puts the first element of a key.
inline int64_t transposed_offset(int64_t key, int64_t size) {
  return key / kKeyTile * size * kScoreStride + key % kKeyTile;
}

// Copies some keys (from a block's beginning) of L × d into tiles of d × kKeyTile, each
// kScoreStride wide; keys beyond the last up to a whole vector are zero.
template <class T>
inline void pack_transposed(const T* from, int64_t from_stride, Range keys, int64_t size,
                            float* to) {
  for (int64_t first = keys.from; first < keys.to; first += kWidth) {
    float* tile = to + transposed_offset(first, size);
    const T* rows = from + first * from_stride;
    for (int r = 0; r < kWidth; r++) prefetch_row<false>(rows + (kWidth + r) * from_stride, size);
    for (int64_t c = 0; c < size; c += kWidth) {
      const int64_t height = keys.to - first, width = size - c;
      if (height >= kWidth && width >= kWidth)
        transpose_square<true>(rows + c, from_stride, kWidth, kWidth, tile + c * kScoreStride,
                               kScoreStride);
      else
        transpose_square<false>(rows + c, from_stride, height, least(width, kWidth),
                                tile + c * kScoreStride, kScoreStride);
    }
  }
}

// Caps scores. The backward pass asks for the slopes, 1 - tanh²(score / cap), and gives them a
// tile.
inline void cap_scores(float cap, int64_t queries, int64_t columns, float* scores, float* slopes) {
  const float inverse = 1.f / cap;
  for (int64_t r = 0; r < queries; r++)
    for (int64_t c = 0; c < columns; c += kWidth) {
      const int64_t at = r * kScoreStride + c;
      const Vec x = tanh_of(load(scores + at) * inverse);
      store(scores + at, x * cap);
      if (slopes) store(slopes + at, 1.f - x * x);
    }
}

// Adds the bias (scores are multiplied by log2 e already), and gives masked keys the score
// -infinity up to the next whole block of dropout columns.
inline void finish_scores(const Head& head, int64_t first_query, int64_t queries, int64_t first_key,
                          int64_t keys, float* scores) {
  const int64_t padded = round_up(keys, kDropoutBlock);
  for (int64_t r = 0; r < queries; r++) {
    float* row = scores + r * kScoreStride;
    const Range visible = visible_keys(head, first_query + r, first_key, keys);
    if (head.bias) {
      const float* bias = head.bias + (first_query + r) * head.bias_stride + first_key;
      for (int64_t c = visible.from; c < visible.to; c++) row[c] += bias[c] * kLog2e;
    }
    for (int64_t c = 0; c < visible.from; c++) row[c] = -__builtin_inff();
    for (int64_t c = visible.to; c < padded; c++) row[c] = -__builtin_inff();
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

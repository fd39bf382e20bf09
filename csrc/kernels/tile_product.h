// Products of small matrices that are already in cache: C = A B or C += A B.
//
// B and C are row-major with rows of whole vectors; A is read element by element, so it may as well
// be stored transposed. No packing here: the caller has laid the tiles out.
#pragma once

#include "simd.h"

namespace {

// A block of C stays in registers while its sum runs. Two vectors wide, and as high as the
// registers allow next to two of B and one of A: AVX-512 has 32 registers, AVX2 and SSE have 16
// (SSE needs one more for the product, having no fma).
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#elif defined(__AVX2__)
constexpr int kBlockRows = 6;
#else
constexpr int kBlockRows = 5;
#endif
constexpr int kBlockVecs = 2;

// A tile's rows, `stride` floats apart.
struct Tile {
  const float* data;
  int64_t stride;
};

// An odd number of cache lines to a row spreads a column of a tile over all sets of the first-level
// cache; a power of two would fold it into a few.
constexpr int64_t kLine = 16;
constexpr int64_t spread_stride(int64_t columns) {
  return ((columns + kLine - 1) / kLine | 1) * kLine;
}
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum class Form { kPlain, kTransposed };  // how A is stored: A[row][k] or A[k][row]
enum class Result { kAssign, kAdd };

// Not inlined: among other code GCC runs out of registers and keeps the sums in memory.
template <Form form, Result result, int kRows, int kVecs>
__attribute__((noinline)) void block_product(int64_t depth, Tile a, Tile b, float* c,
                                             int64_t c_stride) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++)
      sums[r][v] = result == Result::kAdd ? load(c + r * c_stride + v * kWidth) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec row[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) row[v] = load(b.data + k * b.stride + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const Vec x =
          splat(form == Form::kPlain ? a.data[r * a.stride + k] : a.data[k * a.stride + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) sums[r][v] += x * row[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) store(c + r * c_stride + v * kWidth, sums[r][v]);
}

// The last, lower block of rows: found by counting down, so that every height has its own unrolled
// code.
template <Form form, Result result, int kVecs, int kRows = kBlockRows - 1>
inline void last_block_product(int64_t rows, int64_t depth, Tile a, Tile b, float* c,
                               int64_t c_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      block_product<form, result, kRows, kVecs>(depth, a, b, c, c_stride);
    else
      last_block_product<form, result, kVecs, kRows - 1>(rows, depth, a, b, c, c_stride);
  }
}

template <Form form, Result result, int kVecs>
void column_product(int64_t rows, int64_t depth, Tile a, Tile b, float* c, int64_t c_stride) {
  const int64_t step = form == Form::kPlain ? a.stride : 1;
  int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows)
    block_product<form, result, kBlockRows, kVecs>(depth, {a.data + r * step, a.stride}, b,
                                                   c + r * c_stride, c_stride);
  last_block_product<form, result, kVecs>(rows - r, depth, {a.data + r * step, a.stride}, b,
                                          c + r * c_stride, c_stride);
}

// C (rows × columns) = or += A (rows × depth) · B (depth × columns); columns is a multiple of
// kWidth. Column by column, because a column of B (depth × 2 vectors) fits the first-level cache.
template <Form form, Result result>
void tile_product(int64_t rows, int64_t columns, int64_t depth, Tile a, Tile b, float* c,
                  int64_t c_stride) {
  int64_t n = 0;
  for (; n + kBlockVecs * kWidth <= columns; n += kBlockVecs * kWidth)
    column_product<form, result, kBlockVecs>(rows, depth, a, {b.data + n, b.stride}, c + n,
                                             c_stride);
  if (n < columns)
    column_product<form, result, 1>(rows, depth, a, {b.data + n, b.stride}, c + n, c_stride);
}

}  // namespace

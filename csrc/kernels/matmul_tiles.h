// The innermost loops of an int16 product: tiles of sums in registers, scaled into the result.
#pragma once

#include "api.h"
#include "matmul_layout.h"
#include "matmul_operand.h"
#include "matmul_quantise.h"
#include "simd_int16.h"

namespace {

inline VecI load_pairs(const int32_t* p) {
  VecI v;
  memcpy(&v, p, sizeof v);
  return v;
}

// A column of tiles: one panel of the right operand times many of the left, within one block.
struct TileColumn {
  const int32_t *left, *right;
  int64_t pairs;      // a multiple of kPairStep
  int64_t left_step;  // from one left panel to the next
  const float *left_scales, *right_scales;
  float* out;
  int64_t stride;
  int64_t rows, cols;  // of the result that exist; cols up to kTileCols
  const float* bias;   // for these columns, or null
  bool add;
  Rows ahead;  // what will be needed some time after this: fetched bit by bit, between tiles
};

// Rounded after each step, in this order, on every instruction set: the tests compute the same. The
// barrier keeps the last product out of an fma with what is added to it.
inline Vec scaled(VecI sums, float left, Vec right) {
  Vec result = to_float(sums) * kShrink * left * right;
  forget_value(result);
  return result;
}

#define UNROLL(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

// Rows of tiles from `row` to `row_end`: a tile is kPanels panels of the left operand times kVecs
// registers of the right one's panel, and so many sums. Not inlined: among other code GCC runs out
// of registers and keeps the sums in memory.
template <class Step, int kPanels, int kVecs>
__attribute__((noinline)) void tile_rows(const TileColumn& column, int64_t row, int64_t row_end) {
  constexpr int kRows = kPanels * kTileRows;
  const int64_t step = column.left_step, stride = column.stride;
  const int32_t* left = column.left + row / kTileRows * step;
  const int32_t* next = column.right + column.pairs * kTileCols;  // the next panel, most often
  const int64_t tiles = (column.rows + kRows - 1) / kRows;
  const int64_t fetched = column.pairs * kTileCols / tiles;
  next += row / kRows * fetched;
  const Rows ahead = column.ahead;
  for (; row < row_end; row += kRows, left += kPanels * step) {
    const bool whole = row + kRows <= column.rows && column.cols == kTileCols;
    const int32_t* next_end = next + fetched;
    for (; next < next_end; next += 16) fetch_to_second_level(next);
    const int64_t tile = row / kRows;
    for (int64_t r = ahead.count * tile / tiles; r < ahead.count * (tile + 1) / tiles; r++)
      for (int64_t i = 0; i < ahead.width; i += 64)
        fetch_to_second_level(ahead.first + r * ahead.stride + i);
    for (int col = 0; col < kTileCols; col += kVecs * kWidth) {
      float* out = column.out + row * stride + col;
      if (whole)  // the result's lines arrive while the sums are made
        UNROLL (r, kRows)
          UNROLL (v, kVecs) fetch(out + r * stride + v * kWidth);
      VecI sums[kRows][kVecs];
      UNROLL (r, kRows)
        UNROLL (v, kVecs) sums[r][v] = VecI{};
      const int32_t *a[kPanels], *b = column.right + col, *end = b + column.pairs * kTileCols;
      UNROLL (p, kPanels) a[p] = left + p * step;
      for (; b < end; b += kPairStep * kTileCols) {
        UNROLL (k, kPairStep) {
          VecI right[kVecs];
          UNROLL (v, kVecs) right[v] = load_pairs(b + k * kTileCols + v * kWidth);
          UNROLL (r, kRows) {
            const VecI one = splat_i(a[r / kTileRows][k * kTileRows + r % kTileRows]);
            UNROLL (v, kVecs) Step::add(sums[r][v], one, right[v]);
          }
        }
        UNROLL (p, kPanels) a[p] += kPairStep * kTileRows;
      }
      const float* left_scales = column.left_scales + row;
      const float* right_scales = column.right_scales + col;
      if (whole) {
        UNROLL (v, kVecs) {
          const Vec scales = load(right_scales + v * kWidth);
          const Vec bias = column.bias ? load(column.bias + col + v * kWidth) : Vec{};
          UNROLL (r, kRows) {
            float* to = out + r * stride + v * kWidth;
            const Vec start = column.add ? load(to) + bias : bias;
            store(to, scaled(sums[r][v], left_scales[r], scales) + start);
          }
        }
        continue;
      }
      Vec tile[kRows][kVecs];
      UNROLL (r, kRows)
        UNROLL (v, kVecs)
          tile[r][v] = scaled(sums[r][v], left_scales[r], load(right_scales + v * kWidth));
      for (int64_t r = 0; r < kRows && row + r < column.rows; r++)
        for (int64_t c = 0; c < kVecs * kWidth && col + c < column.cols; c++) {
          float* to = out + r * stride + c;
          const float bias = column.bias ? column.bias[col + c] : 0.f;
          *to = tile[r][c / kWidth][c % kWidth] + (column.add ? *to + bias : bias);
        }
    }
  }
}

template <class Step>
void tile_column(const TileColumn& column) {
  tile_rows<Step, 1, kTileVecs>(column, 0, column.rows);
}

#if defined(HAS_DOT_PRODUCT) && !defined(__AVX512F__)
// vpdpwssd takes five cycles and two start in each, so that ten sums are needed. Three panels of
// the left operand times half a panel of the right one have twelve, within sixteen registers.
template <>
void tile_column<DotProduct>(const TileColumn& column) {
  constexpr int kPanels = 3;
  const int64_t row = column.rows / (kPanels * kTileRows) * (kPanels * kTileRows);
  if (row > 0) tile_rows<DotProduct, kPanels, 1>(column, 0, row);
  if (row < column.rows) tile_rows<DotProduct, 1, kTileVecs>(column, row, column.rows);
}
#endif

typedef void (*ColumnProduct)(const TileColumn&);

// Whether to use DotProduct: as the CPU says, or as a test or a benchmark wants it.
int64_t vnni_wanted = kInt16VnniIfKnown;

ColumnProduct best_product() {
#if defined(HAS_DOT_PRODUCT)
  const bool known = cpu_has_dot_product();
  if (vnni_wanted == kInt16VnniAlways || (vnni_wanted == kInt16VnniIfKnown && known))
    return tile_column<DotProduct>;
#endif
  return tile_column<MultiplyAndAdd>;
}

}  // namespace

// Packs columns of a matrix, of float or bf16, for int16 products: a column is a vector, and the
// matrix is read row by row, as it lies in memory.
#pragma once

#include "bf16.h"
#include "matmul_layout.h"
#include "matmul_quantise.h"
#include "matmul_stored.h"
#include "simd_int16.h"

namespace {

// Columns that are interleaved at once: their panels, 4 KB apart, use 8 ways of the first-level
// cache.
constexpr int kStripVecs = 4;
constexpr int kStrip = kStripVecs * kWidth;
// Columns of a task: half a kilobyte of each row, so that a page is worth its address translation.
constexpr int64_t kTaskColumns = 128;
constexpr int kTaskVecs = kTaskColumns / kWidth;
constexpr int64_t kRowsAhead = 12;

struct ColumnStats {
  Vec squares[kTaskVecs], largest[kTaskVecs], sums[kTaskVecs];
};

template <bool kLifted, int kRows, class Source>
inline void add_rows(const Source* x, int64_t stride, int vecs, const Vec* before,
                     ColumnStats& stats) {
  for (int r = 0; r < kRows; r++)
    for (int i = 0; i < vecs * kWidth; i += kElementsOfLine<Source>)
      fetch(x + (r + kRowsAhead) * stride + i);
  for (int j = 0; j < vecs; j++) {
    Vec squares = stats.squares[j], largest = stats.largest[j], sum = {};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Vec v = lifted<kLifted>(load(x + r * stride + j * kWidth), before[j]);
      squares += v * v;
      largest = max(largest, abs(v));
      sum += v;
    }
    stats.squares[j] = squares;
    stats.largest[j] = largest;
    stats.sums[j] += sum;
  }
}

// Row by row, as the matrix lies in memory. Four rows at once, so that the statistics, too many for
// the registers, are loaded and stored less often; and their sums collect fewer roundings.
template <bool kLifted, class Source>
void column_stats(const Source* x, int64_t stride, int64_t depth, int vecs, const Vec* before,
                  ColumnStats& stats) {
  for (int j = 0; j < vecs; j++) stats.squares[j] = stats.largest[j] = stats.sums[j] = Vec{};
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) add_rows<kLifted, 4>(x + k * stride, stride, vecs, before, stats);
  for (; k < depth; k++) add_rows<kLifted, 1>(x + k * stride, stride, vecs, before, stats);
}

// `sums` (of kWidth for each vec, or null) receives the plain sums.
template <class Source>
void column_scales(const Source* x, int64_t stride, int64_t depth, int vecs, BlockScale* scales,
                   float* sums) {
  Vec before[kTaskVecs];
  ColumnStats stats;
  column_stats<false>(x, stride, depth, vecs, before, stats);
  if (sums)
    for (int j = 0; j < vecs; j++) store(sums + j * kWidth, stats.sums[j]);
  VecI all = {};
  for (int j = 0; j < vecs; j++) {
    before[j] = lift_of(stats.largest[j]);
    all |= before[j] != 1.f;
  }
  if (any(all)) column_stats<true>(x, stride, depth, vecs, before, stats);
  for (int j = 0; j < vecs; j++)
    scales[j] = scale_of(stats.squares[j], stats.largest[j], before[j]);
}

// A strip's place in packed memory.
struct StripPlace {
  int32_t* first;    // the panel that the strip's first column is in
  int64_t distance;  // from panel to panel
  int64_t columns;   // of the strip that exist there
};

// A vector of pairs to its panel, or two halves to two: a left panel may be half a vector wide.
template <int kPanel, bool kCareful>
inline void store_columns(const StripPlace& to, int64_t pair, int j, VecI values) {
  constexpr int kPiece = kPanel < kWidth ? kPanel : kWidth;
#pragma GCC unroll 2
  for (int i = 0; i < kWidth; i += kPiece) {
    const int column = j * kWidth + i;
    if (!kCareful || column < to.columns)
      memcpy(to.first + column / kPanel * to.distance + pair * kPanel + column % kPanel,
             (int32_t*)&values + i, kPiece * sizeof(int32_t));
  }
}

// Some pairs of rows of a strip, which are in the cache: the next strip is fetched meanwhile.
// Careful: rows from depth on count as zeros, columns may be missing in packed memory, blocks may
// be lifted.
template <int kPanel, bool kCareful, class Source>
void pack_pairs(const Source* x, int64_t stride, int64_t depth, int64_t begin, int64_t end,
                const BlockScale* scales, const StripPlace& to) {
  for (int64_t p = begin; p < end; p++) {
    const Source* even = x + 2 * p * stride;
    for (int i = 0; i < kStrip; i += kElementsOfLine<Source>) {
      fetch(even + kStrip + i);
      fetch(even + stride + kStrip + i);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kStripVecs; j++) {
      const auto rounded = [&](int64_t r) {
        if (kCareful && 2 * p + r >= depth) return VecI{};
        const Vec v = load(even + r * stride + j * kWidth);
        return round_nearest(lifted<kCareful>(v, scales[j].before) * scales[j].factor);
      };
      store_columns<kPanel, kCareful>(to, p, j, (rounded(0) & 0xffff) | (rounded(1) << 16));
    }
  }
}

template <int kPanel, class Source>
void pack_strip(const Source* x, int64_t stride, int64_t depth, int64_t pairs,
                const BlockScale* scales, const StripPlace& to) {
  VecI any_lifted = {};
  for (int j = 0; j < kStripVecs; j++) any_lifted |= scales[j].before != 1.f;
  const int64_t easy = any(any_lifted) || to.columns < kStrip ? 0 : depth / 2;
  pack_pairs<kPanel, false>(x, stride, depth, 0, easy, scales, to);
  pack_pairs<kPanel, true>(x, stride, depth, easy, pairs, scales, to);
}

// Whole strips of one block of rows, from column `first` on.
template <class Source>
void pack_strips(const Source* x, int64_t stride, int strips, const PackedLayout& layout,
                 int64_t block, int64_t first, void* packed, float* sums) {
  const int64_t depth = layout.filled(block), pairs = layout.pairs_of(block);
  BlockScale scales[kTaskVecs];
  column_scales(x, stride, depth, strips * kStripVecs, scales, sums);
  for (int s = 0; s < strips; s++) {
    const int64_t column = first + s * kStrip;
    const int64_t exist = layout.padded - column < kStrip ? layout.padded - column : kStrip;
    const BlockScale* mine = scales + s * kStripVecs;
    float* to = layout.scales(packed, block) + column;
    for (int i = 0; i < exist; i++) to[i] = mine[i / kWidth].stored[i % kWidth];
    const StripPlace place = {layout.pairs(packed, block, column / layout.panel),
                              layout.panel_words, exist};
    if (layout.panel == kTileRows)
      pack_strip<kTileRows>(x + s * kStrip, stride, depth, pairs, mine, place);
    else
      pack_strip<kTileCols>(x + s * kStrip, stride, depth, pairs, mine, place);
  }
}

// Columns first … first + kTaskColumns of one block of rows; a last, narrower strip is copied and
// filled up with zeros. `sums` (kTaskColumns of them, or null) receives the plain sums.
template <class Source>
void pack_columns(const Source* x, int64_t stride, const PackedLayout& layout, int64_t block,
                  int64_t first, void* packed, float* sums) {
  alignas(64) Source edge[kMaxBlock * kStrip];
  const int64_t depth = layout.filled(block), left = layout.vectors - first;
  const int64_t columns = left < kTaskColumns ? left : kTaskColumns;
  const int strips = columns / kStrip, rest = columns % kStrip;
  const Source* source = x + block * layout.block * stride + first;
  if (strips) pack_strips(source, stride, strips, layout, block, first, packed, sums);
  if (!rest) return;
  memset(edge, 0, depth * kStrip * sizeof(Source));
  for (int64_t k = 0; k < depth; k++)
    memcpy(edge + k * kStrip, source + k * stride + strips * kStrip, rest * sizeof(Source));
  pack_strips(edge, kStrip, 1, layout, block, first + strips * kStrip, packed,
              sums ? sums + strips * kStrip : nullptr);
}

// The same of a weight as it is stored: unpacked strip by strip, into the second-level cache.
inline void pack_stored_columns(const StoredWeight& weight, int64_t stride,
                                const PackedLayout& layout, int64_t block, int64_t first,
                                void* packed) {
  alignas(64) float strip[kMaxBlock * kStrip];
  const int64_t depth = layout.filled(block), left = layout.vectors - first;
  const int64_t columns = left < kTaskColumns ? left : kTaskColumns;
  for (int64_t c = 0; c < columns; c += kStrip) {
    const int64_t width = columns - c < kStrip ? columns - c : kStrip;
    if (width < kStrip) memset(strip, 0, depth * kStrip * sizeof(float));
    for (int64_t k = 0; k < depth; k++) {
      const int64_t row = block * layout.block + k;
      unpack(weight, row * stride + first + c, row, width, strip + k * kStrip);
    }
    pack_strips(strip, kStrip, 1, layout, block, first + c, packed, nullptr);
  }
}

}  // namespace

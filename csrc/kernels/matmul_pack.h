// Packs a matrix, of float or bf16, for int16 products: by its rows, by its columns, or both.
#pragma once

#include "activation.h"
#include "bf16.h"
#include "matmul_layout.h"
#include "matmul_quantise.h"

namespace {

constexpr int kGroup = 4;  // rows that are interleaved at once: 4 pairs fill 128 bits
// Columns that are interleaved at once: their panels, 4 KB apart, use 8 ways of the first-level
// cache.
constexpr int kStripVecs = 4;
constexpr int kStrip = kStripVecs * kWidth;
// Columns of a task: half a kilobyte of each row, so that a page is worth its address translation.
constexpr int64_t kTaskColumns = 128;
constexpr int kTaskVecs = kTaskColumns / kWidth;
constexpr int64_t kTaskRows = 32;  // whole panels of either role, and a divisor of every block
static_assert(kTaskRows % kTileCols == 0 && kTaskRows % kTileRows == 0 &&
              kDepthStep % kTaskRows == 0);

// 16-bit words of lo and hi, lane by lane of 128 bits; then 32-bit and 64-bit interleaving, ditto.
#if defined(__AVX512F__)
typedef __m512i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm512_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
template <int kLane>
inline __m128i lane(Words w) {
  return _mm512_extracti32x4_epi32(w, kLane);
}
#elif defined(__AVX2__)
typedef __m256i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm256_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm256_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm256_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
template <int kLane>
inline __m128i lane(Words w) {
  return _mm256_extracti128_si256(w, kLane);
}
#else
typedef __m128i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm_unpackhi_epi64(a, b); }
template <int kLane>
inline __m128i lane(Words w) {
  return w;
}
#endif

// Blocks are read twice, for the scale and for the values: the second time, when nothing is
// missing, the next rows or columns are fetched, or the memory would idle.
template <class Source>
constexpr int kLine = 64 / sizeof(Source);

// A pair's four rows to its place, for each lane; pairs of one lane are two neighbours in depth.
template <int kLane = 0>
inline void store_pairs(Words first, Words second, int32_t* out, int64_t panel) {
  _mm_storeu_si128((__m128i*)(out + 2 * kLane * panel), lane<kLane>(first));
  _mm_storeu_si128((__m128i*)(out + (2 * kLane + 1) * panel), lane<kLane>(second));
  if constexpr ((kLane + 1) * 4 < kWidth) store_pairs<kLane + 1>(first, second, out, panel);
}

struct RowStats {
  float squares[kWidth], largest[kWidth];  // the first kGroup are used
};

template <bool kLifted, class Source>
inline RowStats row_stats(const Source* x, int64_t stride, int64_t depth, Vec before) {
  Vec squares[kGroup] = {}, largest[kGroup] = {};
  for (int64_t k = 0; k < depth; k += kWidth)
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; r++) {
      const Vec v = lifted<kLifted>(load(x + r * stride + k), splat(before[r]));
      squares[r] += v * v;
      largest[r] = max(largest[r], abs(v));
    }
  RowStats stats = {};
  for (int r = 0; r < kGroup; r++) {
    stats.squares[r] = sum(squares[r]);
    stats.largest[r] = max_lane(largest[r]);
  }
  return stats;
}

template <class Source>
inline BlockScale row_scales(const Source* x, int64_t stride, int64_t depth) {
  RowStats stats = row_stats<false>(x, stride, depth, Vec{});
  const Vec lift = lift_of(load(stats.largest));
  if (any(lift != 1.f)) stats = row_stats<true>(x, stride, depth, lift);
  return scale_of(load(stats.squares), load(stats.largest), lift);
}

template <bool kLifted, class Source>
inline void pack_values(const Source* x, int64_t stride, int64_t depth, const BlockScale& scale,
                        int64_t panel, int32_t* pairs) {
  for (int64_t k = 0; k < depth; k += 2 * kWidth) {
    Words w[kGroup];
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; r++) {
      const Source* row = x + r * stride + k;
      for (int i = 0; i < 2 * kWidth; i += kLine<Source>) fetch(row + kGroup * stride + i);
      const Vec before = splat(scale.before[r]), factor = splat(scale.factor[r]);
      w[r] = narrow(round_nearest(lifted<kLifted>(load(row), before) * factor),
                    round_nearest(lifted<kLifted>(load(row + kWidth), before) * factor));
    }
    const Words a = low32(w[0], w[1]), b = low32(w[2], w[3]);
    const Words c = high32(w[0], w[1]), d = high32(w[2], w[3]);
    int32_t* out = pairs + k / 2 * panel;
    store_pairs(low64(a, b), high64(a, b), out, panel);
    store_pairs(low64(c, d), high64(c, d), out + kWidth / 2 * panel, panel);
  }
}

// Four rows of one block; depth is a multiple of kDepthStep. `pairs` points to the first row's
// place.
template <class Source>
void pack_group(const Source* x, int64_t stride, int64_t depth, int64_t panel, int32_t* pairs,
                float* scales) {
  const BlockScale scale = row_scales(x, stride, depth);
  memcpy(scales, &scale.stored, kGroup * sizeof(float));
  if (any(scale.before != 1.f))
    pack_values<true>(x, stride, depth, scale, panel, pairs);
  else
    pack_values<false>(x, stride, depth, scale, panel, pairs);
}

// What is packed of a row: its values, or something computed from them on the way.
struct Values {
  static constexpr bool kComputed = false;
  template <class Source>
  void copy(const Source* row, int64_t column, int64_t count, Source* to) const {
    memcpy(to, row + column, count * sizeof(Source));
  }
};
struct Activations {
  static constexpr bool kComputed = true;
  ForwardRow activate;
  const float* bias;  // or null
  void copy(const float* row, int64_t column, int64_t count, float* to) const {
    activate(row + column, bias ? bias + column : nullptr, to, nullptr, count);
  }
};

// Rows first … first + kTaskRows of all blocks; what is computed, or lies beyond the matrix and
// counts as zeros, passes through a buffer in the first-level cache.
template <class Source, class What = Values>
void pack_rows(const Source* x, int64_t stride, const PackedLayout& layout, int64_t first,
               void* packed, const What& what = {}) {
  alignas(64) Source edge[kGroup * kMaxBlock];
  for (int64_t b = 0; b < layout.blocks; b++) {
    const int64_t depth = layout.filled(b),
                  whole = (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
    for (int64_t row = first; row < first + kTaskRows && row < layout.padded; row += kGroup) {
      const int64_t rows = layout.vectors - row < kGroup ? layout.vectors - row : kGroup;
      const bool inside = rows == kGroup && depth == whole;
      const Source* source = x + row * stride + b * layout.block;
      int64_t source_stride = stride;
      if (What::kComputed || !inside) {
        if (!inside) memset(edge, 0, kGroup * whole * sizeof(Source));
        for (int64_t r = 0; r < rows; r++)
          what.copy(x + (row + r) * stride, b * layout.block, depth, edge + r * whole);
        source = edge;
        source_stride = whole;
      }
      pack_group(source, source_stride, whole, layout.panel,
                 layout.pairs(packed, b, row / layout.panel) + row % layout.panel,
                 layout.scales(packed, b) + row);
    }
  }
}

constexpr int64_t kRowsAhead = 12;

struct ColumnStats {
  Vec squares[kTaskVecs], largest[kTaskVecs], sums[kTaskVecs];
};

template <bool kLifted, int kRows, class Source>
inline void add_rows(const Source* x, int64_t stride, int vecs, const Vec* before,
                     ColumnStats& stats) {
  for (int r = 0; r < kRows; r++)
    for (int i = 0; i < vecs * kWidth; i += kLine<Source>) fetch(x + (r + kRowsAhead) * stride + i);
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

// Some pairs of rows of a strip. Careful: rows from depth on count as zeros, columns may be missing
// in packed memory, blocks may be lifted.
template <int kPanel, bool kCareful, class Source>
void pack_pairs(const Source* x, int64_t stride, int64_t depth, int64_t begin, int64_t end,
                const BlockScale* scales, const StripPlace& to) {
  for (int64_t p = begin; p < end; p++) {
    const Source* even = x + 2 * p * stride;
    for (int i = 0; i < kStrip; i += kLine<Source>) {
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

// One source and one or two packed operands, as tasks that any thread may do.
struct Packing {
  const void* x;
  bool bf16;  // what x is, else float
  int64_t stride, rows, cols;
  void *by_rows, *by_columns;  // or null
  float* column_sums;          // or null
  PackedLayout row_layout, column_layout;
  int64_t row_tasks, column_tasks;  // for each block of rows
  float* block_sums;                // or null

  Packing(Arena& arena, const void* x, bool bf16, int64_t stride, int64_t rows, int64_t cols,
          void* by_rows, int64_t row_role, void* by_columns, int64_t column_role,
          float* column_sums)
      : x(x),
        bf16(bf16),
        stride(stride),
        rows(rows),
        cols(cols),
        by_rows(by_rows),
        by_columns(by_columns),
        column_sums(column_sums),
        row_layout(rows, cols, row_role),
        column_layout(cols, rows, column_role) {
    row_tasks = by_rows ? column_layout.block / kTaskRows : 0;
    column_tasks = by_columns ? (cols + kTaskColumns - 1) / kTaskColumns : 0;
    const int64_t sums = column_layout.blocks * column_tasks * kTaskColumns;
    block_sums = column_sums ? arena.take<float>(sums) : nullptr;
  }
  Packing(const Packing&) = delete;

  // Block of rows by block of rows, so that what one task reads by rows is still in the shared
  // cache when another reads it by columns.
  int64_t tasks() const { return x ? column_layout.blocks * (row_tasks + column_tasks) : 0; }
  void run(int64_t task) const { bf16 ? run((const Bf16*)x, task) : run((const float*)x, task); }
  template <class Source>
  void run(const Source* x, int64_t task) const {
    const int64_t block = task / (row_tasks + column_tasks),
                  part = task % (row_tasks + column_tasks);
    const int64_t row = block * column_layout.block + part * kTaskRows;
    if (part < row_tasks) {
      if (row < rows) pack_rows(x, stride, row_layout, row, by_rows);
      return;
    }
    const int64_t column = (part - row_tasks) * kTaskColumns;
    pack_columns(x, stride, column_layout, block, column, by_columns,
                 block_sums ? block_sums + block * column_tasks * kTaskColumns + column : nullptr);
  }

  // When all tasks are done. Blocks are added in order, whichever thread did them.
  void total_sums() const {
    if (!column_sums) return;
    for (int64_t c = 0; c < cols; c++) {
      float total = 0;
      for (int64_t b = 0; b < column_layout.blocks; b++)
        total += block_sums[b * column_tasks * kTaskColumns + c];
      column_sums[c] = total;
    }
  }
};

}  // namespace

// Packs a matrix for int16 products: by its rows, by its columns, or both.
#pragma once

#include <cstdlib>

#include "matmul_layout.h"
#include "matmul_quantise.h"

namespace {

constexpr int kGroup = 4;      // rows that are interleaved at once: 4 pairs fill 128 bits
constexpr int kStripVecs = 4;  // a column strip's sums of squares and maxima stay in registers
constexpr int kStrip = kStripVecs * kWidth;
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

// Asks for a cache line. Blocks are read twice, for the scale and for the values: the second time,
// when nothing is missing, the next rows or columns are fetched, or the memory would idle. Beyond
// the end of an array it does nothing.
constexpr int kLine = 16;  // floats
__attribute__((always_inline)) inline void fetch(const float* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T0);
}

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

inline RowStats row_stats(const float* x, int64_t stride, int64_t depth, const float* before) {
  Vec squares[kGroup] = {}, largest[kGroup] = {};
  for (int64_t k = 0; k < depth; k += kWidth)
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; r++) {
      const Vec v = load(x + r * stride + k) * before[r];
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

inline BlockScale row_scales(const float* x, int64_t stride, int64_t depth) {
  float before[kWidth] = {};
  store(before, splat(1.f));
  RowStats stats = row_stats(x, stride, depth, before);
  const Vec lift = lift_of(load(stats.largest));
  if (any(lift != 1.f)) {
    store(before, lift);
    stats = row_stats(x, stride, depth, before);
  }
  return scale_of(load(stats.squares), load(stats.largest), lift);
}

// Four rows of one block; depth is a multiple of kDepthStep. `pairs` points to the first row's
// place.
void pack_group(const float* x, int64_t stride, int64_t depth, int64_t panel, int32_t* pairs,
                float* scales) {
  const BlockScale scale = row_scales(x, stride, depth);
  memcpy(scales, &scale.stored, kGroup * sizeof(float));
  for (int64_t k = 0; k < depth; k += 2 * kWidth) {
    Words w[kGroup];
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; r++) {
      const float* row = x + r * stride + k;
      for (int i = 0; i < 2 * kWidth; i += kLine) fetch(row + kGroup * stride + i);
      const Vec before = splat(scale.before[r]), factor = splat(scale.factor[r]);
      w[r] = narrow(round_nearest(load(row) * before * factor),
                    round_nearest(load(row + kWidth) * before * factor));
    }
    const Words a = low32(w[0], w[1]), b = low32(w[2], w[3]);
    const Words c = high32(w[0], w[1]), d = high32(w[2], w[3]);
    int32_t* out = pairs + k / 2 * panel;
    store_pairs(low64(a, b), high64(a, b), out, panel);
    store_pairs(low64(c, d), high64(c, d), out + kWidth / 2 * panel, panel);
  }
}

// Rows first … first + kTaskRows of all blocks; what lies beyond the matrix is copied as zeros.
void pack_rows(const float* x, int64_t stride, const PackedLayout& layout, int64_t first,
               void* packed) {
  alignas(64) float edge[kGroup * kMaxBlock];
  for (int64_t b = 0; b < layout.blocks; b++) {
    const int64_t depth = layout.filled(b),
                  whole = (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
    for (int64_t row = first; row < first + kTaskRows && row < layout.padded; row += kGroup) {
      const int64_t rows = layout.vectors - row < kGroup ? layout.vectors - row : kGroup;
      const float* source = x + row * stride + b * layout.block;
      int64_t source_stride = stride;
      if (rows < kGroup || depth < whole) {
        memset(edge, 0, kGroup * whole * sizeof(float));
        for (int64_t r = 0; r < rows; r++)
          memcpy(edge + r * whole, source + r * stride, depth * sizeof(float));
        source = edge;
        source_stride = whole;
      }
      pack_group(source, source_stride, whole, layout.panel,
                 layout.pairs(packed, b, row / layout.panel) + row % layout.panel,
                 layout.scales(packed, b) + row);
    }
  }
}

constexpr int64_t kRowsAhead = 16;  // some 100 cycles, a strip's row being two to four lines

struct StripStats {
  Vec squares[kStripVecs], largest[kStripVecs];
};

// Column by column; `sums` (kStrip of them, or null) are the plain sums. They go through totals of
// kSumRows rows, so that fewer roundings pile up.
constexpr int64_t kSumRows = 32;

inline StripStats strip_stats(const float* x, int64_t stride, int64_t depth, const Vec* before,
                              float* sums) {
  StripStats stats = {};
  Vec totals[kStripVecs] = {};
  for (int64_t first = 0; first < depth; first += kSumRows) {
    Vec part[kStripVecs] = {};
    const int64_t last = first + kSumRows < depth ? first + kSumRows : depth;
    for (int64_t k = first; k < last; k++) {
      for (int i = 0; i < kStrip; i += kLine) fetch(x + (k + kRowsAhead) * stride + i);
#pragma GCC unroll 4
      for (int j = 0; j < kStripVecs; j++) {
        const Vec v = load(x + k * stride + j * kWidth) * before[j];
        stats.squares[j] += v * v;
        stats.largest[j] = max(stats.largest[j], abs(v));
        part[j] += v;
      }
    }
    for (int j = 0; j < kStripVecs; j++) totals[j] += part[j];
  }
  if (sums)
    for (int j = 0; j < kStripVecs; j++) store(sums + j * kWidth, totals[j]);
  return stats;
}

struct StripScales {
  BlockScale of[kStripVecs];
};

inline StripScales strip_scales(const float* x, int64_t stride, int64_t depth, float* sums) {
  Vec before[kStripVecs];
  for (Vec& v : before) v = splat(1.f);
  StripStats stats = strip_stats(x, stride, depth, before, sums);
  VecI lifted = {};
  for (int j = 0; j < kStripVecs; j++) {
    before[j] = lift_of(stats.largest[j]);
    lifted |= before[j] != 1.f;
  }
  if (any(lifted)) stats = strip_stats(x, stride, depth, before, nullptr);
  StripScales scales;
  for (int j = 0; j < kStripVecs; j++)
    scales.of[j] = scale_of(stats.squares[j], stats.largest[j], before[j]);
  return scales;
}

// Vectors of pairs to their panels. A left panel may be half a vector wide.
struct PanelStore {
  int32_t* first;           // the panel that column 0 of the strip is in
  int64_t panel, distance;  // between panels
  int64_t columns;          // of the strip that exist in packed memory
  void operator()(int64_t pair, int j, VecI values) const {
    if (panel >= kWidth) {
      const int64_t column = j * kWidth;
      if (column < columns)
        memcpy(first + column / panel * distance + pair * panel + column % panel, &values,
               sizeof values);
      return;
    }
    constexpr int kHalf = kWidth / 2;
    for (int h = 0; h < 2; h++)
      if (j * kWidth + h * kHalf < columns)
        memcpy(first + (2 * j + h) * distance + pair * panel, (int32_t*)&values + h * kHalf,
               kHalf * sizeof(int32_t));
  }
};

// Rows from depth on count as zeros, up to `pairs` pairs.
void pack_strip(const float* x, int64_t stride, int64_t depth, int64_t pairs,
                const StripScales& scales, const PanelStore& put) {
  for (int64_t p = 0; p < pairs; p++) {
    for (int i = 0; i < kStrip; i += kLine) {
      fetch(x + 2 * p * stride + kStrip + i);
      fetch(x + (2 * p + 1) * stride + kStrip + i);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kStripVecs; j++) {
      const BlockScale& s = scales.of[j];
      const float* at = x + 2 * p * stride + j * kWidth;
      const auto row = [&](int64_t r) {
        return 2 * p + r < depth ? round_nearest(load(at + r * stride) * s.before * s.factor)
                                 : VecI{};
      };
      put(p, j, (row(0) & 0xffff) | (row(1) << 16));
    }
  }
}

// Columns first … first + kStrip of one block of rows. `sums` as in strip_stats.
void pack_columns(const float* x, int64_t stride, const PackedLayout& layout, int64_t block,
                  int64_t first, void* packed, float* sums) {
  alignas(64) float edge[kMaxBlock * kStrip];
  const int64_t depth = layout.filled(block);
  const int64_t columns = layout.vectors - first < kStrip ? layout.vectors - first : kStrip;
  const float* source = x + block * layout.block * stride + first;
  if (columns < kStrip) {
    memset(edge, 0, depth * kStrip * sizeof(float));
    for (int64_t k = 0; k < depth; k++)
      memcpy(edge + k * kStrip, source + k * stride, columns * sizeof(float));
    source = edge;
    stride = kStrip;
  }
  const StripScales scales = strip_scales(source, stride, depth, sums);
  const int64_t exist = layout.padded - first < kStrip ? layout.padded - first : kStrip;
  float* to = layout.scales(packed, block) + first;
  for (int j = 0; j < kStripVecs; j++)
    for (int i = 0; i < kWidth && j * kWidth + i < exist; i++)
      to[j * kWidth + i] = scales.of[j].stored[i];
  const PanelStore put = {layout.pairs(packed, block, first / layout.panel), layout.panel,
                          layout.panel * layout.block / 2, exist};
  pack_strip(source, stride, depth, layout.pairs_of(block), scales, put);
}

// One source and one or two packed operands, as tasks that any thread may do.
struct Packing {
  const float* x;
  int64_t stride, rows, cols;
  void *by_rows, *by_columns;  // or null
  float* column_sums;          // or null
  PackedLayout row_layout, column_layout;
  int64_t row_tasks, strips;  // for each block of rows
  float* block_sums;

  Packing(const float* x, int64_t stride, int64_t rows, int64_t cols, void* by_rows,
          int64_t row_role, void* by_columns, int64_t column_role, float* column_sums)
      : x(x),
        stride(stride),
        rows(rows),
        cols(cols),
        by_rows(by_rows),
        by_columns(by_columns),
        column_sums(column_sums),
        row_layout(rows, cols, row_role),
        column_layout(cols, rows, column_role) {
    row_tasks = by_rows ? column_layout.block / kTaskRows : 0;
    strips = by_columns ? (cols + kStrip - 1) / kStrip : 0;
    const int64_t bytes = column_layout.blocks * strips * kStrip * sizeof(float);
    block_sums = column_sums ? (float*)aligned_alloc(64, bytes ? bytes : 64) : nullptr;
    if (column_sums && !block_sums) abort();
  }
  ~Packing() { free(block_sums); }
  Packing(const Packing&) = delete;

  // Block of rows by block of rows, so that what one task reads by rows is still in the shared
  // cache when another reads it by columns.
  int64_t tasks() const { return x ? column_layout.blocks * (row_tasks + strips) : 0; }
  void run(int64_t task) const {
    const int64_t block = task / (row_tasks + strips), part = task % (row_tasks + strips);
    const int64_t row = block * column_layout.block + part * kTaskRows;
    if (part < row_tasks) {
      if (row < rows) pack_rows(x, stride, row_layout, row, by_rows);
      return;
    }
    const int64_t strip = part - row_tasks;
    pack_columns(x, stride, column_layout, block, strip * kStrip, by_columns,
                 block_sums ? block_sums + (block * strips + strip) * kStrip : nullptr);
  }

  // When all tasks are done. Blocks are added in order, whichever thread did them.
  void total_sums() const {
    if (!column_sums) return;
    for (int64_t c = 0; c < cols; c++) {
      float total = 0;
      for (int64_t b = 0; b < column_layout.blocks; b++)
        total += block_sums[b * strips * kStrip + c];
      column_sums[c] = total;
    }
  }
};

}  // namespace

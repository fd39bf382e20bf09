// Packs rows of a matrix, of float or bf16, for int16 products: a row is a vector, four of them are
// interleaved at a time.
#pragma once

#include "activation.h"
#include "bf16.h"
#include "matmul_layout.h"
#include "matmul_quantise.h"
#include "matmul_stored.h"
#include "simd_int16.h"

namespace {

constexpr int kGroup = 4;          // rows that are interleaved at once: 4 pairs fill 128 bits
constexpr int64_t kTaskRows = 32;  // whole panels of either role, and a divisor of every block
static_assert(kTaskRows % kTileCols == 0 && kTaskRows % kTileRows == 0 &&
              kDepthStep % kTaskRows == 0);

// A pair's four rows to its place, for each lane; pairs of one lane are two neighbours in depth.
template <int kLane = 0>
inline void store_pairs(Words first, Words second, int32_t* out, int64_t panel) {
  store_lane<kLane>(out + 2 * kLane * panel, first);
  store_lane<kLane>(out + (2 * kLane + 1) * panel, second);
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

// Reads the block a second time, when it is in the cache: the next rows are fetched meanwhile, or
// the memory would idle.
template <bool kLifted, class Source>
inline void pack_values(const Source* x, int64_t stride, int64_t depth, const BlockScale& scale,
                        int64_t panel, int32_t* pairs) {
  for (int64_t k = 0; k < depth; k += 2 * kWidth) {
    Words w[kGroup];
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; r++) {
      const Source* row = x + r * stride + k;
      for (int i = 0; i < 2 * kWidth; i += kElementsOfLine<Source>)
        fetch(row + kGroup * stride + i);
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
  void copy(const Source* x, int64_t stride, int64_t row, int64_t column, int64_t count,
            Source* to) const {
    memcpy(to, x + row * stride + column, count * sizeof(Source));
  }
};
struct Unpacked {
  static constexpr bool kComputed = true;
  const StoredWeight& weight;
  void copy(const float*, int64_t stride, int64_t row, int64_t column, int64_t count,
            float* to) const {
    unpack(weight, row * stride + column, row, count, to);
  }
};
struct Activations {
  static constexpr bool kComputed = true;
  ForwardRow activate;
  const float* bias;  // or null
  void copy(const float* x, int64_t stride, int64_t row, int64_t column, int64_t count,
            float* to) const {
    activate(x + row * stride + column, bias ? bias + column : nullptr, to, nullptr, count);
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
      const Source* source = What::kComputed ? edge : x + row * stride + b * layout.block;
      int64_t source_stride = stride;
      if (What::kComputed || !inside) {
        if (!inside) memset(edge, 0, kGroup * whole * sizeof(Source));
        for (int64_t r = 0; r < rows; r++)
          what.copy(x, stride, row + r, b * layout.block, depth, edge + r * whole);
        source = edge;
        source_stride = whole;
      }
      pack_group(source, source_stride, whole, layout.panel,
                 layout.pairs(packed, b, row / layout.panel) + row % layout.panel,
                 layout.scales(packed, b) + row);
    }
  }
}

}  // namespace

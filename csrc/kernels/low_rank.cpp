// The low-rank path of an adapter, x · keep · Aᵀ and its gradients. The mask of its dropout is
// drawn on the way, in tiles of the first-level cache: x under its mask is never written.
#include "api.h"
#include "columns.h"
#include "tile_product.h"

namespace {

// 24 rows are two blocks of AVX-512's tile products and four of AVX2's; with 256 columns a tile has
// 24 KB.
constexpr int64_t kTileTokens = 24, kTileColumns = 256;
// Ranks whose sums are found at once; for each band of them the mask is drawn again.
constexpr int64_t kBand = 64;
// A gradient of A is computed in columns of four cache lines, over 64 tokens at a time: 16 KB.
constexpr int64_t kGradTokens = 64, kGradColumns = 64;
static_assert(kTileColumns % kDropoutBlock == 0 && kGradColumns % kDropoutBlock == 0);

struct Mask {
  DropoutRate rate;
  uint64_t key;
  bool on;
  Mask(float p, uint64_t key) : rate(p), key(key), on(p > 0) {}

  // body(column, Whole or Part, factor) for `count` columns of a row, from a whole block on.
  template <class Body>
  INLINE_BODY inline void for_row(int64_t row, int64_t first, int64_t count, Body body) const {
    if (!on) {
      for_columns(count, [&](int64_t c, int, auto part) INLINE_BODY { body(c, part, splat(1.f)); });
      return;
    }
    const RowKey mine = row_key(key, row);
    for (int64_t c = 0; c < count; c += kDropoutBlock) {
      Vec factors[kDropoutVecs];
      dropout_block(mine, rate, first + c, factors);
      for (int i = 0; i < kDropoutVecs; i++) {
        const int64_t at = c + i * kWidth, left = count - at;
        if (left >= kWidth)
          body(at, Whole{}, factors[i]);
        else if (left > 0)
          body(at, Part{(int)left}, factors[i]);
      }
    }
  }
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Part of x under its mask; columns up to whole vectors are zeros.
void fill_tile(const float* x, int64_t stride, int64_t row, int64_t rows, int64_t first,
               int64_t columns, const Mask& mask, float* tile, int64_t tile_stride) {
  for (int64_t r = 0; r < rows; r++) {
    const float* from = x + (row + r) * stride + first;
    float* to = tile + r * tile_stride;
    mask.for_row(row + r, first, columns, [&](int64_t c, auto part, Vec factor) INLINE_BODY {
      store(to + c, part.load(from + c) * factor);
    });
  }
}

// (rows × cols) with rows of whole vectors, whose ends are zeros.
void copy_padded(const float* from, int64_t rows, int64_t cols, float* to, int64_t stride) {
  for (int64_t r = 0; r < rows; r++) {
    memcpy(to + r * stride, from + r * cols, cols * sizeof(float));
    for (int64_t c = cols; c < stride; c++) to[r * stride + c] = 0;
  }
}

}  // namespace

void KERNEL(low_rank)(const float* x, int64_t stride, const float* a, float* out, int64_t rows,
                      int64_t cols, int64_t rank, float p, uint64_t key, Scratch* scratch) {
  Arena arena(scratch);
  const int64_t wide = round_up(rank, kWidth);
  float* turned = arena.take<float>(cols * wide);  // A by its columns
  if (!arena.enough()) return;
  const Mask mask(p, key);
#pragma omp parallel if (rows * cols > kFewElements)
  {
#pragma omp for schedule(static)
    for (int64_t first = 0; first < cols; first += kLine)
      for (int64_t c = first; c < least(first + kLine, cols); c++)
        for (int64_t r = 0; r < wide; r++) turned[c * wide + r] = r < rank ? a[r * cols + c] : 0.f;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row += kTileTokens) {
      alignas(64) float tile[kTileTokens * (kTileColumns + kLine)];
      const int64_t count = least(kTileTokens, rows - row), tile_stride = kTileColumns + kLine;
      for (int64_t band = 0; band < wide; band += kBand) {
        alignas(64) float sums[kTileTokens * kBand];
        memset(sums, 0, sizeof sums);
        for (int64_t first = 0; first < cols; first += kTileColumns) {
          const int64_t depth = least(kTileColumns, cols - first);
          if (band == 0 || cols > kTileColumns)
            fill_tile(x, stride, row, count, first, depth, mask, tile, tile_stride);
          tile_product<Form::kPlain, Result::kAdd>(
              count, least(kBand, wide - band), depth, {tile, tile_stride},
              {turned + first * wide + band, wide}, sums, kBand);
        }
        for (int64_t r = 0; r < count; r++)
          memcpy(out + (row + r) * rank + band, sums + r * kBand,
                 least(kBand, rank - band) * sizeof(float));
      }
    }
  }
}

void KERNEL(low_rank_a_grad)(const float* grad, const float* x, int64_t stride, float* grad_a,
                             int64_t rows, int64_t cols, int64_t rank, float p, uint64_t key,
                             Scratch* scratch) {
  Arena arena(scratch);
  const int64_t threads = omp_get_max_threads();
  const ThreadScratch sums(arena, threads, rank * kGradColumns);
  if (!arena.enough()) return;
  const Mask mask(p, key);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * cols > kFewElements)
  for (int64_t first = 0; first < cols; first += kGradColumns) {
    alignas(64) float tile[kGradTokens * kGradColumns];
    const int64_t width = least(kGradColumns, cols - first);
    float* mine = sums.mine();
    memset(mine, 0, rank * kGradColumns * sizeof(float));
    for (int64_t row = 0; row < rows; row += kGradTokens) {
      const int64_t count = least(kGradTokens, rows - row);
      fill_tile(x, stride, row, count, first, width, mask, tile, kGradColumns);
      tile_product<Form::kTransposed, Result::kAdd>(rank, round_up(width, kWidth), count,
                                                    {grad + row * rank, rank}, {tile, kGradColumns},
                                                    mine, kGradColumns);
    }
    for (int64_t r = 0; r < rank; r++)
      memcpy(grad_a + r * cols + first, mine + r * kGradColumns, width * sizeof(float));
  }
}

void KERNEL(low_rank_x_grad)(const float* grad, const float* a, float* grad_x, int64_t rows,
                             int64_t cols, int64_t rank, float p, uint64_t key, Scratch* scratch) {
  Arena arena(scratch);
  const int64_t wide = round_up(cols, kWidth);
  float* padded = arena.take<float>(rank * wide);
  if (!arena.enough()) return;
  const Mask mask(p, key);
  copy_padded(a, rank, cols, padded, wide);
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t row = 0; row < rows; row += kTileTokens) {
    alignas(64) float tile[kTileTokens * kTileColumns];
    const int64_t count = least(kTileTokens, rows - row);
    for (int64_t first = 0; first < cols; first += kTileColumns) {
      const int64_t width = least(kTileColumns, cols - first);
      tile_product<Form::kPlain, Result::kAssign>(count, round_up(width, kWidth), rank,
                                                  {grad + row * rank, rank}, {padded + first, wide},
                                                  tile, kTileColumns);
      for (int64_t r = 0; r < count; r++) {
        float* to = grad_x + (row + r) * cols + first;
        const float* found = tile + r * kTileColumns;
        mask.for_row(row + r, first, width, [&](int64_t c, auto part, Vec factor) INLINE_BODY {
          part.store(to + c, part.load(to + c) + load(found + c) * factor);
        });
      }
    }
  }
}

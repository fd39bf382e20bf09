// Embeddings: up to three tables' rows gathered and summed, LayerNorm and dropout, in one pass. The
// sum isn't kept: the backward pass gathers it again, which reads no more than a kept copy would.
#include <omp.h>

#include "api.h"
#include "layer_norm.h"

namespace {

// A table and the row of it that each token takes; both null if there is none.
struct Lookup {
  const float* table;
  const int64_t* ids;
  const float* row(int64_t r, int64_t cols) const {
    return table ? table + ids[r] * cols : nullptr;
  }
};

struct Sources {
  Lookup word, position, type;

  // Writes the sum of token r's rows into z and returns the sum of all its columns. Of the tables
  // only the words' is too large for a cache and read in no order: the next token's row is fetched
  // meanwhile.
  float gather(int64_t r, int64_t rows, int64_t cols, float* z) const {
    const float* first = word.row(r, cols);
    const float* next = word.row(r + 1 < rows ? r + 1 : r, cols);
    const float* second = position.row(r, cols);
    const float* third = type.row(r, cols);
    Vec sums[kChains] = {};
    for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
      fetch(next + c);
      Vec v = part.load(first + c);
      if (second) v += part.load(second + c);
      if (third) v += part.load(third + c);
      part.store(z + c, v);
      sums[j] += v;
    });
    return sum_of_chains(sums);
  }
};

// The part of a table's gradient that one thread owns: some columns of some rows. Any thread may
// own it: a row gets its tokens' gradients in their order, so the result doesn't depend on the
// number of threads.
struct Share {
  int64_t first_column, columns, classes, my_class;

  Share(int64_t cols, int64_t threads, int64_t me) {
    // Columns first: they are balanced even if all tokens share one row. Less than 64 (four cache
    // lines) would fetch much and use little of it; further threads divide the rows.
    const int64_t most = cols / 64 > 1 ? cols / 64 : 1, slices = threads < most ? threads : most;
    const int64_t slice = me % slices, width = (cols / slices + 15) / 16 * 16;
    first_column = slice * width < cols ? slice * width : cols;
    columns = slice == slices - 1 || first_column + width > cols ? cols - first_column : width;
    classes = threads / slices;
    my_class = me / slices;  // a thread left over gets a class that no row has
  }
  bool has(int64_t id) const { return classes == 1 ? my_class == 0 : id % classes == my_class; }
};

}  // namespace

void KERNEL(find_outside)(const int64_t* ids, int64_t count, int64_t limit, int64_t* place) {
  *place = -1;
  for (int64_t i = 0; i < count; i++)
    if ((uint64_t)ids[i] >= (uint64_t)limit) {
      *place = i;
      return;
    }
}

void KERNEL(embed)(const float* word, const int64_t* word_ids, const float* position,
                   const int64_t* position_ids, const float* type, const int64_t* type_ids,
                   const float* weight, const float* beta, float* out, float* mean, float* rstd,
                   int64_t rows, int64_t cols, float eps, float p, uint64_t key) {
  const Sources sources = {{word, word_ids}, {position, position_ids}, {type, type_ids}};
  const DropoutRate rate(p);
  const auto normalise = p > 0 ? normalise_row<true> : normalise_row<false>;
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) {
    float* row = out + r * cols;
    const float total = sources.gather(r, rows, cols, row);
    const Moments m = moments(row, cols, total, eps, row);
    mean[r] = m.mean;
    rstd[r] = m.rstd;
    normalise(row, m, weight, beta, row, cols, row_key(key, r), rate, nullptr);
  }
}

void KERNEL(embed_backward)(const float* grad_out, const float* word, const int64_t* word_ids,
                            const float* position, const int64_t* position_ids, const float* type,
                            const int64_t* type_ids, const float* mean, const float* rstd,
                            const float* weight, float* grad_sum, float* grad_weight,
                            float* grad_beta, int64_t rows, int64_t cols, float p, uint64_t key,
                            Scratch* scratch) {
  const Sources sources = {{word, word_ids}, {position, position_ids}, {type, type_ids}};
  const DropoutRate rate(p);
  const RowChunks chunks(rows);
  Arena arena(scratch);
  const ColumnSums sums(arena, chunks, 4, cols);
  if (!arena.enough()) return;
#pragma omp parallel if (rows * cols > kFewElements)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks.count; chunk++) {
      sums.clear(chunk, 2);
      const NormSums add = {sums.row(chunk, 0), sums.row(chunk, 1), nullptr};
      float *kept = sums.row(chunk, 2),
            *gathered = sums.row(chunk, 3);  // scratch that stays in the cache
      for (int64_t r = chunks.first(chunk); r < chunks.last(chunk); r++) {
        const float* grad = grad_out + r * cols;
        if (p > 0) {
          for_columns_dropped<true>(cols, row_key(key, r), rate,
                                    [&](int64_t c, int, auto part, Vec factor) INLINE_BODY {
                                      fetch(grad + cols + c);
                                      part.store(kept + c, part.load(grad + c) * factor);
                                    });
          grad = kept;
        }
        sources.gather(r, rows, cols, gathered);
        const Moments m = {mean[r], rstd[r]};
        GradMeans means;
        grad_means<1>(grad, gathered, &m, weight, add, cols, &means);
        norm_grad_row<false, false>(grad, gathered, m, means, weight, nullptr, grad_sum + r * cols,
                                    nullptr, add, cols);
      }
    }
    sums.total(0, grad_weight);
    sums.total(1, grad_beta);
  }
}

void KERNEL(embedding_grad)(const float* grad, const int64_t* ids, float* grad_table, int64_t rows,
                            int64_t cols, int64_t skipped) {
#pragma omp parallel if (rows * cols > kFewElements)
  {
    const Share mine(cols, omp_get_num_threads(), omp_get_thread_num());
    for (int64_t r = 0; r < rows; r++) {
      if (ids[r] == skipped || !mine.has(ids[r])) continue;
      const float* from = grad + r * cols + mine.first_column;
      float* to = grad_table + ids[r] * cols + mine.first_column;
      for_columns(mine.columns, [&](int64_t c, int, auto part) INLINE_BODY {
        part.store(to + c, part.load(to + c) + part.load(from + c));
      });
    }
  }
}

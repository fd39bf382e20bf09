// out = left · rightᵀ in block-scaled 16-bit integers.
#include <omp.h>

#include "api.h"
#include "matmul_operand.h"
#include "matmul_schedule.h"
#include "matmul_tiles.h"

namespace {

// One product of a sum of two.
struct Term {
  LazyOperand &left, &right;
};

struct Product {
  Term first, second;  // the second's depth may be 0
  float* out;
  int64_t out_stride;
  const float* bias;
  bool accumulate, by_blocks;
  ColumnProduct column;

  // A part of the result for some blocks of the depth. One panel of the right operand stays in the
  // first-level cache while all of the part's left panels, which stay in the second, pass by.
  void compute(ResultPart part, int64_t block, int64_t block_end, Share thread, Share share) const {
    for (int64_t b = block; b < block_end; b++) {
      if (by_blocks) pack_own(b, thread);
      block_of(first, b, part, b == 0, thread, share);
    }
    if (block_end < first.left.layout.blocks) return;
    for (int64_t b = 0; b < second.left.layout.blocks; b++)
      block_of(second, b, part, false, thread, share);
  }

  void block_of(const Term& term, int64_t b, ResultPart part, bool begins, Share thread,
                Share share) const {
    const auto [row, row_end, col, col_end] = part;
    term.left.ensure(b, row * kTileRows, row_end * kTileRows);
    term.right.ensure(b, col * kTileCols, col_end * kTileCols);
    for (int64_t c = col; c < col_end; c++)
      column_at(term, b, row, row_end, c, begins,
                ahead(b + 1, thread, share.piece(c - col, col_end - col)));
  }

  void column_at(const Term& term, int64_t b, int64_t row, int64_t row_end, int64_t c, bool begins,
                 Rows ahead) const {
    const auto& [left, right] = term;
    const int64_t first_row = row * kTileRows, first_col = c * kTileCols;
    const int64_t rows = left.layout.vectors, cols = right.layout.vectors - first_col;
    column({left.layout.pairs(left.packed, b, row), right.layout.pairs(right.packed, b, c),
            left.layout.pairs_of(b), left.layout.panel_words,
            left.layout.scales(left.packed, b) + first_row,
            right.layout.scales(right.packed, b) + first_col,
            out + first_row * out_stride + first_col, out_stride,
            (row_end * kTileRows < rows ? row_end * kTileRows : rows) - first_row,
            cols < kTileCols ? cols : kTileCols, bias && begins ? bias + first_col : nullptr,
            accumulate || !begins, ahead});
  }

  // Where both sides are packed block by block, a thread packs the same vectors in every block, for
  // which it has fetched the source during the block before: into its own cache, by addresses that
  // its own TLB knows. Others do it in its place if they are there first.
  struct Tasks {
    int64_t begin, end;  // the left side's, then the right side's
  };
  Tasks own_tasks(Share thread) const {
    const int64_t tasks = first.left.tasks_of_block() + first.right.tasks_of_block();
    return {tasks * thread.number / thread.count, tasks * (thread.number + 1) / thread.count};
  }
  void pack_own(int64_t b, Share thread) const {
    const Tasks own = own_tasks(thread);
    const auto& [left, right] = first;
    for (int64_t task = own.begin; task < own.end; task++)
      if (task < left.tasks_of_block())
        left.pack(b, task);
      else
        right.pack(b, task - left.tasks_of_block());
  }
  // A share of what the thread's tasks read in this block; of one task, if it would be of two.
  Rows ahead(int64_t b, Share thread, Share share) const {
    const auto& [left, right] = first;
    if (!by_blocks || b >= left.layout.blocks) return {};
    const Tasks own = own_tasks(thread);
    const int64_t rows = left.layout.filled(b), all = (own.end - own.begin) * rows;
    const int64_t begin = all * share.number / share.count, row = begin % rows;
    const int64_t count = all * (share.number + 1) / share.count - begin;
    const int64_t task = own.begin + begin / rows, rest = rows - row;
    return task < left.tasks_of_block()
               ? left.source_of(b, task, row, count < rest ? count : rest)
               : right.source_of(b, task - left.tasks_of_block(), row, count < rest ? count : rest);
  }

  // What is left of the sum when there is nothing to add up.
  void only_bias() const {
    for (int64_t r = 0; r < first.left.layout.vectors; r++)
      for (int64_t c = 0; c < first.right.layout.vectors; c++) {
        float& to = out[r * out_stride + c];
        to = (accumulate ? to : 0.f) + (bias ? bias[c] : 0.f);
      }
  }
};

// Below so many elements or multiplications, waking threads costs more than they save.
constexpr int64_t kElementsForThreads = 16384, kProductsForThreads = 65536;

}  // namespace

void KERNEL(int16_packed_bytes)(int64_t vectors, int64_t depth, int64_t role, int64_t* bytes) {
  *bytes = PackedLayout(vectors, depth, role).bytes();
}

void KERNEL(int16_pack)(const void* x, int64_t kind, int64_t stride, int64_t rows, int64_t cols,
                        void* by_rows, int64_t row_role, void* by_columns, int64_t column_role,
                        float* column_sums, Scratch* scratch) {
  Arena arena(scratch);
  const Packing packing(arena, x, kind, stride, rows, cols, by_rows, row_role, by_columns,
                        column_role, column_sums);
  if (!arena.enough()) return;
#pragma omp parallel for schedule(dynamic) if (rows * cols > kElementsForThreads)
  for (int64_t task = 0; task < packing.tasks(); task++) packing.run(task);
  packing.total_sums();
}

void KERNEL(int16_pack_activated)(const float* h, const float* bias, int64_t kind, int64_t stride,
                                  int64_t rows, int64_t cols, void* packed) {
  const PackedLayout layout(rows, cols, kLeft);
  const Activations activations = {forward_of(kind, bias, false), bias};
#pragma omp parallel for schedule(dynamic) if (rows * cols > kElementsForThreads)
  for (int64_t row = 0; row < rows; row += kTaskRows)
    pack_rows(h, stride, layout, row, packed, activations);
}

void KERNEL(int16_product)(const Int16Operand* left, const Int16Operand* right, float* out,
                           int64_t out_stride, int64_t rows, int64_t cols, int64_t depth,
                           const Int16Term* plus, const float* bias, int64_t accumulate,
                           Scratch* scratch) {
  Arena arena(scratch);
  LazyOperand left_operand(arena, *left, rows, depth, kLeft);
  LazyOperand right_operand(arena, *right, cols, depth, kRight);
  const int64_t more = plus ? plus->depth : 0;
  LazyOperand plus_left(arena, plus ? plus->left : Int16Operand{}, rows, more, kLeft);
  LazyOperand plus_right(arena, plus ? plus->right : Int16Operand{}, cols, more, kRight);
  const int64_t blocks = left_operand.layout.blocks;
  const bool by_blocks = left_operand.packs_by_columns() && right_operand.packs_by_columns();
  if (by_blocks) left_operand.hold(kBlocksHeld), right_operand.hold(kBlocksHeld);
  const Product product = {{left_operand, right_operand},
                           {plus_left, plus_right},
                           out,
                           out_stride,
                           bias,
                           accumulate != 0,
                           by_blocks,
                           best_product()};
  const bool parallel = rows * cols * depth > kProductsForThreads;
  const int64_t threads = parallel ? omp_get_max_threads() : 1;
  const Parts parts(left_operand.layout.panels(), right_operand.layout.panels(), threads);
  const int64_t passes = by_blocks ? blocks : 1, blocks_of_pass = by_blocks ? 1 : blocks;
  Runs runs(arena, parts.count(), passes, threads);
  if (!arena.enough()) return;
  if (depth == 0) product.only_bias();
  left_operand.start(), right_operand.start(), runs.start();
  plus_left.start(), plus_right.start();
#pragma omp parallel if (parallel)
  {
    const Share thread = {omp_get_thread_num(), omp_get_num_threads()};
    for (Runs::Turn turn; (turn = runs.take(thread.number)).part >= 0; runs.done(turn))
      product.compute(parts.part(turn.part), turn.pass * blocks_of_pass,
                      (turn.pass + 1) * blocks_of_pass, thread, turn.of_pass);
  }
  left_operand.finish();
  right_operand.finish();
  plus_left.finish();
  plus_right.finish();
}

void KERNEL(unpack_weight)(const StoredWeight* weight, float* out, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols > kElementsForThreads)
  for (int64_t r = 0; r < rows; r++) unpack(*weight, r * cols, r, cols, out + r * cols);
}

void KERNEL(int16_use_vnni)(int64_t wanted) { vnni_wanted = wanted; }

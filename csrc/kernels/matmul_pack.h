// Packs a matrix for int16 products by its rows, by its columns, or both, in tasks for any thread.
#pragma once

#include <type_traits>

#include "matmul_pack_columns.h"
#include "matmul_pack_rows.h"
#include "scratch.h"

namespace {

// One source and one or two packed operands, as tasks that any thread may do.
struct Packing {
  const void* x;
  int64_t kind;  // what x is
  int64_t stride, rows, cols;
  void *by_rows, *by_columns;  // or null
  float* column_sums;          // or null
  PackedLayout row_layout, column_layout;
  int64_t row_tasks, column_tasks;  // for each block of rows
  float* block_sums;                // or null

  Packing(Arena& arena, const void* x, int64_t kind, int64_t stride, int64_t rows, int64_t cols,
          void* by_rows, int64_t row_role, void* by_columns, int64_t column_role,
          float* column_sums)
      : x(x),
        kind(kind),
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
  void run(int64_t task) const {
    if (kind == kFloatSource)
      run((const float*)x, task);
    else if (kind == kBf16Source)
      run((const Bf16*)x, task);
    else
      run((const StoredWeight*)x, task);
  }
  template <class Source>
  void run(const Source* x, int64_t task) const {
    const int64_t block = task / (row_tasks + column_tasks),
                  part = task % (row_tasks + column_tasks);
    const int64_t row = block * column_layout.block + part * kTaskRows;
    if (part < row_tasks) {
      if (row >= rows) return;
      if constexpr (std::is_same_v<Source, StoredWeight>)
        pack_rows((const float*)nullptr, stride, row_layout, row, by_rows, Unpacked{*x});
      else
        pack_rows(x, stride, row_layout, row, by_rows);
      return;
    }
    const int64_t column = (part - row_tasks) * kTaskColumns;
    float* sums = block_sums ? block_sums + block * column_tasks * kTaskColumns + column : nullptr;
    if constexpr (std::is_same_v<Source, StoredWeight>)
      pack_stored_columns(*x, stride, column_layout, block, column, by_columns);
    else
      pack_columns(x, stride, column_layout, block, column, by_columns, sums);
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

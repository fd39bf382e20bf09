// An operand of a product whose parts are packed by whichever thread needs them first.
//
// A barrier between packing and multiplying would make every thread wait for the slowest, which on
// a busy machine may not even be running; and what a thread has just packed is still in its cache.
#pragma once

#include <sched.h>

#include "api.h"
#include "matmul_pack.h"

namespace {

// One of `count` equal shares of something.
struct Share {
  int64_t number, count;
  Share piece(int64_t n, int64_t pieces) const { return {number * pieces + n, count * pieces}; }
};

// Part of a matrix, in bytes.
struct Rows {
  const char* first;
  int64_t count, width, stride;
};

class LazyOperand {
 public:
  LazyOperand(Arena& arena, const Int16Operand& o, int64_t vectors, int64_t depth, int64_t role)
      : layout(vectors, depth, role),
        packed(o.packed),
        by_columns_(o.by_columns),
        packing_(arena, o.source, o.kind, o.stride, o.by_columns ? depth : vectors,
                 o.by_columns ? vectors : depth, o.by_columns ? nullptr : o.packed, role,
                 o.by_columns ? o.packed : nullptr, role, o.sums),
        states_(arena.take<uint8_t>(packing_.tasks())) {}
  LazyOperand(const LazyOperand&) = delete;

  // Once there is memory: nothing is packed yet.
  void start() { memset(states_, kNot, packing_.tasks()); }

  // When this returns, the vectors first … last - 1 are packed in this block. By columns, threads
  // pack these first, because what a thread packs itself lies in its own cache, and then help with
  // the rest of the block.
  void ensure(int64_t block, int64_t first, int64_t last) {
    if (!lazy()) return;
    last = last < layout.vectors ? last : layout.vectors;
    const int64_t width = by_columns_ ? kTaskColumns : kTaskRows;
    int64_t begin = first / width, end = (last + width - 1) / width;
    if (by_columns_) begin += block * tasks_of_block(), end += block * tasks_of_block();
    work(begin, end);  // by rows, these tasks do all blocks
    if (by_columns_) work(block * tasks_of_block(), (block + 1) * tasks_of_block());
    wait(begin, end);
  }

  bool packs_by_columns() const { return by_columns_ && lazy(); }

  // Blocks take the places of those `count` before them, in this and in what packs it.
  void hold(int64_t count) {
    if (count < layout.blocks) layout.held = packing_.column_layout.held = count;
  }

  // A block is packed by columns in so many tasks.
  int64_t tasks_of_block() const { return packing_.column_tasks; }
  void pack(int64_t block, int64_t task) {
    work(block * tasks_of_block() + task, block * tasks_of_block() + task + 1);
  }
  // What such a task reads, from a row of the block on.
  Rows source_of(int64_t block, int64_t task, int64_t row, int64_t rows) const {
    const int64_t size = packing_.kind == kBf16Source ? sizeof(Bf16) : sizeof(float);
    const int64_t column = task * kTaskColumns, left = layout.vectors - column;
    return {
        (const char*)packing_.x + ((block * layout.block + row) * packing_.stride + column) * size,
        rows, (left < kTaskColumns ? left : kTaskColumns) * size, packing_.stride * size};
  }

  // When all threads are done: packs what no product needed, for the sums.
  void finish() {
    work(0, packing_.tasks());
    packing_.total_sums();
  }

  PackedLayout layout;
  void* const packed;

 private:
  enum State : uint8_t { kNot, kBeing, kDone };

  bool lazy() const { return packing_.tasks() > 0; }

  void work(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      if (claim(t)) {
        packing_.run(t);
        __atomic_store_n(&states_[t], (uint8_t)kDone, __ATOMIC_RELEASE);
      }
  }

  void wait(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; t++)
      while (__atomic_load_n(&states_[t], __ATOMIC_ACQUIRE) != kDone) sched_yield();
  }

  bool claim(int64_t task) {
    uint8_t state = __atomic_load_n(&states_[task], __ATOMIC_RELAXED);
    return state == kNot && __atomic_compare_exchange_n(&states_[task], &state, (uint8_t)kBeing,
                                                        false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }

  const bool by_columns_;
  Packing packing_;
  uint8_t* const states_;  // of the packing's tasks
};

}  // namespace

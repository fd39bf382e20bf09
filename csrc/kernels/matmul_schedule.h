// Which thread computes which part of an int16 product, and in which order.
#pragma once

#include <sched.h>

#include "matmul_layout.h"
#include "matmul_operand.h"
#include "scratch.h"

namespace {

// In units of panels.
struct ResultPart {
  int64_t row, row_end, col, col_end;
};

// How the result is cut into parts for the threads; the cut doesn't change any sum. 96 rows of a
// left block are 96 KB, within a second-level cache of 256 KB, and divide a hidden size of 384.
struct Parts {
  int64_t rows = 96 / kTileRows, cols = 256 / kTileCols;  // in panels
  int64_t row_panels, col_panels, down, across;
  Parts(int64_t row_panels, int64_t col_panels, int64_t threads)
      : row_panels(row_panels), col_panels(col_panels) {
    cut();
    // Sixteen parts a thread, so that none is left alone with the last one for long and one that is
    // held up can leave its share to the others; four if that makes them small.
    while (cols > 4 && count() < 16 * threads) cols /= 2, cut();
    while (cols > 1 && count() < 4 * threads) cols /= 2, cut();
    while (rows > 4 && count() < 4 * threads) rows /= 2, cut();
  }
  void cut() {
    down = (row_panels + rows - 1) / rows;
    across = (col_panels + cols - 1) / cols;
  }
  int64_t count() const { return down * across; }
  // Neighbours along the longer side share vectors of the shorter one only.
  ResultPart part(int64_t number) const {
    const bool by_rows = row_panels * kTileRows >= col_panels * kTileCols;
    const int64_t r = (by_rows ? number / across : number % down) * rows;
    const int64_t c = (by_rows ? number % across : number / down) * cols;
    return {r, r + rows < row_panels ? r + rows : row_panels, c,
            c + cols < col_panels ? c + cols : col_panels};
  }
};

// Every thread has a run of neighbouring parts, for which it packs most vectors itself, and takes
// from the others' when it is done with them. A weight's gradient sums over all tokens: there, a
// run is gone through once for each block of them, so that a block, once packed, is in the cache
// for all parts; and a pass begins when the one kBlocksHeld before it has ended everywhere, because
// its block takes that one's place. A part's blocks are added in order, by any thread.
constexpr int64_t kBlocksHeld = 2;

class Runs {
 public:
  Runs(Arena& arena, int64_t parts, int64_t passes, int64_t threads)
      : parts_(parts), passes_(passes), count_(threads < kMostRuns ? threads : kMostRuns) {
    if (passes == 1) return;
    passed_ = arena.take<int32_t>(parts + passes);
    ended_ = passed_ + parts;
  }
  Runs(const Runs&) = delete;

  // Once there is memory: no run has begun.
  void start() {
    for (int64_t r = 0; r < count_; r++) runs_[r].next = 0;
    if (passed_) memset(passed_, 0, (parts_ + passes_) * sizeof *passed_);
  }

  struct Turn {
    int64_t part, pass;
    Share of_pass;  // in this run
  };
  // The next turn, whose part has had all passes before; or a part of -1. Never waits for a turn
  // that no thread has taken: there may be fewer threads than runs.
  Turn take(int64_t thread) {
    for (;; sched_yield()) {
      bool left = false;
      for (int64_t i = 0; i < count_; i++) {
        const int64_t run = (thread + i) % count_;
        const int64_t length = begin(run + 1) - begin(run), end = length * passes_;
        int64_t n = __atomic_load_n(&runs_[run].next, __ATOMIC_RELAXED);
        while (n < end && may_begin(n / length))
          if (__atomic_compare_exchange_n(&runs_[run].next, &n, n + 1, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED)) {
            const Turn turn = {begin(run) + n % length, n / length, {n % length, length}};
            while (passed_ && __atomic_load_n(&passed_[turn.part], __ATOMIC_ACQUIRE) < turn.pass)
              sched_yield();
            return turn;
          }
        left |= n < end;
      }
      if (!left) return {-1, 0, {0, 1}};
    }
  }
  void done(Turn turn) {
    if (!passed_) return;
    __atomic_store_n(&passed_[turn.part], turn.pass + 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&ended_[turn.pass], 1, __ATOMIC_RELEASE);
  }

 private:
  static constexpr int64_t kMostRuns = 256;
  struct alignas(64) Run {
    int64_t next;
  };
  int64_t begin(int64_t run) const { return parts_ * run / count_; }
  bool may_begin(int64_t pass) const {
    return pass < kBlocksHeld ||
           __atomic_load_n(&ended_[pass - kBlocksHeld], __ATOMIC_ACQUIRE) == parts_;
  }
  const int64_t parts_, passes_, count_;
  int32_t* passed_ = nullptr;  // passes that a part has had
  int32_t* ended_ = nullptr;   // parts that have had a pass
  Run runs_[kMostRuns];
};

}  // namespace

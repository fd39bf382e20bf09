// out = left · rightᵀ in block-scaled 16-bit integers.
#include <omp.h>
#include <sched.h>

#include "api.h"
#include "matmul_operand.h"

namespace {

// Sums of products of pairs: sum += a.low · b.low + a.high · b.high in each 32-bit lane.
struct MultiplyAndAdd {
  static __attribute__((always_inline)) inline void add(VecI& total, VecI a, VecI b) {
#if defined(__AVX512F__)
    total += (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
    asm volatile("" : "+v"(total));
#elif defined(__AVX2__)
    total += (VecI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    // Keeps GCC from moving the next broadcasts up, which would spill the sums.
    asm volatile("" : "+x"(total));
#else
    total += (VecI)_mm_madd_epi16((__m128i)a, (__m128i)b);
    asm volatile("" : "+x"(total));
#endif
  }
};

#if defined(__AVX512F__) || defined(CPUTRAIN_AVX_VNNI)
#define HAS_DOT_PRODUCT
// One instruction for both, on CPUs with AVX512_VNNI, or AVX_VNNI where there is no AVX-512. As
// assembly, because the intrinsics would need all of their callers compiled for VNNI.
struct DotProduct {
  static __attribute__((always_inline)) inline void add(VecI& total, VecI a, VecI b) {
#if defined(__AVX512F__)
    asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
#endif
  }
};
#endif

inline VecI load_pairs(const int32_t* p) {
  VecI v;
  memcpy(&v, p, sizeof v);
  return v;
}

// A column of tiles: one panel of the right operand times many of the left, within one block.
struct TileColumn {
  const int32_t *left, *right;
  int64_t pairs;      // a multiple of kPairStep
  int64_t left_step;  // from one left panel to the next
  const float *left_scales, *right_scales;
  float* out;
  int64_t stride;
  int64_t rows, cols;  // of the result that exist; cols up to kTileCols
  const float* bias;   // for these columns, or null
  bool add;
  Rows ahead;  // what will be needed some time after this: fetched bit by bit, between tiles
};

// Rounded after each step, in this order, on every instruction set: the tests compute the same. The
// barrier keeps the last product out of an fma with what is added to it.
inline Vec scaled(VecI sums, float left, Vec right) {
  Vec result = to_float(sums) * kShrink * left * right;
#if defined(__AVX512F__)
  asm("" : "+v"(result));
#else
  asm("" : "+x"(result));
#endif
  return result;
}

#define UNROLL(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

// Rows of tiles from `row` to `row_end`: a tile is kPanels panels of the left operand times kVecs
// registers of the right one's panel, and so many sums. Not inlined: among other code GCC runs out
// of registers and keeps the sums in memory.
template <class Step, int kPanels, int kVecs>
__attribute__((noinline)) void tile_rows(const TileColumn& column, int64_t row, int64_t row_end) {
  constexpr int kRows = kPanels * kTileRows;
  const int64_t step = column.left_step, stride = column.stride;
  const int32_t* left = column.left + row / kTileRows * step;
  const int32_t* next = column.right + column.pairs * kTileCols;  // the next panel, most often
  const int64_t tiles = (column.rows + kRows - 1) / kRows;
  const int64_t fetched = column.pairs * kTileCols / tiles;
  next += row / kRows * fetched;
  const Rows ahead = column.ahead;
  for (; row < row_end; row += kRows, left += kPanels * step) {
    const bool whole = row + kRows <= column.rows && column.cols == kTileCols;
    const int32_t* next_end = next + fetched;
    for (; next < next_end; next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
    const int64_t tile = row / kRows;
    for (int64_t r = ahead.count * tile / tiles; r < ahead.count * (tile + 1) / tiles; r++)
      for (int64_t i = 0; i < ahead.width; i += 64)
        _mm_prefetch(ahead.first + r * ahead.stride + i, _MM_HINT_T1);
    for (int col = 0; col < kTileCols; col += kVecs * kWidth) {
      float* out = column.out + row * stride + col;
      if (whole)  // the result's lines arrive while the sums are made
        UNROLL (r, kRows)
          UNROLL (v, kVecs) _mm_prefetch((const char*)(out + r * stride + v * kWidth), _MM_HINT_T0);
      VecI sums[kRows][kVecs];
      UNROLL (r, kRows)
        UNROLL (v, kVecs) sums[r][v] = VecI{};
      const int32_t *a[kPanels], *b = column.right + col, *end = b + column.pairs * kTileCols;
      UNROLL (p, kPanels) a[p] = left + p * step;
      for (; b < end; b += kPairStep * kTileCols) {
        UNROLL (k, kPairStep) {
          VecI right[kVecs];
          UNROLL (v, kVecs) right[v] = load_pairs(b + k * kTileCols + v * kWidth);
          UNROLL (r, kRows) {
            const VecI one = splat_i(a[r / kTileRows][k * kTileRows + r % kTileRows]);
            UNROLL (v, kVecs) Step::add(sums[r][v], one, right[v]);
          }
        }
        UNROLL (p, kPanels) a[p] += kPairStep * kTileRows;
      }
      const float* left_scales = column.left_scales + row;
      const float* right_scales = column.right_scales + col;
      if (whole) {
        UNROLL (v, kVecs) {
          const Vec scales = load(right_scales + v * kWidth);
          const Vec bias = column.bias ? load(column.bias + col + v * kWidth) : Vec{};
          UNROLL (r, kRows) {
            float* to = out + r * stride + v * kWidth;
            const Vec start = column.add ? load(to) + bias : bias;
            store(to, scaled(sums[r][v], left_scales[r], scales) + start);
          }
        }
        continue;
      }
      Vec tile[kRows][kVecs];
      UNROLL (r, kRows)
        UNROLL (v, kVecs)
          tile[r][v] = scaled(sums[r][v], left_scales[r], load(right_scales + v * kWidth));
      for (int64_t r = 0; r < kRows && row + r < column.rows; r++)
        for (int64_t c = 0; c < kVecs * kWidth && col + c < column.cols; c++) {
          float* to = out + r * stride + c;
          const float bias = column.bias ? column.bias[col + c] : 0.f;
          *to = tile[r][c / kWidth][c % kWidth] + (column.add ? *to + bias : bias);
        }
    }
  }
}

template <class Step>
void tile_column(const TileColumn& column) {
  tile_rows<Step, 1, kTileVecs>(column, 0, column.rows);
}

#if defined(HAS_DOT_PRODUCT) && !defined(__AVX512F__)
// vpdpwssd takes five cycles and two start in each, so that ten sums are needed. Three panels of
// the left operand times half a panel of the right one have twelve, within sixteen registers.
template <>
void tile_column<DotProduct>(const TileColumn& column) {
  constexpr int kPanels = 3;
  const int64_t row = column.rows / (kPanels * kTileRows) * (kPanels * kTileRows);
  if (row > 0) tile_rows<DotProduct, kPanels, 1>(column, 0, row);
  if (row < column.rows) tile_rows<DotProduct, 1, kTileVecs>(column, row, column.rows);
}
#endif

typedef void (*ColumnProduct)(const TileColumn&);

// Whether to use DotProduct: as the CPU says, or as a test or a benchmark wants it.
int64_t vnni_wanted = kInt16VnniIfKnown;

ColumnProduct best_product() {
#if defined(HAS_DOT_PRODUCT)
#if defined(__AVX512F__)
  const bool known = __builtin_cpu_supports("avx512vnni");
#else
  const bool known = __builtin_cpu_supports("avxvnni");
#endif
  if (vnni_wanted == kInt16VnniAlways || (vnni_wanted == kInt16VnniIfKnown && known))
    return tile_column<DotProduct>;
#endif
  return tile_column<MultiplyAndAdd>;
}

struct Product {
  const PackedLayout &left_layout, &right_layout;
  LazyOperand &left, &right;
  float* out;
  int64_t out_stride;
  const float* bias;
  bool accumulate, by_blocks;
  ColumnProduct column;

  // A part of the result, in units of panels, for some blocks of the depth. One panel of the right
  // operand stays in the first-level cache while all of the part's left panels, which stay in the
  // second, pass by.
  void compute(int64_t row, int64_t row_end, int64_t col, int64_t col_end, int64_t block,
               int64_t block_end, Share thread, Share share) const {
    for (int64_t b = block; b < block_end; b++) {
      if (by_blocks) pack_own(b, thread);
      left.ensure(b, row * kTileRows, row_end * kTileRows);
      right.ensure(b, col * kTileCols, col_end * kTileCols);
      for (int64_t c = col; c < col_end; c++)
        column_at(b, row, row_end, c, ahead(b + 1, thread, share.piece(c - col, col_end - col)));
    }
  }

  void column_at(int64_t b, int64_t row, int64_t row_end, int64_t c, Rows ahead) const {
    const int64_t first_row = row * kTileRows, first_col = c * kTileCols;
    const int64_t rows = left_layout.vectors, cols = right_layout.vectors - first_col;
    column({left_layout.pairs(left.packed, b, row), right_layout.pairs(right.packed, b, c),
            left_layout.pairs_of(b), left_layout.panel_words,
            left_layout.scales(left.packed, b) + first_row,
            right_layout.scales(right.packed, b) + first_col,
            out + first_row * out_stride + first_col, out_stride,
            (row_end * kTileRows < rows ? row_end * kTileRows : rows) - first_row,
            cols < kTileCols ? cols : kTileCols, bias && b == 0 ? bias + first_col : nullptr,
            accumulate || b > 0, ahead});
  }

  // Where both sides are packed block by block, a thread packs the same vectors in every block, for
  // which it has fetched the source during the block before: into its own cache, by addresses that
  // its own TLB knows. Others do it in its place if they are there first.
  struct Tasks {
    int64_t begin, end;  // the left side's, then the right side's
  };
  Tasks own_tasks(Share thread) const {
    const int64_t tasks = left.tasks_of_block() + right.tasks_of_block();
    return {tasks * thread.number / thread.count, tasks * (thread.number + 1) / thread.count};
  }
  void pack_own(int64_t b, Share thread) const {
    const Tasks own = own_tasks(thread);
    for (int64_t task = own.begin; task < own.end; task++)
      if (task < left.tasks_of_block())
        left.pack(b, task);
      else
        right.pack(b, task - left.tasks_of_block());
  }
  // A share of what the thread's tasks read in this block; of one task, if it would be of two.
  Rows ahead(int64_t b, Share thread, Share share) const {
    if (!by_blocks || b >= left_layout.blocks) return {};
    const Tasks own = own_tasks(thread);
    const int64_t rows = left_layout.filled(b), all = (own.end - own.begin) * rows;
    const int64_t first = all * share.number / share.count, row = first % rows;
    const int64_t count = all * (share.number + 1) / share.count - first;
    const int64_t task = own.begin + first / rows, rest = rows - row;
    return task < left.tasks_of_block()
               ? left.source_of(b, task, row, count < rest ? count : rest)
               : right.source_of(b, task - left.tasks_of_block(), row, count < rest ? count : rest);
  }

  // What is left of the sum when there is nothing to add up.
  void only_bias() const {
    for (int64_t r = 0; r < left_layout.vectors; r++)
      for (int64_t c = 0; c < right_layout.vectors; c++) {
        float& to = out[r * out_stride + c];
        to = (accumulate ? to : 0.f) + (bias ? bias[c] : 0.f);
      }
  }
};

// How the result is cut into parts for the threads; the cut doesn't change any sum. 96 rows of a
// left block are 96 KB, within a second-level cache of 256 KB, and divide a hidden size of 384.
struct Parts {
  int64_t rows = 96 / kTileRows, cols = 256 / kTileCols;  // in panels
  int64_t row_panels, col_panels, down, across;
  Parts(const Product& product, int64_t threads)
      : row_panels(product.left_layout.panels()), col_panels(product.right_layout.panels()) {
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
  void compute(const Product& product, int64_t part, int64_t block, int64_t block_end, Share thread,
               Share share) const {
    const bool by_rows = row_panels * kTileRows >= col_panels * kTileCols;
    const int64_t r = (by_rows ? part / across : part % down) * rows;
    const int64_t c = (by_rows ? part % across : part / down) * cols;
    product.compute(r, r + rows < row_panels ? r + rows : row_panels, c,
                    c + cols < col_panels ? c + cols : col_panels, block, block_end, thread, share);
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

// Below so many elements or multiplications, waking threads costs more than they save.
constexpr int64_t kElementsForThreads = 16384, kProductsForThreads = 65536;

}  // namespace

void KERNEL(int16_packed_bytes)(int64_t vectors, int64_t depth, int64_t role, int64_t* bytes) {
  *bytes = PackedLayout(vectors, depth, role).bytes();
}

void KERNEL(int16_pack)(const void* x, int64_t bf16, int64_t stride, int64_t rows, int64_t cols,
                        void* by_rows, int64_t row_role, void* by_columns, int64_t column_role,
                        float* column_sums, Scratch* scratch) {
  Arena arena(scratch);
  const Packing packing(arena, x, bf16, stride, rows, cols, by_rows, row_role, by_columns,
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
                           const float* bias, int64_t accumulate, Scratch* scratch) {
  Arena arena(scratch);
  LazyOperand left_operand(arena, *left, rows, depth, kLeft);
  LazyOperand right_operand(arena, *right, cols, depth, kRight);
  const int64_t blocks = left_operand.layout.blocks;
  const bool by_blocks = left_operand.packs_by_columns() && right_operand.packs_by_columns();
  if (by_blocks) left_operand.hold(kBlocksHeld), right_operand.hold(kBlocksHeld);
  const Product product = {left_operand.layout,
                           right_operand.layout,
                           left_operand,
                           right_operand,
                           out,
                           out_stride,
                           bias,
                           accumulate != 0,
                           by_blocks,
                           best_product()};
  const bool parallel = rows * cols * depth > kProductsForThreads;
  const int64_t threads = parallel ? omp_get_max_threads() : 1;
  const Parts parts(product, threads);
  const int64_t passes = by_blocks ? blocks : 1, blocks_of_pass = by_blocks ? 1 : blocks;
  Runs runs(arena, parts.count(), passes, threads);
  if (!arena.enough()) return;
  left_operand.start(), right_operand.start(), runs.start();
#pragma omp parallel if (parallel)
  {
    const Share thread = {omp_get_thread_num(), omp_get_num_threads()};
    for (Runs::Turn turn; (turn = runs.take(thread.number)).part >= 0; runs.done(turn))
      parts.compute(product, turn.part, turn.pass * blocks_of_pass,
                    (turn.pass + 1) * blocks_of_pass, thread, turn.of_pass);
  }
  left_operand.finish();
  right_operand.finish();
  if (depth == 0) product.only_bias();
}

void KERNEL(int16_use_vnni)(int64_t wanted) { vnni_wanted = wanted; }

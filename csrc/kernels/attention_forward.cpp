// Attention, forward: tiles of scores that never leave the cache, with a running maximum and sum
// per query (Milakov and Gimelshein's online softmax; the tiling of FlashAttention).
#include <omp.h>

#include "attention.h"

namespace {

// The keys and values of one sequence and key/value head, laid out for the products.
struct Keys {
  float* transposed;  // tiles of d × kKeyTile
  float* values;      // L × d
  int64_t stride;     // of a row of values, of queries and of sums
};

// One tile of queries on its way through the keys.
struct Progress {
  alignas(64) float maximum[kQueryTile];
  alignas(64) float correction[kQueryTile];  // 2^(old maximum - new maximum)
  alignas(64) Vec sum[kQueryTile];           // of each lane: added up at the end only
  RowKey row_key[kQueryTile];
};

inline float row_maximum(const float* row, int64_t columns) {
  Vec a = load(row), b = a;
  for (int64_t c = 0; c < columns; c += 2 * kWidth) {
    a = max(a, load(row + c));
    b = max(b, load(row + c + kWidth));
  }
  return max_lane(max(a, b));
}

// A sink is a score of every query that was met already, with a value of 0.
void start(const Head& head, int64_t first_query, int64_t queries, const float* sink,
           Progress& progress) {
  for (int64_t r = 0; r < kQueryTile; r++) {
    // not -infinity, from which -infinity can't be subtracted
    progress.maximum[r] = sink ? *sink * kLog2e : -__FLT_MAX__;
    progress.sum[r] = Vec{};
    if (sink) progress.sum[r][0] = 1.f;
    if (r < queries) progress.row_key[r] = row_key(head.key, head.first_row + first_query + r);
  }
}

// Moves every query's maximum to include this tile, and brings what was summed so far to the new
// maximum.
void raise_maxima(const float* scores, int64_t queries, int64_t columns, int64_t size,
                  Progress& progress, float* sums, int64_t stride) {
  alignas(64) float before[kQueryTile];
  memcpy(before, progress.maximum, sizeof before);
  for (int64_t r = 0; r < queries; r++) {
    const float found = row_maximum(scores + r * kScoreStride, columns);
    // Written so that a NaN is taken over.
    progress.maximum[r] = before[r] >= found ? before[r] : found;
  }
  for (int64_t r = 0; r < kQueryTile; r += kWidth)
    store(progress.correction + r, exp2_nonpositive(load(before + r) - load(progress.maximum + r)));
  for (int64_t r = 0; r < queries; r++) {
    if (progress.correction[r] == 1.f) continue;
    progress.sum[r] *= progress.correction[r];
    for (int64_t c = 0; c < size; c += kWidth)
      store(sums + r * stride + c, load(sums + r * stride + c) * progress.correction[r]);
  }
}

// Scores become 2^(score - maximum), added up before dropout takes its share.
template <bool kDropout>
inline Vec exponentials(float* row, int64_t first_key, int64_t columns, float maximum, RowKey key,
                        DropoutRate rate) {
  Vec total{};
  for (int64_t c = 0; c < columns; c += kDropoutBlock) {
    VecI kept[kDropoutVecs];
    if (kDropout) kept_block(key, rate, first_key + c, kept);
#pragma GCC unroll 8
    for (int i = 0; i < kDropoutVecs; i++) {
      float* at = row + c + i * kWidth;
      const Vec e = exp2_nonpositive(load(at) - maximum);
      total += e;
      store(at, kDropout ? keep(kept[i], e) : e);
    }
  }
  return total;
}

void exponentiate(const Head& head, int64_t queries, int64_t first_key, int64_t columns,
                  float* scores, Progress& progress) {
  for (int64_t r = 0; r < queries; r++) {
    float* row = scores + r * kScoreStride;
    const RowKey key = progress.row_key[r];
    const float maximum = progress.maximum[r];
    progress.sum[r] += head.rate.threshold
                           ? exponentials<true>(row, first_key, columns, maximum, key, head.rate)
                           : exponentials<false>(row, first_key, columns, maximum, key, head.rate);
  }
}

void finish(const AttentionProblem& problem, const Head& head, int64_t first_query, int64_t queries,
            float* sums, int64_t stride, const Progress& progress) {
  for (int64_t r = 0; r < queries; r++) {
    const int64_t token = head.start + first_query + r;
    const float total = sum(progress.sum[r]);
    // All keys masked: zero output, and a log-sum-exp that makes the gradient zero as well.
    const bool empty = total == 0.f;
    const float factor = empty ? 0.f : head.rate.scale / total;
    problem.lse[head.number * problem.total + token] =
        empty ? kNothing : progress.maximum[r] + log2f(total);
    unpack_rows(sums + r * stride, stride, 1, problem.size, factor,
                head_rows(problem.out, token, head.number), 0);
  }
}

struct Workspace {
  float *queries, *sums, *scores;
};

template <class T>
void query_tile(const AttentionProblem& problem, const Head& head, const Keys& keys,
                int64_t first_query, const Workspace& work) {
  const int64_t queries = least(kQueryTile, head.length - first_query),
                padded = round_up(problem.size, kWidth);
  const Range range =
      from_block(overlap(keys_of(head, {first_query, first_query + queries}), {0, head.length}));
  Progress progress;
  start(head, first_query, queries, problem.sinks ? problem.sinks + head.number : nullptr,
        progress);
  pack_rows(head_rows<T>(problem.q, head.start + first_query, head.number), problem.q.token_stride,
            queries, problem.size, problem.scale * kLog2e, work.queries, keys.stride);
  memset(work.sums, 0, queries * keys.stride * sizeof(float));
  for (int64_t first_key = range.from, next; first_key < range.to; first_key = next) {
    next = tile_end(first_key, range.to);
    const int64_t count = next - first_key, columns = round_up(count, kDropoutBlock);
    const float* transposed = keys.transposed + transposed_offset(first_key, problem.size);
    tile_product<Form::kPlain, Result::kAssign>(
        queries, round_up(count, kWidth), problem.size, {work.queries, keys.stride},
        {transposed, kScoreStride}, work.scores, kScoreStride);
    if (head.cap != 0.f)
      cap_scores(head.cap, queries, round_up(count, kWidth), work.scores, nullptr);
    finish_scores(head, first_query, queries, first_key, count, work.scores);
    raise_maxima(work.scores, queries, columns, padded, progress, work.sums, keys.stride);
    exponentiate(head, queries, first_key, columns, work.scores, progress);
    tile_product<Form::kPlain, Result::kAdd>(queries, padded, count, {work.scores, kScoreStride},
                                             {keys.values + first_key * keys.stride, keys.stride},
                                             work.sums, keys.stride);
  }
  finish(problem, head, first_query, queries, work.sums, keys.stride, progress);
}

// One sequence and key/value head, one part of `parts` of its tiles of queries.
template <class T>
void attend(const AttentionProblem& problem, int64_t sequence, int64_t kv_head, int64_t part,
            int64_t parts, float* scratch, int64_t max_length) {
  const int64_t stride = spread_stride(problem.size), group = problem.heads / problem.kv_heads;
  const int64_t start = problem.starts[sequence], length = problem.lengths[sequence];
  const int64_t tiles = (length + kQueryTile - 1) / kQueryTile;
  const int64_t from = tiles * part / parts, to = tiles * (part + 1) / parts;
  if (from == to) return;
  Keys keys{scratch, scratch + transposed_floats(max_length, problem.size), stride};
  Workspace work;
  work.queries = keys.values + max_length * stride;
  work.sums = work.queries + kQueryTile * stride;
  work.scores = work.sums + kQueryTile * stride;
  const Range range = from_block(overlap(
      keys_of(head_of(problem, sequence, kv_head * group), {from * kQueryTile, to * kQueryTile}),
      {0, length}));
  pack_transposed(head_rows<T>(problem.k, start, kv_head), problem.k.token_stride, range,
                  problem.size, keys.transposed);
  pack_rows(head_rows<T>(problem.v, start + range.from, kv_head), problem.v.token_stride,
            range.to - range.from, problem.size, 1.f, keys.values + range.from * stride, stride);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    const Head head = head_of(problem, sequence, h);
    for (int64_t tile = from; tile < to; tile++)
      query_tile<T>(problem, head, keys, tile * kQueryTile, work);
  }
}

}  // namespace

void KERNEL(attention_forward)(const AttentionProblem* problem, Scratch* scratch) {
  const int64_t max_length = longest(*problem), pairs = problem->sequences * problem->kv_heads;
  const int64_t stride = spread_stride(problem->size);
  const int64_t floats = transposed_floats(max_length, problem->size) + max_length * stride +
                         2 * kQueryTile * stride + kQueryTile * kScoreStride;
  // With few sequences and heads their queries are dealt out too (each part lays out the keys
  // again): four tasks a thread even out. A row's result doesn't depend on its part.
  const int64_t threads = team_size(*problem, max_length), wanted = 4 * threads,
                parts = pairs >= wanted || !pairs ? 1 : (wanted + pairs - 1) / pairs;
  const auto attend_part = problem->bf16 ? attend<Bf16> : attend<float>;
  Arena arena(scratch);
  const ThreadScratch memory(arena, threads, floats);
  if (!arena.enough()) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t task = 0; task < pairs * parts; task++) {
    const int64_t pair = task / parts;
    attend_part(*problem, problem->order[pair / problem->kv_heads], pair % problem->kv_heads,
                task % parts, parts, memory.mine(), max_length);
  }
}

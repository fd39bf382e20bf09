// Attention, backward: the probabilities are recomputed tile by tile from the log-sum-exp of the
// forward pass.
//
// With P the probabilities, F the factors of dropout and D = Σ dO·O per query (= Σ P·F·dP, so that
// no pass over a whole row is needed):
//   dV = (P·F)ᵀ dO,  dP = dO Vᵀ,  dS = P·(F·dP - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q.
// Where scores are capped, dS is multiplied by the cap's slope on the way.
// F is 0 or one number, which dO carries from the start: then F is a mask.
#include <omp.h>

#include "attention.h"

namespace {

// Everything that one thread works on: one sequence and key/value head, one query head after the
// other. All rows are `stride` apart; Q is multiplied by the scale and log2 e, dO by dropout's
// factor.
struct Workspace {
  int64_t stride;
  float *keys, *keys_transposed, *values_transposed, *keys_grad, *values_grad;
  float *queries, *queries_grad, *out_grad, *delta;
  float *scores, *scores_grad, *slopes;
};

int64_t workspace_floats(int64_t length, int64_t size) {
  const int64_t rows = length * spread_stride(size);
  return 6 * rows + 2 * transposed_floats(length, size) + round_up(length, kLine) +
         3 * kQueryTile * kScoreStride;
}

Workspace workspace(float* memory, int64_t length, int64_t size) {
  const int64_t stride = spread_stride(size), rows = length * stride,
                transposed = transposed_floats(length, size);
  Workspace work;
  work.stride = stride;
  work.keys = memory;
  work.keys_grad = work.keys + rows;
  work.values_grad = work.keys_grad + rows;
  work.queries = work.values_grad + rows;
  work.queries_grad = work.queries + rows;
  work.out_grad = work.queries_grad + rows;
  work.keys_transposed = work.out_grad + rows;
  work.values_transposed = work.keys_transposed + transposed;
  work.scores = work.values_transposed + transposed;
  work.scores_grad = work.scores + kQueryTile * kScoreStride;
  work.slopes = work.scores_grad + kQueryTile * kScoreStride;
  work.delta = work.slopes + kQueryTile * kScoreStride;
  return work;
}

// Lays out dO times dropout's factor, and D on the way.
void pack_out_grad(const AttentionProblem& problem, const HeadTensor& grad, const Head& head,
                   Range queries, const Workspace& work) {
  const float* out = head_rows(problem.out, head.start + queries.from, head.number);
  const float* from = head_rows(grad, head.start + queries.from, head.number);
  float* to = work.out_grad + queries.from * work.stride;
  const int tail = (int)(problem.size % kWidth);
  for (int64_t t = queries.from; t < queries.to; t++) {
    prefetch_row<false>(out + kRowsAhead * problem.out.token_stride, problem.size);
    prefetch_row<false>(from + kRowsAhead * grad.token_stride, problem.size);
    Vec total{};
    int64_t c = 0;
    for (; c + kWidth <= problem.size; c += kWidth) {
      total += load(from + c) * load(out + c);
      store(to + c, load(from + c) * head.rate.scale);
    }
    if (tail) {
      total += load_part(from + c, tail) * load_part(out + c, tail);
      store(to + c, load_part(from + c, tail) * head.rate.scale);
    }
    work.delta[t] = sum(total);
    out += problem.out.token_stride, from += grad.token_stride, to += work.stride;
  }
}

// A row of scores becomes P·F, a row of dP becomes dS.
template <bool kDropout>
inline void differentiate_row(float* scores, float* scores_grad, int64_t first_key, int64_t columns,
                              float lse, float delta, RowKey key, DropoutRate rate) {
  for (int64_t c = 0; c < columns; c += kDropoutBlock) {
    VecI kept[kDropoutVecs];
    if (kDropout) kept_block(key, rate, first_key + c, kept);
#pragma GCC unroll 8
    for (int i = 0; i < kDropoutVecs; i++) {
      const int64_t at = c + i * kWidth;
      const Vec p = exp2_nonpositive(load(scores + at) - lse);
      const Vec grad = load(scores_grad + at);
      store(scores + at, kDropout ? keep(kept[i], p) : p);
      store(scores_grad + at, p * ((kDropout ? keep(kept[i], grad) : grad) - delta));
    }
  }
}

void differentiate(const AttentionProblem& problem, const Head& head, int64_t first_query,
                   int64_t queries, int64_t first_key, int64_t columns, const Workspace& work) {
  const float* lse = problem.lse + head.number * problem.total + head.start;
  for (int64_t r = 0; r < queries; r++) {
    const int64_t query = first_query + r;
    float *scores = work.scores + r * kScoreStride, *grad = work.scores_grad + r * kScoreStride;
    const RowKey key = row_key(head.key, head.first_row + query);
    if (head.rate.threshold)
      differentiate_row<true>(scores, grad, first_key, columns, lse[query], work.delta[query], key,
                              head.rate);
    else
      differentiate_row<false>(scores, grad, first_key, columns, lse[query], work.delta[query], key,
                               head.rate);
  }
}

// The bias enters the scores as a term, so its gradient is dS itself.
void add_bias_gradient(const Head& head, int64_t first_query, int64_t queries, int64_t first_key,
                       int64_t keys, const float* scores_grad, float* bias_grad,
                       int64_t bias_stride) {
  for (int64_t r = 0; r < queries; r++) {
    float* row = bias_grad + (first_query + r) * bias_stride + first_key;
    const Range visible = visible_keys(head, first_query + r, first_key, keys);
    for (int64_t c = visible.from; c < visible.to; c++) row[c] += scores_grad[r * kScoreStride + c];
  }
}

void through_cap(int64_t queries, int64_t columns, const Workspace& work) {
  for (int64_t r = 0; r < queries; r++)
    for (int64_t c = 0; c < columns; c += kWidth) {
      float* const grad = work.scores_grad + r * kScoreStride + c;
      store(grad, load(grad) * load(work.slopes + r * kScoreStride + c));
    }
}

// What one task computes of a sequence and key/value head: all gradients; or, where there are fewer
// of those than threads, the gradients of some keys and values, or those of some queries. Scores
// are then computed twice, but every gradient still has one writer and one order of its sum.
struct Share {
  Range query, key;
  bool queries, keys;
};

Share share_of(int64_t length, int64_t part, int64_t parts) {
  if (parts == 1) return {{0, length}, {0, length}, true, true};
  const int64_t piece = part / 2, pieces = parts / 2;
  const bool queries = part % 2;
  const int64_t step = queries ? kQueryTile : kDropoutBlock, steps = (length + step - 1) / step;
  const int64_t from = steps * piece / pieces * step;
  const int64_t to = least(steps * (piece + 1) / pieces * step, length);
  return queries ? Share{{from, to}, {0, length}, true, false}
                 : Share{{0, length}, {from, to}, false, true};
}

void tile(const AttentionProblem& problem, const Head& head, const Share& share,
          int64_t first_query, int64_t first_key, int64_t keys, const Workspace& work,
          float* bias_grad, int64_t bias_stride) {
  const int64_t size = problem.size, stride = work.stride, padded = round_up(size, kWidth);
  const int64_t queries = least(kQueryTile, share.query.to - first_query);
  const int64_t columns = round_up(keys, kWidth);
  const int64_t transposed = transposed_offset(first_key, size);
  const Tile q{work.queries + first_query * stride, stride};
  const Tile out_grad{work.out_grad + first_query * stride, stride};
  const Tile scores{work.scores, kScoreStride}, scores_grad{work.scores_grad, kScoreStride};

  tile_product<Form::kPlain, Result::kAssign>(queries, columns, size, q,
                                              {work.keys_transposed + transposed, kScoreStride},
                                              work.scores, kScoreStride);
  tile_product<Form::kPlain, Result::kAssign>(queries, columns, size, out_grad,
                                              {work.values_transposed + transposed, kScoreStride},
                                              work.scores_grad, kScoreStride);
  if (head.cap != 0.f) cap_scores(head.cap, queries, columns, work.scores, work.slopes);
  finish_scores(head, first_query, queries, first_key, keys, work.scores);
  differentiate(problem, head, first_query, queries, first_key, round_up(keys, kDropoutBlock),
                work);
  if (bias_grad)
    add_bias_gradient(head, first_query, queries, first_key, keys, work.scores_grad, bias_grad,
                      bias_stride);
  if (head.cap != 0.f) through_cap(queries, columns, work);
  if (share.keys) {
    tile_product<Form::kTransposed, Result::kAdd>(keys, padded, queries, scores, out_grad,
                                                  work.values_grad + first_key * stride, stride);
    tile_product<Form::kTransposed, Result::kAdd>(keys, padded, queries, scores_grad, q,
                                                  work.keys_grad + first_key * stride, stride);
  }
  if (share.queries)
    tile_product<Form::kPlain, Result::kAdd>(queries, padded, keys, scores_grad,
                                             {work.keys + first_key * stride, stride},
                                             work.queries_grad + first_query * stride, stride);
}

template <class T>
void query_head(const AttentionProblem& problem, const AttentionGradients& grads, const Head& head,
                const Share& share, float* bias_grad, const Workspace& work) {
  const int64_t size = problem.size, stride = work.stride;
  const Range all = share.query;
  const int64_t first = head.start + all.from, count = all.to - all.from;
  pack_rows(head_rows<T>(problem.q, first, head.number), problem.q.token_stride, count, size,
            problem.scale * kLog2e, work.queries + all.from * stride, stride);
  pack_out_grad(problem, grads.out, head, all, work);
  float* const queries_grad = work.queries_grad + all.from * stride;
  if (share.queries) memset(queries_grad, 0, count * stride * sizeof(float));
  for (int64_t query = all.from; query < all.to; query += kQueryTile) {
    const Range seen = keys_of(head, {query, least(query + kQueryTile, all.to)});
    const Range keys = overlap(from_block(overlap(seen, {0, head.length})), share.key);
    for (int64_t key = keys.from, next; key < keys.to; key = next) {
      next = tile_end(key, keys.to);
      tile(problem, head, share, query, key, next - key, work, bias_grad, grads.bias.row_stride);
    }
  }
  if (share.queries)
    unpack_rows(queries_grad, stride, count, size, problem.scale,
                head_rows(grads.q, first, head.number), grads.q.token_stride);
}

// A share that computes some gradients only needs no more than the tokens that these depend on.
Share within_sight(const Head& head, Share share) {
  if (!share.keys) share.key = from_block(overlap(keys_of(head, share.query), share.key));
  if (!share.queries) {
    share.query = overlap(queries_of(head, share.key), share.query);
    share.query.from = share.query.from / kQueryTile * kQueryTile;
  }
  return share;
}

// T is what q, k, v and out are.
template <class T>
void attend_backward(const AttentionProblem& problem, const AttentionGradients& grads,
                     int64_t sequence, int64_t kv_head, int64_t part, int64_t parts,
                     const Workspace& work) {
  const int64_t start = problem.starts[sequence], length = problem.lengths[sequence];
  const int64_t size = problem.size, stride = work.stride, group = problem.heads / problem.kv_heads;
  Share share = share_of(length, part, parts);
  if (share.key.to <= share.key.from || share.query.to <= share.query.from) return;
  share = within_sight(head_of(problem, sequence, kv_head * group), share);
  const Range range = share.key;
  const int64_t keys = range.to - range.from, first = start + range.from;
  const T* k = head_rows<T>(problem.k, start, kv_head);
  pack_rows(k + range.from * problem.k.token_stride, problem.k.token_stride, keys, size, 1.f,
            work.keys + range.from * stride, stride);
  pack_transposed(k, problem.k.token_stride, range, size, work.keys_transposed);
  pack_transposed(head_rows<T>(problem.v, start, kv_head), problem.v.token_stride, range, size,
                  work.values_transposed);
  float* const keys_grad = work.keys_grad + range.from * stride;
  float* const values_grad = work.values_grad + range.from * stride;
  if (share.keys) {
    memset(keys_grad, 0, keys * stride * sizeof(float));
    memset(values_grad, 0, keys * stride * sizeof(float));
  }
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    const BiasTensor& bias = grads.bias;
    float* bias_grad =
        bias.data ? bias.data + sequence * bias.sequence_stride + h * bias.head_stride : nullptr;
    query_head<T>(problem, grads, head_of(problem, sequence, h), share, bias_grad, work);
  }
  if (!share.keys) return;
  // The keys were multiplied by queries that carry log2 e.
  unpack_rows(keys_grad, stride, keys, size, kLn2, head_rows(grads.k, first, kv_head),
              grads.k.token_stride);
  unpack_rows(values_grad, stride, keys, size, 1.f, head_rows(grads.v, first, kv_head),
              grads.v.token_stride);
}

}  // namespace

void KERNEL(attention_backward)(const AttentionProblem* problem, const AttentionGradients* grads,
                                Scratch* scratch) {
  const int64_t max_length = longest(*problem), sequences = problem->sequences,
                kv_heads = problem->kv_heads;
  const int64_t floats = workspace_floats(max_length, problem->size);
  // Sequences (or heads) that share one bias gradient are one task, and one after the other: no
  // race, and one order of the sum.
  const BiasTensor& bias = grads->bias;
  const int64_t serial_sequences = bias.data && !bias.sequence_stride ? sequences : 1;
  const int64_t serial_heads = bias.data && !bias.head_stride ? kv_heads : 1;
  const int64_t sequence_tasks = serial_sequences ? sequences / serial_sequences : 0;
  const int64_t head_tasks = kv_heads / serial_heads, pairs = sequence_tasks * head_tasks;
  const int64_t threads = team_size(*problem, max_length);
  const auto attend = problem->bf16 ? attend_backward<Bf16> : attend_backward<float>;
  const int64_t parts =
      bias.data || !pairs || pairs >= threads ? 1 : 2 * ((threads + pairs - 1) / pairs);
  Arena arena(scratch);
  const ThreadScratch memory(arena, threads, floats);
  if (!arena.enough()) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t task = 0; task < pairs * parts; task++) {
    const Workspace work = workspace(memory.mine(), max_length, problem->size);
    const int64_t pair = task / parts;
    for (int64_t s = 0; s < serial_sequences; s++)
      for (int64_t h = 0; h < serial_heads; h++)
        attend(*problem, *grads, problem->order[pair / head_tasks + s], pair % head_tasks + h,
               task % parts, parts, work);
  }
}

// Attention, backward: the probabilities are recomputed tile by tile from the log-sum-exp of the
// forward pass.
//
// With P the probabilities, F the factors of dropout and D = Σ dO·O per query (= Σ P·F·dP, so that
// no pass over a whole row is needed):
//   dV = (P·F)ᵀ dO,  dP = dO Vᵀ,  dS = P·(F·dP - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q.
// F is 0 or one number, which dO carries from the start: then F is a mask.
#include "attention.h"

namespace {

// Everything that one thread works on: one sequence and key/value head, one query head after the
// other. All rows are `stride` apart; Q is multiplied by the scale and log2 e, dO by dropout's
// factor.
struct Workspace {
  int64_t stride;
  float *keys, *keys_transposed, *values_transposed, *keys_grad, *values_grad;
  float *queries, *queries_grad, *out_grad, *delta;
  float *scores, *scores_grad;
};

int64_t workspace_floats(int64_t length, int64_t size) {
  const int64_t rows = length * spread_stride(size);
  return 6 * rows + 2 * transposed_floats(length, size) + round_up(length, kLine) +
         2 * kQueryTile * kScoreStride;
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
  work.delta = work.scores_grad + kQueryTile * kScoreStride;
  return work;
}

float dot(const float* a, const float* b, int64_t size) {
  Vec total{};
  int64_t c = 0;
  for (; c + kWidth <= size; c += kWidth) total += load(a + c) * load(b + c);
  if (c < size) total += load_part(a + c, (int)(size - c)) * load_part(b + c, (int)(size - c));
  return sum(total);
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
    const int64_t visible = visible_keys(head, first_query + r, first_key, keys);
    for (int64_t c = 0; c < visible; c++) row[c] += scores_grad[r * kScoreStride + c];
  }
}

void tile(const AttentionProblem& problem, const Head& head, int64_t first_query, int64_t first_key,
          int64_t end, const Workspace& work, float* bias_grad, int64_t bias_stride) {
  const int64_t size = problem.size, stride = work.stride, padded = round_up(size, kWidth);
  const int64_t queries = least(kQueryTile, head.length - first_query);
  const int64_t keys = least(kKeyTile, end - first_key), columns = round_up(keys, kWidth);
  const int64_t transposed = first_key / kKeyTile * size * kScoreStride;
  const Tile q{work.queries + first_query * stride, stride},
      out_grad{work.out_grad + first_query * stride, stride};
  const Tile scores{work.scores, kScoreStride}, scores_grad{work.scores_grad, kScoreStride};

  tile_product<Form::kPlain, Result::kAssign>(queries, columns, size, q,
                                              {work.keys_transposed + transposed, kScoreStride},
                                              work.scores, kScoreStride);
  tile_product<Form::kPlain, Result::kAssign>(queries, columns, size, out_grad,
                                              {work.values_transposed + transposed, kScoreStride},
                                              work.scores_grad, kScoreStride);
  finish_scores(head, first_query, queries, first_key, keys, work.scores);
  differentiate(problem, head, first_query, queries, first_key, round_up(keys, kDropoutBlock),
                work);
  if (bias_grad)
    add_bias_gradient(head, first_query, queries, first_key, keys, work.scores_grad, bias_grad,
                      bias_stride);
  tile_product<Form::kTransposed, Result::kAdd>(keys, padded, queries, scores, out_grad,
                                                work.values_grad + first_key * stride, stride);
  tile_product<Form::kTransposed, Result::kAdd>(keys, padded, queries, scores_grad, q,
                                                work.keys_grad + first_key * stride, stride);
  tile_product<Form::kPlain, Result::kAdd>(queries, padded, keys, scores_grad,
                                           {work.keys + first_key * stride, stride},
                                           work.queries_grad + first_query * stride, stride);
}

void query_head(const AttentionProblem& problem, const AttentionGradients& grads, const Head& head,
                float* bias_grad, const Workspace& work) {
  const int64_t size = problem.size, stride = work.stride;
  const float* out = head_rows(problem.out, head.start, head.number);
  const float* out_grad = head_rows(grads.out, head.start, head.number);
  pack_rows(head_rows(problem.q, head.start, head.number), problem.q.token_stride, head.length,
            size, problem.scale * kLog2e, work.queries, stride);
  pack_rows(out_grad, grads.out.token_stride, head.length, size, head.rate.scale, work.out_grad,
            stride);
  for (int64_t t = 0; t < head.length; t++)
    work.delta[t] =
        dot(out + t * problem.out.token_stride, out_grad + t * grads.out.token_stride, size);
  memset(work.queries_grad, 0, head.length * stride * sizeof(float));
  for (int64_t first_query = 0; first_query < head.length; first_query += kQueryTile) {
    const int64_t end = head.causal ? least(head.length, first_query + kQueryTile) : head.length;
    for (int64_t first_key = 0; first_key < end; first_key += kKeyTile)
      tile(problem, head, first_query, first_key, end, work, bias_grad, grads.bias.row_stride);
  }
  unpack_rows(work.queries_grad, stride, head.length, size, problem.scale,
              head_rows(grads.q, head.start, head.number), grads.q.token_stride);
}

// One sequence and key/value head: the only writer of its part of every gradient but the bias's.
void attend_backward(const AttentionProblem& problem, const AttentionGradients& grads,
                     int64_t sequence, int64_t kv_head, const Workspace& work) {
  const int64_t start = problem.starts[sequence], length = problem.lengths[sequence];
  const int64_t size = problem.size, stride = work.stride, group = problem.heads / problem.kv_heads;
  const float *k = head_rows(problem.k, start, kv_head), *v = head_rows(problem.v, start, kv_head);
  pack_rows(k, problem.k.token_stride, length, size, 1.f, work.keys, stride);
  pack_transposed(k, problem.k.token_stride, length, size, work.keys_transposed);
  pack_transposed(v, problem.v.token_stride, length, size, work.values_transposed);
  memset(work.keys_grad, 0, length * stride * sizeof(float));
  memset(work.values_grad, 0, length * stride * sizeof(float));
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    const BiasTensor& bias = grads.bias;
    float* bias_grad =
        bias.data ? bias.data + sequence * bias.sequence_stride + h * bias.head_stride : nullptr;
    query_head(problem, grads, head_of(problem, sequence, h), bias_grad, work);
  }
  unpack_rows(work.keys_grad, stride, length, size, kLn2, head_rows(grads.k, start, kv_head),
              grads.k.token_stride);
  unpack_rows(work.values_grad, stride, length, size, 1.f, head_rows(grads.v, start, kv_head),
              grads.v.token_stride);
}

}  // namespace

void KERNEL(attention_backward)(const AttentionProblem* problem, const AttentionGradients* grads) {
  const int64_t max_length = longest(*problem), sequences = problem->sequences,
                kv_heads = problem->kv_heads;
  const int64_t floats = workspace_floats(max_length, problem->size);
  // Sequences (or heads) that share one bias gradient are one task, and one after the other: no
  // race, and one order of the sum.
  const BiasTensor& bias = grads->bias;
  const int64_t serial_sequences = bias.data && !bias.sequence_stride ? sequences : 1;
  const int64_t serial_heads = bias.data && !bias.head_stride ? kv_heads : 1;
  const int64_t sequence_tasks = serial_sequences ? sequences / serial_sequences : 0;
  const int64_t head_tasks = kv_heads / serial_heads;
#pragma omp parallel for schedule(dynamic, 1) if (sequences * kv_heads * max_length > 64)
  for (int64_t task = 0; task < sequence_tasks * head_tasks; task++) {
    const Workspace work = workspace(thread_scratch(floats), max_length, problem->size);
    for (int64_t s = 0; s < serial_sequences; s++)
      for (int64_t h = 0; h < serial_heads; h++)
        attend_backward(*problem, *grads, problem->order[task / head_tasks + s],
                        task % head_tasks + h, work);
  }
}

// The C interface: every kernel's prototype, and nothing else.
//
// Each kernel source is compiled once per instruction set; KERNEL(name) gives it the symbol
// cputrain_<name>_<isa>. cputrain.native binds the symbols of one instruction set, with the same
// argument types: a test compares its table with this file.
//
// Conventions: matrices are row-major float; `rows`, `cols` are sizes, `…_stride` is in elements.
// Pointers may be null where the comment says "or null". Kernels take no ownership, check nothing
// (Python does), allocate nothing and use as many OpenMP threads as torch does.
#pragma once

#include <cstdint>

#include "visibility.h"

#define CPUTRAIN_JOIN2(name, isa) cputrain_##name##_##isa
#define CPUTRAIN_JOIN(name, isa) CPUTRAIN_JOIN2(name, isa)
#define KERNEL(name) CPUTRAIN_JOIN(name, CPUTRAIN_ISA)

// Working memory, which the caller owns. Every kernel that takes it says in `needed` how much it
// needs; if that is more than `bytes`, it has done nothing else, and is called again with more. How
// much that is depends on the sizes and on the number of threads.
struct Scratch {
  void* data;  // aligned to 64 bytes
  int64_t bytes, needed;
};

// y = x · keep / (1 - p); which elements are kept follows from (key, row, column) alone, so that
// the same call with the gradient in place of x is the backward pass. x and y may be the same
// memory.
CPUTRAIN_EXPORT void KERNEL(dropout)(const float* x, float* y, int64_t rows, int64_t cols, float p,
                                     uint64_t key);

// The low-rank path of an adapter, under the mask that `dropout` draws by the same key: out (rows ×
// rank) = dropout(x) · Aᵀ; A is rank × cols.
CPUTRAIN_EXPORT void KERNEL(low_rank)(const float* x, int64_t stride, const float* a, float* out,
                                      int64_t rows, int64_t cols, int64_t rank, float p,
                                      uint64_t key, Scratch* scratch);
// grad_a = gradᵀ · dropout(x); grad is rows × rank.
CPUTRAIN_EXPORT void KERNEL(low_rank_a_grad)(const float* grad, const float* x, int64_t stride,
                                             float* grad_a, int64_t rows, int64_t cols,
                                             int64_t rank, float p, uint64_t key, Scratch* scratch);
// grad_x += dropout(grad · A).
CPUTRAIN_EXPORT void KERNEL(low_rank_x_grad)(const float* grad, const float* a, float* grad_x,
                                             int64_t rows, int64_t cols, int64_t rank, float p,
                                             uint64_t key, Scratch* scratch);

// Where a kernel takes `kept` (or null), it writes what the backward pass needs there as bf16; the
// backward pass has a flag `bf16` that says so.
//
// out = activation(h + bias); kind: 0 identity, 1 relu, 2 silu, 3 gelu, 4 gelu by tanh. bias or
// null. kept receives h. out may be h.
CPUTRAIN_EXPORT void KERNEL(activation)(const float* h, const float* bias, float* out, void* kept,
                                        int64_t rows, int64_t cols, int64_t kind);

// grad_h = grad · activation'(h + bias), value = activation(h + bias) (or null), grad_bias = column
// sums of grad_h. bias and grad_bias or null, both. grad_h may be grad.
CPUTRAIN_EXPORT void KERNEL(activation_backward)(const float* grad, const void* h, int64_t bf16,
                                                 const float* bias, float* grad_h, float* value,
                                                 float* grad_bias, int64_t rows, int64_t cols,
                                                 int64_t kind, Scratch* scratch);

// out = activation(gate) · up, `count` elements of each. out may be one of the two.
CPUTRAIN_EXPORT void KERNEL(gated)(const float* gate, const float* up, float* out, int64_t count,
                                   int64_t kind);
// The gradients of both, and out again in `value` (or null). grad_gate may be grad.
CPUTRAIN_EXPORT void KERNEL(gated_backward)(const float* grad, const float* gate, const float* up,
                                            float* grad_gate, float* grad_up, float* value,
                                            int64_t count, int64_t kind);

// bf16 of x + bias; bias or null.
CPUTRAIN_EXPORT void KERNEL(round_to_bf16)(const float* x, const float* bias, void* out,
                                           int64_t rows, int64_t cols);
// The way back: out = kept · factor + offset, one of each for every column.
CPUTRAIN_EXPORT void KERNEL(read_bf16)(const void* kept, const float* factor, const float* offset,
                                       float* out, int64_t rows, int64_t cols);

// Rows of x in 16-bit integers, 64 of which share a scale: (cols / 64, rounded up) × 66 words to a
// row; and floats again.
CPUTRAIN_EXPORT void KERNEL(round_to_int16)(const float* x, void* out, int64_t rows, int64_t cols);
CPUTRAIN_EXPORT void KERNEL(read_int16)(const void* kept, float* out, int64_t rows, int64_t cols);

// LayerNorm over the last dimension. weight, bias or null; mean and rstd (one of each per row) are
// for the backward pass. kept (or null) receives the normalised x, before weight and bias.
CPUTRAIN_EXPORT void KERNEL(layer_norm)(const float* x, const float* weight, const float* bias,
                                        float* out, void* kept, float* mean, float* rstd,
                                        int64_t rows, int64_t cols, float eps);

// z = residual + dropout(y + bias), out = LayerNorm(z). bias, weight, beta or null. z may be y; if
// `kept` receives the normalised z, z itself is not written and may be null.
CPUTRAIN_EXPORT void KERNEL(residual_norm)(const float* y, const float* bias, const float* residual,
                                           const float* weight, const float* beta, float* z,
                                           void* kept, float* out, float* mean, float* rstd,
                                           int64_t rows, int64_t cols, float eps, float p,
                                           uint64_t key);

// The gradient of both: grad_z = LayerNorm's gradient + grad_sum (what reached z by another way, or
// null), grad_y = grad_z · dropout factors (or null if p is 0), grad_bias = column sums of that. If
// it was kept as bf16, z is what was normalised, and mean isn't read. weight, grad_weight,
// grad_beta, grad_bias or null. grad_z may be grad_out.
CPUTRAIN_EXPORT void KERNEL(norm_backward)(const float* grad_out, const void* z, int64_t bf16,
                                           const float* mean, const float* rstd,
                                           const float* weight, const float* grad_sum,
                                           float* grad_z, float* grad_y, float* grad_weight,
                                           float* grad_beta, float* grad_bias, int64_t rows,
                                           int64_t cols, float p, uint64_t key, Scratch* scratch);

// out = x · rstd · (offset + weight), rstd = 1 / √(mean of x² + eps) of each row; weight or null.
CPUTRAIN_EXPORT void KERNEL(rms_norm)(const float* x, const float* weight, float offset, float* out,
                                      float* rstd, int64_t rows, int64_t cols, float eps);
// grad_x may be grad. weight and grad_weight or null, both.
CPUTRAIN_EXPORT void KERNEL(rms_norm_backward)(const float* grad, const float* x, const float* rstd,
                                               const float* weight, float offset, float* grad_x,
                                               float* grad_weight, int64_t rows, int64_t cols,
                                               Scratch* scratch);

// Where in `ids` the first one outside 0 … limit - 1 is, or -1.
CPUTRAIN_EXPORT void KERNEL(find_outside)(const int64_t* ids, int64_t count, int64_t limit,
                                          int64_t* place);

// out = dropout(LayerNorm(word[word_ids] + position[position_ids] + type[type_ids])); position and
// its ids, type and its ids or null. Ids must be inside their tables.
CPUTRAIN_EXPORT void KERNEL(embed)(const float* word, const int64_t* word_ids,
                                   const float* position, const int64_t* position_ids,
                                   const float* type, const int64_t* type_ids, const float* weight,
                                   const float* beta, float* out, float* mean, float* rstd,
                                   int64_t rows, int64_t cols, float eps, float p, uint64_t key);

// grad_sum (rows × cols) is the gradient of the sum of the three rows.
CPUTRAIN_EXPORT void KERNEL(embed_backward)(const float* grad_out, const float* word,
                                            const int64_t* word_ids, const float* position,
                                            const int64_t* position_ids, const float* type,
                                            const int64_t* type_ids, const float* mean,
                                            const float* rstd, const float* weight, float* grad_sum,
                                            float* grad_weight, float* grad_beta, int64_t rows,
                                            int64_t cols, float p, uint64_t key, Scratch* scratch);

// grad_table[ids[r]] += grad[r], in the order of the rows, but not where the id is `skipped` (-1:
// none).
CPUTRAIN_EXPORT void KERNEL(embedding_grad)(const float* grad, const int64_t* ids,
                                            float* grad_table, int64_t rows, int64_t cols,
                                            int64_t skipped);

// losses[r] = -Σ q log softmax(f(z[r])), where q is (1 - smoothing) at the row's label plus
// smoothing / cols everywhere, and f(z) = after · tanh(before · z) if `tanh`, else before · z.
// about[r], if wanted: the entropy of p = softmax(f(z[r])), log Σ p², the mean of f(z[r]), and 1 if
// the label is the first of its largest values. z is overwritten: by the gradient of losses ·
// grads + entropies · entropy_grads, or, if grads is null, by f(z). Labels must be inside the row.
CPUTRAIN_EXPORT void KERNEL(cross_entropy)(float* z, int64_t stride, const int64_t* labels,
                                           const float* grads, const float* entropy_grads,
                                           float* losses, float* about, int64_t rows, int64_t cols,
                                           float before, float after, int64_t tanh,
                                           float smoothing);

// The optimizers work on `count` tensors at once: arrays of `count` sizes (in elements) and of
// pointers.
//
// One step of Adam (weight decay added to the gradient) or AdamW (`decoupled`), with stock
// PyTorch's rounding. Adds 1 to every step counter, which is a float as in stock's state.
CPUTRAIN_EXPORT void KERNEL(adam)(int64_t count, const int64_t* sizes, float* const* params,
                                  const float* const* grads, float* const* averages,
                                  float* const* squares, float* const* steps, double lr,
                                  double beta1, double beta2, double eps, double weight_decay,
                                  int64_t decoupled, Scratch* scratch);
// One step of SGD. `buffers` (the momentum) is null without momentum, and filled already otherwise.
CPUTRAIN_EXPORT void KERNEL(sgd)(int64_t count, const int64_t* sizes, float* const* params,
                                 const float* const* grads, float* const* buffers, double lr,
                                 double momentum, double dampening, double weight_decay,
                                 int64_t nesterov, Scratch* scratch);
// The sum of the squares of all elements, in double and in an order that is fixed by the sizes
// alone.
CPUTRAIN_EXPORT void KERNEL(sum_of_squares)(int64_t count, const int64_t* sizes,
                                            const float* const* grads, double* result,
                                            Scratch* scratch);
// Every element times `factor`, in place.
CPUTRAIN_EXPORT void KERNEL(scale)(int64_t count, const int64_t* sizes, float* const* grads,
                                   float factor, Scratch* scratch);

// Attention over sequences that lie behind one another in the token dimension. (tokens, heads,
// size) with the last dimension contiguous; ops/attention.py mirrors the structures.
struct HeadTensor {
  void* data;  // of float, but see bf16 below
  int64_t token_stride, head_stride;
};
// (sequences, heads, queries, keys), keys contiguous; a stride is 0 where sequences or heads share
// it.
struct BiasTensor {
  float* data;  // or null
  int64_t sequence_stride, head_stride, row_stride;
};
struct AttentionProblem {
  HeadTensor q, k, v, out;
  float* lse;  // (heads, total): log2 Σ e^score; infinity where every key is masked
  BiasTensor bias;
  const int64_t *starts, *lengths;  // of the sequences, in tokens
  const int64_t* order;             // the sequences' numbers, longest first
  int64_t sequences, total, heads, kv_heads, size, causal;
  int64_t window;  // keys further away than this are hidden; negative: none is
  int64_t bf16;    // q, k and v are bf16
  float scale, p;
  float cap;           // scores become cap · tanh(score / cap), before the bias; 0: they stay
  const float* sinks;  // of each head, a score of no key that the softmax counts; or null
  uint64_t key;
};
// What backward reads (out) and writes. Into bias.data it adds.
struct AttentionGradients {
  HeadTensor out, q, k, v;
  BiasTensor bias;
};

// out = dropout(softmax(scale · q kᵀ + bias)) v within each sequence. Tokens of no sequence are not
// touched. The gradient of sinks follows from lse: it is left to the caller.
CPUTRAIN_EXPORT void KERNEL(attention_forward)(const AttentionProblem* problem, Scratch* scratch);
CPUTRAIN_EXPORT void KERNEL(attention_backward)(const AttentionProblem* problem,
                                                const AttentionGradients* gradients,
                                                Scratch* scratch);

// Matrix products in block-scaled 16-bit integers (kernels/matmul_*.h say how and how exact).
// A packed operand is a set of `vectors` of length `depth`, in memory aligned to 64 bytes; its role
// (0 left, 1 right) decides its layout, which differs between instruction sets.
CPUTRAIN_EXPORT void KERNEL(int16_packed_bytes)(int64_t vectors, int64_t depth, int64_t role,
                                                int64_t* bytes);
// Packs x (rows × cols, of float or, kind 1, of bf16) in one go: its rows as vectors into by_rows,
// its columns as vectors into by_columns (either or null). column_sums (needs by_columns) or null.
CPUTRAIN_EXPORT void KERNEL(int16_pack)(const void* x, int64_t kind, int64_t stride, int64_t rows,
                                        int64_t cols, void* by_rows, int64_t row_role,
                                        void* by_columns, int64_t column_role, float* column_sums,
                                        Scratch* scratch);
// Packs the rows of activation(h + bias), which is never written, for the left side. bias or null.
CPUTRAIN_EXPORT void KERNEL(int16_pack_activated)(const float* h, const float* bias, int64_t kind,
                                                  int64_t stride, int64_t rows, int64_t cols,
                                                  void* packed);
// A frozen weight as it is stored; formats/stored.py mirrors the structure. Elements are counted
// row by row, without gaps.
enum StoredKind : int64_t { kFloat16Stored, kFourBitStored, kEightBitStored };
struct StoredWeight {
  int64_t kind;
  // fp16; or numbers of 4 bits, two in a byte, the first in its high half, which are code's; or
  // signed bytes.
  const void* values;
  const float* code;    // 16
  const void* scales;   // 4 bits: a float for each `block` of elements; 8 bits: one for each row
  const float* nested;  // 256, or null: then the scales are bytes that stand for these numbers …
  const float* nested_scales;  // … times one of these for each `nested_block` of scales …
  int64_t block, nested_block;
  float nested_offset;  // … plus this
  int64_t first;        // elements before the first one
  int64_t first_row;
};
// All of it as floats.
CPUTRAIN_EXPORT void KERNEL(unpack_weight)(const StoredWeight* weight, float* out, int64_t rows,
                                           int64_t cols);
// One side of a product; formats/int16_matmul.py mirrors the structure.
enum SourceKind : int64_t { kFloatSource, kBf16Source, kStoredSource };
struct Int16Operand {
  const void* source;  // is packed first, or null: `packed` is filled already
  int64_t kind;        // what the source is; kStoredSource: a StoredWeight, which has no sums
  int64_t stride;
  int64_t by_columns;  // the vectors are the source's columns; else its rows
  float* sums;         // receives the source's column sums (needs by_columns), or null
  void* packed;
};
// A second product whose result is added.
struct Int16Term {
  Int16Operand left, right;
  int64_t depth;
};
// out[r][c] = left vector r · right vector c (+ plus) (+ bias[c]) (+ out[r][c] if accumulate). plus
// and bias or null; with plus, not both sides may be packed by columns.
CPUTRAIN_EXPORT void KERNEL(int16_product)(const Int16Operand* left, const Int16Operand* right,
                                           float* out, int64_t out_stride, int64_t rows,
                                           int64_t cols, int64_t depth, const Int16Term* plus,
                                           const float* bias, int64_t accumulate, Scratch* scratch);
// For tests and benchmarks: int16_product without AVX512_VNNI and AVX_VNNI, or with them although
// the CPU doesn't say that it has them (virtual machines hide AVX_VNNI).
enum Int16Vnni { kInt16VnniNever, kInt16VnniIfKnown, kInt16VnniAlways };
CPUTRAIN_EXPORT void KERNEL(int16_use_vnni)(int64_t wanted);

// Element-wise reduction of `ranks` sources of `count` elements, a mean being the sum divided by
// `divisor`; known = 0 if the dtype has none. api_collectives.h has the numbers of dtypes and
// reductions.
CPUTRAIN_EXPORT void KERNEL(ccl_reduce)(int64_t dtype, int64_t reduction, void* out,
                                        const void* const* sources, int64_t ranks, int64_t count,
                                        int64_t divisor, int64_t* known);

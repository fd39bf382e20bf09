// The C interface: every kernel's prototype, and nothing else.
//
// Each kernel source is compiled once per instruction set; KERNEL(name) gives it the symbol
// cputrain_<name>_<isa>. native.py binds the symbols of one instruction set, with the same argument
// types: a test compares its table with this file.
//
// Conventions: matrices are row-major float; `rows`, `cols` are sizes, `…_stride` is in elements.
// Pointers may be null where the comment says "or null". Kernels take no ownership, check nothing
// (Python does) and use as many OpenMP threads as torch does.
#pragma once

#include <cstdint>

#ifdef CPUTRAIN_ISA
#define CPUTRAIN_JOIN2(name, isa) cputrain_##name##_##isa
#define CPUTRAIN_JOIN(name, isa) CPUTRAIN_JOIN2(name, isa)
#define KERNEL(name) CPUTRAIN_JOIN(name, CPUTRAIN_ISA)
#endif
#define CPUTRAIN_EXPORT extern "C" __attribute__((visibility("default")))

// y = x · keep / (1 - p); which elements are kept follows from (key, row, column) alone, so that the
// same call with the gradient in place of x is the backward pass. x and y may be the same memory.
CPUTRAIN_EXPORT void KERNEL(dropout)(const float* x, float* y, int64_t rows, int64_t cols, float p,
                                     uint64_t key);

// The optimizers work on `count` tensors at once: arrays of `count` sizes (in elements) and of pointers.
//
// One step of Adam (weight decay added to the gradient) or AdamW (`decoupled`), with stock PyTorch's
// rounding. Adds 1 to every step counter, which is a float as in stock's state.
CPUTRAIN_EXPORT void KERNEL(adam)(int64_t count, const int64_t* sizes, float* const* params,
                                  const float* const* grads, float* const* averages,
                                  float* const* squares, float* const* steps, double lr, double beta1,
                                  double beta2, double eps, double weight_decay, int64_t decoupled);

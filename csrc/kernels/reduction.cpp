// Element-wise reductions of several ranks' data, for every dtype of torch that can be reduced.
//
// The loops are plain: the compiler makes vectors of them for the instruction set it compiles for.
// 16-bit floats are widened, reduced in fp32 and rounded once.
#include "api.h"
#include "api_collectives.h"
#include "reduction_elements.h"

namespace {

typedef const char* const* Sources;

// 16 KB of widened values at most: stays in the L1 cache from source to source.
constexpr int64_t kBlockElements = 2048;

// out[i] = reduction over the sources' element i. out may be one of the sources.
template <class Element, class Op>
void reduce_elements(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                     int64_t divisor) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Value Value;
  Stored* out = reinterpret_cast<Stored*>(out_bytes);
  if (ranks == 2 && !divisor) {
    const Stored *a = reinterpret_cast<const Stored*>(sources[0]),
                 *b = reinterpret_cast<const Stored*>(sources[1]);
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
      Element::write(Op::apply(Element::read(a[i]), Element::read(b[i])), out + i);
    return;
  }
  alignas(64) Value sum[kBlockElements];
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = count - begin < kBlockElements ? count - begin : kBlockElements;
    const Stored* first = reinterpret_cast<const Stored*>(sources[0]) + begin;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) sum[i] = Element::read(first[i]);
    for (int64_t r = 1; r < ranks; r++) {
      const Stored* next = reinterpret_cast<const Stored*>(sources[r]) + begin;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = Op::apply(sum[i], Element::read(next[i]));
    }
    if (divisor)
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = divided(sum[i], divisor);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) Element::write(sum[i], out + begin + i);
  }
}

#if defined(HAS_FLOAT16_CONVERSION)
template <class Op>
void reduce_float16(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  alignas(64) float sum[kBlockElements], next[kBlockElements];
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = count - begin < kBlockElements ? count - begin : kBlockElements;
    widen_all(reinterpret_cast<const Float16*>(sources[0]) + begin, size, sum);
    for (int64_t r = 1; r < ranks; r++) {
      widen_all(reinterpret_cast<const Float16*>(sources[r]) + begin, size, next);
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = Op::apply(sum[i], next[i]);
    }
    if (divisor)
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = divided(sum[i], divisor);
    narrow_all(sum, size, reinterpret_cast<Float16*>(out_bytes) + begin);
  }
}
#endif

// Two bf16 numbers are read and written as one word: its halves need shifts and masks only, where
// single numbers would be shuffled apart and together again (64 MB, two ranks, AVX2: 17.1 -> 14.1
// ms).
typedef uint32_t __attribute__((aligned(2), may_alias)) Bfloat16Pair;
inline float lower(uint32_t pair) { return from_bits(pair << 16); }
inline float upper(uint32_t pair) { return from_bits(pair & 0xffff0000); }
// A bf16 in the upper half; the lower one is anything. NaN needs no care: it comes from operands
// whose lower half is zero, or is the CPU's own, and nothing is carried into its upper half.
inline uint32_t rounded(float x) {
  const uint32_t bits = bits_of(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}
inline uint32_t paired(float low, float high) {
  return rounded(low) >> 16 | (rounded(high) & 0xffff0000);
}

template <class Op>
void reduce_bfloat16(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                     int64_t divisor) {
  alignas(64) float low[kBlockElements], high[kBlockElements];
  Bfloat16Pair* out = reinterpret_cast<Bfloat16Pair*>(out_bytes);
  const Bfloat16Pair* first = reinterpret_cast<const Bfloat16Pair*>(sources[0]);
  const int64_t pairs = count / 2;
  if (ranks == 2 && !divisor) {
    const Bfloat16Pair* second = reinterpret_cast<const Bfloat16Pair*>(sources[1]);
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
      const uint32_t a = first[i], b = second[i];
      out[i] = paired(Op::apply(lower(a), lower(b)), Op::apply(upper(a), upper(b)));
    }
  } else {
    for (int64_t begin = 0; begin < pairs; begin += kBlockElements) {
      const int64_t size = pairs - begin < kBlockElements ? pairs - begin : kBlockElements;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) {
        low[i] = lower(first[begin + i]);
        high[i] = upper(first[begin + i]);
      }
      for (int64_t r = 1; r < ranks; r++) {
        const Bfloat16Pair* next = reinterpret_cast<const Bfloat16Pair*>(sources[r]) + begin;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
          low[i] = Op::apply(low[i], lower(next[i]));
          high[i] = Op::apply(high[i], upper(next[i]));
        }
      }
      if (divisor)
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
          low[i] = divided(low[i], divisor);
          high[i] = divided(high[i], divisor);
        }
#pragma omp simd
      for (int64_t i = 0; i < size; i++) out[begin + i] = paired(low[i], high[i]);
    }
  }
  if (count % 2) {
    const char* last[kCclMostRanks] = {};
    for (int64_t r = 0; r < ranks; r++) last[r] = sources[r] + 4 * pairs;
    reduce_elements<Half<Bfloat16>, Op>(out_bytes + 4 * pairs, last, ranks, 1, divisor);
  }
}

template <class Element, class Op>
struct Reduce {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_elements<Element, Op>(out, sources, ranks, count, divisor);
  }
};
template <class Op>
struct Reduce<Half<Bfloat16>, Op> {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_bfloat16<Op>(out, sources, ranks, count, divisor);
  }
};
#if defined(HAS_FLOAT16_CONVERSION)
template <class Op>
struct Reduce<Half<Float16>, Op> {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_float16<Op>(out, sources, ranks, count, divisor);
  }
};
#endif

template <class Element>
bool reduce_numbers(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  switch (reduction) {
    case kCclSum:
    case kCclPartOfMean:
      Reduce<Element, Sum>::run(out, sources, ranks, count, 0);
      return true;
    case kCclMean:
      if (ranks == 2 && divisor == 2)
        Reduce<Element, MeanOfTwo>::run(out, sources, ranks, count, 0);
      else
        Reduce<Element, Sum>::run(out, sources, ranks, count, divisor);
      return true;
    case kCclProduct:
      Reduce<Element, Product>::run(out, sources, ranks, count, 0);
      return true;
  }
  return false;
}
template <class Element>
bool reduce_ordered(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  switch (reduction) {
    case kCclMin:
      Reduce<Element, Minimum>::run(out, sources, ranks, count, 0);
      return true;
    case kCclMax:
      Reduce<Element, Maximum>::run(out, sources, ranks, count, 0);
      return true;
  }
  return reduce_numbers<Element>(reduction, out, sources, ranks, count, divisor);
}
template <class Element>
bool reduce_bits(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                 int64_t divisor) {
  switch (reduction) {
    case kCclAnd:
      Reduce<Element, BitAnd>::run(out, sources, ranks, count, 0);
      return true;
    case kCclOr:
      Reduce<Element, BitOr>::run(out, sources, ranks, count, 0);
      return true;
    case kCclXor:
      Reduce<Element, BitXor>::run(out, sources, ranks, count, 0);
      return true;
  }
  return reduce_ordered<Element>(reduction, out, sources, ranks, count, divisor);
}
// Truth values: the sum is "any", the product "all".
inline bool reduce_truths(int64_t reduction, char* out, Sources sources, int64_t ranks,
                          int64_t count, int64_t divisor) {
  switch (reduction) {
    case kCclSum:
    case kCclMax:
      return reduce_bits<Boolean>(kCclOr, out, sources, ranks, count, divisor);
    case kCclProduct:
    case kCclMin:
      return reduce_bits<Boolean>(kCclAnd, out, sources, ranks, count, divisor);
    case kCclMean:
      return false;
  }
  return reduce_bits<Boolean>(reduction, out, sources, ranks, count, divisor);
}

// A mean is the sum divided by `divisor`. False if the dtype has no such reduction.
bool reduce(int64_t dtype, int64_t reduction, char* out, Sources sources, int64_t ranks,
            int64_t count, int64_t divisor) {
  switch (dtype) {
    case kCclBool:
      return reduce_truths(reduction, out, sources, ranks, count, divisor);
    case kCclUint8:
      return reduce_bits<Plain<uint8_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclInt8:
      return reduce_bits<Plain<int8_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclInt16:
      return reduce_bits<Plain<int16_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclInt32:
      return reduce_bits<Plain<int32_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclInt64:
      return reduce_bits<Plain<int64_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclUint16:
      return reduce_bits<Plain<uint16_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclUint32:
      return reduce_bits<Plain<uint32_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclUint64:
      return reduce_bits<Plain<uint64_t>>(reduction, out, sources, ranks, count, divisor);
    case kCclFloat16:
      return reduce_ordered<Half<Float16>>(reduction, out, sources, ranks, count, divisor);
    case kCclBfloat16:
      return reduce_ordered<Half<Bfloat16>>(reduction, out, sources, ranks, count, divisor);
    case kCclFloat32:
      return reduce_ordered<Plain<float>>(reduction, out, sources, ranks, count, divisor);
    case kCclFloat64:
      return reduce_ordered<Plain<double>>(reduction, out, sources, ranks, count, divisor);
    case kCclComplex64:
      return reduce_numbers<Complex<float>>(reduction, out, sources, ranks, count, divisor);
    case kCclComplex128:
      return reduce_numbers<Complex<double>>(reduction, out, sources, ranks, count, divisor);
  }
  return false;
}

}  // namespace

void KERNEL(ccl_reduce)(int64_t dtype, int64_t reduction, void* out, const void* const* sources,
                        int64_t ranks, int64_t count, int64_t divisor, int64_t* known) {
  *known = reduce(dtype, reduction, static_cast<char*>(out),
                  reinterpret_cast<const char* const*>(sources), ranks, count, divisor);
}

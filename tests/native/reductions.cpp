// Element-wise reductions of every dtype.
#include "guarded.h"

namespace {

constexpr int kDtypes = 15, kReductions = 9;
const int64_t kBytes[kDtypes] = {1, 1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 8, 16};

double fp16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

struct FloatFormat {
  double tolerance, largest;  // half a unit in the last place, and some
};
FloatFormat format_of(int64_t dtype) {
  switch (dtype) {
    case kCclFloat16:
      return {6e-4, 65504};
    case kCclBfloat16:
      return {5e-3, 3e38};
    case kCclFloat32:
      return {1e-6, 3e38};
    default:
      return {1e-14, 1e308};
  }
}
double float_at(int64_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case kCclFloat16:
      return fp16_value(((const uint16_t*)data)[i]);
    case kCclBfloat16:
      return bf16_value(((const uint16_t*)data)[i]);
    case kCclFloat32:
      return ((const float*)data)[i];
    default:
      return ((const double*)data)[i];
  }
}

// Sums, means and extremes of floats; what overflows on the way is left out.
void expect_floats(int64_t dtype, int64_t reduction, const char* out,
                   const std::vector<const void*>& sources, int64_t count) {
  const FloatFormat format = format_of(dtype);
  for (int64_t i = 0; i < count; i++) {
    double total = 0, size = 0, least = INFINITY, most = -INFINITY;
    for (const void* source : sources) {
      const double x = float_at(dtype, source, i);
      total += x, size += std::fabs(x);
      least = x < least ? x : least, most = x > most ? x : most;
    }
    const bool extreme = reduction == kCclMin || reduction == kCclMax;
    if (std::isnan(size) || (!extreme && !(size < format.largest))) continue;
    const double sum = reduction == kCclMean ? total / (double)sources.size() : total;
    const double expected = reduction == kCclMin ? least : reduction == kCclMax ? most : sum;
    const double found = float_at(dtype, out, i);
    const double scale = extreme ? 0 : 2 * format.tolerance * size + 6e-8;  // a subnormal fp16
    expect(found == expected || std::fabs(found - expected) <= scale, "a reduction of floats");
  }
}

}  // namespace

void check_reductions(Random& random) {
  const int64_t dtype = random.below(kDtypes), reduction = random.below(kReductions);
  const int64_t ranks = 1 + random.below(5), count = random.size(5000);
  describe("ccl_reduce", dtype, reduction, ranks, count);
  const int64_t bytes = count * kBytes[dtype];
  std::vector<Guarded<char>*> sources;
  std::vector<const void*> pointers;
  for (int64_t r = 0; r < ranks; r++) {
    sources.push_back(new Guarded<char>(bytes));
    for (int64_t i = 0; i < bytes; i++) (*sources[r])[i] = (char)random.bits();
    for (int64_t i = 0; dtype == kCclFloat32 && i < count; i++)
      ((float*)sources[r]->data())[i] = random.normal();
    pointers.push_back(sources[r]->data());
  }
  std::vector<char> first;
  on_every_isa(0, [&](Same&) {
    if (position.isa == "avx512") return;  // not compiled for it: CMakeLists.txt says why
    Guarded<char> out(bytes);
    int64_t known = -1;
    CALL(ccl_reduce, dtype, reduction, out, pointers.data(), ranks, count, ranks, &known);
    expect(known == 0 || known == 1, "ccl_reduce");
    for (int64_t i = 0; dtype == kCclInt32 && reduction == kCclSum && i < count; i++) {
      uint32_t total = 0;
      for (const void* source : pointers) total += ((const uint32_t*)source)[i];
      expect(((uint32_t*)out.data())[i] == total, "sum of int32");
    }
    const bool in_double = reduction != kCclProduct && reduction <= kCclMax;
    if (dtype >= kCclFloat16 && dtype <= kCclFloat64 && in_double)
      expect_floats(dtype, reduction, out.data(), pointers, count);
    const bool exact = dtype <= 8;  // a NaN's bits may differ
    if (!exact || !known) return;
    if (first.empty()) first.assign(out.data(), out.data() + bytes);
    expect(!bytes || memcmp(out, first.data(), bytes) == 0,
           "reductions differ between instruction sets");
  });
  for (Guarded<char>* source : sources) delete source;
}

// Element-wise reductions of every dtype.
#include "guarded.h"

namespace {

constexpr int kDtypes = 15, kReductions = 9;
const int64_t kBytes[kDtypes] = {1, 1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 8, 16};

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
    for (int64_t i = 0; known && reduction == kCclSum && i < count; i++) {
      uint32_t integers = 0;
      double floats = 0;
      for (const void* source : pointers)
        if (dtype == kCclInt32)
          integers += ((const uint32_t*)source)[i];
        else if (dtype == kCclFloat32)
          floats += ((const float*)source)[i];
      if (dtype == kCclInt32) expect(((uint32_t*)out.data())[i] == integers, "sum of int32");
      if (dtype == kCclFloat32)
        expect(near(((float*)out.data())[i], floats, 1e-5), "sum of float32");
    }
    const bool exact = dtype <= 8;  // a NaN's bits may differ
    if (!exact || !known) return;
    if (first.empty()) first.assign(out.data(), out.data() + bytes);
    expect(!bytes || memcmp(out, first.data(), bytes) == 0,
           "reductions differ between instruction sets");
  });
  for (Guarded<char>* source : sources) delete source;
}

// Runs every kernel over random shapes: under AddressSanitizer and UndefinedBehaviorSanitizer, or
// for another CPU.
//
//   sanitize_kernels [shapes] [seed] [first shape]
//   portable_kernels [shapes] [seed] [first shape]
//
// A failure names the shape and the seed; given both, with `shapes` 1, it is repeated alone.
#include <omp.h>

#include "guarded.h"

// The sanitizer's own settings: kernels allocate nothing, so there is nothing to leak.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

int main(int count, char** arguments) {
  const auto number = [&](int i, uint64_t otherwise) {
    return i < count ? strtoull(arguments[i], nullptr, 10) : otherwise;
  };
  const int64_t shapes = (int64_t)number(1, 500), first = (int64_t)number(3, 0);
  position.seed = number(2, 0);
  for (int64_t shape = first; shape < first + shapes; shape++) {
    position.shape = shape;
    Random random(position.seed * 1000003 + (uint64_t)shape);
    omp_set_num_threads(random.coin() ? 1 : 1 + (int)random.below(4));
    check_rows(random);
    check_embeddings(random);
    check_optimizers(random);
    check_attention(random);
    check_products(random);
    check_adapters(random);
    check_reductions(random);
  }
  printf("%lld shapes on", (long long)shapes);
  for (const std::string& isa : runnable()) printf(" %s", isa.c_str());
  printf(": clean\n");
}

// One parallel pass over the elements of many tensors, as the optimizers need it.
//
// Every tensor is cut into blocks of kBlock elements, and the blocks of all tensors are dealt to
// the threads in equal, contiguous shares. The cut doesn't depend on the number of threads.
#pragma once

#include <cstdint>

#include "scratch.h"

namespace {

// 64 KB of each tensor: long enough for the hardware's prefetchers, short enough that no thread
// waits long for another at the end of the pass.
constexpr int64_t kBlock = 16384;

// Which block is whose: tensor t has the blocks first[t] … first[t + 1] - 1, once they are
// numbered.
struct Blocks {
  const int64_t* const sizes;
  const int64_t count;
  int64_t* const first;
  int64_t total = 0;

  Blocks(Arena& arena, int64_t tensors, const int64_t* tensor_sizes)
      : sizes(tensor_sizes), count(tensors), first(arena.take<int64_t>(tensors + 1)) {
    for (int64_t t = 0; t < count; t++) total += blocks_of(t);
  }
  void number() const {
    first[0] = 0;
    for (int64_t t = 0; t < count; t++) first[t + 1] = first[t] + blocks_of(t);
  }
  int64_t blocks_of(int64_t tensor) const { return (sizes[tensor] + kBlock - 1) / kBlock; }
  int64_t tensor_of(int64_t block) const {
    int64_t low = 0, high = count;  // first[low] <= block < first[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first[middle] <= block ? low : high) = middle;
    }
    return low;
  }
};

// visit(block, tensor, begin, end) for every block.
template <class Visit>
void for_each_block(const Blocks& blocks, Visit visit) {
  const int64_t total = blocks.total;
  blocks.number();
#pragma omp parallel for schedule(static) if (total > 1)
  for (int64_t block = 0; block < total; block++) {
    const int64_t tensor = blocks.tensor_of(block);
    const int64_t begin = (block - blocks.first[tensor]) * kBlock;
    const int64_t left = blocks.sizes[tensor] - begin;
    visit(block, tensor, begin, begin + (left < kBlock ? left : kBlock));
  }
}

}  // namespace

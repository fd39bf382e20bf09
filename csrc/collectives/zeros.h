// Pages of zeros are not passed on, but said to be such.
//
// Over half of the gradients of a small language model are those of its vocabulary, and zero but
// for the tokens of this batch. A rank that finds a page of zeros leaves it out of its slot; where
// all have left it out, any reduction's result is zeros again, and in place nothing is written.
#pragma once

#include "segment.h"

namespace {

alignas(64) const char kZeros[kPage] = {};

// A byte per page of the chunk, at the end of the slot, which no reduction fills.
inline char& is_left_out(char* slot, int64_t page) { return slot[kSlot - kChunk / kPage + page]; }

// Ends at the first 256 bytes that aren't: what isn't zeros is seldom looked at further.
inline bool are_zeros(const char* data, int64_t bytes) {
  int64_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    uint64_t words[32], any = 0;
    memcpy(words, data + i, 256);
    for (int w = 0; w < 32; w++) any |= words[w];
    if (any) return false;
  }
  char any = 0;
  for (; i < bytes; i++) any |= data[i];
  return !any;
}

inline void show_but_zeros(const char* data, int64_t bytes, char* slot) {
  for (int64_t begin = 0; begin < bytes; begin += kPage) {
    const int64_t size = bytes - begin < kPage ? bytes - begin : kPage;
    const bool zeros = are_zeros(data + begin, size);
    is_left_out(slot, begin / kPage) = zeros;
    if (!zeros) memcpy(slot + begin, data + begin, size);
  }
}

}  // namespace

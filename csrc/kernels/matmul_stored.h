// Unpacks weights as they are stored: fp16, 4-bit numbers with a scale for each block, 8-bit
// numbers with one for each row.
//
// A product unpacks a few rows at a time, into the cache, on their way into its panels: the weight
// is never written as floats.
#pragma once

#include "api.h"
#include "half_precision.h"
#include "simd.h"

namespace {

inline float scale_of_block(const StoredWeight& w, int64_t block) {
  if (!w.nested) return ((const float*)w.scales)[block];
  return w.nested[((const uint8_t*)w.scales)[block]] * w.nested_scales[block / w.nested_block] +
         w.nested_offset;
}

// Elements begin … begin + count - 1, all of one block.
inline void unpack_block(const uint8_t* values, const float* code, const Table16& table,
                         float scale, int64_t begin, int64_t count, float* to) {
  int64_t i = 0;
  if (begin % 2 && count) to[i++] = code[values[begin / 2] & 15] * scale;
  const uint8_t* bytes = values + (begin + i) / 2;
  for (; i + kWidth <= count; i += kWidth, bytes += kWidth / 2)
    store(to + i, table.at(load_nibbles(bytes)) * scale);
  for (int64_t high = 1; i < count; i++, high = !high, bytes += high)
    to[i] = code[high ? *bytes >> 4 : *bytes & 15] * scale;
}

inline void unpack_four_bits(const StoredWeight& w, int64_t begin, int64_t count, float* to) {
  const Table16 table(w.code);
  while (count > 0) {
    const int64_t block = begin / w.block, left = (block + 1) * w.block - begin;
    const int64_t here = left < count ? left : count;
    unpack_block((const uint8_t*)w.values, w.code, table, scale_of_block(w, block), begin, here,
                 to);
    begin += here, count -= here, to += here;
  }
}

inline void unpack_eight_bits(const int8_t* values, float scale, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = values[i] * scale;
}

inline void unpack_float16(const Float16* values, int64_t count, float* to) {
#if defined(HAS_FLOAT16_CONVERSION)
  widen_all(values, count, to);
#else
  for (int64_t i = 0; i < count; i++) to[i] = widen(values[i]);
#endif
}

// Elements of one row.
inline void unpack(const StoredWeight& w, int64_t begin, int64_t row, int64_t count, float* to) {
  begin += w.first;
  if (w.kind == kFourBitStored)
    unpack_four_bits(w, begin, count, to);
  else if (w.kind == kEightBitStored)
    unpack_eight_bits((const int8_t*)w.values + begin, ((const float*)w.scales)[w.first_row + row],
                      count, to);
  else
    unpack_float16((const Float16*)w.values + begin, count, to);
}

}  // namespace

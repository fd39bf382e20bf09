// Rows as they are kept in 16-bit integers, and floats again: 64 values share a scale.
//
// A row is `blocks` × 64 words (those beyond the last column are zero) and, behind them, `blocks`
// scales as floats. The largest value of a block becomes 32767.
#include "api.h"
#include "columns.h"
#include "simd_int16.h"

namespace {

constexpr int64_t kBlock = 64;  // 4 vectors of AVX-512; as many words are two cache lines
constexpr int kVecs = kBlock / kWidth;
// Blocks below it are zeros: 32767 / largest must be a number.
constexpr float kTiny = 1e-30f;

inline int64_t blocks_of(int64_t cols) { return (cols + kBlock - 1) / kBlock; }
inline int64_t words_of(int64_t cols) { return blocks_of(cols) * (kBlock + 2); }
inline float* scales_of(Word* row, int64_t cols) {
  return (float*)(row + blocks_of(cols) * kBlock);
}

// `part` loads a vector's floats from a block's i-th.
template <class Load>
void round_block(Load part, Word* words, float* scale) {
  Vec largest{}, spoilt{};
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; i++) {
    const Vec x = part(i);
    largest = max(largest, abs(x));
    spoilt += x - x;  // NaN of an infinity or a NaN
  }
  const float most = max_lane(largest), inverse = most > kTiny ? 32767.f / most : 0.f;
  *scale = most * (1.f / 32767.f) + sum(spoilt);
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; i++)
    store_lower_words(words + i * kWidth, (VecU)round_nearest(part(i) * inverse) & 0xffffu);
}

void round_row(const float* x, Word* row, int64_t cols) {
  float* const scales = scales_of(row, cols);
  int64_t c = 0;
  for (; c + kBlock <= cols; c += kBlock) {
    round_block([&](int i) INLINE_BODY { return load(x + c + i * kWidth); }, row + c,
                scales + c / kBlock);
  }
  if (c == cols) return;
  alignas(64) float last[kBlock] = {};
  memcpy(last, x + c, (cols - c) * sizeof(float));
  round_block([&](int i) INLINE_BODY { return load(last + i * kWidth); }, row + c,
              scales + c / kBlock);
}

inline Vec read(const Word* words, Vec scale) {
  return to_float((VecI)load_upper_words(words) >> 16) * scale;
}

void read_row(const Word* row, float* out, int64_t cols) {
  const float* const scales = scales_of((Word*)row, cols);
  for (int64_t c = 0; c < cols; c += kBlock) {
    const Vec scale = splat(scales[c / kBlock]);
    for (int64_t at = c; at < c + kBlock && at < cols; at += kWidth) {
      const Vec x = read(row + at, scale);
      cols - at < kWidth ? store_part(out + at, x, (int)(cols - at)) : store(out + at, x);
    }
  }
}

}  // namespace

void KERNEL(round_to_int16)(const float* x, void* out, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) round_row(x + r * cols, (Word*)out + r * words_of(cols), cols);
}

void KERNEL(read_int16)(const void* kept, float* out, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++)
    read_row((const Word*)kept + r * words_of(cols), out + r * cols, cols);
}

// How an operand of a matrix product lies in packed memory, so that the innermost loop reads it
// from front to back.
//
// An operand is a set of vectors (rows of x, rows or columns of w …) that are multiplied with each
// other operand's vectors along their depth. The depth is cut into blocks; in a block, `panel`
// vectors lie interleaved: [block][panel][pair of depth][vector] of two 16-bit values each, and
// behind all that one float scale per [block][vector]. Vectors beyond the last are zeros. An
// operand that is packed while it is multiplied may hold a few blocks only, each in place of an
// older one.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

// The left operand's values are broadcast, the right operand's fill whole registers. A tile of
// results is kTileRows × kTileVecs registers: AVX2 and SSE have 16 registers, of which 8 sums, 2
// of the right, 1 of the left and 1 product are used (more sums gain nothing: an integer addition
// takes one cycle, and the four broadcasts and two loads to eight products keep within two or three
// loads a cycle). AVX-512 needs 16 sums: vpdpwssd takes five cycles and two start in each.
// AVX_VNNI, the same instruction for CPUs without AVX-512, gets 12 from tiles of another shape on
// the same panels (matmul_tiles.h).
#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVecs = 2;
constexpr int kTileCols = kTileVecs * kWidth;

// Values that share a scale, at most. A panel of the right operand (16 or 32 vectors × 512 × 2
// bytes = 16 or 32 KB) and one of the left (4 or 8 KB) fit the first-level cache of 32 KB (48 KB
// where there is AVX-512 with VNNI). A depth is cut into equal blocks: 768 into two of 384.
constexpr int64_t kMaxBlock = 512;
constexpr int64_t kDepthStep = 32;  // depth that the packing loops handle at once, at least

// Pairs that the innermost loop handles before it jumps back: a block has at most 64 jumps then,
// which branch prediction can count.
constexpr int kPairStep = 4;

// A line between panels: at 4 KB exactly, all of them would compete for one set of the cache.
constexpr int64_t kPanelGap = 16;

enum Role : int64_t { kLeft = 0, kRight = 1 };

struct PackedLayout {
  int64_t vectors, depth, panel;
  int64_t padded;         // vectors, up to whole panels
  int64_t block, blocks;  // depth of a block as stored, and how many there are
  int64_t held;           // blocks that are in memory at a time
  int64_t panel_words;    // from one panel to the next, in pairs

  PackedLayout(int64_t vectors, int64_t depth, int64_t role)
      : vectors(vectors), depth(depth), panel(role == kLeft ? kTileRows : kTileCols) {
    padded = (vectors + panel - 1) / panel * panel;
    const int64_t fewest = (depth + kMaxBlock - 1) / kMaxBlock;
    const int64_t even = fewest ? (depth + fewest - 1) / fewest : 0;
    block = (even + kDepthStep - 1) / kDepthStep * kDepthStep;
    blocks = block ? (depth + block - 1) / block : 0;
    held = blocks;
    panel_words = panel * block / 2 + kPanelGap;
  }

  int64_t panels() const { return padded / panel; }
  int64_t bytes() const { return blocks * (panels() * panel_words + padded) * sizeof(int32_t); }
  // How much of a block is filled.
  int64_t filled(int64_t b) const { return depth - b * block < block ? depth - b * block : block; }
  // Pairs of a block to be multiplied; those beyond what is filled are zeros.
  int64_t pairs_of(int64_t b) const {
    return (filled(b) + 2 * kPairStep - 1) / (2 * kPairStep) * kPairStep;
  }
  int32_t* pairs(void* packed, int64_t b, int64_t panel_number) const {
    return (int32_t*)packed + (b % held * panels() + panel_number) * panel_words;
  }
  const int32_t* pairs(const void* packed, int64_t b, int64_t panel_number) const {
    return pairs(const_cast<void*>(packed), b, panel_number);
  }
  float* scales(void* packed, int64_t b) const {
    return (float*)packed + blocks * panels() * panel_words + b * padded;
  }
  const float* scales(const void* packed, int64_t b) const {
    return scales(const_cast<void*>(packed), b);
  }
};

}  // namespace

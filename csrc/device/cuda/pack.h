// What the kernel that copies many pieces does (pack.cu), down to one thread's share. Pieces are cut into tiles that
// blocks take by turns, so that many small pieces keep the whole GPU busy, and so does a large one among them. It is
// plain C++ too, as scale.h is, so that tests run it where there is no GPU (tests/unit/device/cuda/cuda_pack_test.cc).
#pragma once
#include <cstddef>
#include <cstdint>

#include "device/cuda/scale.h"

namespace lightcc::packing {

using scaling::Vector;  // the widest access

// What a block copies at a time: a few accesses of each of its threads. A multiple of the widest access, so that all
// tiles of a piece lie alike.
constexpr size_t kTileBytes = 16 << 10;

// The pieces of one launch, as the kernel's only argument.
template <uint32_t kMost> struct Pieces {
  static constexpr uint32_t kRoom = kMost;
  void* to[kMost];
  const void* from[kMost];
  size_t bytes[kMost];   // 1 or more
  uint32_t end[kMost];   // tiles of this piece and all before it
  uint32_t count;
};
// As many as fit into a kernel's arguments: any CUDA takes 4 KiB, and 12.1 and later, with such a driver, 32,764 bytes.
using FewPieces = Pieces<144>;
using ManyPieces = Pieces<1169>;
static_assert(sizeof(FewPieces) <= 4096 && sizeof(ManyPieces) <= 32764);

// ---- on the host

// Adds the first of the copies, as many as there is room for; returns how many these are. Some may have no bytes.
// Copy: CudaCopy.
template <uint32_t kMost, class Copy> inline size_t take(Pieces<kMost>& pieces, const Copy* copies, size_t count) {
  size_t taken = 0;
  for (; taken < count && pieces.count < kMost; ++taken) {
    const Copy& copy = copies[taken];
    if (copy.bytes == 0) continue;
    const uint32_t before = pieces.count > 0 ? pieces.end[pieces.count - 1] : 0;
    pieces.to[pieces.count] = copy.to;
    pieces.from[pieces.count] = copy.from;
    pieces.bytes[pieces.count] = copy.bytes;
    pieces.end[pieces.count++] = before + static_cast<uint32_t>((copy.bytes + kTileBytes - 1) / kTileBytes);
  }
  return taken;
}

template <uint32_t kMost> inline uint32_t tiles_of(const Pieces<kMost>& pieces) {
  return pieces.count > 0 ? pieces.end[pieces.count - 1] : 0;
}

// ---- one thread's share

constexpr uint32_t kLineBytes = 128;  // that the threads of a warp write at a time, if they begin where it does

// So many words a thread reads before it writes the first: else it would wait for each.
template <class Word> constexpr uint32_t kAtOnce = sizeof(Word) < 4 ? 8 : 64 / sizeof(Word);

// The first thread begins where the line does in which the output begins.
template <class Word>
inline void copy_words(uint32_t thread, uint32_t threads, Word* to, const Word* from,
                                           uint32_t count) {
  const auto before = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes / sizeof(Word));
  for (uint32_t i = thread; i < before + count; i += kAtOnce<Word> * threads) {
    Word words[kAtOnce<Word>] = {};
    LIGHTCC_UNROLL for (uint32_t k = 0; k < kAtOnce<Word>; ++k) {
      const uint32_t at = i + k * threads - before;  // wraps round before the first word
      if (at < count) words[k] = from[at];
    }
    LIGHTCC_UNROLL for (uint32_t k = 0; k < kAtOnce<Word>; ++k) {
      const uint32_t at = i + k * threads - before;
      if (at < count) to[at] = words[k];
    }
  }
}

// Words begin where both addresses are multiples of their size; what lies before the first and after the last goes
// byte by byte.
template <class Word>
inline void copy_tile(uint32_t thread, uint32_t threads, uint8_t* to, const uint8_t* from,
                                          uint32_t bytes) {
  uint32_t before = static_cast<uint32_t>((0 - reinterpret_cast<uintptr_t>(from)) % sizeof(Word));
  if (before > bytes) before = bytes;
  const uint32_t words = (bytes - before) / sizeof(Word), after = before + words * sizeof(Word);
  auto* const out = reinterpret_cast<Word*>(to + before);
  copy_words(thread, threads, out, reinterpret_cast<const Word*>(from + before), words);
  for (uint32_t i = thread; i < before; i += threads) to[i] = from[i];
  for (uint32_t i = after + thread; i < bytes; i += threads) to[i] = from[i];
}

// The first piece that ends behind the tile; `first`: that, or one before it.
template <uint32_t kMost>
inline uint32_t piece_of(const Pieces<kMost>& pieces, uint32_t tile, uint32_t first) {
  uint32_t last = pieces.count - 1;
  while (first < last) {
    const uint32_t middle = (first + last) / 2;
    if (pieces.end[middle] > tile)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

// Copies this thread's share of every `blocks`-th tile from `block` on, in the widest words that both addresses allow.
template <uint32_t kMost>
inline void copy_share(uint32_t thread, uint32_t threads, uint32_t block, uint32_t blocks,
                                           const Pieces<kMost>& pieces) {
  const uint32_t tiles = tiles_of(pieces);
  uint32_t piece = 0;
  for (uint32_t tile = block; tile < tiles; tile += blocks) {
    piece = piece_of(pieces, tile, piece);
    const uint32_t first = piece > 0 ? pieces.end[piece - 1] : 0;
    const size_t begin = (tile - first) * kTileBytes, left = pieces.bytes[piece] - begin;
    const auto bytes = static_cast<uint32_t>(left < kTileBytes ? left : kTileBytes);
    auto* const to = static_cast<uint8_t*>(pieces.to[piece]) + begin;
    const auto* const from = static_cast<const uint8_t*>(pieces.from[piece]) + begin;
    const uintptr_t apart = reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
    if (apart % sizeof(Vector) == 0)
      copy_tile<Vector>(thread, threads, to, from, bytes);
    else if (apart % sizeof(uint64_t) == 0)
      copy_tile<uint64_t>(thread, threads, to, from, bytes);
    else if (apart % sizeof(uint32_t) == 0)
      copy_tile<uint32_t>(thread, threads, to, from, bytes);
    else if (apart % sizeof(uint16_t) == 0)
      copy_tile<uint16_t>(thread, threads, to, from, bytes);
    else
      copy_tile<uint8_t>(thread, threads, to, from, bytes);
  }
}

}  // namespace lightcc::packing

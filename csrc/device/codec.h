// What codecs of gradients have in common: they work on a piece, a rank's shard of one tensor, block by block.
#pragma once
#include <cstddef>

namespace lightcc {

inline constexpr size_t kCodecBlock = 65536;  // elements: so many that a uint16 tells them apart

inline constexpr size_t blocks_of(size_t count) { return (count + kCodecBlock - 1) / kCodecBlock; }
inline constexpr size_t length_of_block(size_t block, size_t count) {
  const size_t left = count - block * kCodecBlock;
  return left < kCodecBlock ? left : kCodecBlock;
}

}  // namespace lightcc

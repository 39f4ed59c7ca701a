// Int8 quantization with error feedback on a GPU (device/quantization.h says how), down to the phases of a block. The
// bits are those of a CPU. A warp takes a group of 256 elements; with the second buffer of the residual
// (topk_encode.h) an element costs 13 bytes.
//
//   int8_prepare   a block a piece
//   int8_encode    a block a tile: 16 groups
//   int8_finish    a block a piece: turns the word, if all sums are finite
//   int8_prepare_decode   a block a piece
//   int8_decode    a block a tile: the sum over the nodes, written once
#pragma once
#include "device/cuda/codec_numbers.h"
#include "device/cuda/topk_encode.h"

namespace lightcc::gpu {

constexpr uint32_t kGroup = 256;  // elements with a scale of their own
constexpr float kLeastScale = 0x1p-126f, kMostScale = 0x1.020406p+121f, kOnes = 0x1.8p+23f;  // quantization_loops.cc

struct Int8EncodePiece {
  const void* gradient;  // elements of `type`; is read only
  float* residual[2];
  CodecState* state;
  uint8_t* body;  // of the message, at any address
  uint64_t count;
  float scale;
  uint32_t type;
  // What lay_out() sets (codec_plan.h).
  uint32_t first_tile, tiles;
};

struct Int8EncodeBatch {
  const Int8EncodePiece* pieces;
  uint32_t* tile_piece;
  uint32_t* not_finite;  // of each piece
  uint32_t piece_count, tiles;
};

LIGHTCC_DEVICE uint64_t groups_of(uint64_t count) { return (count + kGroup - 1) / kGroup; }

LIGHTCC_DEVICE void int8_prepare(TileBlock& block, const Int8EncodeBatch& batch, uint32_t number) {
  const Int8EncodePiece& piece = batch.pieces[number];
  block.threads([&](uint32_t thread) {
    for (uint32_t i = thread; i < piece.tiles; i += TileBlock::kThreads)
      batch.tile_piece[piece.first_tile + i] = number;
    if (thread == 0) batch.not_finite[number] = 0;
  });
}

LIGHTCC_DEVICE float scale_of(float largest) {
  return largest > 0 ? most_of(kLeastScale, least_of(kMostScale, divide(largest, 127))) : 0;
}

// Four signed bytes, the first in the lowest.
LIGHTCC_DEVICE void store_bytes(uint8_t* to, uint32_t at, uint32_t n, uint32_t bytes) {
  if (at + 4 <= n) return store(to + at, bytes);
  for (uint32_t j = 0; j < 4; ++j)
    if (at + j < n) to[at + j] = static_cast<uint8_t>(bytes >> 8 * j);
}

// A group, by one warp.
template <class Elements>
LIGHTCC_DEVICE void encode_group(const Int8EncodePiece& piece, uint32_t from, uint32_t* not_finite, uint64_t group) {
  using Stored = typename Elements::Stored;
  constexpr uint32_t kFours = kGroup / kWarp / 4;
  const uint64_t first = group * kGroup;
  const auto n = static_cast<uint32_t>(least_of<uint64_t>(kGroup, piece.count - first));
  const float* const old = global(piece.residual[from]) + first;
  float* const left = global(piece.residual[1 - from]) + first;
  const Stored* const gradient = global(static_cast<const Stored*>(piece.gradient)) + first;
  const bool fours = holds_fours(old) && holds_fours(left), gradient_fours = holds_fours(gradient);
  struct Sums {
    Four<float> of[kFours];
  };
  PerLane<Sums> sums;
  PerLane<uint32_t> magnitude;
  lanes([&](uint32_t lane) {
    Four<float> olds[kFours];
    Four<Stored> gradients[kFours];
    LIGHTCC_UNROLLED for (uint32_t i = 0; i < kFours; ++i) {
      const uint32_t at = (i * kWarp + lane) * 4;
      olds[i] = load_four(old, at, n, fours);
      gradients[i] = load_four(gradient, at, n, gradient_fours);
    }
    magnitude[lane] = 0;
    LIGHTCC_UNROLLED for (uint32_t i = 0; i < kFours; ++i) {
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
        const float step = product_of(piece.scale, Elements::number(gradients[i].at[j]));
        const float sum = sums[lane].of[i].at[j] = sum_of(olds[i].at[j], step);
        const bool here = (i * kWarp + lane) * 4 + j < n;  // beyond, infinity times 0 may be added
        magnitude[lane] = most_of(magnitude[lane], here ? magnitude_bits(sum) : 0);
      }
    }
  });
  const uint32_t most = largest(magnitude);
  const bool finite = most < kInfinityBits;
  const float scale = finite ? scale_of(float_of(most)) : float_of(0x7fc00000u), by = scale > 0 ? scale : 1;
  uint8_t* const values = global(piece.body) + groups_of(piece.count) * sizeof(float) + first;
  lanes([&](uint32_t lane) {
    if (lane == 0) {
      store(piece.body + group * sizeof(float), bits_of(scale));
      if (!finite) atomic_or(not_finite, 1);
    }
    LIGHTCC_UNROLLED for (uint32_t i = 0; i < kFours; ++i) {
      const uint32_t at = (i * kWarp + lane) * 4;
      uint32_t bytes = 0;
      Four<float> rest;
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
        const float sum = sums[lane].of[i].at[j], shifted = add(divide(sum, by), kOnes);
        bytes |= (bits_of(shifted) & 0xff) << 8 * j;
        rest.at[j] = add(sum, -multiply(add(shifted, -kOnes), scale));
      }
      store_bytes(values, at, n, finite ? bytes : 0);
      store_four(left, at, n, fours, rest);
    }
  });
}

LIGHTCC_DEVICE void int8_encode(TileBlock& block, const Int8EncodeBatch& batch, uint32_t number) {
  const uint32_t of = batch.tile_piece[number];
  const Int8EncodePiece& piece = batch.pieces[of];
  const uint32_t from = piece.state->holds & 1, index = number - piece.first_tile;
  const uint64_t begin = uint64_t{index} * (kTile / kGroup);
  const uint64_t end = least_of(groups_of(piece.count), begin + kTile / kGroup);
  block.warps([&](uint32_t warp) {
    with_elements(piece.type, [&](auto elements) {
      for (uint64_t group = begin + warp; group < end; group += TileBlock::kWarps)
        encode_group<decltype(elements)>(piece, from, &batch.not_finite[of], group);
    });
  });
}

LIGHTCC_DEVICE void int8_finish(TileBlock& block, const Int8EncodeBatch& batch, uint32_t number) {
  block.threads([&](uint32_t thread) {
    if (thread == 0 && !batch.not_finite[number]) batch.pieces[number].state->holds ^= 1;
  });
}

// ---- decode

struct Int8DecodePiece {
  const uint8_t* bodies;
  uint64_t stride;
  void* out;
  uint64_t count;
  uint32_t nodes, type;
  uint32_t scales;
  float scale;
  uint32_t first_tile, tiles;
};

struct Int8DecodeBatch {
  const Int8DecodePiece* pieces;
  uint32_t* tile_piece;
  uint32_t piece_count, tiles;
};

LIGHTCC_DEVICE void int8_prepare_decode(TileBlock& block, const Int8DecodeBatch& batch, uint32_t number) {
  const Int8DecodePiece& piece = batch.pieces[number];
  block.threads([&](uint32_t thread) {
    for (uint32_t i = thread; i < piece.tiles; i += TileBlock::kThreads)
      batch.tile_piece[piece.first_tile + i] = number;
  });
}

LIGHTCC_DEVICE uint32_t load_bytes(const uint8_t* from, uint32_t at, uint32_t n) {
  if (at + 4 <= n) return load32(from + at);
  uint32_t bytes = 0;
  for (uint32_t j = 0; j < 4; ++j)
    if (at + j < n) bytes |= uint32_t{from[at + j]} << 8 * j;
  return bytes;
}

// Four of a tile's elements a thread and turn.
template <class Elements>
LIGHTCC_DEVICE void add_messages(const Int8DecodePiece& piece, uint64_t first, uint32_t n, uint32_t thread) {
  using Stored = typename Elements::Stored;
  Stored* const out = global(static_cast<Stored*>(piece.out)) + first;
  const bool fours = holds_fours(out);
  const uint64_t scales_bytes = groups_of(piece.count) * sizeof(float);
  for (uint32_t at = thread * 4; at < n; at += TileBlock::kThreads * 4) {
    Four<float> sums{};
    for (uint32_t node = 0; node < piece.nodes; ++node) {
      const uint8_t* const body = global(piece.bodies) + piece.stride * node;
      const float scale = float_of(load32(body + (first + at) / kGroup * sizeof(float)));
      const uint32_t bytes = load_bytes(body + scales_bytes + first, at, n);
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
        const auto value = static_cast<float>(static_cast<int8_t>(bytes >> 8 * j & 0xff));
        sums.at[j] = sum_of(sums.at[j], product_of(value, scale));
      }
    }
    Four<Stored> four;
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j)
      four.at[j] = Elements::stored(piece.scales ? product_of(sums.at[j], piece.scale) : sums.at[j]);
    store_four(out, at, n, fours, four);
  }
}

LIGHTCC_DEVICE void int8_decode(TileBlock& block, const Int8DecodeBatch& batch, uint32_t number) {
  const Int8DecodePiece& piece = batch.pieces[batch.tile_piece[number]];
  const uint32_t index = number - piece.first_tile;
  block.threads([&](uint32_t thread) {
    with_elements(piece.type, [&](auto elements) {
      add_messages<decltype(elements)>(piece, uint64_t{index} * kTile, tile_length(piece.count, index), thread);
    });
  });
}

}  // namespace lightcc::gpu

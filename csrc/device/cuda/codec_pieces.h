// Pieces of the table (device/cuda.h) as those of the kernels. For the host.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "device/cuda.h"
#include "device/cuda/codec_plan.h"

namespace lightcc::gpu {

static_assert(sizeof(CodecState) == kCodecStateBytes);

// What both codecs have.
template <class Piece>
Piece piece_of(const CudaEncode& from) {
  Piece piece{};
  piece.gradient = from.gradient;
  std::copy_n(from.residual, 2, piece.residual);
  piece.state = static_cast<CodecState*>(from.state);
  piece.body = static_cast<uint8_t*>(from.body);
  piece.count = from.count;
  piece.scale = from.scale;
  piece.type = static_cast<uint32_t>(from.dtype);
  if constexpr (requires { piece.k; }) {
    std::copy_n(from.velocity, 2, piece.velocity);
    piece.k = from.k;
    piece.momentum = from.momentum;
    piece.half = from.half != 0;
  }
  return piece;
}

template <class Piece>
Piece piece_of(const CudaDecode& from) {
  Piece piece{};
  piece.bodies = static_cast<const uint8_t*>(from.bodies);
  piece.stride = from.stride;
  piece.out = from.out;
  piece.count = from.count;
  piece.nodes = from.nodes;
  piece.type = static_cast<uint32_t>(from.dtype);
  piece.scales = from.scale != 1;
  piece.scale = static_cast<float>(from.scale);
  if constexpr (requires { piece.k; }) {
    piece.k = from.k;
    piece.half = from.half != 0;
  }
  return piece;
}

// Those that have elements. Throws Error{internal} if they cannot be taken.
template <class Piece, class From>
std::vector<Piece> pieces_of(const From* from, size_t count) {
  std::vector<Piece> pieces;
  for (const From* one = from; one < from + count; ++one) {
    const auto dtype = static_cast<DType>(one->dtype);
    if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16)
      throw Error(Code::internal, "a codec on a GPU was given elements of DType " + std::to_string(one->dtype));
    if constexpr (requires { pieces.front().k; }) {
      if (one->count > 0 && (one->k < 1 || one->k > one->count))
        throw Error(Code::internal, "top-k on a GPU cannot select " + std::to_string(one->k) + " of " +
                                        std::to_string(one->count) + " elements");
    }
    if (one->count > 0) pieces.push_back(piece_of<Piece>(*one));
  }
  return pieces;
}

}  // namespace lightcc::gpu

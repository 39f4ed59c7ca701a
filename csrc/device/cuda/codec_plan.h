// Where what kernels of codecs need for a batch of pieces stands in one piece of device memory: the table of the pieces
// first, which the host writes. For the host.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/cuda/int8_codec.h"
#include "device/cuda/topk_decode.h"
#include "device/cuda/topk_encode.h"
#include "device/quantization.h"

namespace lightcc::gpu {

static_assert(kGroup == Int8::kGroup);

// Takes memory from an address on, aligned; from nullptr on it counts.
class BatchMemory {
 public:
  explicit BatchMemory(std::byte* memory) : memory_(memory) {}

  template <class T>
  T* take(uint64_t count) {
    constexpr size_t kAlignment = 256;
    const size_t at = bytes_;
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return memory_ ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* const memory_;
  size_t bytes_ = 0;
};

inline uint32_t parts_of(uint64_t count, uint32_t part) { return static_cast<uint32_t>((count + part - 1) / part); }

// Numbers the tiles of all pieces through; returns how many there are.
template <class Piece>
uint32_t number_tiles(Piece* pieces, size_t count, uint32_t tile) {
  uint32_t tiles = 0;
  for (Piece* piece = pieces; piece < pieces + count; ++piece) {
    piece->first_tile = tiles;
    tiles += piece->tiles = parts_of(piece->count, tile);
  }
  return tiles;
}

// Begins a batch: the table of its pieces, and their tiles.
template <class Piece, class Batch>
void lay_out_table(BatchMemory& layout, Piece* pieces, size_t count, uint32_t tile, Batch& batch) {
  batch = {};
  batch.pieces = layout.take<Piece>(count);
  batch.piece_count = static_cast<uint32_t>(count);
  batch.tiles = number_tiles(pieces, count, tile);
}

// Each of these sets what pieces have in the memory, and the batch; returns how many bytes it takes, and does only that
// for nullptr. Pieces have one element or more. What follows the table at the beginning of the memory may be any bytes.

inline size_t lay_out(EncodePiece* pieces, size_t count, std::byte* memory, EncodeBatch& batch) {
  constexpr uint64_t kMostOfAll = 512;  // blocks of a piece that read all its sums, eight tiles each at least
  BatchMemory layout(memory);
  lay_out_table(layout, pieces, count, kTile, batch);
  batch.missed = layout.take<uint32_t>(1);
  batch.work = layout.take<EncodeWork>(count);
  batch.histograms = layout.take<uint64_t>(count * kBins);
  for (EncodePiece* piece = pieces; piece < pieces + count; ++piece) {
    piece->room = std::min(piece->count, 4 * piece->k + piece->count / kRoomShare + kLeastRoom);
    piece->first_chunk = batch.chunks;
    piece->chunks = std::max(parts_of(piece->room, kChunk),
                             static_cast<uint32_t>(std::min<uint64_t>(kMostOfAll, piece->tiles / 8)));
    batch.chunks += piece->chunks;
    piece->first_span = batch.spans;
    batch.spans += piece->spans = parts_of(piece->count, kCodecBlock);
    piece->values = layout.take<float>(piece->room);
    piece->indices = layout.take<uint16_t>(piece->room);
  }
  batch.tile = layout.take<EncodeTile>(batch.tiles);
  batch.span = layout.take<EncodeSpan>(batch.spans);
  batch.chunk_piece = layout.take<uint32_t>(batch.chunks);
  return layout.bytes();
}

inline size_t lay_out(DecodePiece* pieces, size_t count, std::byte* memory, DecodeBatch& batch) {
  BatchMemory layout(memory);
  lay_out_table(layout, pieces, count, kDecodeTile, batch);
  for (DecodePiece* piece = pieces; piece < pieces + count; ++piece) {
    piece->begins = layout.take<uint64_t>((blocks_of(piece->count) + 1) * piece->nodes);
    batch.nodes = std::max(batch.nodes, piece->nodes);
  }
  batch.tile_piece = layout.take<uint32_t>(batch.tiles);
  return layout.bytes();
}

inline size_t lay_out(Int8EncodePiece* pieces, size_t count, std::byte* memory, Int8EncodeBatch& batch) {
  BatchMemory layout(memory);
  lay_out_table(layout, pieces, count, kTile, batch);
  batch.not_finite = layout.take<uint32_t>(count);
  batch.tile_piece = layout.take<uint32_t>(batch.tiles);
  return layout.bytes();
}

inline size_t lay_out(Int8DecodePiece* pieces, size_t count, std::byte* memory, Int8DecodeBatch& batch) {
  BatchMemory layout(memory);
  lay_out_table(layout, pieces, count, kTile, batch);
  batch.tile_piece = layout.take<uint32_t>(batch.tiles);
  return layout.bytes();
}

}  // namespace lightcc::gpu

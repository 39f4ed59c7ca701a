// What the kernels that select the largest elements know of a batch of pieces (topk_encode.h), from step to step and
// within one.
#pragma once
#include "device/cuda/codec_numbers.h"

namespace lightcc::gpu {

constexpr uint32_t kTile = 4096;                // elements
constexpr uint32_t kChunk = 4096;               // candidates
constexpr uint32_t kSpanTiles = kCodecBlock / kTile;
constexpr uint32_t kBins = 2048;
static_assert(kCodecBlock % kTile == 0);

using TileBlock = Block<256>;
using PieceBlock = Block<1024>;
constexpr uint32_t kTileWarps = TileBlock::kWarps;

// The guess lies a gap below what the last step's cut becomes if it changes as it has changed of late (its trend). A
// miss, which costs two thirds of a step, doubles the gap; otherwise it widens until there are a quarter more
// candidates than are sent, and narrows the faster the more there are. With gradients that grow or shrink by a fifth a
// step, one or two of 50 steps miss; without the trend, or with the CPU's slower gap (topk.cc), a third to all of
// those that grow do.
constexpr float kFirstGap = 0.1f, kLeastGap = 1.0f / 4096, kMostGap = 0.5f, kMissed = 2;
constexpr float kLeastTrend = 0.5f, kMostTrend = 2, kTrendWeight = 0.25f;
constexpr uint32_t kSampleLines = 2048, kLeastSampleLines = 32, kSampleShare = 8, kLineFloats = 16;
constexpr float kDeviations = 4;
// There is room for 4 * k candidates and a share of all; pieces that are smaller than the last part of it have no
// guess that can be too low.
constexpr uint32_t kRoomShare = 64, kLeastRoom = 8192;

// Of a piece, in device memory, from step to step. All zero at first.
struct CodecState {
  uint32_t holds;      // which of the buffers holds the residual: 0 or 1
  uint32_t threshold;  // of the last step, as bits; 0: not known
  float gap;           // how far below what is expected, relatively, the guess lies
  float trend;         // the factor by which thresholds change
};

struct EncodePiece {
  const void* gradient;  // elements of `type`; is read only
  float* residual[2];
  float* velocity[2];  // momentum correction (piece_codec.cc); nullptr: none
  CodecState* state;
  uint8_t* body;  // of the message, at any address
  uint64_t count, k;
  float scale, momentum;
  uint32_t type;  // of the gradient
  uint32_t half;  // values are sent as float16
  // What lay_out() sets (codec_plan.h).
  uint64_t room;      // for candidates
  float* values;      // of candidates
  uint16_t* indices;  // in their blocks
  uint32_t first_tile, tiles, first_chunk, chunks, first_span, spans;
};

enum CandidateSource : uint32_t { kOfCandidates, kToRescue, kToRecollect, kOfAll };

// What becomes of a piece during a batch.
struct EncodeWork {
  uint64_t progress;  // tiles that have collected, above kFoundBits bits for what they have found
  uint64_t found;     // candidates
  uint64_t wanted;    // so many of those with the leading bits of the cut
  uint32_t mode;
  uint32_t least;     // candidates are at least that
  uint32_t cut;
  uint32_t tickets;   // blocks that have counted
  uint32_t from;      // which buffer holds the residual; the sums go to the other
  uint32_t not_finite;
  uint32_t warm;      // the guess came from the last step
  float gap, trend;
};
constexpr uint32_t kFoundBits = 40;

struct EncodeTile {
  uint64_t begin;  // its candidates
  uint32_t found, above, equal, piece;
};

struct EncodeSpan {
  uint64_t above_before, equal_before;  // in those before it
  uint32_t above, equal, piece;
};

struct EncodeBatch {
  const EncodePiece* pieces;
  EncodeWork* work;      // a piece each
  EncodeTile* tile;
  EncodeSpan* span;
  uint32_t* chunk_piece;
  uint64_t* histograms;  // kBins a piece
  uint32_t* missed;      // one word: a piece is to be rescued
  uint32_t piece_count, tiles, chunks, spans;
};

LIGHTCC_DEVICE uint32_t tile_length(uint64_t count, uint32_t index) {
  return static_cast<uint32_t>(least_of<uint64_t>(kTile, count - uint64_t{index} * kTile));
}

// ---- a sum

LIGHTCC_DEVICE float accelerated(const EncodePiece& piece, float velocity, float gradient) {
  return sum_of(product_of(piece.momentum, velocity), product_of(piece.scale, gradient));
}

// ---- which bin holds the one that is wanted, counted from the top

struct BinShared {
  WarpSums<uint64_t, PieceBlock::kWarps> sums;
  uint64_t above, in;  // in the bins above it, and in it
  uint32_t bin;
};
struct TileBinShared {
  WarpSums<uint64_t, TileBlock::kWarps> sums;
  uint64_t above, in;
  uint32_t bin;
};

// take(bin): how many are in it; called once for each bin. At least `wanted` are in all.
template <class Block, class Shared, class Take>
LIGHTCC_DEVICE void find_bin(Block& block, Shared& shared, uint64_t wanted, Take take) {
  constexpr uint32_t kEach = kBins / Block::kThreads;
  struct Bins {
    uint64_t in[kEach];
  };
  PerThread<Bins, Block::kThreads> bins;
  PerThread<uint64_t, Block::kThreads> above;
  block.threads([&](uint32_t thread) {
    above[thread] = 0;
    LIGHTCC_UNROLLED for (uint32_t i = 0; i < kEach; ++i)
      above[thread] += bins[thread].in[i] = take(kBins - 1 - (thread * kEach + i));
  });
  prefix(block, shared.sums, above);
  block.threads([&](uint32_t thread) {
    uint64_t over = above[thread];
    LIGHTCC_UNROLLED for (uint32_t i = 0; i < kEach; ++i) {
      const uint64_t in = bins[thread].in[i];
      if (over < wanted && wanted <= over + in) {
        shared.bin = kBins - 1 - (thread * kEach + i);
        shared.above = over;
        shared.in = in;
      }
      over += in;
    }
  });
}

}  // namespace lightcc::gpu

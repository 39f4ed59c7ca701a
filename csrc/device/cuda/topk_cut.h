// Steps rescue and cut of topk_encode.h: histograms of the leading bits say where the k-th largest lies.
#pragma once
#include "device/cuda/topk_collect.h"

namespace lightcc::gpu {

// ---- histograms

struct HistogramShared {
  uint32_t bins[kBins];
  TileBinShared found;
  uint32_t is_last;
};

LIGHTCC_DEVICE void clear_bins(TileBlock& block, HistogramShared& shared) {
  block.threads([&](uint32_t thread) {
    for (uint32_t bin = thread; bin < kBins; bin += TileBlock::kThreads) shared.bins[bin] = 0;
  });
}

// Adds the block's bins to the piece's. The last of `blocks` blocks finds the bin and leaves the piece's bins empty;
// then it is true.
LIGHTCC_DEVICE bool add_bins(TileBlock& block, HistogramShared& shared, uint64_t* histogram, uint32_t* tickets,
                             uint32_t blocks, uint64_t wanted) {
  block.threads([&](uint32_t thread) {
    for (uint32_t bin = thread; bin < kBins; bin += TileBlock::kThreads)
      if (shared.bins[bin] > 0) atomic_add(&histogram[bin], uint64_t{shared.bins[bin]});
    fence();
  });
  block.threads([&](uint32_t thread) {
    if (thread > 0) return;
    shared.is_last = atomic_add(tickets, 1u) == blocks - 1;
    if (shared.is_last) *tickets = 0;
    fence();
  });
  const bool is_last = shared.is_last;
  if (is_last) find_bin(block, shared.found, wanted, [&](uint32_t bin) { return exchange(&histogram[bin], 0); });
  return is_last;
}

LIGHTCC_DEVICE void rescue(TileBlock& block, HistogramShared& shared, const EncodeBatch& batch, uint32_t number) {
  const uint32_t of = batch.tile[number].piece;
  const EncodePiece& piece = batch.pieces[of];
  EncodeWork& work = batch.work[of];
  if (work.mode != kToRescue) return;
  const uint32_t index = number - piece.first_tile, n = tile_length(piece.count, index);
  const float* const sums = global(piece.residual[1 - work.from]) + uint64_t{index} * kTile;
  clear_bins(block, shared);
  block.threads([&](uint32_t thread) {
    for (uint32_t i = thread; i < n; i += TileBlock::kThreads)
      atomic_add(&shared.bins[magnitude_bits(sums[i]) >> 20], 1u);
  });
  if (!add_bins(block, shared, batch.histograms + uint64_t{of} * kBins, &work.tickets, piece.tiles, piece.k)) return;
  block.threads([&](uint32_t thread) {
    if (thread > 0) return;
    work.progress = 0;
    work.least = shared.found.bin << 20;
    work.mode = shared.found.above + shared.found.in <= piece.room ? kToRecollect : kOfAll;
  });
}

// As one of so many blocks: every tile that is its.
LIGHTCC_DEVICE void rescue_share(TileBlock& block, HistogramShared& shared, const EncodeBatch& batch, uint32_t first,
                                 uint32_t blocks) {
  if (*batch.missed == 0) return;
  for (uint32_t number = first; number < batch.tiles; number += blocks) rescue(block, shared, batch, number);
}

// ---- cut

template <uint32_t kLevel>
LIGHTCC_DEVICE void count_bits(uint32_t* bins, uint32_t cut, float sum) {
  constexpr uint32_t kShift = kLevel == 0 ? 20 : kLevel == 1 ? 10 : 0;
  const uint32_t magnitude = magnitude_bits(sum);
  if (kLevel == 0) atomic_add(&bins[magnitude >> kShift], 1u);
  else if ((magnitude ^ cut) >> (kShift + 10) == 0) atomic_add(&bins[magnitude >> kShift & 1023], 1u);
}

template <uint32_t kLevel>
LIGHTCC_DEVICE void cut(TileBlock& block, HistogramShared& shared, const EncodeBatch& batch, uint32_t number) {
  constexpr uint32_t kShift = kLevel == 0 ? 20 : kLevel == 1 ? 10 : 0;
  const uint32_t of = batch.chunk_piece[number];
  const EncodePiece& piece = batch.pieces[of];
  EncodeWork& work = batch.work[of];
  const bool of_all = work.mode == kOfAll;
  const uint32_t index = number - piece.first_chunk;
  const uint32_t blocks = of_all ? piece.chunks : static_cast<uint32_t>((work.found + kChunk - 1) / kChunk);
  if (index >= blocks) return;
  const uint32_t so_far = work.cut;
  const uint64_t wanted = kLevel == 0 ? piece.k : work.wanted;
  clear_bins(block, shared);
  if (of_all) {
    const float* const sums = global(piece.residual[1 - work.from]);
    block.threads([&](uint32_t thread) {
      for (uint64_t tile = uint64_t{index} * kTile; tile < piece.count; tile += uint64_t{blocks} * kTile) {
        const uint64_t end = least_of<uint64_t>(piece.count, tile + kTile);
        for (uint64_t i = tile + thread; i < end; i += TileBlock::kThreads)
          count_bits<kLevel>(shared.bins, so_far, sums[i]);
      }
    });
  } else {
    const float* const values = global(piece.values);
    const uint64_t first = uint64_t{index} * kChunk, end = least_of<uint64_t>(work.found, first + kChunk);
    block.threads([&](uint32_t thread) {
      for (uint64_t i = first + thread; i < end; i += TileBlock::kThreads)
        count_bits<kLevel>(shared.bins, so_far, values[i]);
    });
  }
  if (!add_bins(block, shared, batch.histograms + uint64_t{of} * kBins, &work.tickets, blocks, wanted)) return;
  block.threads([&](uint32_t thread) {
    if (thread > 0) return;
    work.cut = so_far | shared.found.bin << kShift;
    work.wanted = wanted - shared.found.above;
  });
}

}  // namespace lightcc::gpu

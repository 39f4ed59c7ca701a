// Top-K selection with error feedback on a GPU (device/topk.h says what is selected), down to the phases of a block.
// The bits are those of TopKSelection: message and residual.
//
// 1. Sums go to the second of two buffers of the residual; a word in device memory says which of the two holds it, and
//    it is turned at the end, if all sums are finite. So nothing is undone, and an element costs 12 bytes.
// 2. Nothing depends on the order in which blocks run: candidates of a tile stand side by side, in ascending order, but
//    tiles take their place among the candidates as they come. Where the selected of a tile go in the message, the sums
//    over the tiles before it say, which are formed once the cut is known. So no block waits for another.
// 3. The host never waits and never learns what the GPU has found: a batch of any number of pieces is kSteps launches,
//    and those which are not needed end at once.
//
// Steps, each a launch. Tiles and chunks of all pieces are numbered through.
//   prepare    a block a piece: the guess, a little below the last step's cut or from a sample
//   collect    a block a tile: sums; all from the guess on become candidates. The last tile of a piece decides whether
//              there were enough and whether there was room
//   rescue     where not: counts all sums by their leading 11 bits, so that the next pass begins at the right one
//   recollect  candidates again, from there on; if even then there would be no room, none, and all sums are read below
//   cut        three times, by 11, 10 and 10 bits: the k-th largest of the candidates, and how many equal go with it
//   count      a warp a tile, a block a span: how many are selected
//   place      a block a piece: where a span's go; the counts of the message; the word and the guess for the next step
//   write      a warp a tile, a block a span: indices and values; what is left behind of the selected
// A span is what has one count in the message: kCodecBlock elements.
#pragma once
#include "device/cuda/topk_cut.h"

namespace lightcc::gpu {

// ---- count and write, by one warp

// What a tile's candidates are: those that it has appended, or all its elements.
struct TileCandidates {
  const float* values;
  const uint16_t* indices;  // nullptr: they are all elements, from `first` on
  uint32_t n;
  uint16_t first;
  LIGHTCC_DEVICE uint32_t index(uint32_t i) const { return indices ? indices[i] : static_cast<uint16_t>(first + i); }
};
LIGHTCC_DEVICE TileCandidates candidates_of(const EncodePiece& piece, const EncodeWork& work, const EncodeTile& tile,
                                            uint32_t index) {
  const uint64_t first = uint64_t{index} * kTile;
  if (work.mode == kOfAll)
    return {piece.residual[1 - work.from] + first, nullptr, tile_length(piece.count, index),
            static_cast<uint16_t>(first)};
  return {piece.values + tile.begin, piece.indices + tile.begin, tile.found, 0};
}

LIGHTCC_DEVICE void count_tile(const EncodeBatch& batch, uint32_t number) {
  EncodeTile& tile = batch.tile[number];
  const EncodePiece& piece = batch.pieces[tile.piece];
  const EncodeWork& work = batch.work[tile.piece];
  const TileCandidates candidates = candidates_of(piece, work, tile, number - piece.first_tile);
  uint32_t above = 0, equal = 0;
  for (uint32_t i = 0; i < candidates.n; i += kWarp) {
    PerLane<uint32_t> magnitude;
    lanes([&](uint32_t lane) {
      magnitude[lane] = i + lane < candidates.n ? magnitude_bits(candidates.values[i + lane]) : 0;
    });
    above += bits_set(ballot([&](uint32_t lane) { return magnitude[lane] > work.cut; }));
    equal += bits_set(ballot([&](uint32_t lane) { return i + lane < candidates.n && magnitude[lane] == work.cut; }));
  }
  lanes([&](uint32_t lane) {
    if (lane > 0) return;
    tile.above = above;
    tile.equal = equal;
  });
}

// Which tiles of the batch are a span's.
struct SpanTiles {
  uint32_t first, count;
};
LIGHTCC_DEVICE SpanTiles tiles_of(const EncodePiece& piece, uint32_t span) {
  const uint32_t first = (span - piece.first_span) * kSpanTiles;
  return {piece.first_tile + first, least_of(kSpanTiles, piece.tiles - first)};
}

struct SpanShared {
  uint32_t above[kSpanTiles], equal[kSpanTiles];
};

LIGHTCC_DEVICE void load_counts(TileBlock& block, SpanShared& shared, const EncodeBatch& batch,
                                const SpanTiles& tiles) {
  block.threads([&](uint32_t thread) {
    if (thread >= kSpanTiles) return;
    shared.above[thread] = thread < tiles.count ? batch.tile[tiles.first + thread].above : 0;
    shared.equal[thread] = thread < tiles.count ? batch.tile[tiles.first + thread].equal : 0;
  });
}

LIGHTCC_DEVICE void count(TileBlock& block, SpanShared& shared, const EncodeBatch& batch, uint32_t number) {
  EncodeSpan& span = batch.span[number];
  const SpanTiles tiles = tiles_of(batch.pieces[span.piece], number);
  block.warps([&](uint32_t warp) {
    for (uint32_t i = warp; i < tiles.count; i += kTileWarps) count_tile(batch, tiles.first + i);
  });
  load_counts(block, shared, batch, tiles);
  block.threads([&](uint32_t thread) {
    if (thread > 0) return;
    uint32_t above = 0, equal = 0;
    for (uint32_t i = 0; i < kSpanTiles; ++i) above += shared.above[i], equal += shared.equal[i];
    span.above = above;
    span.equal = equal;
  });
}

LIGHTCC_DEVICE void store_entry(const EncodePiece& piece, uint64_t entry, uint32_t index, float sum) {
  uint8_t* const indices = piece.body + blocks_of(piece.count) * sizeof(uint32_t);
  uint8_t* const values = indices + piece.k * sizeof(uint16_t);
  store(indices + entry * sizeof(uint16_t), static_cast<uint16_t>(index));
  if (piece.half) store(values + entry * sizeof(uint16_t), send_float16(sum));
  else store(values + entry * sizeof(float), bits_of(sum));
}

LIGHTCC_DEVICE void leave_behind(const EncodePiece& piece, uint32_t to, uint64_t at, float sum) {
  piece.residual[to][at] = piece.half ? add(sum, -float_of_float16(send_float16(sum))) : 0.0f;
  if (piece.velocity[0]) piece.velocity[to][at] = 0;
}

// above, equal: so many are before it, in the piece.
LIGHTCC_DEVICE void write_tile(const EncodeBatch& batch, uint32_t number, uint64_t above, uint64_t equal_before) {
  const EncodeTile& tile = batch.tile[number];
  const EncodePiece& piece = batch.pieces[tile.piece];
  const EncodeWork& work = batch.work[tile.piece];
  const uint32_t tile_index = number - piece.first_tile, cut = work.cut, to = 1 - work.from;
  const uint64_t span = uint64_t{tile_index} / kSpanTiles * kCodecBlock, wanted = work.wanted;
  const TileCandidates candidates = candidates_of(piece, work, tile, tile_index);
  uint64_t ties = equal_before, position = above + least_of(ties, wanted);  // of what follows
  for (uint32_t i = 0; i < candidates.n; i += kWarp) {
    PerLane<float> sum;
    lanes([&](uint32_t lane) { sum[lane] = i + lane < candidates.n ? candidates.values[i + lane] : 0.0f; });
    const uint32_t equal = ballot(
        [&](uint32_t lane) { return i + lane < candidates.n && magnitude_bits(sum[lane]) == cut; });
    const uint32_t selected = ballot([&](uint32_t lane) {
      const bool goes_with = (equal >> lane & 1) && ties + bits_set(equal & before(lane)) < wanted;
      return goes_with || magnitude_bits(sum[lane]) > cut;
    });
    lanes([&](uint32_t lane) {
      if (!(selected >> lane & 1)) return;
      const uint32_t index = candidates.index(i + lane);
      store_entry(piece, position + bits_set(selected & before(lane)), index, sum[lane]);
      leave_behind(piece, to, span + index, sum[lane]);
    });
    position += bits_set(selected);
    ties += bits_set(equal);
  }
}

LIGHTCC_DEVICE void write(TileBlock& block, SpanShared& shared, const EncodeBatch& batch, uint32_t number) {
  const EncodeSpan& span = batch.span[number];
  const SpanTiles tiles = tiles_of(batch.pieces[span.piece], number);
  load_counts(block, shared, batch, tiles);
  block.warps([&](uint32_t warp) {
    for (uint32_t i = warp; i < tiles.count; i += kTileWarps) {
      uint64_t above = span.above_before, equal = span.equal_before;
      for (uint32_t before = 0; before < i; ++before) above += shared.above[before], equal += shared.equal[before];
      write_tile(batch, tiles.first + i, above, equal);
    }
  });
}

// ---- place

struct PlaceShared {
  WarpSums<uint64_t, PieceBlock::kWarps> sums;
};

LIGHTCC_DEVICE void place(PieceBlock& block, PlaceShared& shared, const EncodeBatch& batch, uint32_t number) {
  const EncodePiece& piece = batch.pieces[number];
  const EncodeWork& work = batch.work[number];
  EncodeSpan* const spans = batch.span + piece.first_span;
  const uint32_t each = (piece.spans + PieceBlock::kThreads - 1) / PieceBlock::kThreads;
  const auto begin_of = [&](uint32_t thread) { return least_of(piece.spans, thread * each); };
  PerThread<uint64_t, PieceBlock::kThreads> above, equal;
  block.threads([&](uint32_t thread) {
    above[thread] = equal[thread] = 0;
    for (uint32_t i = begin_of(thread); i < begin_of(thread + 1); ++i) {
      above[thread] += spans[i].above;
      equal[thread] += spans[i].equal;
    }
  });
  prefix(block, shared.sums, above);
  prefix(block, shared.sums, equal);
  block.threads([&](uint32_t thread) {
    const auto position = [&] { return above[thread] + least_of(equal[thread], work.wanted); };
    for (uint32_t i = begin_of(thread); i < begin_of(thread + 1); ++i) {
      const uint64_t begin = position();
      spans[i].above_before = above[thread];
      spans[i].equal_before = equal[thread];
      above[thread] += spans[i].above;
      equal[thread] += spans[i].equal;
      store(piece.body + i * sizeof(uint32_t), static_cast<uint32_t>(position() - begin));
    }
    if (thread > 0 || work.not_finite) return;  // a step that will be skipped changes and teaches nothing
    const float change = float_of(work.cut) / float_of(piece.state->threshold);
    const float change_within = most_of(kLeastTrend, least_of(kMostTrend, change));
    if (work.warm) piece.state->trend = work.trend + kTrendWeight * (change_within - work.trend);
    piece.state->holds = 1 - work.from;
    piece.state->threshold = work.cut;
    piece.state->gap = work.gap;
  });
}

}  // namespace lightcc::gpu

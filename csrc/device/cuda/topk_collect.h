// Steps prepare, collect and recollect of topk_encode.h: the guess, the sums, and the candidates that are not below it.
#pragma once
#include "device/cuda/topk_pieces.h"

namespace lightcc::gpu {

// ---- prepare

struct PrepareShared {
  uint32_t bins[kBins];
  BinShared found;
};

constexpr uint32_t kSamples = kSampleLines * kLineFloats, kEachSamples = kSamples / PieceBlock::kThreads;
struct Samples {
  uint32_t magnitudes[kEachSamples];
};

// Of one thread, of the sums of one line of 16 in each of as many equal parts of the piece.
template <class Elements>
LIGHTCC_DEVICE void take_samples(const EncodePiece& piece, uint32_t from, uint32_t lines, uint32_t thread,
                                 Samples& samples) {
  constexpr uint32_t kMostOffset = 1 << 24;
  const uint64_t part = piece.count / lines;
  const auto offsets = static_cast<uint32_t>(least_of<uint64_t>(part - kLineFloats, kMostOffset));
  const auto* const gradient = global(static_cast<const typename Elements::Stored*>(piece.gradient));
  const float* const residual = global(piece.residual[from]);
  LIGHTCC_UNROLLED for (uint32_t i = 0; i < kEachSamples; ++i) {
    const uint32_t sample = i * PieceBlock::kThreads + thread, line = sample / kLineFloats;
    samples.magnitudes[i] = 0;
    if (line >= lines) continue;
    const uint32_t random = (line + 1) * 2654435761u;  // so that it falls into step with no row of a matrix
    const uint64_t at = line * part + (random >> 8) % offsets + sample % kLineFloats;
    const float one = Elements::number(gradient[at]);
    const float step =
        piece.velocity[0] ? accelerated(piece, piece.velocity[from][at], one) : product_of(piece.scale, one);
    samples.magnitudes[i] = magnitude_bits(sum_of(residual[at], step));
  }
}

// A little less than the k-th largest magnitude of the sample, or 0.
LIGHTCC_DEVICE uint32_t guess_from_sample(PieceBlock& block, PrepareShared& shared, const EncodePiece& piece,
                                          uint32_t from) {
  const auto lines =
      static_cast<uint32_t>(least_of<uint64_t>(kSampleLines, piece.count / kLineFloats / kSampleShare));
  if (lines < kLeastSampleLines) return 0;
  const auto samples = static_cast<float>(lines * kLineFloats);
  const float expected = static_cast<float>(piece.k) / static_cast<float>(piece.count) * samples;
  const float wanted = expected + kDeviations * sqrtf(expected) + 2 * kDeviations;
  if (!(wanted < samples)) return 0;

  PerThread<Samples, PieceBlock::kThreads> taken;
  constexpr uint32_t kShifts[2] = {20, 9};
  uint32_t least = 0;
  uint64_t left = static_cast<uint64_t>(wanted);
  LIGHTCC_UNROLLED for (uint32_t level = 0; level < 2; ++level) {
    const uint32_t shift = kShifts[level];
    block.threads([&](uint32_t thread) {
      for (uint32_t bin = thread; bin < kBins; bin += PieceBlock::kThreads) shared.bins[bin] = 0;
      if (level > 0) return;
      with_elements(piece.type, [&](auto elements) {
        take_samples<decltype(elements)>(piece, from, lines, thread, taken[thread]);
      });
    });
    block.threads([&](uint32_t thread) {
      LIGHTCC_UNROLLED for (uint32_t i = 0; i < kEachSamples; ++i) {
        const uint32_t magnitude = taken[thread].magnitudes[i];
        if ((i * PieceBlock::kThreads + thread) / kLineFloats >= lines) continue;
        if (level == 0 || magnitude >> kShifts[0] == least >> kShifts[0])
          atomic_add(&shared.bins[(magnitude >> shift) % kBins], 1u);
      }
    });
    find_bin(block, shared.found, left, [&](uint32_t bin) { return uint64_t{shared.bins[bin]}; });
    least |= shared.found.bin << shift;
    left -= shared.found.above;
  }
  return least;
}

LIGHTCC_DEVICE void prepare(PieceBlock& block, PrepareShared& shared, const EncodeBatch& batch, uint32_t number) {
  const EncodePiece& piece = batch.pieces[number];
  const CodecState state = *piece.state;
  const uint32_t from = state.holds & 1;
  const float gap = state.gap >= kLeastGap && state.gap <= kMostGap ? state.gap : kFirstGap;
  const float trend = state.trend >= kLeastTrend && state.trend <= kMostTrend ? state.trend : 1;
  const float guess = float_of(state.threshold) * trend * (1 - gap);
  const bool warm = guess > 0 && bits_of(guess) < kInfinityBits;
  uint32_t least = warm ? bits_of(guess) : guess_from_sample(block, shared, piece, from);
  if (least == 0 && piece.count > piece.room) least = 1;  // not the zeros, of which there may be too many
  block.threads([&](uint32_t thread) {
    for (uint32_t bin = thread; bin < kBins; bin += PieceBlock::kThreads)
      batch.histograms[uint64_t{number} * kBins + bin] = 0;
    for (uint32_t i = thread; i < piece.tiles; i += PieceBlock::kThreads)
      batch.tile[piece.first_tile + i].piece = number;
    for (uint32_t i = thread; i < piece.chunks; i += PieceBlock::kThreads)
      batch.chunk_piece[piece.first_chunk + i] = number;
    for (uint32_t i = thread; i < piece.spans; i += PieceBlock::kThreads)
      batch.span[piece.first_span + i].piece = number;
    if (thread > 0) return;
    EncodeWork work{};
    work.least = least;
    work.from = from;
    work.warm = warm;
    work.gap = gap;
    work.trend = trend;
    batch.work[number] = work;
    if (number == 0) *batch.missed = 0;
  });
}

// ---- collect

struct CollectShared {
  uint32_t found[kTileWarps];
  uint64_t begin;
  uint32_t all, fits;
};

constexpr uint32_t kPerThread = kTile / TileBlock::kThreads, kRounds = kPerThread / 4;

// Of one thread: four neighbours in each of kRounds rounds, which the lanes of a warp take side by side.
struct Collected {
  float sums[kPerThread];
  uint32_t candidates;  // as bits
};
LIGHTCC_DEVICE uint32_t element_of(uint32_t warp, uint32_t round, uint32_t lane) {
  return (warp * kRounds + round) * 4 * kWarp + lane * 4;
}

template <class Elements>
LIGHTCC_DEVICE void add_gradient(const EncodePiece& piece, uint32_t from, uint64_t first, uint32_t n, uint32_t warp,
                                 uint32_t lane, float (&sums)[kPerThread]) {
  using Stored = typename Elements::Stored;
  const float* const old = global(piece.residual[from]) + first;
  float* const sum = global(piece.residual[1 - from]) + first;
  const Stored* const gradient = global(static_cast<const Stored*>(piece.gradient)) + first;
  const bool fours = holds_fours(old) && holds_fours(sum), gradient_fours = holds_fours(gradient);
  Four<float> olds[kRounds];
  Four<Stored> gradients[kRounds];
  LIGHTCC_UNROLLED for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t at = element_of(warp, round, lane);
    olds[round] = load_four(old, at, n, fours);
    gradients[round] = load_four(gradient, at, n, gradient_fours);
  }
  LIGHTCC_UNROLLED for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t at = element_of(warp, round, lane);
    Four<float> step;
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j)
      step.at[j] = product_of(piece.scale, Elements::number(gradients[round].at[j]));
    if (piece.velocity[0]) {
      const float* const old_velocity = global(piece.velocity[from]) + first;
      float* const new_velocity = global(piece.velocity[1 - from]) + first;
      const bool velocity_fours = holds_fours(old_velocity) && holds_fours(new_velocity);
      const Four<float> velocity = load_four(old_velocity, at, n, velocity_fours);
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j)
        step.at[j] = sum_of(product_of(piece.momentum, velocity.at[j]), step.at[j]);
      store_four(new_velocity, at, n, velocity_fours, step);
    }
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) step.at[j] = sum_of(olds[round].at[j], step.at[j]);
    store_four(sum, at, n, fours, step);
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) sums[round * 4 + j] = step.at[j];
  }
}

LIGHTCC_DEVICE void load_sums(const EncodePiece& piece, uint32_t from, uint64_t first, uint32_t n, uint32_t warp,
                              uint32_t lane, float (&sums)[kPerThread]) {
  const float* const sum = global(piece.residual[1 - from]) + first;
  const bool fours = holds_fours(sum);
  LIGHTCC_UNROLLED for (uint32_t round = 0; round < kRounds; ++round) {
    const Four<float> four = load_four(sum, element_of(warp, round, lane), n, fours);
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) sums[round * 4 + j] = four.at[j];
  }
}

// By the last tile of a piece: whether the guess was good, and the gap that the next one shall have.
LIGHTCC_DEVICE void judge(const EncodeBatch& batch, const EncodePiece& piece, EncodeWork& work, uint64_t found,
                          bool first_pass) {
  work.found = found;
  const bool few = found < piece.k, missed = few || found > piece.room;
  work.mode = missed ? kToRescue : kOfCandidates;
  if (missed) *batch.missed = 1;
  if (!work.warm || !first_pass) return;
  const float share = static_cast<float>(found) / static_cast<float>(piece.k);
  const float by = few ? kMissed : share > 4 ? 0.5f : share > 2 ? 0.75f : share > 1.25f ? 0.95f : 1.05f;
  work.gap = most_of(kLeastGap, least_of(kMostGap, work.gap * by));
}

// Writes this tile's candidates to where begin says.
LIGHTCC_DEVICE void append(const CollectShared& shared, const EncodePiece& piece, uint64_t first, uint32_t warp,
                           PerThread<Collected, TileBlock::kThreads>& collected) {
  uint64_t position = shared.begin;
  for (uint32_t i = 0; i < warp; ++i) position += shared.found[i];
  LIGHTCC_UNROLLED for (uint32_t round = 0; round < kRounds; ++round) {
    uint32_t bits[4], all = 0;
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
      bits[j] = ballot(
          [&](uint32_t lane) { return collected[warp * kWarp + lane].candidates >> (round * 4 + j) & 1; });
      all += bits_set(bits[j]);
    }
    if (all == 0) continue;
    lanes([&](uint32_t lane) {
      const Collected& own = collected[warp * kWarp + lane];
      if ((own.candidates >> round * 4 & 15) == 0) return;
      uint64_t to = position;
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) to += bits_set(bits[j] & before(lane));
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
        if (!(own.candidates >> (round * 4 + j) & 1)) continue;
        global(piece.values)[to] = own.sums[round * 4 + j];
        global(piece.indices)[to++] = static_cast<uint16_t>(first + element_of(warp, round, lane) + j);
      }
    });
    position += all;
  }
}

// load(first, n, warp, lane, sums): the sums of a thread.
template <class Load>
LIGHTCC_DEVICE void collect_tile(TileBlock& block, CollectShared& shared, const EncodeBatch& batch, uint32_t number,
                                 bool first_pass, Load load) {
  EncodeTile& tile = batch.tile[number];
  const EncodePiece& piece = batch.pieces[tile.piece];
  EncodeWork& work = batch.work[tile.piece];
  const uint32_t index = number - piece.first_tile, n = tile_length(piece.count, index), least = work.least;
  const uint64_t first = uint64_t{index} * kTile;
  PerThread<Collected, TileBlock::kThreads> collected;
  block.warps([&](uint32_t warp) {
    PerLane<uint32_t> found;
    const uint32_t not_finite = ballot([&](uint32_t lane) {
      Collected& own = collected[warp * kWarp + lane];
      load(first, n, warp, lane, own.sums);
      own.candidates = 0;
      bool finite = true;
      LIGHTCC_UNROLLED for (uint32_t i = 0; i < kPerThread; ++i) {
        const uint32_t magnitude = magnitude_bits(own.sums[i]);
        const bool here = element_of(warp, i / 4, lane) + i % 4 < n;
        own.candidates |= static_cast<uint32_t>(here && magnitude >= least) << i;
        finite &= magnitude < kInfinityBits;
      }
      found[lane] = bits_set(own.candidates);
      return !finite;
    });
    const uint32_t all = prefix(found);
    lanes([&](uint32_t lane) {
      if (lane > 0) return;
      shared.found[warp] = all;
      if (not_finite) atomic_or(&work.not_finite, 1);
    });
  });
  block.threads([&](uint32_t thread) {
    if (thread > 0) return;
    uint32_t all = 0;
    for (const uint32_t found : shared.found) all += found;
    const uint64_t progress = atomic_add(&work.progress, (uint64_t{1} << kFoundBits) + all);
    tile.begin = shared.begin = progress & ((uint64_t{1} << kFoundBits) - 1);
    tile.found = shared.all = all;
    shared.fits = shared.begin + all <= piece.room;
    if (progress >> kFoundBits == piece.tiles - 1) judge(batch, piece, work, shared.begin + all, first_pass);
  });
  const bool fits = shared.fits && shared.all > 0;
  if (fits) block.warps([&](uint32_t warp) { append(shared, piece, first, warp, collected); });
}

template <class Elements>
LIGHTCC_DEVICE void collect_elements(TileBlock& block, CollectShared& shared, const EncodeBatch& batch,
                                     uint32_t number) {
  const EncodePiece& piece = batch.pieces[batch.tile[number].piece];
  const uint32_t from = batch.work[batch.tile[number].piece].from;
  collect_tile(block, shared, batch, number, true,
               [&](uint64_t first, uint32_t n, uint32_t warp, uint32_t lane, float (&sums)[kPerThread]) {
                 add_gradient<Elements>(piece, from, first, n, warp, lane, sums);
               });
}

LIGHTCC_DEVICE void collect(TileBlock& block, CollectShared& shared, const EncodeBatch& batch, uint32_t number) {
  with_elements(batch.pieces[batch.tile[number].piece].type, [&](auto elements) {
    collect_elements<decltype(elements)>(block, shared, batch, number);
  });
}

LIGHTCC_DEVICE void recollect(TileBlock& block, CollectShared& shared, const EncodeBatch& batch, uint32_t number) {
  const EncodePiece& piece = batch.pieces[batch.tile[number].piece];
  const EncodeWork& work = batch.work[batch.tile[number].piece];
  if (work.mode != kToRecollect) return;
  const uint32_t from = work.from;
  collect_tile(block, shared, batch, number, false,
               [&](uint64_t first, uint32_t n, uint32_t warp, uint32_t lane, float (&sums)[kPerThread]) {
                 load_sums(piece, from, first, n, warp, lane, sums);
               });
}

// As one of so many blocks: every tile that is its.
LIGHTCC_DEVICE void recollect_share(TileBlock& block, CollectShared& shared, const EncodeBatch& batch, uint32_t first,
                                    uint32_t blocks) {
  if (*batch.missed == 0) return;
  for (uint32_t number = first; number < batch.tiles; number += blocks) recollect(block, shared, batch, number);
}

}  // namespace lightcc::gpu

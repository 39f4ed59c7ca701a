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
      const Four<float> velocity = load_four(global(piece.velocity[from]) + first, at, n, fours);
      LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j)
        step.at[j] = sum_of(product_of(piece.momentum, velocity.at[j]), step.at[j]);
      store_four(global(piece.velocity[1 - from]) + first, at, n, fours, step);
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
LIGHTCC_DEVICE void recollect_share(TileBlock& block, CollectShared& shared, const EncodeBatch& batch, uint32_t first,
                                    uint32_t blocks) {
  if (*batch.missed == 0) return;
  for (uint32_t number = first; number < batch.tiles; number += blocks) recollect(block, shared, batch, number);
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

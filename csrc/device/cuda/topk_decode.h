// What the nodes have sent of a piece becomes a dense vector on a GPU, down to the phases of a block: zero, and the
// values of the messages (device/topk_message.h) in the order of the nodes, scaled, as elements of the gradient's
// type. A block sums up a tile in shared memory and writes it once. No two threads add to an element at a time, so the
// bits are the same everywhere, and those of a CPU.
//
// A message is bytes from the network, and nothing is believed: a message that a CPU would refuse sets the error word,
// and nothing is written outside of the piece. Where entries of a tile begin is found by bisection, which in a forged
// message may lead anywhere. But tiles share their borders, so if these ascend, the tiles of a block see all of its
// entries, and each entry is held against its tile and the one before it. What a refused message has left of a piece
// is worth nothing.
//
//   begin_entries   a block a piece and node: where the entries of each block of elements begin
//   decode          a block a tile
#pragma once
#include "device/cuda/codec_numbers.h"

namespace lightcc::gpu {

constexpr uint32_t kDecodeTile = 8192;  // elements
constexpr uint32_t kDecodeTilesPerBlock = kCodecBlock / kDecodeTile;
static_assert(kCodecBlock % kDecodeTile == 0);

using DecodeBlock = Block<256>;
using EntryBlock = Block<256>;

struct DecodePiece {
  const uint8_t* bodies;  // of node 0, at any address, those of the next nodes behind it
  uint64_t stride;        // bytes from one to the next
  void* out;              // elements of `type`
  uint64_t count, k;
  uint32_t nodes, type;
  uint32_t half;    // values are float16
  uint32_t scales;  // by `scale`
  float scale;
  // What lay_out() sets (codec_plan.h).
  uint32_t first_tile, tiles;
  uint64_t* begins;  // for each node of each block of elements, and the end
};

struct DecodeBatch {
  const DecodePiece* pieces;
  uint32_t* tile_piece;
  // 0, or of the first message that was refused: 1 + the number of the piece, and above 32 bits the node. The caller
  // has set it to 0.
  uint64_t* error;
  uint32_t piece_count, tiles, nodes;  // the most nodes of a piece
};

LIGHTCC_DEVICE void refuse(const DecodeBatch& batch, uint32_t piece, uint32_t node) {
  set_if_zero(batch.error, uint64_t{node} << 32 | (uint64_t{piece} + 1));
}

// ---- begin_entries

struct EntryShared {
  WarpSums<uint64_t, EntryBlock::kWarps> sums;
  uint32_t refused;
};

LIGHTCC_DEVICE void begin_entries(EntryBlock& block, EntryShared& shared, const DecodeBatch& batch, uint32_t number,
                                  uint32_t node) {
  const DecodePiece& piece = batch.pieces[number];
  if (node >= piece.nodes) return;
  const uint64_t blocks = blocks_of(piece.count);
  const uint8_t* const counts = piece.bodies + piece.stride * node;
  uint64_t* const begins = piece.begins + (blocks + 1) * node;
  block.threads([&](uint32_t thread) {
    if (thread == 0) shared.refused = 0;
    if (node > 0) return;
    for (uint32_t i = thread; i < piece.tiles; i += EntryBlock::kThreads)
      batch.tile_piece[piece.first_tile + i] = number;
  });
  uint64_t begin = 0;
  for (uint64_t first = 0; first < blocks; first += EntryBlock::kThreads) {
    PerThread<uint64_t, EntryBlock::kThreads> entries;
    block.threads([&](uint32_t thread) {
      const uint64_t at = first + thread;
      entries[thread] = at < blocks ? load32(counts + at * sizeof(uint32_t)) : 0;
      if (at < blocks && entries[thread] > length_of_block(at, piece.count)) atomic_or(&shared.refused, 1);
    });
    const uint64_t all = prefix(block, shared.sums, entries);
    block.threads([&](uint32_t thread) {
      if (first + thread < blocks) begins[first + thread] = begin + entries[thread];
    });
    begin += all;
  }
  const bool refused = shared.refused || begin != piece.k;
  block.threads([&](uint32_t thread) {
    if (refused) {  // it has no entries
      for (uint64_t i = thread; i <= blocks; i += EntryBlock::kThreads) begins[i] = 0;
      if (thread == 0) refuse(batch, number, node);
    } else if (thread == 0) {
      begins[blocks] = begin;
    }
  });
}

// ---- decode

constexpr uint32_t kSlots = DecodeBlock::kWarps;  // so many nodes at a time

struct DecodeShared {
  float sums[kDecodeTile];
  // Of each of these nodes, which entries are in the tile, and where those of its block of elements begin.
  uint64_t begin[kSlots], end[kSlots], block_begin[kSlots];
};

// Where among entries that ascend the first one is whose index is not below a given one.
struct Search {
  uint64_t begin, end;  // it is from begin to end
  uint32_t index;
};

// One round of a warp: what is left is a 33rd part. `below`: which lanes' entries are below the index; that of a lane
// is entry_of(search, lane).
LIGHTCC_DEVICE uint64_t step_of(const Search& search) { return (search.end - search.begin + kWarp) / (kWarp + 1); }
LIGHTCC_DEVICE bool is_below(const Search& search, const uint8_t* indices, uint32_t lane) {
  const uint64_t at = search.begin + (lane + 1) * step_of(search) - 1;
  return search.begin < search.end && at < search.end && load16(indices + at * sizeof(uint16_t)) < search.index;
}
LIGHTCC_DEVICE void narrow(Search& search, uint32_t below) {
  if (search.begin == search.end) return;
  const uint64_t step = step_of(search);
  uint32_t steps = 0;  // only those below that no other one interrupts
  while (steps < kWarp && (below >> steps & 1)) ++steps;
  search.begin += steps * step;
  if (steps < kWarp) search.end = least_of(search.end, search.begin + step - 1);
}
// Both by one warp.
LIGHTCC_DEVICE void search_both(const uint8_t* indices, Search& first, Search& second) {
  while (first.begin < first.end || second.begin < second.end) {
    PerLane<uint32_t> of_first, of_second;
    lanes([&](uint32_t lane) {
      of_first[lane] = is_below(first, indices, lane);
      of_second[lane] = is_below(second, indices, lane);
    });
    narrow(first, ballot([&](uint32_t lane) { return of_first[lane]; }));
    narrow(second, ballot([&](uint32_t lane) { return of_second[lane]; }));
  }
}

template <class Elements>
LIGHTCC_DEVICE void write_sums(const DecodePiece& piece, const float* sums, uint64_t first, uint32_t n,
                               uint32_t thread) {
  using Stored = typename Elements::Stored;
  Stored* const out = global(static_cast<Stored*>(piece.out)) + first;
  const bool fours = holds_fours(out);
  for (uint32_t at = thread * 4; at < n; at += DecodeBlock::kThreads * 4) {
    Four<Stored> four;
    LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) {
      const float sum = sums[at + j];
      four.at[j] = Elements::stored(piece.scales ? product_of(sum, piece.scale) : sum);
    }
    store_four(out, at, n, fours, four);
  }
}

// What a block decodes.
struct DecodeTile {
  uint32_t piece;
  uint64_t first;     // of its elements
  uint32_t n;         // of these
  uint64_t block;     // of elements, in which it is
  uint32_t base;      // where in that
  uint64_t blocks;    // of the piece
};

LIGHTCC_DEVICE const uint8_t* indices_of(const DecodePiece& piece, const DecodeTile& tile, uint32_t node) {
  return global(piece.bodies) + piece.stride * node + tile.blocks * sizeof(uint32_t);
}

// Where the entries of the tile are that a node has sent. By one warp.
LIGHTCC_DEVICE void find_entries(DecodeShared& shared, const DecodeBatch& batch, const DecodePiece& piece,
                                 const DecodeTile& tile, uint32_t node, uint32_t slot) {
  const uint64_t* const begins = piece.begins + (tile.blocks + 1) * node + tile.block;
  Search lower{begins[0], begins[1], tile.base}, upper{begins[0], begins[1], tile.base + kDecodeTile};
  if (tile.base == 0) lower.end = lower.begin;
  if (tile.base + kDecodeTile == kCodecBlock || tile.first + tile.n == piece.count) upper.begin = upper.end;
  search_both(indices_of(piece, tile, node), lower, upper);
  lanes([&](uint32_t lane) {
    if (lane > 0) return;
    const bool ascends = lower.begin <= upper.begin;
    if (!ascends) refuse(batch, tile.piece, node);
    shared.block_begin[slot] = begins[0];
    shared.begin[slot] = lower.begin;
    shared.end[slot] = ascends ? upper.begin : lower.begin;
  });
}

struct SentEntry {
  uint32_t at;  // in the tile, or kNowhere
  float value;
};
constexpr uint32_t kNowhere = ~0u;

LIGHTCC_DEVICE SentEntry load_entry(const DecodeShared& shared, const DecodeBatch& batch, const DecodePiece& piece,
                                const DecodeTile& tile, uint32_t node, uint32_t slot, uint64_t i) {
  const uint8_t* const indices = indices_of(piece, tile, node);
  const uint8_t* const values = indices + piece.k * sizeof(uint16_t);
  const uint32_t index = load16(indices + i * sizeof(uint16_t)), at = index - tile.base;
  const float value = piece.half ? Float16Elements::number(load16(values + i * sizeof(uint16_t)))
                                 : float_of(load32(values + i * sizeof(float)));
  if (at < tile.n && (i == shared.block_begin[slot] || load16(indices + (i - 1) * sizeof(uint16_t)) < index))
    return {at, value};
  refuse(batch, tile.piece, node);
  return {kNowhere, 0};
}

LIGHTCC_DEVICE void decode(DecodeBlock& block, DecodeShared& shared, const DecodeBatch& batch, uint32_t number) {
  DecodeTile tile;
  tile.piece = batch.tile_piece[number];
  const DecodePiece& piece = batch.pieces[tile.piece];
  tile.first = uint64_t{number - piece.first_tile} * kDecodeTile;
  tile.n = static_cast<uint32_t>(least_of<uint64_t>(kDecodeTile, piece.count - tile.first));
  tile.block = tile.first / kCodecBlock;
  tile.base = static_cast<uint32_t>(tile.first % kCodecBlock);
  tile.blocks = blocks_of(piece.count);
  for (uint32_t first = 0; first < piece.nodes; first += kSlots) {
    block.warps([&](uint32_t warp) {
      if (first + warp < piece.nodes) find_entries(shared, batch, piece, tile, first + warp, warp);
    });
    // A thread's first entry of each node is read at once, before it is added in its turn.
    struct Entries {
      SentEntry of[kSlots];
    };
    PerThread<Entries, DecodeBlock::kThreads> entries;
    block.threads([&](uint32_t thread) {
      LIGHTCC_UNROLLED for (uint32_t slot = 0; slot < kSlots; ++slot) {
        entries[thread].of[slot].at = kNowhere;
        if (first + slot >= piece.nodes) continue;
        const uint64_t i = shared.begin[slot] + thread;
        if (i < shared.end[slot])
          entries[thread].of[slot] = load_entry(shared, batch, piece, tile, first + slot, slot, i);
      }
      if (first > 0) return;
      for (uint32_t i = thread; i < kDecodeTile; i += DecodeBlock::kThreads) shared.sums[i] = 0;
    });
    LIGHTCC_UNROLLED for (uint32_t slot = 0; slot < kSlots; ++slot) {
      if (first + slot >= piece.nodes) continue;
      block.threads([&](uint32_t thread) {
        const auto add_entry = [&](const SentEntry& entry) {
          if (entry.at != kNowhere) shared.sums[entry.at] = sum_of(shared.sums[entry.at], entry.value);
        };
        add_entry(entries[thread].of[slot]);
        for (uint64_t i = shared.begin[slot] + thread + DecodeBlock::kThreads; i < shared.end[slot];
             i += DecodeBlock::kThreads)
          add_entry(load_entry(shared, batch, piece, tile, first + slot, slot, i));
      });
    }
  }
  block.threads([&](uint32_t thread) {
    with_elements(piece.type, [&](auto elements) {
      write_sums<decltype(elements)>(piece, shared.sums, tile.first, tile.n, thread);
    });
  });
}

}  // namespace lightcc::gpu

// The messages of calls as bytes. A rank's segment for another: a header, a header for each table, and for each table
// what belongs to it: keys, their checks, and numbers (gradients, or rows). All parts begin at multiples of 8 bytes.
#pragma once
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "embedding/steps.h"
#include "embedding/transport.h"

namespace lightcc::embedding {

enum class Op : int32_t { serve, lookup, update, apply, read, rows, agree };

struct CallHeader {
  uint64_t magic = 0x6c63636d62656431;
  Op op = Op::serve;
  uint32_t flags = 0;
  int32_t tables = 0;
  int32_t status = 0;   // why the sender wants the call refused
  double scale = 1;     // of apply: times this; below 0: the step is forgotten
  int64_t lookup = -1;  // of read: the number of the prefetched lookup that is to be answered
  char text[208] = {};  // of status
  void refuse(int code, const std::string& why) {
    status = code;
    std::strncpy(text, why.c_str(), sizeof text - 1);
  }
};
struct TableHeader {
  uint64_t id = 0, fingerprint = 0;  // of the name; of all else in which ranks must agree
  int64_t keys = 0;
  int64_t value_bytes = 0;           // of all keys together
  int64_t lookup = -1;               // update: the number of the call whose keys these gradients are of; -1: see `keys`
  double sum = 0;                    // agree: of squares
  int64_t rows = 0;                  // agree: of the sender's shard, after the update
  Numbers numbers;                   // update
  int32_t checked = 0;
  int32_t reserved = 0;
  char name[64] = {};
};

struct TablePart {
  TableHeader head;
  std::span<const int64_t> keys;
  const uint32_t* checks = nullptr;
  const std::byte* values = nullptr;
};
struct RankSegment {
  CallHeader head;
  std::vector<TablePart> tables;
};
// Throws Error{internal} for bytes that are no such segment; from: the rank, for the text.
RankSegment parse(std::span<const std::byte> bytes, int from);

size_t bytes_of(const RankSegment&);  // of its heads' counts
// Writes the heads; then the parts of table i are to be written to the places that `parts` gets.
struct PartPlaces { int64_t* keys; uint32_t* checks; std::byte* values; };
void write_heads(const RankSegment&, std::byte* to, std::vector<PartPlaces>& parts);

// A refusal that all ranks see alike: the lowest rank's, or what ranks disagree in. Throws. calls: one segment a rank.
// Ranks that serve agree with everybody. Returns a rank that does not serve, or -1.
int agreed(const std::vector<RankSegment>& calls);

}  // namespace lightcc::embedding

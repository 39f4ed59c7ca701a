// The handles of the C API: a group of ranks, its tables, and calls. A call is a state machine of one to three
// messages, which finish() moves; nothing here waits but the transport.
//
// 1. Calls of a group are numbered as they begin, alike on all ranks. The first message of a call is named by its
//    number, and so are those that follow it, so calls may overlap.
// 2. Every rank hears every rank's header, so that all refuse a call alike, before a row has changed.
// 3. An update is applied when its owners have said that they can. So a step is whole, on all ranks or on none. Updates
//    may overlap; they are collected and applied one after the other, in the order in which they began.
// 4. Rows of a prefetched lookup are read when it is finished. A rank that serves does not know when others come to
//    that, so where one serves the others say Op::read first.
// 5. Owners remember the same training lookups: the last ones, less those that an update has referred to. A rank's
//    gradients refer to a lookup only where all owners still have it (known_lookup).
#pragma once
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "embedding/admission.h"
#include "embedding/changes.h"
#include "embedding/dedup.h"
#include "embedding/eviction.h"
#include "embedding/message.h"
#include "embedding/owners.h"
#include "embedding/shard.h"
#include "embedding/table.h"

namespace lightcc::embedding {

using Table = lightcc_embedding_table;

// One rank's part of what an owner is asked for.
struct AskedKeys { std::span<const int64_t> keys; const uint32_t* checks; };

// What the ranks ask one owner for: their keys together, each once.
struct OwnedKeys {
  std::vector<int64_t> keys;
  std::vector<uint32_t> checks;           // none where the table has none
  std::vector<int64_t> inverse;           // of each key as it came, rank by rank
  std::vector<Shard::Record> found;       // none until they are looked up
  uint64_t generation = 0;                // of the shard, when they were,
  size_t rows = 0;                        // and how many it had
  // came: the record of each key as it came, or none.
  void collect(const Table&, std::span<const AskedKeys>, std::span<const Shard::Record> came, Dedup&);
  const uint32_t* checks_or_null() const { return checks.empty() ? nullptr : checks.data(); }
};

// A training lookup that an owner has answered. The update's gradients refer to it: their keys need not travel again.
struct Asked {
  int64_t call = -1;
  std::vector<int64_t> first;  // of each rank's keys in owned.inverse, and their number at the end
  OwnedKeys owned;
  int64_t count(int rank) const { return first[size_t(rank) + 1] - first[size_t(rank)]; }
};

}  // namespace lightcc::embedding

struct lightcc_embedding_table {
  lightcc_embedding_table(lightcc_embedding_group&, const lightcc_embedding_options&);
  void attach(const lightcc::embedding::SparseRule&);
  void set_owners(lightcc::embedding::Owners);
  void erase(std::span<const int64_t> keys);
  void evict(std::span<const int64_t> keys);
  void after_step();
  void settle_absent();  // has the shard read keys without a row as admission says
  std::string about(const std::string& text) const { return "table '" + name + "': " + text; }
  size_t row_bytes() const { return size_t(shard->layout().dim) * shard->layout().number_bytes; }
  size_t wire_bytes() const { return wire ? size_t(shard->layout().dim) * 2 : row_bytes(); }
  size_t gradient_bytes() const { return row_bytes() + (admission.counts() ? sizeof(uint32_t) : 0); }  // and its count
  lightcc::embedding::TableHeader header() const;

  lightcc_embedding_group& group;
  const std::string name;
  const int32_t wire;
  const size_t limit_bytes;
  const int64_t max_rows;
  lightcc::embedding::Owners owners;
  std::unique_ptr<lightcc::embedding::Shard> shard;
  std::vector<lightcc::embedding::Shard::Record> found;  // of the last read
  std::vector<lightcc::embedding::Asked> asked;          // of the last training lookups, the latest last
  lightcc::embedding::Buffer sums;                       // memory of the last update, for the next one
  lightcc::embedding::Admission admission;
  lightcc::embedding::Eviction eviction;
  lightcc::embedding::Changes changes[2];                // for deltas, and for checkpoints
  int64_t evicted = 0, total_rows = 0;  // total_rows: of all ranks, after the last step and before its evictions
  uint64_t owners_print = 0;  // of the map that was set; 0: the first one
  bool has_rule = false;
};

namespace lightcc::embedding {

// body(float()) or body(double()): what the table's numbers are.
template <class Body> void with_number(const Table& table, Body body) {
  if (table.shard->layout().number_bytes == sizeof(double)) body(double());
  else body(float());
}

// This rank's gradients of one table for its own rows. They refer to a lookup and stay where they are: in the caller's
// memory, until keep() or the end of the call.
struct OwnGradients {
  const std::byte* values = nullptr;  // nullptr: they are in the message, as those for others
  size_t bytes = 0;
  std::vector<uint32_t> occurrences;  // one a key, if the table counts them
  Buffer memory;
  void keep();
};

// One table's step at its owner, ready to be applied.
struct OwnedStep {
  Table* table = nullptr;
  Numbers numbers;
  OwnedKeys owned;
  const std::byte* gradients = nullptr;  // one a key
  Buffer memory;                         // of gradients, unless they are the caller's
  double sum = 0;                        // of their squares
  int64_t total_rows = 0;                // of all ranks, when it is applied
  Counted counted;                       // of keys that get no row yet
  size_t reserved_at = 0;                // how many rows the shard had, when there was memory for the new ones
  // Adds up what came, in the order of ranks, and divides. asked: the lookups that the ranks refer to.
  void collect(const std::vector<RankSegment>& calls, size_t index, const OwnGradients& own, std::vector<Asked>& asked,
               double divisor, Dedup&);
  size_t bytes() const { return owned.keys.size() * table->row_bytes(); }
  void scale(double factor);
  double squares() const;
  void find();                           // again, where rows came or went
  void admit(const std::vector<uint32_t>& occurrences);  // one a key: leaves out those that get no row yet
  bool reserve();
  int64_t rows_after() const;            // of this shard
  void apply();
};

// Keys of an update, sorted by owner.
struct Partition {
  std::vector<int64_t> counts;  // by owner
  std::vector<int64_t> order;   // places in keys, owner by owner
  void make(const Table&, std::span<const int64_t> keys);
};

// Where a key of a lookup goes: it is its owner's key number `place`, and in the end the whole lookup's.
struct KeyPlace { uint32_t owner, place; };

struct Wanted {  // of a lookup
  Table* table = nullptr;
  std::vector<int64_t> keys, inverse;  // owner by owner
  std::vector<uint32_t> checks;
  Buffer rows;
  int64_t padded = 0, call = -1;       // call: the number of a training lookup of several ranks
  bool plain = false;
  std::vector<int64_t> counts;         // of keys, by owner
  std::vector<Shard::Record> found;    // world of one; generation, rows: as in OwnedKeys
  uint64_t generation = 0;
  size_t rows_then = 0;
  void sort_by_owner(std::span<KeyPlace> places, std::vector<int64_t>& memory);
  void clear();  // but for its memory
};

}  // namespace lightcc::embedding

struct lightcc_embedding_call {
  enum class Stage { first_message, second_message, done, failed };
  lightcc_embedding_group& group;
  lightcc::embedding::Op op;
  uint32_t flags;
  Stage stage = Stage::first_message;
  int64_t number = 0;
  int served = LIGHTCC_EMBEDDING_SERVED_END;
  bool skipped = false, deferred = false, released = false;
  std::unique_ptr<lightcc_embedding_call> announcement;  // Op::read, of a prefetched lookup
  std::unique_ptr<lightcc::embedding::PendingMessage> message;
  std::byte* outgoing = nullptr;
  std::vector<lightcc::embedding::RankSegment> calls;  // what the ranks want; their parts point into the first message
  std::unique_ptr<lightcc::embedding::PendingMessage> first;
  std::vector<lightcc::embedding::Wanted> wanted;
  std::vector<lightcc::embedding::OwnGradients> own;  // of an update, one for each of wanted
  std::vector<lightcc::embedding::OwnedStep> steps;   // of an update between its messages
  std::vector<double> sums;
  lightcc::embedding::CallHeader head;
  int error = 0;
  std::string error_text;
  explicit lightcc_embedding_call(lightcc_embedding_group& group, lightcc::embedding::Op op, uint32_t flags)
      : group(group), op(op), flags(flags) {}
  ~lightcc_embedding_call();
};

struct lightcc_embedding_group {
  lightcc_embedding_group(int rank, int size, std::unique_ptr<lightcc::embedding::Alltoalls> transport)
      : transport(std::move(transport)), rank_(rank), size_(size) {}
  int rank() const { return rank_; }
  int size() const { return size_; }
  lightcc_embedding_table* find(const std::string& name) const;
  lightcc_embedding_table* find(uint64_t id) const;
  lightcc_embedding_table* add(std::unique_ptr<lightcc_embedding_table>);
  void remove(lightcc_embedding_table*);

  std::unique_ptr<lightcc::embedding::Alltoalls> transport;
  lightcc::embedding::Dedup dedup;
  std::vector<lightcc::embedding::KeyPlace> places; // of the lookup that begins; its memory is kept
  std::vector<int64_t> keys;                        // memory as well
  std::vector<lightcc::embedding::OwnedStep> held;  // an update that awaits Op::apply
  std::vector<lightcc_embedding_call*> updates;     // under way, in the order in which they began
  std::vector<lightcc::embedding::Wanted> spare;    // memory for the next lookups; calls that end give it back
  std::list<std::unique_ptr<lightcc_embedding_call>> background;  // what was released or is served before it was done
  int64_t calls = 0;                                // begun
  int64_t handed_out = 0;                           // calls that a caller has
  bool closed = false;                              // it goes with the last of them and of its tables
  bool is_needed() const { return !closed || handed_out > 0 || !tables_.empty(); }
 private:
  int rank_, size_;
  std::map<std::string, std::unique_ptr<lightcc_embedding_table>> tables_;
};

namespace lightcc::embedding {

using Group = lightcc_embedding_group;
using Call = lightcc_embedding_call;

// A collector of garbage frees a group, its tables and its calls in any order.
inline void delete_if_over(Group& group) {
  if (!group.is_needed()) delete &group;
}

inline constexpr const char* kHeld = "an update is held: apply or discard it first";

// lookup.cc
void begin_lookup(Call&, std::span<const lightcc_embedding_wanted>);
void answer_lookup(Call&);               // the first message has come: sends rows
void take_rows(Call&);                   // the second has
void count_occurrences(const Wanted&, uint32_t* occurrences);  // adds, one a key
// update.cc
void begin_update(Call&, std::span<const lightcc_embedding_step>);
void collect_update(Call&);              // the first message has come: sends what this owner says to it
void end_update(Call&);                  // the second has
void apply_held(Group&, double scale);   // below 0: forgets it
// call.cc
// parts[rank]: the header's tables with their counts; fill writes the parts of a rank. If that fails, or if the message
// is too large, a refusal is sent in its place.
using Fill = std::function<void(int rank, std::vector<PartPlaces>&)>;
void send(Call&, const std::string& kind, std::vector<RankSegment>& to_ranks, const Fill& fill);
bool advance(Call&, int timeout_ms);     // true: done, or failed
void begin_simple(Call&);                // serve, apply: a header alone

}  // namespace lightcc::embedding

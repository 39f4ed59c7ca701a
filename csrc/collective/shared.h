// Collectives between ranks of one host, straight from each other's mapped memory. What is not reduced is in
// copy_collective.h and shared_broadcast.h.
//   flat    up to kFlatBytes: everyone publishes its input once, everyone adds all up in rank order: one hop.
//   direct  all inputs and outputs lie in arenas: each rank owns a shard, reads it from all inputs and writes it
//           to all outputs. No byte is staged: this is the floor, every input read once, every output written once.
//           Of a reducescatter only the inputs must lie there, since each rank writes its own output.
//   staged  anything else: each rank publishes only what others own, block by block; the owner reduces straight
//           out of the streams into its own output and back into the published lines, whence the others copy.
// All three sum in rank order, so all ranks end with the same bits.
#pragma once
#include "collective/collective.h"
#include "net/shm/local_ranks.h"

namespace lightcc {

// Where a member's input and output lie in its arena; -1: in private memory.
struct ArenaOffsets { int64_t input = -1, output = -1; };

class SharedBackend : public Backend {
 public:
  static constexpr size_t kFlatBytes = 4 << 10;

  // members: ranks of this host, this one among them, in order; links[i]: the data link to member i (nullptr for this
  // rank itself). lane: of the common ring, which nobody else uses.
  SharedBackend(LocalRanks&, int group, int lane, std::vector<int> members, std::vector<Link*> links);
  const char* name() const override { return "shared"; }
  bool accepts(const Collective&) const override;  // not average, Adasum
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;  // has one way for each collective
  // An allreduce of more than kFlatBytes, or a reducescatter, whose members know each other's offsets already, and that
  // all inputs are there. Such a reducescatter ends with this member's part: when the others have read its input, the
  // caller learns by other ways.
  std::unique_ptr<Work> start(const Collective&, std::vector<ArenaOffsets>);
  ArenaOffsets offsets_of(const Collective&) const;  // this rank's; the output's of an allreduce alone

 private:
  friend class FlatReduce;
  friend class BlockReduce;
  friend class OffsetExchange;
  friend class CopyCollective;
  friend class SharedBroadcast;
  std::byte* reserve(size_t n) { return writer_.reserve(n); }
  void commit(size_t n);
  int slowest_reader() const;           // the member that holds up reserve()
  const std::byte* peek(int member, size_t n) { return readers_[member].peek(n); }
  void consume(int member, size_t n);

  LocalRanks& local_ranks_;
  std::vector<int> members_;
  int index_;
  std::vector<Link*> links_;
  RingWriter writer_;
  std::vector<RingReader> readers_;    // by member; the own one is never read
};

// Every member tells the others where its memory lies and, by that, that its input is there.
class OffsetExchange {
 public:
  OffsetExchange(SharedBackend& backend, ArenaOffsets own) : backend_(backend), own_(own) {}
  bool step();                          // like Work's
  bool done() const { return seen_ == int(backend_.members_.size()); }
  int waiting_for() const { return offsets_.empty() ? backend_.slowest_reader() : seen_; }
  const std::vector<ArenaOffsets>& offsets() const { return offsets_; }  // by member, once done

 private:
  SharedBackend& backend_;
  const ArenaOffsets own_;
  std::vector<ArenaOffsets> offsets_;
  int seen_ = 0;
};

}  // namespace lightcc

// What a collective on several nodes does among the members of its own: reduce-scatters and all-gathers of parts of one
// vector. One of each may be in work at a time; the calls come in the same order on all members.
#pragma once
#include <optional>

#include "collective/node_links.h"

namespace lightcc {

// So many bytes behind p.
inline std::byte* at(void* p, int64_t bytes) { return static_cast<std::byte*>(p) + bytes; }
inline const std::byte* at(const void* p, int64_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

// A queue that has one item in work, which start() begins; finished: so many are done.
template <class Count, class Start> bool advance(std::unique_ptr<Work>& work, Count& finished, Start start) {
  if (!work) work = start();
  const bool moved = work->step();
  if (!work->done()) return moved;
  work.reset();
  ++finished;
  return true;
}

class LocalPhases {
 public:
  // The collective's input and output are vectors; its node has several members. All must outlive this.
  LocalPhases(NodeLinks&, const Collective&);

  // Until the members here know where the inputs lie, true if something moved; reduce-scatters come after that.
  bool step() { return input_offsets_->step(); }
  bool knows_inputs();
  int waiting_for() const { return input_offsets_ ? input_offsets_->waiting_for() : -1; }

  // Both work on the part that begins at element `first`. counts: how many elements of it each member here owns, one
  // share behind the other. The sum of what this member owns, prescaled, is written to its place in the output.
  std::unique_ptr<Work> reduce_scatter(int64_t first, std::vector<int64_t> counts);
  // Copies that place into all outputs.
  std::unique_ptr<Work> all_gather(int64_t first, std::vector<int64_t> counts);

 private:
  Collective part(Kind, std::vector<int64_t> counts) const;

  NodeLinks& links_;
  const Collective& c_;
  const int64_t element_;
  std::optional<OffsetExchange> input_offsets_;  // until the members here know them
  std::vector<ArenaOffsets> inputs_;             // where the inputs of the members here lie
};

}  // namespace lightcc

// What a collective on several nodes does among the members of its own: reduce-scatters and all-gathers of parts of one
// vector. One of each may be in work at a time; the calls come in the same order on all members. Their Work numbers the
// members here.
#pragma once
#include <optional>

#include "collective/node_links.h"

namespace lightcc {

// So many bytes behind p.
inline std::byte* at(void* p, int64_t bytes) { return static_cast<std::byte*>(p) + bytes; }
inline const std::byte* at(const void* p, int64_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

class LocalPhases {
 public:
  // The collective's input and output are vectors; its node has several members. All must outlive this.
  LocalPhases(NodeLinks&, const Collective&);

  // Both work on the part that begins at element `first`. counts: how many elements of it each member here owns, one
  // share behind the other. The sum of what this member owns, prescaled, is written to its place in the output. The
  // first one waits until the members here know where the inputs lie.
  std::unique_ptr<Work> reduce_scatter(int64_t first, std::vector<int64_t> counts);
  // Copies that place into all outputs.
  std::unique_ptr<Work> all_gather(int64_t first, std::vector<int64_t> counts);

 private:
  class FirstReduceScatter;
  bool knows_inputs();
  std::unique_ptr<Work> start_reduce_scatter(int64_t first, std::vector<int64_t> counts);
  Collective part(Kind, std::vector<int64_t> counts) const;

  NodeLinks& links_;
  const Collective& c_;
  const int64_t element_;
  std::optional<OffsetExchange> input_offsets_;  // until the members here know them
  std::vector<ArenaOffsets> inputs_;             // where the inputs of the members here lie
};

}  // namespace lightcc

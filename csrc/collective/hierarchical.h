// 2D all-reduce, for groups on several nodes (hosts, or parts of one): a reduce-scatter among the members here, an
// all-reduce between the owners of each shard, an all-gather here. So each byte crosses the network as often as between
// one rank a node, and all members of a node share that work. After Jia et al. 2018 and Shi et al., MLSys 2021.
//
// 1. A vector is cut into chunks, and each chunk into V shards, one a lane (node_links.h). A member's lie side by side.
// 2. The chunks pass through three queues, each in their order, and behind them those of the all-reduce that was
//    started next. The queues share no stream of records, so the reduce-scatter of one chunk, the exchange of the chunk
//    before and the all-gather of the one before that go on together, however the members' steps interleave.
// 3. All members of a node write, in the output, only what they own until the all-gather; and what a member reads of
//    another's input is what it owns. So the output may be the input.
// 4. If all inputs of a node lie in mapped memory, the owner of a shard reads it straight from there. Nobody says when
//    it has read: the shard that it then gives to the all-gather says so, and the all-reduce ends with that.
// 5. 16-bit floats are summed in float32 and rounded once a node, and once more between nodes where their number lets
//    everyone send straight to everyone. What is gathered is forwarded bit by bit: all members end with equal bits.
#pragma once
#include <memory>

#include "collective/node_links.h"

namespace lightcc {

class HierarchicalBackend : public Backend {
 public:
  struct Limits {
    int64_t least_bytes = 0;               // smaller all-reduces are not accepted
    int64_t one_lane_bytes = 256 << 10;    // up to here lane 0 has all: the nodes' first members exchange alone
    int64_t chunk_bytes = 512 << 10;       // of a lane
  };

  // Several all-reduces may be in flight: step every one. To drop one that is not done breaks the rest.
  HierarchicalBackend(std::shared_ptr<NodeLinks>, const Limits&);
  const char* name() const override { return "2d"; }
  bool accepts(const Collective&) const override;
  // algorithm: of the all-reduce between the nodes; nullptr: by the size of what they exchange.
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

 private:
  friend class HierarchicalAllreduce;
  const std::shared_ptr<NodeLinks> links_;
  const Limits limits_;
  uint64_t started_ = 0;                 // all-reduces; the numbers of those that may put chunks into each queue:
  uint64_t reduces_ = 0, exchanges_ = 0, gathers_ = 0;
};

}  // namespace lightcc

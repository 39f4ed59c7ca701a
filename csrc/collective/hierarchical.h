// 2D all-reduce, for groups on several nodes (hosts, or parts of one): a reduce-scatter among the members here, an
// all-reduce between the owners of each shard, an all-gather here. So each byte crosses the network as often as between
// one rank a node, and all members of a node share that work. After Jia et al. 2018 and Shi et al., MLSys 2021.
//
// 1. A vector is cut into chunks, and each chunk into V shards, one a lane. On a node of L members, lane v belongs to
//    member floor(v * L / V): nodes may have different numbers of members, and a member's shards lie side by side.
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
#include <vector>

#include "collective/links.h"
#include "collective/selector.h"
#include "collective/shared.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

// The members of each node: of each host, or of pieces of it that have so many members (the last may have fewer).
std::vector<std::vector<int>> nodes_of(const Group&, int members_of_node = 0);

// Which lanes, of so many, belong to a member of a node of `members`: [begin, end).
struct LaneRange { int begin, end; };
LaneRange lanes_of(int lanes, int members, int member);

class HierarchicalBackend : public Backend {
 public:
  static constexpr int kFlows = 2;         // connections of a lane between two owners; chunks take them in turn
  struct Limits {
    int64_t least_bytes = 0;               // smaller all-reduces are not accepted
    int64_t one_lane_bytes = 256 << 10;    // up to here lane 0 has all: the nodes' first members exchange alone
    int64_t chunk_bytes = 512 << 10;       // of a lane
  };

  // nodes: of the group, at least 2. Several all-reduces may be in flight: step every one. To drop one that is not done
  // breaks the rest.
  HierarchicalBackend(Peers&, const Group&, std::vector<std::vector<int>> nodes, const Limits&);
  ~HierarchicalBackend() override;
  const char* name() const override { return "2d"; }
  bool accepts(const Collective&) const override;
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

  struct LocalLinks;                     // of a queue: a SharedBackend among the members here, with links of its own
  struct Flow;                           // a LinksBackend among the owners of a lane, with links of its own

 private:
  friend class HierarchicalAllreduce;
  const std::vector<int>& own_node() const { return nodes_[size_t(node_)]; }

  const std::vector<std::vector<int>> nodes_;
  const Limits limits_;
  int node_ = -1, place_ = -1;           // this rank's node, and its place there
  int lanes_ = 0;
  uint64_t started_ = 0;                 // all-reduces; the numbers of those that may put chunks into each queue:
  uint64_t reduces_ = 0, exchanges_ = 0, gathers_ = 0;
  bool broken_ = false;                  // one was dropped half-way
  std::unique_ptr<LocalLinks> reduce_scatter_, all_gather_;  // none where this rank is alone
  LaneRange own_lanes_{};
  std::vector<std::vector<std::unique_ptr<Flow>>> flows_;  // by own lane
};

}  // namespace lightcc

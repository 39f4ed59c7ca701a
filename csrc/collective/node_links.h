// The nodes of a group (hosts, or parts of one), and the links on which collectives pass through them in two levels:
// among the members of a node, and between the nodes along lanes. Shared by the backends that do so (hierarchical.h).
//
// On a node of L members, lane v of V belongs to member floor(v * L / V): nodes may have different numbers of members,
// and a member's lanes lie side by side. The owners of a lane, one a node, are joined by kFlows sets of links.
#pragma once
#include <memory>
#include <vector>

#include "collective/links.h"
#include "collective/selector.h"
#include "collective/shared.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

// Everyone sends straight to everyone up to so many: more would overrun the switch in front of each of them.
inline constexpr int kPairwiseOwners = 8;

// The members of each node: of each host, or of pieces of it that have so many members (the last may have fewer).
std::vector<std::vector<int>> nodes_of(const Group&, int members_of_node = 0);

// Which lanes, of so many, belong to a member of a node of `members`: [begin, end).
struct LaneRange { int begin, end; };
LaneRange lanes_of(int lanes, int members, int member);

// A vector of `count` elements is cut into `parts`: where part `part` begins, on a line of memory; count at the end.
int64_t border(int64_t count, int64_t part, int64_t parts, int64_t line);

class NodeLinks {
 public:
  static constexpr int kFlows = 2;  // connections of a lane between two owners; what is exchanged takes them in turn

  struct LocalLinks;                // of a queue: a SharedBackend among the members here, with links of its own
  class Flow;                       // a LinksBackend among the owners of a lane, with links of its own

  // nodes: of the group, at least 2.
  NodeLinks(Peers&, const Group&, std::vector<std::vector<int>> nodes);
  ~NodeLinks();

  int node() const { return node_; }        // this rank's
  int nodes() const { return int(nodes_.size()); }
  const std::vector<int>& members() const { return nodes_[size_t(node_)]; }  // of this rank's node
  int place() const { return place_; }      // this rank's among them
  bool alone() const { return members().size() == 1; }
  int lanes() const { return lanes_; }
  LaneRange own_lanes() const { return own_lanes_; }  // of all lanes

  // None where this rank is alone.
  SharedBackend& reduce_scatter() const;
  SharedBackend& all_gather() const;
  Flow& flow(int own_lane, int64_t number) const;     // those of a lane in turn

  // A collective was dropped half-way: what is in the links has no meaning now, and check() throws.
  void give_up() { given_up_ = true; }
  void check() const;

 private:
  const std::vector<std::vector<int>> nodes_;
  int node_ = -1, place_ = -1;
  int lanes_ = 0;
  LaneRange own_lanes_{};
  std::unique_ptr<LocalLinks> reduce_scatter_, all_gather_;
  std::vector<std::vector<std::unique_ptr<Flow>>> flows_;  // by own lane
  bool given_up_ = false;
};

class NodeLinks::Flow {
 public:
  Flow(Peers&, const Group&, const std::vector<int>& owners, int lane, int flow);
  // An all-reduce, or an all-gather, among the owners, whose numbers are those of their nodes. algorithm: nullptr: one
  // that suits what is exchanged. 16-bit floats always take that which rounds the fewest times.
  std::unique_ptr<Work> start(const Collective&, const Algorithm* algorithm = nullptr) const;
  int owner(int node) const { return owners_[size_t(node)]; }  // the member

 private:
  friend class LentMemory;
  const std::vector<int> owners_;  // members, by node
  std::vector<std::unique_ptr<Link>> links_;
  std::unique_ptr<LinksBackend> backend_;
  Selector exchange_, round_once_;
};

// The memory of one collective, out of which flows may still send what they have exchanged.
class LentMemory {
 public:
  // Before anything is started behind it: an exchange of this collective on the flow is done.
  void note(const NodeLinks::Flow&);
  void release();                  // from now on no flow uses it

 private:
  struct Lent { const NodeLinks::Flow* flow; std::vector<uint64_t> marks; };
  std::vector<Lent> lent_;
};

}  // namespace lightcc

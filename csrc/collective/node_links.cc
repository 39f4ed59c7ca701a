#include "collective/node_links.h"

#include <algorithm>

#include "base/error.h"
#include "device/device.h"

namespace lightcc {
namespace {

// Lanes of the links and of the common rings of a host that no other backend of the group uses.
constexpr int kReduceScatterLane = 1, kAllGatherLane = 2;
static_assert(kAllGatherLane < LocalRanks::kLanes && kAllGatherLane < LocalRanks::kCommonLanes);

// Between the owners of a lane. Two exchange in one round what is small; where all can send straight to all, two
// rounds do; beyond that start-ups count below and bytes above.
constexpr Rule kExchangeRules[] = {
    {Kind::allreduce, 0, 2, 64 << 10, "links", "recursive_doubling"},
    {Kind::allreduce, 0, 0, 8 << 10, "links", "recursive_doubling"},
    {Kind::allreduce, 0, kPairwiseOwners, 0, "links", "pairwise"},
    {Kind::allreduce, 0, 0, 512 << 10, "links", "halving_doubling"},
    {Kind::allreduce, 0, 1024, 0, "links", "ring"},
    {Kind::allreduce, 0, 0, 0, "links", "halving_doubling"},
    {Kind::allgather, 0, 0, 32 << 10, "links", "bruck"},
    {Kind::allgather, 0, 1024, 0, "links", "ring"},
    {Kind::allgather, 0, 0, 0, "links", "bruck"},
};
// 16-bit floats: every rank's piece goes to one owner, which sums up in float32 and rounds once.
constexpr int kRoundOnceOwners = 64;
constexpr Rule kRoundOnceRules[] = {
    {Kind::allreduce, 0, kRoundOnceOwners, 0, "links", "pairwise"},
    {Kind::allreduce, 0, 0, 0, "links", "halving_doubling"},
};

}  // namespace

std::vector<std::vector<int>> nodes_of(const Group& group, int members_of_node) {
  if (members_of_node <= 0) return group.hosts();
  std::vector<std::vector<int>> nodes;
  for (const auto& host : group.hosts())
    for (size_t i = 0; i < host.size(); ++i) {
      if (i % size_t(members_of_node) == 0) nodes.emplace_back();
      nodes.back().push_back(host[i]);
    }
  return nodes;
}

LaneRange lanes_of(int lanes, int members, int member) {
  const auto first = [&](int m) { return (m * lanes + members - 1) / members; };
  return {first(member), first(member + 1)};
}

int64_t border(int64_t count, int64_t part, int64_t parts, int64_t line) {
  return part == parts ? count : std::min(count, (count * part / parts + line - 1) / line * line);
}

struct NodeLinks::LocalLinks {
  LocalLinks(Peers& peers, const Group& group, const std::vector<int>& node, int lane) {
    std::vector<int> members;
    std::vector<Link*> to;
    for (const int member : node) {
      const bool other = member != group.index();
      links.push_back(other ? peers.data_link(group.id(), lane, group.rank(member)) : nullptr);
      to.push_back(links.back().get());
      members.push_back(group.local_index(member));
    }
    shared = std::make_unique<SharedBackend>(peers.local_ranks(), group.id(), lane, std::move(members), to);
  }
  std::vector<std::unique_ptr<Link>> links;
  std::unique_ptr<SharedBackend> shared;
};

// ---- flows

// Nodes of one host are joined by the links that the members of one node use within it: no pair needs both.
NodeLinks::Flow::Flow(Peers& peers, const Group& group, const std::vector<int>& owners, int lane, int flow)
    : owners_(owners) {
  std::vector<Link*> to;
  for (const int member : owners_) {
    const int rank = group.rank(member);
    const int local = flow % 2 == 0 ? kReduceScatterLane : kAllGatherLane;
    const bool other = member != group.index();
    links_.push_back(other ? peers.data_link(group.id(), peers.is_local(rank) ? local : 1 + lane * kFlows + flow, rank)
                           : nullptr);
    to.push_back(links_.back().get());
  }
  backend_ = std::make_unique<LinksBackend>(to, Hosts{}, true);
  Backend* const only = backend_.get();
  exchange_ = Selector({&only, 1}, int(owners_.size()), "", kExchangeRules);
  round_once_ = Selector({&only, 1}, int(owners_.size()), "", kRoundOnceRules);
}

std::unique_ptr<Work> NodeLinks::Flow::start(const Collective& c, const Algorithm* algorithm) const {
  const bool rounds = c.kind == Kind::allreduce && is_floating(c.dtype) && size_of(c.dtype) == 2;
  if (algorithm && !rounds) return backend_->start(c, algorithm);
  const Row& row = (rounds ? round_once_ : exchange_).choose(c);
  return row.backend->start(c, row.algorithm);
}

void LentMemory::note(const NodeLinks::Flow& flow) {
  auto known = std::find_if(lent_.begin(), lent_.end(), [&](const Lent& lent) { return lent.flow == &flow; });
  if (known == lent_.end()) known = lent_.insert(known, {&flow, {}});
  flow.backend_->lent(&known->marks);
}

void LentMemory::release() {
  for (const Lent& lent : lent_) lent.flow->backend_->release_lent(lent.marks);
  lent_.clear();
}

// ---- the nodes

NodeLinks::NodeLinks(Peers& peers, const Group& group, std::vector<std::vector<int>> nodes)
    : nodes_(std::move(nodes)) {
  size_t least = nodes_[0].size(), most = 0;
  bool share_host = false;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    const auto& members = nodes_[node];
    least = std::min(least, members.size());
    most = std::max(most, members.size());
    share_host = share_host || (node > 0 && group.share_host(members[0], nodes_[node - 1][0]));
    const auto found = std::find(members.begin(), members.end(), group.index());
    if (found == members.end()) continue;
    node_ = int(node);
    place_ = int(found - members.begin());
  }
  // Lanes of nodes that share a host have different owners: their links are few.
  lanes_ = int(share_host ? least : most);
  if (!alone()) {
    reduce_scatter_ = std::make_unique<LocalLinks>(peers, group, members(), kReduceScatterLane);
    all_gather_ = std::make_unique<LocalLinks>(peers, group, members(), kAllGatherLane);
  }
  own_lanes_ = lanes_of(lanes_, int(members().size()), place_);
  for (int lane = own_lanes_.begin; lane < own_lanes_.end; ++lane) {
    std::vector<int> owners;
    for (const auto& members : nodes_) owners.push_back(members[size_t(lane) * members.size() / size_t(lanes_)]);
    auto& flows = flows_.emplace_back();
    for (int flow = 0; flow < kFlows; ++flow) flows.push_back(std::make_unique<Flow>(peers, group, owners, lane, flow));
  }
}

NodeLinks::~NodeLinks() = default;

void NodeLinks::check() const {
  if (!given_up_) return;
  throw Error(Code::internal, "an all-reduce between hosts cannot go on: an earlier one was given up before its end; "
                              "shut down and init again");
}

SharedBackend& NodeLinks::reduce_scatter() const { return *reduce_scatter_->shared; }
SharedBackend& NodeLinks::all_gather() const { return *all_gather_->shared; }

NodeLinks::Flow& NodeLinks::flow(int lane, int64_t number) const {
  const auto& flows = flows_[size_t(lane - own_lanes_.begin)];
  return *flows[size_t(number) % flows.size()];
}

}  // namespace lightcc

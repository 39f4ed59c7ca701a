#include "collective/hierarchical.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

// Lanes of the links and of the common rings of a host that no other backend of the group uses.
constexpr int kReduceScatterLane = 1, kAllGatherLane = 2;
static_assert(kAllGatherLane < LocalRanks::kLanes && kAllGatherLane < LocalRanks::kCommonLanes);

// Between the owners of a lane. Two exchange in one round what is small; where all can send straight to all, two
// rounds do; beyond that start-ups count below and bytes above.
constexpr int kPairwiseOwners = 8;
constexpr Rule kExchangeRules[] = {
    {Kind::allreduce, 0, 2, 64 << 10, "links", "recursive_doubling"},
    {Kind::allreduce, 0, 0, 8 << 10, "links", "recursive_doubling"},
    {Kind::allreduce, 0, kPairwiseOwners, 0, "links", "pairwise"},
    {Kind::allreduce, 0, 0, 512 << 10, "links", "halving_doubling"},
    {Kind::allreduce, 0, 1024, 0, "links", "ring"},
    {Kind::allreduce, 0, 0, 0, "links", "halving_doubling"},
};
// 16-bit floats: everyone's piece goes to one owner, who sums up in float32 and rounds once.
constexpr int kRoundOnceOwners = 64;
constexpr Rule kRoundOnceRules[] = {
    {Kind::allreduce, 0, kRoundOnceOwners, 0, "links", "pairwise"},
    {Kind::allreduce, 0, 0, 0, "links", "halving_doubling"},
};

int64_t border(int64_t count, int lane, int lanes, int64_t line) {
  return lane == lanes ? count : std::min(count, (count * lane / lanes + line - 1) / line * line);
}

std::byte* at(void* p, int64_t bytes) { return static_cast<std::byte*>(p) + bytes; }
const std::byte* at(const void* p, int64_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

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

// ---- the links of each queue

struct HierarchicalBackend::LocalLinks {
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

struct HierarchicalBackend::Flow {
  // Nodes of one host are joined by the links that the members of one node use within it: no pair needs both.
  Flow(Peers& peers, const Group& group, const std::vector<int>& members, int lane, int flow) : owners(members) {
    std::vector<Link*> to;
    for (const int member : owners) {
      const int rank = group.rank(member);
      const int local = flow % 2 == 0 ? kReduceScatterLane : kAllGatherLane;
      const bool other = member != group.index();
      links.push_back(other ? peers.data_link(group.id(), peers.is_local(rank) ? local : 1 + lane * kFlows + flow, rank)
                            : nullptr);
      to.push_back(links.back().get());
    }
    backend = std::make_unique<LinksBackend>(to, Hosts{}, true);
    Backend* const only = backend.get();
    exchange = Selector({&only, 1}, int(owners.size()), "", kExchangeRules);
    round_once = Selector({&only, 1}, int(owners.size()), "", kRoundOnceRules);
  }
  std::unique_ptr<Work> start(const Collective& c) const {
    const bool is_short = is_floating(c.dtype) && size_of(c.dtype) == 2;
    const Row& row = (is_short ? round_once : exchange).choose(c);
    return row.backend->start(c, row.algorithm);
  }

  const std::vector<int> owners;         // members, by node
  std::vector<std::unique_ptr<Link>> links;
  std::unique_ptr<LinksBackend> backend;
  Selector exchange, round_once;
};

HierarchicalBackend::HierarchicalBackend(Peers& peers, const Group& group, std::vector<std::vector<int>> nodes,
                                         const Limits& limits)
    : nodes_(std::move(nodes)), limits_(limits) {
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
  const int members_here = int(own_node().size());
  if (members_here > 1) {
    reduce_scatter_ = std::make_unique<LocalLinks>(peers, group, own_node(), kReduceScatterLane);
    all_gather_ = std::make_unique<LocalLinks>(peers, group, own_node(), kAllGatherLane);
  }
  own_lanes_ = lanes_of(lanes_, members_here, place_);
  for (int lane = own_lanes_.begin; lane < own_lanes_.end; ++lane) {
    std::vector<int> owners;
    for (const auto& members : nodes_) owners.push_back(members[size_t(lane) * members.size() / size_t(lanes_)]);
    auto& flows = flows_.emplace_back();
    for (int flow = 0; flow < kFlows; ++flow) flows.push_back(std::make_unique<Flow>(peers, group, owners, lane, flow));
  }
}

HierarchicalBackend::~HierarchicalBackend() = default;

bool HierarchicalBackend::accepts(const Collective& c) const {
  return c.kind == Kind::allreduce && !is_adasum(c) && c.op != ReduceOp::average && bytes_of(c) >= limits_.least_bytes;
}

// ---- one all-reduce

class HierarchicalAllreduce : public Work {
 public:
  HierarchicalAllreduce(HierarchicalBackend& backend, const Collective& c)
      : backend_(backend),
        c_(c),
        element_(int64_t(size_of(c.dtype))),
        node_(backend.own_node()),
        number_(backend.started_++) {
    const int64_t bytes = c.count * element_;
    lanes_ = bytes <= backend.limits_.one_lane_bytes ? 1 : backend.lanes_;
    own_ = lanes_of(lanes_, int(node_.size()), backend.place_);
    const int64_t most = backend.limits_.chunk_bytes * lanes_;
    chunks_ = std::max<int64_t>(1, (bytes + most - 1) / most);
    if (alone()) return;
    if (size_t(bytes) <= SharedBackend::kFlatBytes) {  // less work to publish than to say where it lies
      inputs_.resize(node_.size());
    } else {
      SharedBackend& shared = *backend.reduce_scatter_->shared;
      input_offsets_.emplace(shared, ArenaOffsets{shared.offsets_of(c_).input, -1});
    }
  }

  ~HierarchicalAllreduce() override {
    if (done()) return;
    backend_.broken_ = true;
    release();
  }
  bool step() override {
    if (backend_.broken_) {
      throw Error(Code::internal, "an all-reduce between hosts cannot go on: an earlier one was given up before its "
                                  "end; shut down and init again");
    }
    const uint64_t begun_ns = c_.timed ? now_ns() : 0;
    bool moved = exchange();
    moved |= gather();
    moved |= reduce();
    if (done()) release();
    if (c_.timed && moved) note_times(begun_ns);
    return moved;
  }
  std::span<const Phase> phases() const override { return phases_; }
  bool done() const override { return gathered_ == chunks_; }

  // Whoever holds up the oldest chunk.
  int waiting_for() const override {
    if (done()) return -1;
    if (gather_) return node_[size_t(gather_->waiting_for())];
    if (!exchanges_.empty())
      for (const Exchange& one : exchanges_.front())
        if (!one.work->done()) return one.waiting_for();
    if (input_offsets_) return node_[size_t(input_offsets_->waiting_for())];
    return reduce_ ? node_[size_t(reduce_->waiting_for())] : -1;
  }

 private:
  struct Exchange {            // of one shard of a chunk
    const HierarchicalBackend::Flow* flow;
    std::unique_ptr<Work> work;
    int waiting_for() const {
      const int owner = work->waiting_for();
      return owner < 0 ? -1 : flow->owners[size_t(owner)];
    }
  };
  bool alone() const { return node_.size() == 1; }
  // The output is the caller's again.
  void release() {
    exchanges_.clear();
    for (const auto& [flow, lent] : lent_) flow->backend->release_lent(lent);
    lent_.clear();
  }
  int64_t begin(int64_t chunk) const {
    return border(c_.count, int(chunk), int(chunks_), kLine / element_);
  }
  // The border before a lane, in elements of the whole vector.
  int64_t shard_begin(int64_t chunk, int lane) const {
    const int64_t from = begin(chunk);
    return from + border(begin(chunk + 1) - from, lane, lanes_, kLine / element_);
  }
  // What the members here own of a chunk.
  std::vector<int64_t> counts(int64_t chunk) const {
    std::vector<int64_t> counts;
    for (size_t member = 0; member < node_.size(); ++member) {
      const LaneRange lanes = lanes_of(lanes_, int(node_.size()), int(member));
      counts.push_back(shard_begin(chunk, lanes.end) - shard_begin(chunk, lanes.begin));
    }
    return counts;
  }
  Collective part(Kind kind, int index, size_t size) const {
    Collective c{};
    c.kind = kind;
    c.index = index;
    c.size = int(size);
    c.dtype = c_.dtype;
    c.op = c_.op;
    return c;
  }

  // Each queue, from when it has had something to do to when its last chunk was done. A step is short, so its own begin
  // and end are near enough.
  void note_times(uint64_t begun_ns) {
    const uint64_t now = now_ns();
    const auto note = [&](const char* name, bool has_begun, int64_t finished) {
      if (!has_begun) return;
      const std::string_view wanted = name;
      auto phase = std::find_if(phases_.begin(), phases_.end(), [&](const Phase& one) { return one.name == wanted; });
      if (phase == phases_.end()) phase = phases_.insert(phase, Phase{name, begun_ns, 0});
      if (phase->end_ns == 0 && finished == chunks_) phase->end_ns = now;
    };
    if (!alone()) note("LOCAL_REDUCESCATTER", backend_.reduces_ >= number_, reduced_);
    note("CROSS_ALLREDUCE", started_ > 0, exchanged_);
    if (!alone()) note("LOCAL_ALLGATHER", gather_ || gathered_ > 0, gathered_);
  }

  // A queue that has one chunk in work, which start() begins; finished: so many are done.
  template <class Start> static bool advance(std::unique_ptr<Work>& work, int64_t& finished, Start start) {
    if (!work) work = start();
    const bool moved = work->step();
    if (!work->done()) return moved;
    work.reset();
    ++finished;
    return true;
  }

  // A queue is this all-reduce's until its last chunk is in it.
  void pass_on(uint64_t& queue, int64_t finished) const {
    if (finished == chunks_) ++queue;
  }

  bool reduce() {
    if (backend_.reduces_ != number_) return false;
    if (alone()) {
      reduced_ = chunks_;
      pass_on(backend_.reduces_, reduced_);
      return true;
    }
    if (input_offsets_) {
      const bool moved = input_offsets_->step();
      if (!input_offsets_->done()) return moved;
      inputs_ = input_offsets_->offsets();
      input_offsets_.reset();
    }
    const bool moved = advance(reduce_, reduced_, [&] {
      Collective c = part(Kind::reducescatter, backend_.place_, node_.size());
      c.counts = counts(reduced_);
      c.pre = c_.pre;
      c.input = at(c_.input, begin(reduced_) * element_);
      c.output = at(c_.output, shard_begin(reduced_, own_.begin) * element_);
      std::vector<ArenaOffsets> inputs = inputs_;
      for (ArenaOffsets& each : inputs)
        if (each.input >= 0) each.input += begin(reduced_) * element_;
      return backend_.reduce_scatter_->shared->start(c, std::move(inputs));
    });
    pass_on(backend_.reduces_, reduced_);
    return moved;
  }

  // As many chunks are under way as there are flows, and one more each, so that none runs dry.
  bool exchange() {
    bool moved = false;
    if (backend_.exchanges_ == number_) {
      while (started_ < reduced_ && started_ - exchanged_ < 2 * HierarchicalBackend::kFlows) start_exchange();
      pass_on(backend_.exchanges_, started_);
    }
    for (auto& shards : exchanges_)
      for (Exchange& one : shards) moved |= !one.work->done() && step(one);
    const auto is_done = [](const Exchange& one) { return one.work->done(); };
    while (!exchanges_.empty() && std::all_of(exchanges_.front().begin(), exchanges_.front().end(), is_done)) {
      exchanges_.pop_front();
      ++exchanged_;
      moved = true;
    }
    return moved;
  }
  bool step(Exchange& one) {
    const bool moved = one.work->step();
    if (one.work->done()) lent_[one.flow] = one.flow->backend->lent();  // before those behind it lend more
    return moved;
  }
  void start_exchange() {
    auto& shards = exchanges_.emplace_back();
    for (int lane = own_.begin; lane < own_.end; ++lane) {
      const int64_t first = shard_begin(started_, lane), count = shard_begin(started_, lane + 1) - first;
      if (count == 0) continue;
      const auto& flows = backend_.flows_[size_t(lane - backend_.own_lanes_.begin)];
      const auto& flow = *flows[size_t(started_) % flows.size()];
      Collective c = part(Kind::allreduce, backend_.node_, flow.owners.size());
      c.count = count;
      c.pre = alone() ? c_.pre : 1;
      c.post = c_.post;
      c.output = at(c_.output, first * element_);
      c.input = alone() ? at(c_.input, first * element_) : c.output;
      shards.push_back({&flow, flow.start(c)});
    }
    ++started_;
  }

  bool gather() {
    if (backend_.gathers_ != number_ || gathered_ == exchanged_) return false;
    if (alone()) {
      gathered_ = exchanged_;
      pass_on(backend_.gathers_, gathered_);
      return true;
    }
    const bool moved = advance(gather_, gathered_, [&] {
      Collective c = part(Kind::allgather, backend_.place_, node_.size());
      c.counts = counts(gathered_);
      c.input = at(c_.output, shard_begin(gathered_, own_.begin) * element_);
      c.output = at(c_.output, begin(gathered_) * element_);
      return backend_.all_gather_->shared->start(c, nullptr);
    });
    pass_on(backend_.gathers_, gathered_);
    return moved;
  }

  HierarchicalBackend& backend_;
  const Collective c_;
  const int64_t element_;
  const std::vector<int>& node_;
  const uint64_t number_;                        // among the backend's
  int lanes_ = 0;
  LaneRange own_{};
  int64_t chunks_ = 0;
  int64_t reduced_ = 0, started_ = 0, exchanged_ = 0, gathered_ = 0;  // so many chunks
  std::optional<OffsetExchange> input_offsets_;  // until the members here know them
  std::vector<ArenaOffsets> inputs_;             // where the inputs of the members here lie
  std::unique_ptr<Work> reduce_, gather_;
  std::deque<std::vector<Exchange>> exchanges_;  // of chunks exchanged_ to started_
  std::map<const HierarchicalBackend::Flow*, std::vector<uint64_t>> lent_;  // by what is exchanged
  std::vector<Phase> phases_;                    // of a timed one, those that have begun
};

std::unique_ptr<Work> HierarchicalBackend::start(const Collective& c, const Algorithm*) {
  if (!accepts(c))
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with op " + name_of(c.op) + " was given to 2D");
  return std::make_unique<HierarchicalAllreduce>(*this, c);
}

}  // namespace lightcc

#include "collective/hierarchical.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "collective/local_phases.h"
#include "collective/pipeline.h"

namespace lightcc {

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<NodeLinks> links, const Limits& limits)
    : links_(std::move(links)), limits_(limits) {}

bool HierarchicalBackend::accepts(const Collective& c) const {
  return c.kind == Kind::allreduce && !is_adasum(c) && c.op != ReduceOp::average && bytes_of(c) >= limits_.least_bytes;
}

// ---- one all-reduce

class HierarchicalAllreduce : public Work {
 public:
  HierarchicalAllreduce(HierarchicalBackend& backend, const Collective& c, const Algorithm* algorithm)
      : c_(c),
        algorithm_(algorithm),
        element_(int64_t(size_of(c.dtype))),
        links_(*backend.links_),
        node_(links_.members()),
        lanes_(c.count * element_ <= backend.limits_.one_lane_bytes ? 1 : links_.lanes()),
        own_(lanes_of(lanes_, int(node_.size()), links_.place())),
        chunks_(chunks_of(c.count * element_, backend.limits_.chunk_bytes * lanes_)),
        pipeline_(stages(backend, backend.started_++)),
        times_(c.timed) {
    if (!links_.alone()) local_.emplace(links_, c_);
  }

  ~HierarchicalAllreduce() override {
    if (done()) return;
    links_.give_up();
    release();
  }
  bool step() override {
    links_.check();
    times_.begin_step();
    const bool moved = pipeline_.step();
    if (done()) release();
    if (times_.timed() && moved) pipeline_.note(times_);
    return moved;
  }
  std::span<const TimedPhase> phases() const override { return times_.phases(); }
  bool done() const override { return pipeline_.done(); }
  int waiting_for() const override { return pipeline_.waiting_for(); }

 private:
  class Exchange;

  static int64_t chunks_of(int64_t bytes, int64_t most) { return std::max<int64_t>(1, (bytes + most - 1) / most); }

  // As many chunks are exchanged at once as there are flows, and one more each, so that none runs dry.
  std::vector<Pipeline::Stage> stages(HierarchicalBackend& backend, uint64_t number) {
    const auto chunks = size_t(chunks_);
    Pipeline::Stage reduce{"LOCAL_REDUCESCATTER", chunks, [this](size_t chunk) {
      return local_->reduce_scatter(begin(int64_t(chunk)), counts(int64_t(chunk)));
    }};
    Pipeline::Stage exchange{"CROSS_ALLREDUCE", chunks, [this](size_t chunk) {
      return start_exchange(int64_t(chunk));
    }};
    Pipeline::Stage gather{"LOCAL_ALLGATHER", chunks, [this](size_t chunk) {
      return local_->all_gather(begin(int64_t(chunk)), counts(int64_t(chunk)));
    }};
    reduce.members = gather.members = &node_;
    exchange.at_once = 2 * NodeLinks::kFlows;
    reduce.number = exchange.number = gather.number = number;
    reduce.turn = &backend.reduces_;
    exchange.turn = &backend.exchanges_;
    gather.turn = &backend.gathers_;
    if (links_.alone()) return {exchange};
    return {reduce, exchange, gather};
  }

  // The output is the caller's again.
  void release() {
    pipeline_.clear();
    lent_.release();
  }
  int64_t begin(int64_t chunk) const { return border(c_.count, chunk, chunks_, kLine / element_); }
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
  std::unique_ptr<Work> start_exchange(int64_t chunk);

  const Collective c_;
  const Algorithm* const algorithm_;  // of the exchange; nullptr: by size
  const int64_t element_;
  NodeLinks& links_;
  const std::vector<int>& node_;      // the members here
  const int lanes_;
  const LaneRange own_;
  const int64_t chunks_;
  std::optional<LocalPhases> local_;  // none where this rank is alone
  LentMemory lent_;                   // by what is exchanged
  Pipeline pipeline_;
  PhaseTimes times_;
};

// What this rank owns of a chunk, with those who own it on the other nodes.
class HierarchicalAllreduce::Exchange : public Work {
 public:
  explicit Exchange(LentMemory& lent) : lent_(lent) {}
  void add(const NodeLinks::Flow& flow, const Collective& shard, const Algorithm* algorithm) {
    shards_.push_back({&flow, flow.start(shard, algorithm)});
  }
  bool step() override {
    bool moved = false;
    for (const LaneShard& shard : shards_) {
      if (shard.work->done()) continue;
      moved |= shard.work->step();
      if (shard.work->done()) lent_.note(*shard.flow);
    }
    return moved;
  }
  bool done() const override {
    return std::ranges::all_of(shards_, [](const LaneShard& shard) { return shard.work->done(); });
  }
  int waiting_for() const override {
    const auto late = std::ranges::find_if(shards_, [](const LaneShard& shard) { return !shard.work->done(); });
    const int owner = late == shards_.end() ? -1 : late->work->waiting_for();
    return owner < 0 ? -1 : late->flow->owner(owner);
  }

 private:
  struct LaneShard {
    const NodeLinks::Flow* flow;
    std::unique_ptr<Work> work;
  };
  LentMemory& lent_;
  std::vector<LaneShard> shards_;
};

std::unique_ptr<Work> HierarchicalAllreduce::start_exchange(int64_t chunk) {
  auto exchange = std::make_unique<Exchange>(lent_);
  for (int lane = own_.begin; lane < own_.end; ++lane) {
    const int64_t first = shard_begin(chunk, lane), count = shard_begin(chunk, lane + 1) - first;
    if (count == 0) continue;
    Collective c{};
    c.kind = Kind::allreduce;
    c.index = links_.node();
    c.size = links_.nodes();
    c.dtype = c_.dtype;
    c.op = c_.op;
    c.count = count;
    c.pre = links_.alone() ? c_.pre : 1;
    c.post = c_.post;
    c.output = at(c_.output, first * element_);
    c.input = links_.alone() ? at(c_.input, first * element_) : c.output;
    exchange->add(links_.flow(lane, chunk), c, algorithm_);
  }
  return exchange;
}

std::unique_ptr<Work> HierarchicalBackend::start(const Collective& c, const Algorithm* exchange) {
  if (!accepts(c))
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with op " + name_of(c.op) + " was given to 2D");
  return std::make_unique<HierarchicalAllreduce>(*this, c, exchange);
}

}  // namespace lightcc

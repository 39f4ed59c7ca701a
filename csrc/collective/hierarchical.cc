#include "collective/hierarchical.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "base/error.h"
#include "collective/local_phases.h"
#include "collective/phases.h"

namespace lightcc {

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<NodeLinks> links, const Limits& limits)
    : links_(std::move(links)), limits_(limits) {}

bool HierarchicalBackend::accepts(const Collective& c) const {
  return c.kind == Kind::allreduce && !is_adasum(c) && c.op != ReduceOp::average && bytes_of(c) >= limits_.least_bytes;
}

// ---- one all-reduce

class HierarchicalAllreduce : public Work {
 public:
  HierarchicalAllreduce(HierarchicalBackend& backend, const Collective& c, const Algorithm* exchange)
      : backend_(backend),
        c_(c),
        exchange_(exchange),
        element_(int64_t(size_of(c.dtype))),
        links_(*backend.links_),
        node_(links_.members()),
        number_(backend.started_++),
        times_(c.timed) {
    const int64_t bytes = c.count * element_;
    lanes_ = bytes <= backend.limits_.one_lane_bytes ? 1 : links_.lanes();
    own_ = lanes_of(lanes_, int(node_.size()), links_.place());
    const int64_t most = backend.limits_.chunk_bytes * lanes_;
    chunks_ = std::max<int64_t>(1, (bytes + most - 1) / most);
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
    bool moved = exchange();
    moved |= gather();
    moved |= reduce();
    if (done()) release();
    if (times_.timed() && moved) note_times();
    return moved;
  }
  std::span<const TimedPhase> phases() const override { return times_.phases(); }
  bool done() const override { return gathered_ == chunks_; }

  // Whoever holds up the oldest chunk.
  int waiting_for() const override {
    if (done()) return -1;
    if (gather_) return node_[size_t(gather_->waiting_for())];
    if (!exchanges_.empty())
      for (const Exchange& one : exchanges_.front())
        if (!one.work->done()) return one.waiting_for();
    if (reduce_) return node_[size_t(reduce_->waiting_for())];
    const int place = local_ ? local_->waiting_for() : -1;
    return place < 0 ? -1 : node_[size_t(place)];
  }

 private:
  struct Exchange {            // of one shard of a chunk
    const NodeLinks::Flow* flow;
    std::unique_ptr<Work> work;
    int waiting_for() const {
      const int owner = work->waiting_for();
      return owner < 0 ? -1 : flow->owner(owner);
    }
  };
  // The output is the caller's again.
  void release() {
    exchanges_.clear();
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
  void note_times() {
    if (!links_.alone()) times_.note("LOCAL_REDUCESCATTER", backend_.reduces_ >= number_, reduced_ == chunks_);
    times_.note("CROSS_ALLREDUCE", started_ > 0, exchanged_ == chunks_);
    if (!links_.alone()) times_.note("LOCAL_ALLGATHER", gather_ || gathered_ > 0, gathered_ == chunks_);
  }

  // A queue is this all-reduce's until its last chunk is in it.
  void pass_on(uint64_t& queue, int64_t finished) const {
    if (finished == chunks_) ++queue;
  }

  bool reduce() {
    if (backend_.reduces_ != number_) return false;
    if (links_.alone()) {
      reduced_ = chunks_;
      pass_on(backend_.reduces_, reduced_);
      return true;
    }
    if (!local_->knows_inputs()) {
      const bool moved = local_->step();
      if (!local_->knows_inputs()) return moved;
    }
    const bool moved =
        advance(reduce_, reduced_, [&] { return local_->reduce_scatter(begin(reduced_), counts(reduced_)); });
    pass_on(backend_.reduces_, reduced_);
    return moved;
  }

  // As many chunks are under way as there are flows, and one more each, so that none runs dry.
  bool exchange() {
    bool moved = false;
    if (backend_.exchanges_ == number_) {
      while (started_ < reduced_ && started_ - exchanged_ < 2 * NodeLinks::kFlows) start_exchange();
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
    if (one.work->done()) lent_.note(*one.flow);
    return moved;
  }
  void start_exchange() {
    auto& shards = exchanges_.emplace_back();
    for (int lane = own_.begin; lane < own_.end; ++lane) {
      const int64_t first = shard_begin(started_, lane), count = shard_begin(started_, lane + 1) - first;
      if (count == 0) continue;
      const NodeLinks::Flow& flow = links_.flow(lane, started_);
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
      shards.push_back({&flow, flow.start(c, exchange_)});
    }
    ++started_;
  }

  bool gather() {
    if (backend_.gathers_ != number_ || gathered_ == exchanged_) return false;
    if (links_.alone()) {
      gathered_ = exchanged_;
      pass_on(backend_.gathers_, gathered_);
      return true;
    }
    const bool moved =
        advance(gather_, gathered_, [&] { return local_->all_gather(begin(gathered_), counts(gathered_)); });
    pass_on(backend_.gathers_, gathered_);
    return moved;
  }

  HierarchicalBackend& backend_;
  const Collective c_;
  const Algorithm* const exchange_;              // between nodes; nullptr: by size
  const int64_t element_;
  NodeLinks& links_;
  const std::vector<int>& node_;                 // the members here
  const uint64_t number_;                        // among the backend's
  int lanes_ = 0;
  LaneRange own_{};
  int64_t chunks_ = 0;
  int64_t reduced_ = 0, started_ = 0, exchanged_ = 0, gathered_ = 0;  // so many chunks
  std::optional<LocalPhases> local_;             // none where this rank is alone
  std::unique_ptr<Work> reduce_, gather_;
  std::deque<std::vector<Exchange>> exchanges_;  // of chunks exchanged_ to started_
  LentMemory lent_;                              // by what is exchanged
  PhaseTimes times_;
};

std::unique_ptr<Work> HierarchicalBackend::start(const Collective& c, const Algorithm* exchange) {
  if (!accepts(c))
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with op " + name_of(c.op) + " was given to 2D");
  return std::make_unique<HierarchicalAllreduce>(*this, c, exchange);
}

}  // namespace lightcc

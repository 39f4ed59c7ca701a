#include "collective/local_phases.h"

#include <numeric>
#include <utility>

namespace lightcc {

class LocalPhases::FirstReduceScatter : public Work {
 public:
  FirstReduceScatter(LocalPhases& phases, int64_t first, std::vector<int64_t> counts)
      : phases_(phases), first_(first), counts_(std::move(counts)) {}
  bool step() override {
    if (!work_) {
      const bool moved = phases_.input_offsets_->step();
      if (!phases_.knows_inputs()) return moved;
      work_ = phases_.start_reduce_scatter(first_, std::move(counts_));
    }
    return work_->step();
  }
  bool done() const override { return work_ && work_->done(); }
  int waiting_for() const override { return work_ ? work_->waiting_for() : phases_.input_offsets_->waiting_for(); }

 private:
  LocalPhases& phases_;
  const int64_t first_;
  std::vector<int64_t> counts_;
  std::unique_ptr<Work> work_;
};

LocalPhases::LocalPhases(NodeLinks& links, const Collective& c)
    : links_(links), c_(c), element_(int64_t(size_of(c.dtype))) {
  if (size_t(c.count * element_) <= SharedBackend::kFlatBytes) {  // less work to publish than to say where it lies
    inputs_.resize(links.members().size());
  } else {
    SharedBackend& shared = links.reduce_scatter();
    input_offsets_.emplace(shared, ArenaOffsets{shared.offsets_of(c).input, -1});
  }
}

bool LocalPhases::knows_inputs() {
  if (!input_offsets_) return true;
  if (!input_offsets_->done()) return false;
  inputs_ = input_offsets_->offsets();
  input_offsets_.reset();
  return true;
}

Collective LocalPhases::part(Kind kind, std::vector<int64_t> counts) const {
  Collective c{};
  c.kind = kind;
  c.index = links_.place();
  c.size = int(links_.members().size());
  c.dtype = c_.dtype;
  c.op = c_.op;
  c.counts = std::move(counts);
  return c;
}

std::unique_ptr<Work> LocalPhases::reduce_scatter(int64_t first, std::vector<int64_t> counts) {
  if (knows_inputs()) return start_reduce_scatter(first, std::move(counts));
  return std::make_unique<FirstReduceScatter>(*this, first, std::move(counts));
}

std::unique_ptr<Work> LocalPhases::start_reduce_scatter(int64_t first, std::vector<int64_t> counts) {
  Collective c = part(Kind::reducescatter, std::move(counts));
  const int64_t own = std::accumulate(c.counts.begin(), c.counts.begin() + c.index, first);
  c.pre = c_.pre;
  c.input = at(c_.input, first * element_);
  c.output = at(c_.output, own * element_);
  std::vector<ArenaOffsets> inputs = inputs_;
  for (ArenaOffsets& each : inputs)
    if (each.input >= 0) each.input += first * element_;
  return links_.reduce_scatter().start(c, std::move(inputs));
}

std::unique_ptr<Work> LocalPhases::all_gather(int64_t first, std::vector<int64_t> counts) {
  Collective c = part(Kind::allgather, std::move(counts));
  const int64_t own = std::accumulate(c.counts.begin(), c.counts.begin() + c.index, first);
  c.input = at(c_.output, own * element_);
  c.output = at(c_.output, first * element_);
  return links_.all_gather().start(c, nullptr);
}

}  // namespace lightcc

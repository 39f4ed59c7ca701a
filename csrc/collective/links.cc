#include "collective/links.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "collective/algorithms.h"
#include "collective/execution.h"
#include "device/device.h"

namespace lightcc {

struct LinksBackend::Turns {
  uint64_t started = 0, finished = 0;  // collective number `finished` has the links
  int waiting_for = -1;                // whom it waits for
  bool broken = false;                 // one was dropped half-way: what is in the links has no meaning now
  std::vector<BulkLink*> bulk_links;
  bool keeps_lent = false;

  void release() {
    for (BulkLink* link : bulk_links) count_staged(link->release());
  }
};

namespace {

constexpr size_t kCachedSchedules = 256;  // a training step has a few shapes; when there are more, planning is cheap

class Turn : public Work {
 public:
  // members: whom the execution's numbers stand for; nullptr: themselves.
  Turn(std::shared_ptr<LinksBackend::Turns> turns, Execution execution, const std::vector<int>* members)
      : turns_(std::move(turns)), execution_(std::move(execution)), members_(members), number_(turns_->started++) {}
  Turn(const Turn&) = delete;
  ~Turn() override {
    if (done()) return;
    turns_->broken = true;
    turns_->release();
  }

  bool step() override {
    if (done()) return false;
    if (turns_->broken) {
      throw Error(Code::internal, "a collective cannot use the group's links: an earlier one was given up before its "
                                  "end; shut down and init again");
    }
    if (turns_->finished != number_) return false;
    const bool moved = execution_.step();
    const int peer = execution_.waiting_for();
    turns_->waiting_for = members_ && peer >= 0 ? (*members_)[size_t(peer)] : peer;
    if (!execution_.done()) return moved;
    if (execution_.uses_bulk() && !turns_->keeps_lent) turns_->release();
    ++turns_->finished;
    return true;
  }
  bool done() const override { return turns_->finished > number_; }
  int waiting_for() const override { return done() ? -1 : turns_->waiting_for; }

 private:
  std::shared_ptr<LinksBackend::Turns> turns_;
  Execution execution_;
  const std::vector<int>* const members_;
  const uint64_t number_;
};

}  // namespace

LinksBackend::LinksBackend(std::vector<Link*> links, Hosts hosts, bool keeps_lent)
    : hosts_(hosts.empty() ? one_host(int(links.size())) : std::move(hosts)),
      links_(std::move(links)),
      by_host_(in_host_order(hosts_)),
      turns_(std::make_shared<Turns>()) {
  for (const int member : by_host_) links_by_host_.push_back(links_[size_t(member)]);
  turns_->keeps_lent = keeps_lent;
  for (Link* link : links_)
    if (BulkLink* bulk = link ? link->bulk() : nullptr) turns_->bulk_links.push_back(bulk);
}

void LinksBackend::lent(std::vector<uint64_t>* marks) const {
  marks->clear();
  for (const BulkLink* link : turns_->bulk_links) marks->push_back(link->lent());
}

void LinksBackend::release_lent(const std::vector<uint64_t>& before) {
  for (size_t i = 0; i < before.size(); ++i) count_staged(turns_->bulk_links[i]->release_lent(before[i]));
}

bool LinksBackend::accepts(const Collective& c) const {
  if (c.size != int(links_.size())) return false;
  switch (c.kind) {
    case Kind::send:
    case Kind::receive:
    case Kind::add_group:
    case Kind::remove_group:
    case Kind::join: return false;
    case Kind::allreduce:
      return is_adasum(c) ? is_floating(c.dtype) && !c.tensors.empty() : c.op != ReduceOp::average;
    case Kind::reducescatter: return c.op != ReduceOp::average && c.op != ReduceOp::adasum;
    default: return true;
  }
}

std::unique_ptr<Work> LinksBackend::start(const Collective& c, const Algorithm* algorithm) {
  if (!accepts(c) || !algorithm || algorithm->kind != c.kind || algorithm->adasum != is_adasum(c)) {
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with op " + name_of(c.op) + " among " +
                                    std::to_string(c.size) + " ranks was given to the links of " +
                                    std::to_string(links_.size()) + ", by " +
                                    (algorithm ? algorithm->name : "no algorithm"));
  }
  const bool any_order = (c.kind == Kind::allreduce && !is_adasum(c)) || c.kind == Kind::barrier;
  if (!any_order) return std::make_unique<Turn>(turns_, Execution(schedule_of(c, *algorithm), c, links_), nullptr);
  Collective numbered = c;
  numbered.index = int(std::find(by_host_.begin(), by_host_.end(), c.index) - by_host_.begin());
  return std::make_unique<Turn>(turns_, Execution(schedule_of(numbered, *algorithm), numbered, links_by_host_),
                                &by_host_);
}

std::shared_ptr<const Schedule> LinksBackend::schedule_of(const Collective& c, const Algorithm& algorithm) {
  std::vector<int64_t> key{&algorithm - algorithms().data(), c.index, c.root, c.count, c.pre != 1.0,
                           int64_t(size_of(c.dtype)), int64_t(c.tensors.size())};
  key.insert(key.end(), c.counts.begin(), c.counts.end());
  key.insert(key.end(), c.send.begin(), c.send.end());
  if (auto known = schedules_.find(key); known != schedules_.end()) return known->second;
  if (schedules_.size() >= kCachedSchedules) schedules_.clear();
  return schedules_[key] = std::make_shared<const Schedule>(plan(algorithm, c, hosts_));
}

}  // namespace lightcc

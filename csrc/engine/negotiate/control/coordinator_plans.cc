// The coordinator's learned fusion plans: when one is made, what members say by it, and its end (coordinator.h).
#include <algorithm>
#include <utility>

#include "engine/negotiate/control/coordinator.h"

namespace lightcc {
namespace {

constexpr size_t kRecordedSets = 64;  // sets whose steps are remembered: functions that are traced again make new ones

}  // namespace

// A request of a set has been announced; if it is ready by that, a step may have ended.
void Coordinator::learn(const Entry& e) {
  if (e.set == 0 || !e.ready || !limits_.fusion.enabled || joined_.count > 0 || !first_left_.empty()) return;
  if (records_.size() > kRecordedSets && !records_.contains(e.set)) records_.clear();
  StepRecord& record = records_[e.set];
  if (record.ready(e.key, lateness_.now_ns())) make_plan(e.set, record);
}

void Coordinator::make_plan(int set, StepRecord& record) {
  std::vector<Entry*> entries;
  std::vector<PlanRequest> requests;
  for (const StepRecord::Item& item : record.step()) {
    auto it = entries_.find(item.key);
    if (it == entries_.end() || it->second.id == kNoId) return record.start_over(0);
    Entry& e = it->second;
    if (!e.ready && e.count > 0) return record.realign();  // somebody is in the next step, so this is not its end
    if (!e.known || (e.ready && e.fresh)) return;            // not all remember it: a later step may do better
    entries.push_back(&e);
    requests.push_back({ready_request(e), double(item.ready_ns - record.step()[0].ready_ns) * 1e-9});
  }
  const uint32_t number = next_plan_++;
  FusionPlan& made = plans_[number];
  Plan message{number, {}};
  for (const Bucket& bucket : plan_buckets(requests, costs_.costs(), limits_.fusion)) {
    PlannedBucket& planned = made.buckets.emplace_back();
    auto& ids = message.buckets.emplace_back();
    for (size_t i : bucket) {
      entries[i]->plan = number;
      entries[i]->bucket = uint32_t(made.buckets.size() - 1);
      ++entries[i]->plans;
      planned.entries.push_back(entries[i]);
      ids.push_back(entries[i]->id);
    }
    planned.announced.resize(rank_of_.size());
  }
  made.set = set;
  made.last_used = ++clock_;
  made.left.resize(rank_of_.size());
  plan_of_[set] = number;
  plan_messages_.emplace_back(std::move(message));
}

Coordinator::FusionPlan& Coordinator::plan(uint32_t number) {
  auto it = plans_.find(number);
  if (it == plans_.end()) throw Error(Code::internal, "a member named a fusion plan that there is not");
  return it->second;
}

std::vector<std::string> Coordinator::announce_bucket(int member, const BucketReady& one, uint64_t now_ns) {
  lateness_.set_now(now_ns);
  if (!cycles_.blocked_on.empty()) cycles_.blocked_on.erase(member);
  FusionPlan& p = plan(one.plan);
  if (one.bucket >= p.buckets.size() || p.left[size_t(member)])
    throw Error(Code::internal, "a member announced a bucket that its fusion plan does not have");
  PlannedBucket& bucket = p.buckets[one.bucket];
  std::vector<std::string> keys;
  for (Entry* e : bucket.entries) {
    keys.push_back(e->key);
    e->last_used = ++clock_;
  }
  if (std::exchange(bucket.announced[size_t(member)], 1))
    throw Error(Code::internal, "a member announced a bucket twice");
  ++bucket.count;
  if (p.ended) return expand(bucket), keys;
  if (!refused_.empty())
    for (const std::string& key : keys)
      if (auto it = refused_.find(key); it != refused_.end()) it->second[size_t(member)].count = 0;
  const uint64_t since_ns = std::exchange(bucket.arrived_ns, now_ns);
  if (bucket.count < int(rank_of_.size())) return keys;
  lateness_.note_last(member, since_ns);
  bucket.ready = true;
  ready_buckets_.push_back({one.plan, one.bucket});
  ++bucket.served;
  p.last_used = ++clock_;
  return keys;
}

// What members have said by the bucket is from now on as if they had announced each of its requests.
void Coordinator::expand(PlannedBucket& bucket) {
  const std::vector<char> announced = std::exchange(bucket.announced, std::vector<char>(rank_of_.size()));
  bucket.count = 0;
  bucket.ready = false;
  for (Entry* e : bucket.entries)
    for (int member = 0; member < int(announced.size()); ++member)
      if (announced[size_t(member)]) {
        arrived(*e, member);
        learn(*e);
      }
}

void Coordinator::end_plan(uint32_t number) {
  FusionPlan& p = plans_.at(number);
  p.ended = true;
  plan_of_.erase(p.set);
  std::erase_if(ready_buckets_, [&](const BucketBatch& batch) { return batch.plan == number; });
  plan_messages_.emplace_back(PlanEnded{number});
  uint64_t steps = 0;
  for (PlannedBucket& bucket : p.buckets) steps = std::max(steps, bucket.served -= bucket.ready);
  std::set<std::string> rest;  // of the step in which it ends
  for (PlannedBucket& bucket : p.buckets)
    for (Entry* e : bucket.entries) {
      e->plan = 0;
      if (bucket.served < steps) rest.insert(e->key);
    }
  records_[p.set].start_over(steps, std::move(rest));
  for (PlannedBucket& bucket : p.buckets) expand(bucket);
}

// Something of it, or of its set, happens otherwise.
void Coordinator::end_plan_of(const Entry& e) {
  if (e.plan != 0) return end_plan(e.plan);
  if (e.set == 0) return;
  if (auto it = plan_of_.find(e.set); it != plan_of_.end()) end_plan(it->second);
}

void Coordinator::end_plans() {
  while (!plan_of_.empty()) end_plan(plan_of_.begin()->second);
}

// It keeps numbers that others could use.
void Coordinator::end_oldest_plan() {
  uint32_t oldest = 0;
  for (auto& [number, p] : plans_)
    if (!p.ended && (oldest == 0 || p.last_used < plans_.at(oldest).last_used)) oldest = number;
  if (oldest != 0) end_plan(oldest);
}

void Coordinator::plan_left(int member, uint32_t number) {
  FusionPlan& p = plan(number);
  if (!p.ended || std::exchange(p.left[size_t(member)], 1))
    throw Error(Code::internal, "a member left a fusion plan that has not ended, or twice");
  if (std::ranges::find(p.left, 0) != p.left.end()) return;
  for (PlannedBucket& bucket : p.buckets)
    for (Entry* e : bucket.entries) --e->plans;
  plans_.erase(number);
}

// By itself or with its bucket.
bool Coordinator::has_announced(const Entry& e, int member) const {
  if (e.announced[size_t(member)] || e.plan == 0) return e.announced[size_t(member)];
  const PlannedBucket& bucket = plans_.at(e.plan).buckets[e.bucket];
  return bucket.announced[size_t(member)];
}

bool Coordinator::is_ready(const Entry& e) const {
  return e.ready || (e.plan != 0 && plans_.at(e.plan).buckets[e.bucket].ready);
}

}  // namespace lightcc

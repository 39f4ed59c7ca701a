#include "engine/negotiate/control/member_plans.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "engine/negotiate/control/hold.h"

namespace lightcc {

bool MemberPlans::MemberPlan::holds() const {
  return std::ranges::any_of(buckets, [](const Bucket& b) { return b.count > 0 && b.count < b.keys.size(); });
}

MemberPlans::Messages MemberPlans::submit(const std::string& key, const Announcement& what, int set,
                                          uint64_t now_ns, Slot* slot) {
  Messages messages;
  auto plan = plans_.find(slot->plan);
  if (plan == plans_.end() || plan->second.left || plan->second.life != slot->life) {
    *slot = {};
    if (auto it = slots_.find(key); it != slots_.end()) {
      plan = plans_.find(it->second.plan);
      if (plan->second.set == 0) plan->second.set = set;
      if (set != 0 && plan->second.set == set && cache_.knows(key, what))
        *slot = it->second;
      else
        leave(plan->second, messages);
    }
    if (slot->plan == 0) {
      messages.emplace_back(cache_.announce(key, what));
      return messages;
    }
  }
  Bucket& bucket = plan->second.buckets[slot->bucket];
  if (std::exchange(bucket.here[slot->index], 1)) throw Error(Code::internal, key + " is in flight twice");
  if (bucket.count++ == 0) bucket.since_ns = now_ns;
  ++held_;
  if (bucket.count < bucket.keys.size()) return messages;
  held_ -= bucket.count;
  // Requests of several threads may come in another order than that of their times.
  const uint64_t took_ns = std::max(now_ns, bucket.since_ns) - bucket.since_ns;
  bucket.usual_ns = std::max(took_ns, bucket.usual_ns - bucket.usual_ns / 8);
  messages.emplace_back(BucketReady{slot->plan, slot->bucket});
  return messages;
}

void MemberPlans::leave(MemberPlan& plan, Messages& messages) {
  plan.left = true;
  for (Bucket& bucket : plan.buckets) {
    for (const std::string& key : bucket.keys) slots_.erase(key);
    if (bucket.count == bucket.keys.size()) continue;  // announced
    held_ -= std::exchange(bucket.count, 0);
    for (size_t i = 0; i < bucket.keys.size(); ++i)
      if (std::exchange(bucket.here[i], 0)) messages.emplace_back(cache_.repeat(bucket.keys[i]));
  }
}

MemberPlans::Messages MemberPlans::leave_with(const std::string& key) {
  Messages messages;
  if (auto it = slots_.find(key); it != slots_.end())
    if (MemberPlan& plan = plans_.at(it->second.plan); plan.holds()) leave(plan, messages);
  return messages;
}

MemberPlans::Messages MemberPlans::leave_all() {
  Messages messages;
  for (auto& [number, plan] : plans_)
    if (!plan.left) leave(plan, messages);
  return messages;
}

MemberPlans::Messages MemberPlans::leave_stuck(uint64_t now_ns) {
  Messages messages;
  const auto is_stuck = [&](const Bucket& b) {
    return b.count > 0 && b.count < b.keys.size() && now_ns > b.since_ns &&
           hold::is_bucket_stuck(now_ns - b.since_ns, b.usual_ns);
  };
  for (auto& [number, plan] : plans_)
    if (!plan.left && std::ranges::any_of(plan.buckets, is_stuck)) leave(plan, messages);
  return messages;
}

void MemberPlans::begin(const Plan& message) {
  static std::atomic<uint64_t> lives{0};
  MemberPlan plan{++lives, {}};
  for (const auto& ids : message.buckets) {
    Bucket& bucket = plan.buckets.emplace_back();
    for (uint32_t id : ids) {
      const std::string* key = cache_.key_of(id);
      const Slot slot{plan.life, message.plan, uint32_t(plan.buckets.size() - 1), uint32_t(bucket.keys.size())};
      if (!key) {  // it is on its way to the coordinator in full, which will end the plan
        plan.left = true;
        continue;
      }
      if (!slots_.try_emplace(*key, slot).second)
        throw Error(Code::internal, "the coordinator made a second fusion plan of " + *key);
      bucket.keys.push_back(*key);
    }
    bucket.here.resize(bucket.keys.size());
  }
  if (plan.left)
    for (const Bucket& bucket : plan.buckets)
      for (const std::string& key : bucket.keys) slots_.erase(key);
  if (!plans_.emplace(message.plan, std::move(plan)).second)
    throw Error(Code::internal, "the coordinator made two fusion plans of one number");
}

void MemberPlans::clear() {
  plans_.clear();
  slots_.clear();
  held_ = 0;
}

MemberPlans::Messages MemberPlans::end(const PlanEnded& ended) {
  auto it = plans_.find(ended.plan);
  if (it == plans_.end()) throw Error(Code::internal, "the coordinator ended a fusion plan that it has not made");
  Messages messages;
  if (!it->second.left) leave(it->second, messages);
  plans_.erase(it);
  messages.emplace_back(PlanLeft{ended.plan, member_});
  return messages;
}

const std::vector<std::string>& MemberPlans::run(const BucketBatch& batch) {
  auto it = plans_.find(batch.plan);
  if (it == plans_.end() || batch.bucket >= it->second.buckets.size())
    throw Error(Code::internal, "told to run a bucket of no fusion plan");
  Bucket& bucket = it->second.buckets[batch.bucket];
  if (bucket.count == 0 || bucket.count < bucket.keys.size())
    throw Error(Code::internal, "told to run a bucket that was not announced here");
  bucket.count = 0;
  std::ranges::fill(bucket.here, 0);
  return bucket.keys;
}

std::string MemberPlans::text() const {
  std::string text;
  for (auto& [number, plan] : plans_) {
    if (plan.left) continue;
    text += "plan " + std::to_string(number) + "\n";
    for (size_t i = 0; i < plan.buckets.size(); ++i) {
      const std::vector<std::string>& keys = plan.buckets[i].keys;
      text += "  bucket " + std::to_string(i) + ": " + std::to_string(keys.size()) + " tensors, " + keys.front() +
              (keys.size() > 1 ? " to " + keys.back() : "") + "\n";
    }
  }
  return text;
}

}  // namespace lightcc

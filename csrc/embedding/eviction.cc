#include "embedding/eviction.h"

#include <algorithm>
#include <cmath>

namespace lightcc::embedding {
namespace {

constexpr double kFar = 1u << 31;

double faded(const EvictionRule& rule, const RowHeader& header, double age) {
  return header.count * std::pow(rule.b, age);
}

// How many steps after its last one a row may go.
double patience(const EvictionRule& rule, const RowHeader& header) {
  if (rule.kind == EvictionKind::ttl) return rule.a;
  double age = std::floor(std::log(rule.a / std::max(1u, uint32_t(header.count))) / std::log(rule.b)) - 1;
  age = std::clamp(age, 0.0, kFar);
  while (age < kFar && faded(rule, header, age) >= rule.a) ++age;
  return age;
}

}  // namespace

uint32_t due_step(const EvictionRule& rule, const RowHeader& header, uint32_t now) {
  if (rule.kind == EvictionKind::l2 || rule.kind == EvictionKind::asked) {
    const uint32_t turn = uint32_t(mix(uint64_t(header.key)) % rule.every);
    return now + 1 + (turn + rule.every - (now + 1) % rule.every) % rule.every;
  }
  return uint32_t(std::max(double(now) + 1, std::min(header.last + patience(rule, header), kFar)));
}

bool goes(const EvictionRule& rule, const RowHeader& header, double norm, uint32_t now) {
  const double age = double(now) - header.last;
  switch (rule.kind) {
    case EvictionKind::ttl: return age >= rule.a;
    case EvictionKind::count: return faded(rule, header, age) < rule.a;
    case EvictionKind::l2: return norm < rule.a;
    default: return false;
  }
}

std::vector<int64_t> Eviction::after_step(Shard& shard) {
  std::vector<int64_t> gone;
  if (!active()) return gone;
  const uint32_t now = shard.steps().now();
  const Slabs& records = shard.records();
  for (uint32_t row : due_) wait(shard, row, now);  // nobody has answered for them
  due_.clear();
  for (uint32_t row = known_ ? Slabs::kNone : records.next_taken(0); row != Slabs::kNone;
       row = records.next_taken(row + 1)) {
    const RowHeader& header = *records.header(row);
    const bool is_born_now = header.count == 1 && header.last == now;  // which born() has look at later steps
    wait(shard, row, is_born_now ? now : now - 1);
  }
  known_ = true;
  while (!waiting_.empty() && waiting_.begin()->first <= now) {
    const std::vector<uint32_t> rows = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + 8 < rows.size()) __builtin_prefetch(records.header(rows[i + 8]));
      const RowHeader& header = *records.header(rows[i]);
      const double norm = rule_.kind == EvictionKind::l2 ? shard.norm(rows[i]) : 0;
      if (rule_.kind == EvictionKind::asked) due_.push_back(rows[i]);
      else if (goes(rule_, header, norm, now)) gone.push_back(header.key);
      else wait(shard, rows[i], now);
    }
  }
  return gone;
}

std::vector<int64_t> Eviction::answer(const Shard& shard, const uint8_t* go) {
  std::vector<int64_t> gone;
  for (size_t i = 0; i < due_.size(); ++i) {
    if (go[i]) gone.push_back(shard.records().header(due_[i])->key);
    else wait(shard, due_[i], shard.steps().now());
  }
  due_.clear();
  return gone;
}

}  // namespace lightcc::embedding

#include "engine/negotiate/control/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace lightcc {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// What a bucket costs the computation beside it, whether or not the exchange is hidden: waking threads, cold caches.
constexpr double kOverheadS = 50e-6;
// To copy tensors together and apart again, beyond what a collective of one of them copies anyway: 256 KiB
// (kMostCopiedBytes) are worth a collective.
constexpr double kCopyByteS = 2e-10;
constexpr size_t kMostBuckets = 16;  // more are made only where the limit of a bucket's bytes asks for them
constexpr size_t kMostUnits = 256;   // which the optimum is sought of: consecutive requests are put together first

constexpr size_t kMostRequests = 16384;  // of a step: more are no set

constexpr size_t kSamples = 64;
constexpr int64_t kSmallBytes = 64 << 10, kLargeBytes = 256 << 10;

double quantile(std::deque<double> values, double share) {
  const auto at = values.begin() + ptrdiff_t(share * double(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Consecutive requests, in the order of readiness, and what they are together.
struct Unit {
  size_t first, last;  // requests [first, last)
  int64_t bytes = 0;
  double ready_s = 0;
  uintptr_t begin = UINTPTR_MAX, end = 0;  // in shared memory; begin 0: some is in private memory
  size_t padded = 0;

  void add(const Unit& other) {
    last = other.last;
    bytes += other.bytes;
    ready_s = std::max(ready_s, other.ready_s);
    begin = std::min(begin, other.begin);
    end = std::max(end, other.end);
    padded += other.padded;
  }
  bool side_by_side() const { return last - first == 1 || (begin != 0 && end - begin == padded); }
  double cost(PlanCosts costs) const {
    return costs.start_s + double(bytes) * (costs.byte_s + (side_by_side() ? 0 : kCopyByteS));
  }
};

std::vector<Unit> units_of(std::span<const PlanRequest> requests) {
  const size_t each = (requests.size() + kMostUnits - 1) / kMostUnits;
  std::vector<Unit> units;
  for (size_t i = 0; i < requests.size(); ++i) {
    const ReadyRequest& request = requests[i].request;
    const size_t padded = round_up(size_t(request.bytes));
    const Unit one{i, i + 1, request.bytes, requests[i].ready_s, request.address, request.address + padded, padded};
    if (i % each == 0)
      units.push_back(one);
    else
      units.back().add(one);
  }
  return units;
}

// Buckets as runs of requests that are alike and in the order of readiness: where each ends.
std::vector<size_t> cut(std::span<const PlanRequest> requests, PlanCosts costs, int64_t most_bytes) {
  const std::vector<Unit> units = units_of(requests);
  const size_t n = units.size(), most = std::min(n, kMostBuckets);
  // end[k][j]: when k buckets of the first j units can have ended; from[k][j]: where the last of them begins.
  std::vector<std::vector<double>> end(most + 1, std::vector<double>(n + 1, kNever));
  std::vector<std::vector<size_t>> from(most + 1, std::vector<size_t>(n + 1, 0));
  end[0][0] = 0;
  for (size_t j = 1; j <= n; ++j) {
    Unit bucket = units[j - 1];
    for (size_t i = j; i-- > 0;) {
      if (i + 1 < j) {
        Unit longer = units[i];
        longer.add(bucket);
        bucket = longer;
      }
      if (bucket.bytes > most_bytes && i + 1 < j) break;
      const double cost = bucket.cost(costs);
      for (size_t k = 1; k <= most; ++k) {
        const double ends = std::max(bucket.ready_s, end[k - 1][i]) + cost;
        if (ends < end[k][j]) end[k][j] = ends, from[k][j] = i;
      }
    }
  }
  size_t best = 0;
  double least = kNever;
  for (size_t k = 1; k <= most; ++k)
    if (const double price = end[k][n] + double(k) * kOverheadS; price < least) least = price, best = k;
  std::vector<size_t> ends;
  for (size_t j = n; best > 0; j = from[best--][j]) ends.push_back(units[j - 1].last);
  std::ranges::reverse(ends);
  if (!ends.empty()) return ends;
  int64_t bytes = 0;  // so many buckets would be too large: each as full as it may be
  for (size_t i = 0; i < requests.size(); ++i) {
    if (bytes > 0 && bytes + requests[i].request.bytes > most_bytes) ends.push_back(i), bytes = 0;
    bytes += requests[i].request.bytes;
  }
  ends.push_back(requests.size());
  return ends;
}

}  // namespace

bool StepRecord::ready(const std::string& key, uint64_t now_ns) {
  if (!rest_.empty()) {
    if (rest_.erase(key) > 0) return false;
    rest_.clear();  // the others do not come any more
  }
  if (now_keys_.contains(key)) end_step();
  if (now_.empty() && !known_.empty() && !known_.contains(key)) {  // the step had one more than those before
    last_.push_back({key, now_ns});
    steps_[0].insert(key);
    known_.insert(key);
    equal_ = 0;
    return false;
  }
  if (now_.size() >= kMostRequests) start_over(0);
  now_.push_back({key, now_ns});
  now_keys_.insert(key);
  if (known_.empty() || !std::ranges::includes(now_keys_, known_)) return false;
  end_step();
  return equal_ >= kEqualSteps * caution_ - 1;
}

void StepRecord::end_step() {
  equal_ = !steps_.empty() && now_keys_ == steps_[0] ? equal_ + 1 : 0;
  last_ = std::exchange(now_, {});
  steps_.push_front(std::exchange(now_keys_, {}));
  if (steps_.size() > size_t(kEqualSteps)) steps_.pop_back();
  known_.clear();
  for (const Keys& keys : steps_) known_.insert(keys.begin(), keys.end());
}

void StepRecord::start_over(uint64_t served_steps, Keys rest) {
  caution_ = served_steps >= kServedSteps ? 1 : std::min(2 * caution_, kMostCaution);
  equal_ = 0;
  now_.clear(), now_keys_.clear(), last_.clear(), steps_.clear(), known_.clear();
  rest_ = std::move(rest);
}

void StepRecord::realign() {
  size_t begin = 0;  // of the step that is under way
  uint64_t longest_ns = 0;
  for (size_t i = 1; i < last_.size(); ++i)
    if (const uint64_t pause_ns = last_[i].ready_ns - last_[i - 1].ready_ns; pause_ns > longest_ns)
      longest_ns = pause_ns, begin = i;
  Keys rest;
  for (size_t i = 0; i < begin; ++i) rest.insert(last_[i].key);
  start_over(kServedSteps, std::move(rest));
}

void MeasuredCosts::note(int64_t bytes, double seconds) {
  const auto keep = [](std::deque<double>& samples, double sample) {
    samples.push_back(sample);
    if (samples.size() > kSamples) samples.pop_front();
  };
  if (bytes <= kSmallBytes) keep(starts_, seconds);
  if (bytes >= kLargeBytes) keep(bytes_, seconds / double(bytes));
}

// Low quantiles: on a busy machine most samples are of threads that had to wait for a core.
PlanCosts MeasuredCosts::costs() const {
  PlanCosts costs = costs_;
  if (!starts_.empty()) costs.start_s = std::clamp(quantile(starts_, 0.25), 5e-6, 2e-3);
  if (!bytes_.empty()) costs.byte_s = quantile(bytes_, 0.25);
  return costs;
}

std::vector<Bucket> plan_buckets(std::span<const PlanRequest> requests, PlanCosts costs, FusionLimits limits) {
  struct Planned {
    double ready_s;
    Bucket bucket;
  };
  std::vector<std::vector<size_t>> alike;  // requests that may run as one, in the order of readiness
  std::vector<size_t> order(requests.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return requests[i].ready_s; });
  for (size_t i : order) {
    auto found = std::ranges::find_if(alike, [&](const auto& others) {
      return may_fuse(requests[others[0]].request, requests[i].request);
    });
    if (found == alike.end())
      alike.push_back({i});
    else
      found->push_back(i);
  }
  std::vector<Planned> planned;
  for (const std::vector<size_t>& members : alike) {
    std::vector<PlanRequest> run;
    for (size_t i : members) run.push_back(requests[i]);
    size_t begin = 0;
    for (size_t end : cut(run, costs, limits.bucket_bytes)) {
      planned.push_back({run[end - 1].ready_s, {members.begin() + ptrdiff_t(begin), members.begin() + ptrdiff_t(end)}});
      begin = end;
    }
  }
  std::ranges::stable_sort(planned, {}, &Planned::ready_s);
  std::vector<Bucket> buckets;
  for (Planned& one : planned) {
    std::ranges::stable_sort(one.bucket, {}, [&](size_t i) { return requests[i].request.address; });
    buckets.push_back(std::move(one.bucket));
  }
  return buckets;
}

}  // namespace lightcc

#include "engine/timeline/bucket_rows.h"

#include <algorithm>
#include <utility>

namespace lightcc {
namespace {

constexpr size_t kNamed = 8;  // requests of a batch whose names are written

std::string name_of_row(int row) { return "bucket " + std::to_string(row + 1); }

std::string names_of(const std::vector<std::string>& requests) {
  std::string names;
  for (size_t i = 0; i < std::min(requests.size(), kNamed); ++i) names += (i ? ", " : "") + requests[i];
  if (requests.size() > kNamed) names += " and " + std::to_string(requests.size() - kNamed) + " more";
  return names;
}

}  // namespace

void BucketRows::begin_if_new() {
  if (std::exchange(file_, timeline_.file_number()) == timeline_.file_number()) return;
  steps_ = in_flight_ = waiting_ = 0;
  pending_.clear();
  ready_.clear();
  rows_.clear();
}

void BucketRows::count_bytes(uint64_t now_ns) {
  timeline_.count("bytes", now_ns, JsonObject().add("in flight", in_flight_).add("waiting", waiting_));
}

void BucketRows::step(uint64_t now_ns) {
  begin_if_new();
  timeline_.phase("steps", "STEP " + std::to_string(++steps_), now_ns);
}

void BucketRows::submitted(const std::string& request, int64_t bytes, uint64_t now_ns) {
  begin_if_new();
  pending_[request] = {bytes, now_ns};
  in_flight_ += bytes;
  waiting_ += bytes;
  count_bytes(now_ns);
}

void BucketRows::ready(const std::string& request, int rank, uint64_t now_ns) {
  begin_if_new();
  ready_[request].emplace_back(rank, now_ns);
}

int BucketRows::take_row(uint64_t since_ns, int requests) {
  const auto is_free = [&](const BucketRow& row) { return row.unfinished == 0 && row.free_ns <= since_ns; };
  auto row = std::find_if(rows_.begin(), rows_.end(), is_free);
  if (row == rows_.end()) row = rows_.insert(row, BucketRow{});
  row->unfinished = requests;
  return int(row - rows_.begin());
}

void BucketRows::agreed(const std::vector<std::string>& requests, const std::string& kind, JsonObject args, bool waits,
                        uint64_t now_ns) {
  begin_if_new();
  uint64_t since_ns = now_ns;
  std::map<int, uint64_t> ready_ns;  // by rank, with all of them
  for (const std::string& request : requests) {
    Pending& pending = pending_[request];  // of a rank that has joined, and of what began before the file: a new one
    if (pending.submitted_ns) since_ns = std::min(since_ns, pending.submitted_ns);
    waiting_ -= pending.bytes;
    const auto ranks = ready_.extract(request);
    if (ranks.empty()) continue;
    for (const auto& [rank, ns] : ranks.mapped()) ready_ns[rank] = std::max(ready_ns[rank], ns);
  }
  const int number = take_row(since_ns, int(requests.size()));
  const std::string row = name_of_row(number);
  for (const std::string& request : requests) pending_[request].row = number;
  std::vector<std::pair<uint64_t, int>> ticks;
  for (const auto& [rank, ns] : ready_ns) ticks.emplace_back(ns, rank);
  std::sort(ticks.begin(), ticks.end());
  timeline_.phase(row, "NEGOTIATE_" + kind, since_ns);
  for (const auto& [ns, rank] : ticks) timeline_.tick(row, "NEGOTIATE_" + kind, std::to_string(rank), ns);
  args.add("tensors", names_of(requests));
  timeline_.phase(row, kind, now_ns, args);
  if (waits) timeline_.activity(row, "QUEUE", now_ns);
  count_bytes(now_ns);
}

void BucketRows::activity(const std::string& request, std::string_view what, uint64_t now_ns) {
  begin_if_new();
  if (auto found = pending_.find(request); found != pending_.end() && found->second.row >= 0)
    timeline_.activity(name_of_row(found->second.row), what, now_ns);
}

void BucketRows::finished(const std::string& request, bool failed, const JsonObject& status, uint64_t now_ns) {
  begin_if_new();
  const auto found = pending_.extract(request);
  if (failed) ready_.erase(request);  // else these are of ranks that are in the next step already
  const Pending pending = found.empty() ? Pending{} : found.mapped();
  in_flight_ -= pending.bytes;
  if (pending.row < 0) {  // it failed before it ran, or began before the file
    waiting_ -= pending.bytes;
    if (failed) timeline_.phase("failed", request, now_ns), timeline_.end("failed", now_ns, status);
  } else if (BucketRow& row = rows_[size_t(pending.row)]; --row.unfinished == 0) {
    row.free_ns = now_ns;
    timeline_.end(name_of_row(pending.row), now_ns, status);
  }
  count_bytes(now_ns);
}

}  // namespace lightcc

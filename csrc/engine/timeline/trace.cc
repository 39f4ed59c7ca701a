#include "engine/timeline/trace.h"

#include <algorithm>

namespace lightcc {

std::string timeline_path(std::string pattern, int rank) {
  constexpr std::string_view kRank = "{rank}";
  size_t at = pattern.find(kRank);
  if (at == pattern.npos) return rank == 0 ? pattern : "";
  for (; at != pattern.npos; at = pattern.find(kRank)) pattern.replace(at, kRank.size(), std::to_string(rank));
  return pattern;
}

// ---- life

void Timeline::start(const Start& start) {
  const std::string about =
      JsonObject().add("name", "lightcc " + start.writer).add("start_time_since_epoch_in_micros", start.wall_us).text();
  std::lock_guard life(life_);
  complete(start.now_ns);
  auto file = std::make_unique<TraceFile>(start.path, about, start.now_ns, most_events_, start.by_bucket);
  std::lock_guard lock(mutex_);
  file_ = std::move(file);
  start_ns_ = mark_ns_ = last_ns_ = start.now_ns;
  last_id_ = 0;
  mark_cycles_ = start.mark_cycles;
  by_bucket_ = start.by_bucket;
  ++file_number_;
  running_ = true;
}

bool Timeline::stop(uint64_t now_ns) {
  std::lock_guard life(life_);
  return complete(now_ns);
}

bool Timeline::complete(uint64_t now_ns) {
  std::unique_ptr<TraceFile> file;
  {
    std::lock_guard lock(mutex_);
    if (!file_) return false;
    running_ = false;
    for (auto& [name, row] : rows_) {
      row.last_ns = std::max(row.last_ns, now_ns);
      row.waiting.clear();
      end_phase(name, row);
    }
    rows_.clear();
    file_->close(std::max(last_ns_, now_ns));
    file = std::move(file_);
  }
  return true;  // when ~TraceFile has seen the last event written
}

// ---- events

void Timeline::phase(const std::string& name, std::string_view what, uint64_t time_ns, const JsonObject& args) {
  std::lock_guard lock(mutex_);
  Track* row = at(name, time_ns);
  if (!row || row->phase.name == what) return;
  end(name, *row, row->activity);
  end(name, *row, row->phase);
  begin(name, *row, row->phase, what, args);
}

void Timeline::activity(const std::string& name, std::string_view what, uint64_t time_ns) {
  std::lock_guard lock(mutex_);
  Track* row = at(name, time_ns);
  if (!row || row->phase.name.empty() || row->activity.name == what) return;
  end(name, *row, row->activity);
  begin(name, *row, row->activity, what);
}

void Timeline::tick(const std::string& name, std::string_view phase, std::string_view what, uint64_t time_ns) {
  std::lock_guard lock(mutex_);
  Track* row = at(name, time_ns);
  if (!row) return;
  if (row->phase.name.empty()) begin(name, *row, row->phase, phase);
  if (row->phase.name == phase)
    put(name, *row, 'X', what);
  else
    row->waiting.emplace_back(phase, what);
}

void Timeline::end(const std::string& name, uint64_t time_ns, const JsonObject& args, bool last) {
  std::lock_guard lock(mutex_);
  Track* row = at(name, time_ns);
  if (!row) return;
  end_phase(name, *row, args);
  if (last) rows_.erase(name);
}

void Timeline::mark(std::string_view name, uint64_t time_ns, const JsonObject& args) {
  std::lock_guard lock(mutex_);
  if (!file_ || !mark_cycles_) return;
  mark_ns_ = std::max(mark_ns_, time_ns);
  last_ns_ = std::max(last_ns_, mark_ns_);
  file_->put({'i', 0, mark_ns_, std::string(name), args.empty() ? "" : args.text()});
}

void Timeline::count(std::string_view name, uint64_t time_ns, const JsonObject& values) {
  std::lock_guard lock(mutex_);
  if (!file_) return;
  mark_ns_ = std::max(mark_ns_, time_ns);
  last_ns_ = std::max(last_ns_, mark_ns_);
  file_->put({'C', 0, mark_ns_, std::string(name), values.text()});
}

// ---- rows

Timeline::Track* Timeline::at(const std::string& name, uint64_t time_ns) {
  if (!file_ || file_->failed()) {
    running_ = false;
    return nullptr;
  }
  auto [it, is_new] = rows_.try_emplace(name);
  Track& row = it->second;
  if (is_new) {
    row.id = ++last_id_;
    row.last_ns = start_ns_;
  }
  row.last_ns = std::max(row.last_ns, time_ns);
  last_ns_ = std::max(last_ns_, row.last_ns);
  return &row;
}

bool Timeline::put(const std::string& name, Track& row, char kind, std::string_view what, const JsonObject& args) {
  if (!row.named) row.named = file_->put({'M', row.id, row.last_ns, name, ""});
  return file_->put({kind, row.id, row.last_ns, std::string(what), args.empty() ? "" : args.text()});
}

void Timeline::begin(const std::string& name, Track& row, Slice& slice, std::string_view what, const JsonObject& args) {
  slice.name = what;
  slice.written = !what.empty() && put(name, row, 'B', what, args);
}

void Timeline::end(const std::string& name, Track& row, Slice& slice, const JsonObject& args) {
  if (std::exchange(slice.written, false)) put(name, row, 'E', slice.name, args);
  slice.name.clear();
}

void Timeline::end_phase(const std::string& name, Track& row, const JsonObject& args) {
  end(name, row, row.activity);
  end(name, row, row.phase, args);
  for (auto& [phase, tick] : std::exchange(row.waiting, {})) {
    if (row.phase.name.empty()) begin(name, row, row.phase, phase);
    put(name, row, 'X', tick);
  }
}

}  // namespace lightcc

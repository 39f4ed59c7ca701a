// How an update keeps the gradients of keys that are let in, and counts the others; and the C API of admission.
#include "embedding/admission.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace lightcc::embedding {

void Admission::note(int64_t cell) {
  for (CountLog& log : logs)
    if (log.active) log.cells.note(cell, value_of(cell));
}

void Admission::reserve_logs(size_t cells) {
  for (CountLog& log : logs)
    if (log.active) log.cells.reserve(cells);
}

bool Admission::reserve(const Counted& counted) {
  if (filter.active()) {
    reserve_logs(counted.keys.size() * size_t(filter.shape().hashes));
    filter.reserve(counted.keys);
    return true;
  }
  reserve_logs(counted.keys.size() + counted.admitted.size());
  return candidates.reserve(counted.keys);
}

// The filter keeps the count of a key that is let in as it was before.
void Admission::apply(const Counted& counted) {
  for (size_t i = 0; i < counted.keys.size(); ++i) {
    if (filter.active()) filter.raise(counted.keys[i], counted.counts[i], [&](auto... of) { set(of...); });
    else set(counted.keys[i], counted.counts[i]);
  }
  for (int64_t key : counted.admitted) forget(key);
  admitted += int64_t(counted.admitted.size());
}

void Admission::forget(int64_t key) {
  if (!filter.active() && candidates.count(key)) set(key, 0);
}

void Admission::clear() {
  const bool is_logged = logs[0].active || logs[1].active;
  for (int part = 0; is_logged && part < kParts; ++part)
    each(part, 0, [&](int64_t cell, uint32_t) { note(cell); });
  candidates.clear();
  filter.clear();
}

void Admission::has_read(int64_t cell, int reader) {
  if (filter.active()) filter.has_read(cell, reader);
  else candidates.has_read(cell, reader);
}

void Admission::has_read_all(int reader) {
  candidates.has_read_all(reader);
  filter.has_read_all(reader);
}

void Admission::set_shape(const FilterShape& shape) {
  if (shape == filter.shape()) return;
  for (int log = 0; log < kLogs; ++log) end_log(log);  // they have other cells
  candidates.clear();
  filter.set_shape(shape);
}

bool Admission::is_cell(int64_t cell) const {
  return !filter.active() || (cell >= 0 && cell < filter.shape().all_cells());
}

uint32_t Admission::bucket_of_cell(int64_t cell) const {
  return filter.active() ? uint32_t(filter.bucket_of_cell(cell)) : bucket_of(mix(uint64_t(cell)));
}

bool Admission::reserve(std::span<const int64_t> cells) {
  reserve_logs(cells.size());
  if (!filter.active()) return candidates.reserve(cells);
  filter.reserve_cells(cells);
  return true;
}

void Admission::set(int64_t cell, uint32_t value) {
  note(cell);
  if (filter.active()) filter.set_cell(cell, value);
  else if (value) candidates.set(cell, value);
  else candidates.erase(cell);
}

bool Admission::reserve_back(int log) {
  const NotedKeys& then = logs[log].cells;
  std::vector<int64_t> cells;
  for (size_t i = 0; i < then.size(); ++i)
    if (then.number(i)) cells.push_back(then.key(i));
  reserve_logs(then.size());
  return reserve(cells);
}

void Admission::go_back(int log) {
  const NotedKeys then = std::exchange(logs[log], CountLog()).cells;  // the other log goes on meanwhile
  for (size_t i = 0; i < then.size(); ++i) set(then.key(i), then.number(i));
  begin_log(log);
}

// What is kept moves together, in its order.
void OwnedStep::admit(const std::vector<uint32_t>& occurrences) {
  const Admission& admission = table->admission;
  if (!admission.counts()) return;
  const size_t bytes = table->row_bytes();
  std::vector<size_t> kept;
  for (size_t i = 0; i < owned.keys.size(); ++i) {
    if (!owned.found[i] && table->shard->row_of(owned.keys[i]) == Slabs::kNone) {
      const uint64_t count = uint64_t(admission.count(owned.keys[i])) + occurrences[i];
      if (count < admission.min_count) {
        counted.keys.push_back(owned.keys[i]);
        counted.counts.push_back(uint32_t(count));
        continue;
      }
      counted.admitted.push_back(owned.keys[i]);
    }
    kept.push_back(i);
  }
  if (kept.size() == owned.keys.size()) return;
  std::byte* to = gradients == memory.data() ? memory.data() : memory.reserve(kept.size() * bytes + 1);
  for (size_t i = 0; i < kept.size(); ++i) {
    const size_t from = kept[i];
    owned.keys[i] = owned.keys[from];
    owned.found[i] = owned.found[from];
    if (!owned.checks.empty()) owned.checks[i] = owned.checks[from];
    std::memmove(to + i * bytes, gradients + from * bytes, bytes);
  }
  gradients = to;
  owned.keys.resize(kept.size());
  owned.found.resize(kept.size());
  if (!owned.checks.empty()) owned.checks.resize(kept.size());
}

// How often each key was asked for in the lookups that its gradient is of.
void count_occurrences(const Wanted& wanted, uint32_t* occurrences) {
  for (int64_t place : wanted.inverse) ++occurrences[place];
}

}  // namespace lightcc::embedding

namespace {

int filter_bits(const lightcc_embedding_table& table, int64_t min_count) {
  const int bits = min_count > 1 ? KeyFilter::bits_for(uint32_t(min_count)) : 2;
  if (bits) return bits;
  throw Error(Code::invalid_argument, table.about("a filter counts to 65536, and min_count is " +
                                                  std::to_string(min_count)));
}

}  // namespace

extern "C" {

int lightcc_embedding_set_admission(lightcc_embedding_table* table, int64_t min_count, double absent) {
  return guard([&] {
    if (min_count < 1 || min_count > int64_t(KeyCounts::kMostCount) || !std::isfinite(absent))
      throw Error(Code::invalid_argument, table->about("min_count is " + std::to_string(min_count) +
                                                       ", which must be 1 to 1073741823, and what is absent finite"));
    Admission& admission = table->admission;
    if (admission.filter.active()) {
      FilterShape shape = admission.filter.shape();
      shape.bits = filter_bits(*table, min_count);
      admission.set_shape(shape);
    }
    admission.min_count = uint32_t(min_count);
    admission.absent = absent;
    if (!admission.counts()) admission.clear();
    table->settle_absent();
    return 0;
  });
}

int lightcc_embedding_set_filter(lightcc_embedding_table* table, int64_t bytes, int hashes) {
  return guard([&] {
    constexpr int64_t kStep = int64_t(kBuckets) * 64;
    if (bytes < 0 || bytes % kStep || bytes / kStep > KeyFilter::kMostLines)
      throw Error(Code::invalid_argument, table->about("a filter has " + std::to_string(bytes) +
                                                       " bytes, which must be a multiple of " + std::to_string(kStep)));
    if (bytes && (hashes < 1 || hashes > KeyFilter::kMostHashes))
      throw Error(Code::invalid_argument, table->about("a filter has 1 to 32 hashes, not " + std::to_string(hashes)));
    FilterShape shape;
    if (bytes) shape = {bytes / kStep, hashes, filter_bits(*table, table->admission.min_count)};
    table->admission.set_shape(shape);
    return 0;
  });
}
}

#include "embedding/shard.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace lightcc::embedding {
namespace {

constexpr size_t kSliceBuckets = 4096;

}  // namespace

size_t RecordLayout::slot_offset(int slot) const {
  size_t numbers = slot >= 0 ? size_t(dim) : 0;
  for (int i = 0; i < slot; ++i) numbers += size_t(slot_width(rule, i, dim));
  return sizeof(RowHeader) + numbers * number_bytes;
}

size_t RecordLayout::check_offset() const { return slot_offset(3) + size_t(slot_width(rule, 3, dim)) * number_bytes; }

size_t RecordLayout::record_bytes() const { return (check_offset() + (checked ? sizeof(uint32_t) : 0) + 15) / 16 * 16; }

Shard::Shard(const RecordLayout& layout, const FirstValues& first, size_t limit_bytes)
    : layout_(layout), first_(first), absent_(first), records_(layout.record_bytes(), limit_bytes),
      steps_(layout.rule.terms), arithmetic_(make_arithmetic(layout_, first_, absent_, steps_, numbers_,
                                                                  records_)),
      logs_{UndoLog(layout.record_bytes()), UndoLog(layout.record_bytes())} {}

Shard::~Shard() = default;

void Shard::expect_check(Record record, uint32_t check) const {
  uint32_t own;
  std::memcpy(&own, record + layout_.check_offset(), sizeof own);
  if (own == check) return;
  throw Error(Code::invalid_argument, "two strings have the same 64-bit hash " +
                                          std::to_string(reinterpret_cast<const RowHeader*>(record)->key) +
                                          ": one of them must be written otherwise");
}

// visit(first, n) comes after the group's records are found.
template <class Visit>
void Shard::find_in_groups(std::span<const int64_t> keys, const uint32_t* checks, size_t bytes, Record* found,
                           Visit visit) const {
  // In groups, after a group's buckets were asked for: when its records are, when those in second buckets are, and when
  // all are used.
  constexpr size_t kGroup = 8, kAsk = 3, kAskAgain = 5, kUse = 7, kKept = 8;
  static_assert(kKept > kUse);
  uint64_t hashes[kKept][kGroup];
  const size_t groups = (keys.size() + kGroup - 1) / kGroup;
  const auto size_of = [&](size_t group) { return std::min(kGroup, keys.size() - group * kGroup); };
  for (size_t turn = 0; turn < groups + kUse; ++turn) {
    if (turn < groups)
      for (size_t i = 0; i < size_of(turn); ++i)
        index_.prefetch(hashes[turn % kKept][i] = mix(uint64_t(keys[turn * kGroup + i])));
    if (const size_t group = turn - kAsk; turn >= kAsk && group < groups)
      for (size_t i = 0; i < size_of(group); ++i)
        found[group * kGroup + i] = asked_for(index_.guess(hashes[group % kKept][i], records_), bytes);
    if (const size_t group = turn - kAskAgain; turn >= kAskAgain && group < groups)
      for (size_t i = 0; i < size_of(group); ++i)
        if (Record& record = found[group * kGroup + i]; !record)
          record = asked_for(index_.second_guess(hashes[group % kKept][i]), bytes);
    if (turn < kUse) continue;
    const size_t group = turn - kUse, first = group * kGroup, n = size_of(group);
    for (size_t i = first; i < first + n; ++i) {
      settle(keys[i], hashes[group % kKept][i - first], found[i]);
      if (checks && found[i]) expect_check(found[i], checks[i]);
    }
    visit(first, n);
  }
}

void Shard::find(std::span<const int64_t> keys, const uint32_t* checks, Record* found) const {
  find_in_groups(keys, checks, sizeof(RowHeader), found, [](size_t, size_t) {});
}

size_t Shard::bytes_to_read() const {
  return layout_.rule.kind == RuleKind::sparse_adam ? layout_.record_bytes() : layout_.slot_offset(0);
}

void Shard::read(std::span<const int64_t> keys, const Record* found, void* rows) const {
  constexpr size_t kGroup = 16;
  const size_t row_bytes = size_t(layout_.dim) * layout_.number_bytes, bytes = bytes_to_read();
  const auto ask_for_group = [&](size_t first) {
    for (size_t i = first; i < std::min(first + kGroup, keys.size()); ++i)
      if (found[i]) ask_for(found[i], bytes);
  };
  ask_for_group(0);
  for (size_t first = 0; first < keys.size(); first += kGroup) {
    ask_for_group(first + kGroup);
    const size_t n = std::min(kGroup, keys.size() - first);
    arithmetic_->read(keys.subspan(first, n), found + first, static_cast<Record>(rows) + first * row_bytes);
  }
}

void Shard::find_and_read(std::span<const int64_t> keys, const uint32_t* checks, Record* found, void* rows) {
  const size_t row_bytes = size_t(layout_.dim) * layout_.number_bytes;
  find_in_groups(keys, checks, bytes_to_read(), found, [&](size_t first, size_t n) {
    arithmetic_->read(keys.subspan(first, n), found + first, static_cast<Record>(rows) + first * row_bytes);
  });
  index_.move_slice(kSliceBuckets, records_);
}

void Shard::fill_first(int64_t key, int64_t i, void* rows) const {
  const int64_t at = i * layout_.dim;
  if (layout_.number_bytes == sizeof(double)) first_.fill(key, layout_.dim, static_cast<double*>(rows) + at);
  else first_.fill(key, layout_.dim, static_cast<float*>(rows) + at);
}

double Shard::norm(uint32_t row) const {
  const std::byte* weights = records_.at(row) + layout_.slot_offset(-1);
  if (layout_.number_bytes == sizeof(double))
    return std::sqrt(sum_of_squares(reinterpret_cast<const double*>(weights), layout_.dim));
  return std::sqrt(double(sum_of_squares(reinterpret_cast<const float*>(weights), layout_.dim)));
}

bool Shard::reserve(size_t rows) { return index_.reserve(rows, records_) && records_.reserve(rows); }

void Shard::reserve_logs(size_t rows) {
  for (UndoLog& log : logs_)
    if (log.active()) log.reserve(rows);
}

void Shard::before_changes(std::span<const Record> rows) {
  for (UndoLog& log : logs_)
    for (size_t i = 0; log.active() && i < rows.size(); ++i)
      if (rows[i]) log.changes(rows[i]);
}

Shard::Record Shard::insert(int64_t key, uint32_t check) {
  const uint64_t hash = mix(uint64_t(key));
  uint32_t row = index_.find(key, hash, records_);
  if (row != Slabs::kNone) {
    const Record record = records_.at(row);
    if (is_logged()) before_changes({&record, 1});
    return record;
  }
  for (UndoLog& log : logs_)
    if (log.active()) log.is_born(key);
  row = records_.take();
  index_.insert(hash, row);
  Record record = records_.at(row);
  std::memset(record, 0, layout_.record_bytes());
  records_.header(row)->key = key;
  if (layout_.checked) std::memcpy(record + layout_.check_offset(), &check, sizeof check);
  return record;
}

void Shard::update(std::span<const int64_t> keys, const uint32_t* checks, const Record* found, const void* gradients,
                   const Numbers& numbers) {
  Record rows[256];
  const uint32_t step = steps_.now() + 1;
  const double alpha = alpha_of(layout_.rule.kind, numbers, step);
  const size_t row_bytes = size_t(layout_.dim) * layout_.number_bytes;
  if (is_logged()) before_changes({found, keys.size()});
  const bool all_found = std::find(found, found + keys.size(), nullptr) == found + keys.size();
  if (all_found) arithmetic_->update({found, keys.size()}, gradients, numbers, alpha);
  for (size_t first = all_found ? keys.size() : 0; first < keys.size(); first += std::size(rows)) {
    const size_t n = std::min(std::size(rows), keys.size() - first);
    for (size_t i = 0; i < n; ++i) {
      rows[i] = found[first + i];
      if (rows[i]) continue;
      rows[i] = insert(keys[first + i], checks ? checks[first + i] : 0);
      if (reinterpret_cast<RowHeader*>(rows[i])->last == 0) arithmetic_->birth(rows[i], numbers);
    }
    arithmetic_->update({rows, n}, static_cast<const std::byte*>(gradients) + first * row_bytes, numbers, alpha);
  }
  numbers_ = numbers;
  steps_.take(alpha);
  ++updates_;
  index_.move_slice(kSliceBuckets, records_);
}

void Shard::erase(std::span<const int64_t> keys) {
  for (int64_t key : keys) {
    const uint64_t hash = mix(uint64_t(key));
    const uint32_t row = index_.find(key, hash, records_);
    if (row == Slabs::kNone) continue;
    const Record record = records_.at(row);
    if (is_logged()) before_changes({&record, 1});
    index_.erase(key, hash, records_);
    records_.give_back(row);
    ++generation_;
  }
}

void Shard::clear() {
  for (uint32_t row = records_.next_taken(0); is_logged() && row != Slabs::kNone; row = records_.next_taken(row + 1)) {
    const Record record = records_.at(row);
    before_changes({&record, 1});
  }
  set_alphas({});
  index_.clear();
  records_.clear();
  ++generation_;
}

void Shard::set_alphas(std::vector<double> alphas) {
  for (UndoLog& log : logs_)
    if (log.active()) log.steps_change(steps_);
  steps_.set_alphas(std::move(alphas));
}

void Shard::go_back() {
  UndoLog& log = logs_[of_commit];
  if (!log.active()) throw Error(Code::invalid_argument, "there is nothing to go back to: no log was begun");
  reserve_logs(log.keys());
  if (!reserve(log.records())) throw Error(Code::internal, "memory does not suffice to go back");
  UndoLog undone = std::move(log);
  log = UndoLog(layout_.record_bytes());  // the other log goes on meanwhile
  undone.each([&](int64_t key, const std::byte* then) {
    if (!then) return;
    const Record record = insert(key, 0);
    std::memcpy(record, then, layout_.record_bytes());
    records_.set_changed(record);
  });
  undone.each([&](int64_t key, const std::byte* then) {  // last: a slab that they leave empty has room for the others
    if (!then) erase({&key, 1});
  });
  set_alphas(undone.alphas_then(steps_));
  numbers_ = undone.numbers_then();
  ++generation_;
  begin_log(of_commit);
}

}  // namespace lightcc::embedding

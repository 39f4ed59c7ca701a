#include "embedding/shard.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lightcc::embedding {
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kAhead = 16;
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
    : layout_(layout), first_(first), records_(layout.record_bytes(), limit_bytes), steps_(layout.rule.terms),
      arithmetic_(make_arithmetic(layout_, first_, steps_, numbers_)) {}

Shard::~Shard() = default;

void Shard::expect_check(Record record, uint32_t check) const {
  uint32_t own;
  std::memcpy(&own, record + layout_.check_offset(), sizeof own);
  if (own == check) return;
  throw Error(Code::invalid_argument, "two strings have the same 64-bit hash " +
                                          std::to_string(reinterpret_cast<const RowHeader*>(record)->key) +
                                          ": one of them must be written otherwise");
}

// A key's bucket is asked for kAhead keys before its record is, and that kAhead keys before it is looked at.
void Shard::find(std::span<const int64_t> keys, const uint32_t* checks, Record* found) const {
  uint64_t hashes[kBlock];
  for (size_t first = 0; first < keys.size(); first += kBlock) {
    const size_t n = std::min(kBlock, keys.size() - first);
    Record* guesses = found + first;
    for (size_t i = 0; i < n + 2 * kAhead; ++i) {
      if (i < n) index_.prefetch(hashes[i] = mix(uint64_t(keys[first + i])));
      if (i >= kAhead && i < n + kAhead) guesses[i - kAhead] = guess(hashes[i - kAhead]);
      if (i >= 2 * kAhead) settle(keys[first + i - 2 * kAhead], hashes[i - 2 * kAhead], guesses[i - 2 * kAhead]);
    }
    for (size_t i = 0; checks && i < n; ++i)
      if (guesses[i]) expect_check(guesses[i], checks[first + i]);
  }
}

void Shard::read(std::span<const int64_t> keys, const Record* found, bool training, void* rows) {
  if (training) arithmetic_->catch_up({found, keys.size()});
  arithmetic_->read(keys, found, static_cast<Record>(rows));
}

void Shard::find_and_read(std::span<const int64_t> keys, const uint32_t* checks, bool training, Record* found,
                          void* rows) {
  constexpr size_t kPiece = 512;
  const size_t row_bytes = size_t(layout_.dim) * layout_.number_bytes;
  for (size_t first = 0; first < keys.size(); first += kPiece) {
    const std::span<const int64_t> piece = keys.subspan(first, std::min(kPiece, keys.size() - first));
    find(piece, checks ? checks + first : nullptr, found + first);
    read(piece, found + first, training, static_cast<Record>(rows) + first * row_bytes);
  }
}

bool Shard::reserve(size_t rows) { return index_.reserve(rows, records_) && records_.reserve(rows); }

Shard::Record Shard::insert(int64_t key, uint32_t check) {
  const uint64_t hash = mix(uint64_t(key));
  uint32_t row = index_.find(key, hash, records_);
  if (row != Slabs::kNone) return records_.at(row);
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
  numbers_ = numbers;
  Record rows[256];
  const uint32_t step = steps_.now() + 1;
  const double alpha = alpha_of(layout_.rule.kind, numbers, step);
  const size_t row_bytes = size_t(layout_.dim) * layout_.number_bytes;
  for (size_t first = 0; first < keys.size(); first += std::size(rows)) {
    const size_t n = std::min(std::size(rows), keys.size() - first);
    for (size_t i = 0; i < n; ++i) {
      rows[i] = found[first + i];
      if (rows[i]) continue;
      rows[i] = insert(keys[first + i], checks ? checks[first + i] : 0);
      if (reinterpret_cast<RowHeader*>(rows[i])->last == 0) arithmetic_->birth(rows[i], numbers);
    }
    arithmetic_->update({rows, n}, static_cast<const std::byte*>(gradients) + first * row_bytes, numbers, alpha);
  }
  steps_.take(alpha);
  index_.move_slice(kSliceBuckets, records_);
}

void Shard::erase(std::span<const int64_t> keys) {
  for (int64_t key : keys) {
    const uint64_t hash = mix(uint64_t(key));
    const uint32_t row = index_.find(key, hash, records_);
    if (row == Slabs::kNone) continue;
    index_.erase(key, hash, records_);
    records_.give_back(row);
    ++generation_;
  }
}

void Shard::clear() {
  index_.clear();
  records_.clear();
  steps_.set_alphas({});
  ++generation_;
}

}  // namespace lightcc::embedding

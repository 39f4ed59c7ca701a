#include "embedding/undo_log.h"

#include <cstring>

#include "embedding/slabs.h"

namespace lightcc::embedding {

void UndoLog::begin(const Steps& steps, const Numbers& numbers) {
  noted_.clear();
  records_ = 0;
  steps_ = steps.now();
  numbers_ = numbers;
  other_steps_ = false;
  alphas_ = {};
  active_ = true;
}

void UndoLog::steps_change(const Steps& steps) {
  if (!other_steps_) alphas_ = alphas_then(steps);
  other_steps_ = true;
}

std::vector<double> UndoLog::alphas_then(const Steps& now) const {
  return other_steps_ ? alphas_ : std::vector<double>(now.alphas().begin(), now.alphas().begin() + steps_);
}

void UndoLog::end() {
  *this = UndoLog(record_bytes_);  // and gives its memory back
}

void UndoLog::reserve(size_t keys) {
  noted_.reserve(keys);
  while (pieces_.size() * kPieceRecords < records_ + keys)
    pieces_.emplace_back(new std::byte[kPieceRecords * record_bytes_]);
}

void UndoLog::changes(const std::byte* record) {
  const int64_t key = reinterpret_cast<const RowHeader*>(record)->key;
  if (records_ == pieces_.size() * kPieceRecords) pieces_.emplace_back(new std::byte[kPieceRecords * record_bytes_]);
  if (!noted_.note(key, uint32_t(records_))) return;
  std::memcpy(const_cast<std::byte*>(at(uint32_t(records_++))), record, record_bytes_);
}

size_t UndoLog::bytes() const {
  return pieces_.size() * kPieceRecords * record_bytes_ + noted_.bytes() + alphas_.capacity() * sizeof(double);
}

size_t UndoLog::next_record(size_t i) const {
  while (i < keys() && noted_.number(i) == kBorn) ++i;
  return i < keys() ? i : kBorn;
}

}  // namespace lightcc::embedding

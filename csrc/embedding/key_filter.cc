#include "embedding/key_filter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace lightcc::embedding {
namespace {

constexpr int64_t kPieceLines = 1 << 14;  // about

}  // namespace

int KeyFilter::bits_for(uint32_t min_count) {
  for (int bits = 2; bits <= 16; bits *= 2)
    if (min_count - 1 < 1u << bits) return bits;
  return 0;
}

void KeyFilter::set_shape(const FilterShape& shape) {
  *this = KeyFilter();
  shape_ = shape;
  if (!active()) return;
  slots_.assign(kBuckets, 0);
  used_cells_.assign(kBuckets, 0);
}

int64_t KeyFilter::slots_per_piece() const { return std::max<int64_t>(1, kPieceLines / shape_.lines); }

KeyFilter::Line* KeyFilter::lines_of(int64_t bucket) const {
  if (!slots_[size_t(bucket)]) return nullptr;
  const int64_t slot = slots_[size_t(bucket)] - 1;
  return pieces_[size_t(slot / slots_per_piece())].lines.get() + slot % slots_per_piece() * shape_.lines;
}

KeyFilter::Unread* KeyFilter::unread_of(int64_t bucket) const {
  const int64_t slot = slots_[size_t(bucket)] - 1;
  return pieces_[size_t(slot / slots_per_piece())].unread.get() + slot % slots_per_piece() * shape_.lines;
}

uint32_t KeyFilter::cell(int64_t number) const {
  const Line* lines = lines_of(bucket_of_cell(number));
  const int64_t i = number % shape_.cells();
  return lines ? lines[i / FilterShape::kLineCells].cells[i % FilterShape::kLineCells] : 0;
}

uint32_t KeyFilter::count(int64_t key) const {
  uint32_t least = std::numeric_limits<uint32_t>::max();
  at_counters(key, [&](int64_t number, int shift) { least = std::min(least, cell(number) >> shift & most()); });
  return least;
}

void KeyFilter::take_slot(int64_t bucket) {
  if (slots_[size_t(bucket)]) return;
  if (free_.empty()) {
    const auto slots = size_t(slots_per_piece()), lines = slots * size_t(shape_.lines);
    free_.reserve((pieces_.size() + 1) * slots);  // so that one can be given back without failure
    pieces_.reserve(pieces_.size() + 1);
    Piece piece{std::make_unique<Line[]>(lines), std::make_unique<Unread[]>(lines)};
    for (size_t i = slots; i > 0; --i) free_.push_back(uint32_t(pieces_.size() * slots + i - 1));
    pieces_.push_back(std::move(piece));
  }
  slots_[size_t(bucket)] = free_.back() + 1;
  free_.pop_back();
}

void KeyFilter::reserve(std::span<const int64_t> keys) {
  for (int64_t key : keys) take_slot(bucket_of(mix(uint64_t(key))));
}

void KeyFilter::reserve_cells(std::span<const int64_t> numbers) {
  for (int64_t number : numbers) take_slot(bucket_of_cell(number));
}

int KeyFilter::used_counters(uint32_t counters) const {
  int used = 0;
  for (; counters; counters >>= shape_.bits) used += (counters & most()) != 0;
  return used;
}

void KeyFilter::give_slot_back(int64_t bucket) {
  std::fill_n(unread_of(bucket), shape_.lines, Unread());
  free_.push_back(std::exchange(slots_[size_t(bucket)], 0) - 1);
}

// Between two cells of a bucket it may have no slot: the one that it gave back is free then.
void KeyFilter::set_cell(int64_t number, uint32_t counters) {
  const int64_t bucket = bucket_of_cell(number), i = number % shape_.cells();
  if (counters) take_slot(bucket);
  else if (!slots_[size_t(bucket)]) return;
  uint32_t& cell = lines_of(bucket)[i / FilterShape::kLineCells].cells[i % FilterShape::kLineCells];
  used_counters_ += used_counters(counters) - used_counters(cell);
  used_cells_[size_t(bucket)] += uint32_t(counters != 0) - uint32_t(cell != 0);
  cell = counters;
  for (uint16_t& cells : unread_of(bucket)[i / FilterShape::kLineCells].of_reader)
    cells |= uint16_t(1u << i % FilterShape::kLineCells);
  if (!used_cells_[size_t(bucket)]) give_slot_back(bucket);
}

void KeyFilter::has_read(int64_t number, int reader) {
  const int64_t i = number % shape_.cells();
  unread_of(bucket_of_cell(number))[i / FilterShape::kLineCells].forget(reader, 1u << i % FilterShape::kLineCells);
}

void KeyFilter::has_read_all(int reader) {
  for (Piece& piece : pieces_)
    for (int64_t line = 0; line < slots_per_piece() * shape_.lines; ++line)
      piece.unread[size_t(line)].forget(reader, kAllCells);
}

size_t KeyFilter::bytes() const {
  const size_t lines = active() ? pieces_.size() * size_t(slots_per_piece() * shape_.lines) : 0;
  return lines * (sizeof(Line) + sizeof(Unread)) + (slots_.capacity() + used_cells_.capacity()) * sizeof(uint32_t);
}

// A key leaves a counter of its line, one of c, at zero with the probability (1 - 1 / c)^hashes. Of n keys on a line,
// where n is distributed by Poisson's law about its mean, exp(-mean * (1 - (1 - 1 / c)^hashes)) stay at zero.
int64_t KeyFilter::keys(int64_t buckets) const {
  if (!active() || !used_counters_ || !buckets) return 0;
  const double of_line = FilterShape::kLineCells * (32 / shape_.bits), lines = double(buckets * shape_.lines);
  const double zero = std::max(lines * of_line - double(used_counters_), 1.0);
  return std::llround(lines * std::log(lines * of_line / zero) / (1 - std::pow(1 - 1 / of_line, shape_.hashes)));
}

}  // namespace lightcc::embedding

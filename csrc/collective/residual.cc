#include "collective/residual.h"

#include <algorithm>
#include <utility>

namespace lightcc {
namespace {

void add_overlap(std::vector<float>& to, int64_t to_first, const std::vector<float>& from, int64_t from_first) {
  const int64_t begin = std::max(to_first, from_first);
  const int64_t end = std::min(to_first + int64_t(to.size()), from_first + int64_t(from.size()));
  for (int64_t i = begin; i < end; ++i) to[size_t(i - to_first)] += from[size_t(i - from_first)];
}

}  // namespace

const char* name_of(CodecRoute route) {
  return route == CodecRoute::host ? "host" : route == CodecRoute::gpu ? "gpu" : "nccl";
}

CompressionTotals& CompressionTotals::operator+=(const CompressionTotals& other) {
  gradient_bytes += other.gradient_bytes;
  elements += other.elements;
  sent_elements += other.sent_elements;
  sent_bytes += other.sent_bytes;
  dense_sent_bytes += other.dense_sent_bytes;
  return *this;
}

bool Residual::try_hold_at_home() {
  if (!try_hold()) return false;
  bool has_more = true;
  try {
    has_more = step_home();
  } catch (...) {
    let_go();
    throw;
  }
  if (has_more) let_go();
  return !has_more;
}

bool Residual::step_home() {
  const auto piece = std::ranges::find_if(pieces_, [](const ResidualPiece& one) { return one.device != nullptr; });
  if (piece == pieces_.end()) return false;
  if (!coming_) coming_ = piece->device->copy();
  if (coming_->step()) return true;
  piece->values = std::move(coming_->values);
  piece->velocity = std::move(coming_->velocity);
  piece->device = nullptr;
  coming_ = nullptr;
  return true;
}

bool Residual::is_cut(int64_t elements, const std::vector<Range>& ranges, bool velocity) const {
  const auto fits = [](const ResidualPiece& piece, const Range& range) {
    return piece.first == range.first && piece.count() == range.count;
  };
  return elements == elements_ && velocity == velocity_ && saved_.empty() &&
         std::ranges::equal(pieces_, ranges, fits);
}

void Residual::cut(int64_t elements, int node, int nodes, const std::vector<Range>& ranges, bool velocity) {
  node_ = node;
  nodes_ = nodes;
  coming_ = nullptr;  // a device that encodes now replaces what is copied
  if (is_cut(elements, ranges, velocity)) return;
  std::vector<ResidualPiece> old = std::exchange(pieces_, {});
  if (elements != elements_) old.clear();
  for (const Range& range : ranges) {
    ResidualPiece& piece = pieces_.emplace_back();
    piece.first = range.first;
    piece.values.resize(size_t(range.count));
    if (velocity) piece.velocity.resize(size_t(range.count));
    for (const ResidualPiece& before : old) {
      add_overlap(piece.values, piece.first, before.values, before.first);
      add_overlap(piece.velocity, piece.first, before.velocity, before.first);
    }
    for (const SavedPart& part : saved_)
      if (elements == saved_elements_ && part.node % nodes == node)
        add_overlap(part.velocity ? piece.velocity : piece.values, piece.first, part.values, part.first);
  }
  saved_.clear();
  elements_ = elements;
  velocity_ = velocity;
}

void Residual::count(const CompressionTotals& exchange) {
  totals_ += exchange;
  last_ += exchange;
}

void Residual::note_dense(int64_t elements) {
  if (elements_ == 0) elements_ = elements;
}

void Residual::add_saved(int64_t elements, SavedPart part) {
  if (elements != saved_elements_) saved_.clear();
  saved_elements_ = elements;
  saved_.push_back(std::move(part));
}

}  // namespace lightcc

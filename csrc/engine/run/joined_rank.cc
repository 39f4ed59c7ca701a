#include "engine/run/joined_rank.h"

#include <algorithm>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr size_t kFillBytes = 1 << 20;  // at most a step

size_t bytes_of(const TensorSpec& tensor) { return size_t(count_of(tensor.shape)) * size_of(tensor.dtype); }

// The other kinds send no rows, and what they receive lies in memory of the request's own.
bool needs_memory(Kind kind) {
  return kind == Kind::allreduce || kind == Kind::reducescatter || kind == Kind::broadcast;
}

}  // namespace

BatchItem JoinedRank::placeholder(const Response& response) {
  RequestForm form;
  form.key = response.key;
  form.what = response.what;
  form.inputs.resize(response.what.tensors.size());
  form.outputs.resize(response.what.tensors.size());
  auto request = std::make_shared<Request>(std::move(form));
  request->submitted(now_ns());
  return {std::move(request), response.rows, int(response.absent.size()), true};
}

void JoinedResiduals::remember(const Request& request) {
  if (request.residuals.empty()) return;
  auto& known = known_[request.key];
  const auto is_same = [](const std::weak_ptr<Residual>& a, const std::shared_ptr<Residual>& b) {
    return !a.owner_before(b) && !b.owner_before(a);
  };
  if (std::ranges::equal(known, request.residuals, is_same)) return;
  known = {request.residuals.begin(), request.residuals.end()};
}

void JoinedResiduals::give(Request& placeholder) {
  if (placeholder.what.codec.kind == CodecKind::none) return;
  Residuals& kept = kept_[placeholder.key];
  kept.resize(placeholder.what.tensors.size());
  const auto known = known_.find(placeholder.key);
  for (size_t t = 0; t < kept.size(); ++t) {
    if (kept[t]) continue;
    if (known != known_.end() && t < known->second.size()) kept[t] = known->second[t].lock();
    if (!kept[t]) kept[t] = std::make_shared<Residual>();
  }
  placeholder.residuals = kept;
}

// Every tensor begins on a line, those of one dtype one behind the other, so that a fused batch runs in place.
void JoinedRank::lay_out(const std::vector<BatchItem>& items) {
  size_t bytes = 0;
  for (const BatchItem& item : items)
    for (const TensorSpec& tensor : item.request->what.tensors)
      if (needs_memory(item.request->what.kind)) bytes += round_up(bytes_of(tensor));
  std::byte* at = buffer_.at_least(bytes);
  for (int dtype = 0; dtype < kDTypes; ++dtype)
    for (const BatchItem& item : items) {
      Request& request = *item.request;
      const Announcement& what = request.what;
      if (!needs_memory(what.kind)) continue;
      for (size_t t = 0; t < what.tensors.size(); ++t) {
        const TensorSpec& tensor = what.tensors[t];
        if (tensor.dtype != DType(dtype)) continue;
        request.inputs[t] = request.outputs[t] = at;
        if (what.kind != Kind::broadcast)
          pieces_.push_back({{tensor.dtype, what.op, what.pre, what.post}, at, size_t(count_of(tensor.shape))});
        at += round_up(bytes_of(tensor));
      }
    }
  laid_out_ = true;
}

bool JoinedRank::prepare(const std::vector<BatchItem>& items) {
  if (!laid_out_) lay_out(items);
  for (size_t budget = kFillBytes; !pieces_.empty() && budget > 0;) {
    Piece& piece = pieces_.back();
    const size_t element = size_of(piece.reduction.dtype), n = std::min(piece.count, budget / element);
    fill_neutral(piece.reduction, piece.at, n);
    piece.at += n * element;
    piece.count -= n;
    budget = piece.count > 0 ? 0 : budget - n * element;
    if (piece.count == 0) pieces_.pop_back();
  }
  if (!pieces_.empty()) return false;
  laid_out_ = false;
  return true;
}

}  // namespace lightcc

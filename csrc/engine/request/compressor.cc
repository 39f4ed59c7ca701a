#include "engine/request/compressor.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"

namespace lightcc {
namespace {

constexpr int64_t kWarmupStages = 5;
constexpr uint64_t kMostHoldNs = 10'000'000'000;  // compressing the largest tensor on a busy machine takes less
constexpr uint64_t kMostCopyNs = 60'000'000'000;  // of a device, behind what the program has given it

double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += double(value) * double(value);
  return std::sqrt(sum);
}

std::string json_list(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ",") + item;
  return "[" + text + "]";
}

}  // namespace

HeldResidual::HeldResidual(std::shared_ptr<Residual> residual) : residual_(std::move(residual)) {
  const uint64_t deadline = now_ns() + kMostHoldNs;
  while (!residual_->try_hold()) {
    if (now_ns() > deadline)
      throw Error(Code::timeout, "a residual is in use: the exchange of a compressed gradient makes no progress");
    std::this_thread::yield();
  }
}

const std::vector<float>& values_of(const ResidualPiece& piece, bool velocity, std::vector<float>* room) {
  if (!piece.device) return velocity ? piece.velocity : piece.values;
  const auto copy = piece.device->copy();
  for (const uint64_t deadline = now_ns() + kMostCopyNs; copy->step(); std::this_thread::yield())
    if (now_ns() > deadline)
      throw Error(Code::timeout, "what compression has left behind on a GPU cannot be read: the GPU does not go on");
  return *room = std::move(velocity ? copy->velocity : copy->values);
}

Compressor::Compressor(const Codec& codec, int64_t warmup_steps) : codec_(codec), warmup_steps_(warmup_steps) {
  if (codec.kind == CodecKind::none) throw Error(Code::invalid_argument, "compression: none is not a codec");
  if (const char* fault = fault_of(codec)) throw Error(Code::invalid_argument, std::string("compression: ") + fault);
  if (warmup_steps < 0) throw Error(Code::invalid_argument, "compression: warmup_steps must be 0 or more");
}

Residuals Compressor::residuals(int group, const std::string& name, size_t tensors) {
  std::lock_guard lock(mutex_);
  Residuals& found = residuals_[{group, name}];
  while (found.size() < tensors) found.push_back(std::make_shared<Residual>());
  return {found.begin(), found.begin() + long(tensors)};
}

std::shared_ptr<Residual> Compressor::find(int group, const std::string& name, size_t tensor) const {
  std::lock_guard lock(mutex_);
  const auto found = residuals_.find({group, name});
  return found == residuals_.end() || tensor >= found->second.size() ? nullptr : found->second[tensor];
}

Codec Compressor::codec_for(const Residuals& residuals) const {
  Codec codec = codec_;
  int64_t steps = warmup_steps_;
  for (const auto& residual : residuals) steps = std::min(steps, residual->steps());
  if (steps >= warmup_steps_) return codec;
  const double stage = double(steps * kWarmupStages / warmup_steps_ + 1);
  codec.ratio = double(float(std::pow(codec_.ratio, stage / kWarmupStages)));  // the same bits on all machines
  return codec;
}

void Compressor::forget(const std::function<bool(int group)>& ended) {
  std::lock_guard lock(mutex_);
  std::erase_if(residuals_, [&](const auto& one) { return ended(one.first.first); });
}

void Compressor::set_dense(const std::string& why) {
  std::lock_guard lock(mutex_);
  dense_ = why;
}

std::string Compressor::state() const {
  std::unique_lock lock(mutex_);
  const auto all = residuals_;
  const std::string dense = dense_;
  lock.unlock();
  CompressionTotals totals;
  std::vector<std::string> tensors;
  for (const auto& [key, residuals] : all)
    for (size_t t = 0; t < residuals.size(); ++t) {
      const HeldResidual residual(residuals[t]);
      totals += residual->totals();
      if (residual->elements() == 0) continue;  // not exchanged yet
      std::vector<std::string> pieces;
      std::vector<float> room;
      for (const ResidualPiece& piece : residual->pieces())
        pieces.push_back(JsonObject()
                             .add("first", piece.first)
                             .add("count", piece.count())
                             .add("norm", norm_of(values_of(piece, false, &room)))
                             .text());
      tensors.push_back(JsonObject()
                            .add("group", int64_t(key.first))
                            .add("name", key.second)
                            .add("tensor", int64_t(t))
                            .add("elements", residual->elements())
                            .add("steps", residual->steps())
                            .add("node", int64_t(residual->node()))
                            .add("nodes", int64_t(residual->nodes()))
                            .add("route", name_of(residual->route()))
                            .add_json("velocity", residual->has_velocity() ? "true" : "false")
                            .add_json("pieces", json_list(pieces))
                            .text());
    }
  return JsonObject()
      .add("gradient_bytes", int64_t(totals.gradient_bytes))
      .add("sent_bytes", int64_t(totals.sent_bytes))
      .add("dense_sent_bytes", int64_t(totals.dense_sent_bytes))
      .add("sent_elements", int64_t(totals.sent_elements))
      .add("elements", int64_t(totals.elements))
      .add("dense", dense)
      .add_json("tensors", json_list(tensors))
      .text();
}

}  // namespace lightcc

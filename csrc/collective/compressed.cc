#include "collective/compressed.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "collective/local_phases.h"
#include "collective/phases.h"
#include "collective/piece_codec.h"
#include "device/device.h"
#include "device/float32.h"

namespace lightcc {
namespace {

Collective without_prescale(Collective c) {
  c.pre = 1;
  return c;
}

// Every node receives the messages of all others, but of a dense sum only as much as 2 (N - 1) / N vectors.
double share_of_dense(const Codec& codec, DType dtype, int nodes) {
  constexpr size_t kMany = size_t(1) << 30;
  return double(piece_bytes(codec, kMany)) * nodes / (2.0 * double(kMany) * double(size_of(dtype)));
}

}  // namespace

bool compresses(const Codec& codec, DType dtype, int nodes) {
  return nodes > 1 && codec.kind != CodecKind::none && share_of_dense(codec, dtype, nodes) < 1;
}

std::string why_dense(const Codec& codec, DType dtype, int nodes) {
  if (compresses(codec, dtype, nodes)) return "";
  if (nodes < 2) return "all ranks are on one host";
  if (codec.kind == CodecKind::none) return "no compression was asked for";
  return text_of(codec) + " among " + std::to_string(nodes) + " hosts would send " +
         std::to_string(int(std::lround(100 * share_of_dense(codec, dtype, nodes)))) + " % of the bytes of " +
         name_of(dtype);
}

bool CompressedBackend::accepts(const Collective& c) const {
  const bool adds = c.kind == Kind::allreduce && c.op == ReduceOp::sum;
  const bool floats = c.dtype == DType::float32 || c.dtype == DType::float16 || c.dtype == DType::bfloat16;
  return adds && floats && compresses(c.codec, c.dtype, links_->nodes());
}

// ---- one all-reduce

class CompressedAllreduce : public Work {
 public:
  CompressedAllreduce(NodeLinks& links, const Collective& c, std::unique_ptr<CompressedExchange> exchange)
      : c_(without_prescale(c)),
        scale_(float(c.pre)),
        element_(int64_t(size_of(c.dtype))),
        links_(links),
        node_(links.members()),
        exchange_(std::move(exchange)),
        encoder_(make_piece_encoder(c.codec)),
        times_(c.timed) {
    if (!links_.alone()) local_.emplace(links_, c_);
  }

  ~CompressedAllreduce() override {
    if (held_) held_->let_go();
    if (!done()) links_.give_up();
  }

  bool step() override {
    links_.check();
    times_.begin_step();
    bool moved = exchange_->step(encoded_parts());
    moved |= gather();
    moved |= add();
    moved |= encode();
    moved |= reduce();
    if (done()) exchange_->release();
    if (times_.timed() && moved) note_times();
    return moved;
  }
  std::span<const TimedPhase> phases() const override { return times_.phases(); }
  bool done() const override { return gathered_ == tensors().size(); }
  std::optional<NoMemory> no_memory() const override { return exchange_->no_memory(); }

  int waiting_for() const override {
    if (done()) return -1;
    if (gather_) return node_[size_t(gather_->waiting_for())];
    if (exchange_->exchanged() < exchange_->started()) return exchange_->waiting_for();
    if (reduce_) return node_[size_t(reduce_->waiting_for())];
    const int place = local_ ? local_->waiting_for() : -1;
    return place < 0 ? -1 : node_[size_t(place)];
  }

 private:
  using Tensor = CompressedTensor;
  using Shard = CompressedShard;
  const std::vector<Tensor>& tensors() const { return exchange_->layout().tensors; }
  size_t encoded_parts() const { return encoded_ == tensors().size() ? exchange_->parts() : tensors()[encoded_].part; }
  const void* input(const Tensor& tensor, int64_t element) const {
    return at(c_.input, (tensor.place.offset + element) * element_);
  }
  void* output(const Tensor& tensor, int64_t element) const {
    return at(c_.output, (tensor.place.offset + element) * element_);
  }
  bool is_float32() const { return c_.dtype == DType::float32; }

  void note_times() {
    const size_t n = tensors().size();
    if (!links_.alone()) times_.note("LOCAL_REDUCESCATTER", true, reduced_ == n);
    times_.note("COMPRESS", reduced_ > 0, encoded_ == n);
    times_.note("CROSS_ALLGATHER", exchange_->started() > 0, exchange_->exchanged() == exchange_->parts());
    times_.note("DECOMPRESS", exchange_->exchanged() > 0, added_ == n);
    if (!links_.alone()) times_.note("LOCAL_ALLGATHER", gather_ || gathered_ > 0, gathered_ == n);
  }

  // ---- the queues

  bool reduce() {
    if (reduced_ == tensors().size()) return false;
    if (links_.alone()) {
      reduced_ = tensors().size();
      return true;
    }
    if (!local_->knows_inputs()) {
      const bool moved = local_->step();
      if (!local_->knows_inputs()) return moved;
    }
    return advance(reduce_, reduced_, [&] {
      const Tensor& tensor = tensors()[reduced_];
      return local_->reduce_scatter(tensor.place.offset, tensor.counts);
    });
  }

  // A shard a time, a block of it a step.
  bool encode() {
    if (encoded_ == reduced_) return false;
    const Tensor& tensor = tensors()[encoded_];
    Residual& residual = *c_.residuals[encoded_];
    if (!held_) {
      if (!residual.try_hold_at_home()) return true;  // who copies it rings nobody when it has finished
      held_ = &residual;
      begin_tensor(tensor);
    }
    if (lane_ < tensor.shards.size()) {
      encode_shard(tensor);
      return true;
    }
    end_tensor(tensor);
    held_->let_go();
    held_ = nullptr;
    lane_ = 0;
    ++encoded_;
    return true;
  }

  void begin_tensor(const Tensor& tensor) {
    std::vector<Residual::Range> ranges;
    for (const Shard& shard : tensor.shards) ranges.push_back({shard.first, shard.count});
    held_->cut(tensor.place.count, links_.node(), links_.nodes(), ranges, c_.codec.momentum > 0);
    for (size_t lane = 0; lane < tensor.shards.size(); ++lane) {
      if (exchange_->has_memory(tensor.part, lane)) continue;
      const size_t bytes = exchange_->message_bytes(tensor.part, lane) * size_t(links_.nodes());
      const auto memory = std::make_shared_for_overwrite<std::byte[]>(bytes);
      exchange_->lend(tensor.part, lane, {memory, memory.get()});
    }
  }

  void encode_shard(const Tensor& tensor) {
    const Shard& shard = tensor.shards[lane_];
    const size_t count = size_t(shard.count);
    if (!encoding_ && copied_ < count) return copy_block(tensor, shard);
    if (!encoding_ && count > 0) {
      encoder_->start({gradient_of(tensor, shard), count, scale_, &held_->pieces()[lane_],
                       exchange_->message(tensor.part, lane_, links_.node()) + shard.body});
      encoding_ = true;
    }
    if (encoding_ && encoder_->step()) return;
    encoding_ = false;
    copied_ = 0;
    ++lane_;
  }

  // Where the encoder finds the sum as float32, and may overwrite it.
  float* gradient_of(const Tensor& tensor, const Shard& shard) {
    return is_float32() ? static_cast<float*>(output(tensor, shard.first)) : gradients_.data();
  }
  // Where a rank is alone the sum is its own input, which must not be changed.
  void copy_block(const Tensor& tensor, const Shard& shard) {
    const size_t count = size_t(shard.count), n = std::min(kCodecBlock, count - copied_);
    const int64_t first = shard.first + int64_t(copied_);
    const void* sum = links_.alone() ? input(tensor, first) : output(tensor, first);
    if (!is_float32()) {
      gradients_.resize(count);
      to_float32(c_.dtype, sum, gradients_.data() + copied_, n);
    } else if (sum == output(tensor, first)) {
      copied_ = count;  // it lies there already
      return;
    } else {
      copy(output(tensor, first), sum, n * sizeof(float));
    }
    copied_ += n;
  }

  void end_tensor(const Tensor& tensor) {
    held_->set_on_gpu(false);
    held_->count(exchange_->totals_of(tensor));
  }

  // A block of a shard a step: zero, and the nodes' messages in their order.
  bool add() {
    if (added_ == tensors().size() || tensors()[added_].part >= exchange_->exchanged()) return false;
    const Tensor& tensor = tensors()[added_];
    if (tensor.shards.empty() || !has_values(tensor)) {  // a node may have fewer lanes than members
      ++added_;
      return true;
    }
    const Shard& shard = tensor.shards[add_lane_];
    const size_t count = size_t(shard.count);
    if (count > 0) {
      if (block_ == 0) read_messages(tensor, shard);
      const size_t first = block_ * kCodecBlock, n = std::min(kCodecBlock, count - first);
      if (!is_float32()) sums_.resize(count);
      float* sum = is_float32() ? static_cast<float*>(output(tensor, shard.first)) : sums_.data();
      std::fill_n(sum + first, n, 0.0f);
      for (const auto& one : received_) one->add_to(sum, block_);
      scale(sum + first, n);
      if (!is_float32()) from_float32(c_.dtype, sum + first, output(tensor, shard.first + int64_t(first)), n);
      if (++block_ * kCodecBlock < count) return true;
    }
    block_ = 0;
    if (++add_lane_ < tensor.shards.size()) return true;
    add_lane_ = 0;
    ++added_;
    return true;
  }

  bool has_values(const Tensor& tensor) {
    bool has = true;
    for (size_t lane = 0; lane < tensor.shards.size(); ++lane) has &= exchange_->check(tensor.part, lane);
    return has;
  }

  void read_messages(const Tensor& tensor, const Shard& shard) {
    received_.clear();
    for (int node = 0; node < links_.nodes(); ++node)
      received_.push_back(read_piece(c_.codec, {exchange_->message(tensor.part, add_lane_, node) + shard.body,
                                                piece_bytes(c_.codec, size_t(shard.count))},
                                     size_t(shard.count)));
  }

  void scale(float* values, size_t n) const {
    if (c_.post == 1) return;
    void* out = values;
    const void* in = values;
    lightcc::reduce({DType::float32, ReduceOp::sum, 1, c_.post}, {&out, 1}, {&in, 1}, n);
  }

  bool gather() {
    if (gathered_ == added_) return false;
    if (links_.alone()) {
      gathered_ = added_;
      return true;
    }
    return advance(gather_, gathered_, [&] {
      const Tensor& tensor = tensors()[gathered_];
      return local_->all_gather(tensor.place.offset, tensor.counts);
    });
  }

  const Collective c_;
  const float scale_;                           // the prescale factor: applied in float32, as sums may be 16 bits
  const int64_t element_;
  NodeLinks& links_;
  const std::vector<int>& node_;                // the members here
  const std::unique_ptr<CompressedExchange> exchange_;
  size_t reduced_ = 0, encoded_ = 0;            // so many tensors
  size_t added_ = 0, gathered_ = 0;             // so many tensors
  std::optional<LocalPhases> local_;            // none where this rank is alone
  std::unique_ptr<Work> reduce_, gather_;
  const std::unique_ptr<PieceEncoder> encoder_;
  Residual* held_ = nullptr;                    // of tensor encoded_
  bool encoding_ = false;                       // its shard lane_
  size_t lane_ = 0, copied_ = 0;                // and so many elements of it
  size_t add_lane_ = 0, block_ = 0;             // of tensor added_
  std::vector<std::unique_ptr<PieceMessage>> received_;  // of that shard, by node
  std::vector<float> gradients_, sums_;         // where elements are no float32
  PhaseTimes times_;
};

std::unique_ptr<CompressedExchange> CompressedBackend::exchange(const Collective& c) {
  if (!accepts(c) || c.tensors.size() != c.residuals.size() || c.tensors.empty())
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with compression " + text_of(c.codec) +
                                    " was given to the compressed all-reduce");
  return std::make_unique<CompressedExchange>(*links_, c, started_++);
}

std::unique_ptr<Work> CompressedBackend::start(const Collective& c, const Algorithm*) {
  return std::make_unique<CompressedAllreduce>(*links_, c, exchange(c));
}

}  // namespace lightcc

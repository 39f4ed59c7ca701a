#include "collective/compressed.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "collective/local_phases.h"
#include "collective/piece_codec.h"
#include "collective/pipeline.h"
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
        links_(links),
        node_(links.members()),
        exchange_(std::move(exchange)),
        encoder_(make_piece_encoder(c.codec)),
        pipeline_(stages()),
        times_(c.timed) {
    if (!links_.alone()) local_.emplace(links_, c_);
  }

  ~CompressedAllreduce() override {
    if (!done()) links_.give_up();
  }

  bool step() override {
    links_.check();
    times_.begin_step();
    bool moved = exchange_->step(encoded_parts());
    moved |= pipeline_.step();
    if (done()) exchange_->release();
    if (times_.timed() && moved) note_times();
    return moved;
  }
  std::span<const TimedPhase> phases() const override { return times_.phases(); }
  bool done() const override { return pipeline_.done(); }
  std::optional<NoMemory> no_memory() const override { return exchange_->no_memory(); }
  int waiting_for() const override {
    if (!done() && exchange_->exchanged() < exchange_->started()) return exchange_->waiting_for();
    return pipeline_.waiting_for();
  }

 private:
  using Tensor = CompressedTensor;
  using Shard = CompressedShard;
  class Encoding;
  class Addition;

  // The exchange, of parts and not of tensors, goes on beside these.
  std::vector<Pipeline::Stage> stages() {
    const size_t n = tensors().size();
    Pipeline::Stage reduce{"LOCAL_REDUCESCATTER", n, [this](size_t tensor) {
      return local_->reduce_scatter(tensors()[tensor].place.offset, tensors()[tensor].counts);
    }};
    Pipeline::Stage encode{"COMPRESS", n, [this](size_t tensor) { return start_encoding(tensor); }};
    Pipeline::Stage add{"DECOMPRESS", n, [this](size_t tensor) { return start_addition(tensor); }};
    Pipeline::Stage gather{"LOCAL_ALLGATHER", n, [this](size_t tensor) {
      return local_->all_gather(tensors()[tensor].place.offset, tensors()[tensor].counts);
    }};
    reduce.members = gather.members = &node_;
    add.ready = [this] { return exchange_->exchanged() == 0 ? 0 : parts()[exchange_->exchanged() - 1].end; };
    if (links_.alone()) return {encode, add};
    return {reduce, encode, add, gather};
  }
  const std::vector<Tensor>& tensors() const { return exchange_->layout().tensors; }
  const std::vector<CompressedPart>& parts() const { return exchange_->layout().parts; }
  size_t encoded_parts() const {
    const size_t encoded = pipeline_.left(links_.alone() ? 0 : 1);
    return encoded == tensors().size() ? parts().size() : tensors()[encoded].part;
  }
  void note_times() {
    times_.note("CROSS_ALLGATHER", exchange_->started() > 0, exchange_->exchanged() == parts().size());
    pipeline_.note(times_);
  }
  const void* input(const Tensor& tensor, int64_t element) const {
    return at(c_.input, (tensor.place.offset + element) * int64_t(size_of(c_.dtype)));
  }
  void* output(const Tensor& tensor, int64_t element) const {
    return at(c_.output, (tensor.place.offset + element) * int64_t(size_of(c_.dtype)));
  }
  bool is_float32() const { return c_.dtype == DType::float32; }
  std::unique_ptr<Work> start_encoding(size_t tensor);
  std::unique_ptr<Work> start_addition(size_t tensor);

  const Collective c_;
  const float scale_;                  // the prescale factor: applied in float32, as sums may be 16 bits
  NodeLinks& links_;
  const std::vector<int>& node_;       // the members here
  const std::unique_ptr<CompressedExchange> exchange_;
  std::optional<LocalPhases> local_;   // none where this rank is alone
  const std::unique_ptr<PieceEncoder> encoder_;
  std::vector<float> gradients_, sums_;  // where elements are no float32
  Pipeline pipeline_;
  PhaseTimes times_;
};

// What this rank owns of a tensor becomes messages: a shard a time, a block of it a step.
class CompressedAllreduce::Encoding : public Work {
 public:
  Encoding(CompressedAllreduce& whole, size_t tensor)
      : whole_(whole), tensor_(whole.tensors()[tensor]), residual_(*whole.c_.residuals[tensor]) {}
  ~Encoding() override {
    if (held_) residual_.let_go();
  }
  bool step() override {
    if (!held_) {
      if (!residual_.try_hold_at_home()) return true;  // who copies it rings nobody when it has finished
      held_ = true;
      begin();
    }
    if (lane_ < tensor_.shards.size()) encode(tensor_.shards[lane_]);
    else end();
    return true;
  }
  bool done() const override { return done_; }
  int waiting_for() const override { return -1; }

 private:
  void begin() {
    CompressedExchange& exchange = *whole_.exchange_;
    std::vector<Residual::Range> ranges;
    for (const Shard& shard : tensor_.shards) ranges.push_back({shard.first, shard.count});
    residual_.cut(tensor_.place.count, whole_.links_.node(), whole_.links_.nodes(), ranges,
                  whole_.c_.codec.momentum > 0);
    for (size_t lane = 0; lane < tensor_.shards.size(); ++lane) {
      if (exchange.has_memory(tensor_.part, lane)) continue;
      const size_t bytes = exchange.message_bytes(tensor_.part, lane) * size_t(whole_.links_.nodes());
      const auto memory = std::make_shared_for_overwrite<std::byte[]>(bytes);
      exchange.lend(tensor_.part, lane, {memory, memory.get()});
    }
  }
  void encode(const Shard& shard) {
    const size_t count = size_t(shard.count);
    if (!encoding_ && copied_ < count) return copy_block(shard);
    if (!encoding_ && count > 0) {
      std::byte* const message = whole_.exchange_->message(tensor_.part, lane_, whole_.links_.node());
      whole_.encoder_->start({gradient_of(shard), count, whole_.scale_, &residual_.pieces()[lane_],
                              message + shard.body});
      encoding_ = true;
    }
    if (encoding_ && whole_.encoder_->step()) return;
    encoding_ = false;
    copied_ = 0;
    ++lane_;
  }
  void end() {
    residual_.set_route(CodecRoute::host);
    residual_.count(totals_of(tensor_, whole_.c_.codec, whole_.c_.dtype, whole_.links_.nodes()));
    residual_.let_go();
    held_ = false;
    done_ = true;
  }

  // Where the encoder finds the sum as float32, and may overwrite it.
  float* gradient_of(const Shard& shard) {
    return whole_.is_float32() ? static_cast<float*>(whole_.output(tensor_, shard.first)) : whole_.gradients_.data();
  }
  // Where a rank is alone the sum is its own input, which must not be changed.
  void copy_block(const Shard& shard) {
    const size_t count = size_t(shard.count), n = std::min(kCodecBlock, count - copied_);
    const int64_t first = shard.first + int64_t(copied_);
    void* const output = whole_.output(tensor_, first);
    const void* const sum = whole_.links_.alone() ? whole_.input(tensor_, first) : output;
    if (!whole_.is_float32()) {
      whole_.gradients_.resize(count);
      to_float32(whole_.c_.dtype, sum, whole_.gradients_.data() + copied_, n);
    } else if (sum == output) {
      copied_ = count;  // it lies there already
      return;
    } else {
      copy(output, sum, n * sizeof(float));
    }
    copied_ += n;
  }

  CompressedAllreduce& whole_;
  const Tensor& tensor_;
  Residual& residual_;
  bool held_ = false, encoding_ = false, done_ = false;  // encoding_: shard lane_
  size_t lane_ = 0, copied_ = 0;                         // and so many elements of it
};

// The nodes' messages of a tensor become its sum: a block of a shard a step, zero and the messages in their order.
class CompressedAllreduce::Addition : public Work {
 public:
  Addition(CompressedAllreduce& whole, size_t tensor) : whole_(whole), tensor_(whole.tensors()[tensor]) {
    bool has_values = true;
    for (size_t lane = 0; lane < tensor_.shards.size(); ++lane)
      has_values &= whole_.exchange_->check(tensor_.part, lane);
    if (!has_values) lane_ = tensor_.shards.size();
  }
  bool step() override {
    const Shard& shard = tensor_.shards[lane_];
    const size_t count = size_t(shard.count);
    if (count > 0) {
      if (block_ == 0) read_messages(shard);
      add_block(shard);
      if (++block_ * kCodecBlock < count) return true;
    }
    block_ = 0;
    ++lane_;
    return true;
  }
  bool done() const override { return lane_ == tensor_.shards.size(); }  // a node may have fewer lanes than members
  int waiting_for() const override { return -1; }

 private:
  void add_block(const Shard& shard) {
    const size_t count = size_t(shard.count), first = block_ * kCodecBlock, n = std::min(kCodecBlock, count - first);
    void* const output = whole_.output(tensor_, shard.first);
    if (!whole_.is_float32()) whole_.sums_.resize(count);
    float* const sum = whole_.is_float32() ? static_cast<float*>(output) : whole_.sums_.data();
    std::fill_n(sum + first, n, 0.0f);
    for (const auto& one : received_) one->add_to(sum, block_);
    scale(sum + first, n);
    if (!whole_.is_float32())
      from_float32(whole_.c_.dtype, sum + first, whole_.output(tensor_, shard.first + int64_t(first)), n);
  }
  void read_messages(const Shard& shard) {
    const size_t count = size_t(shard.count), bytes = piece_bytes(whole_.c_.codec, count);
    received_.clear();
    for (int node = 0; node < whole_.links_.nodes(); ++node) {
      const std::byte* const message = whole_.exchange_->message(tensor_.part, lane_, node);
      received_.push_back(read_piece(whole_.c_.codec, {message + shard.body, bytes}, count));
    }
  }
  void scale(float* values, size_t n) const {
    if (whole_.c_.post == 1) return;
    void* out = values;
    const void* in = values;
    reduce({DType::float32, ReduceOp::sum, 1, whole_.c_.post}, {&out, 1}, {&in, 1}, n);
  }

  CompressedAllreduce& whole_;
  const Tensor& tensor_;
  size_t lane_ = 0, block_ = 0;
  std::vector<std::unique_ptr<PieceMessage>> received_;  // of a shard, by node
};

std::unique_ptr<Work> CompressedAllreduce::start_encoding(size_t tensor) {
  return std::make_unique<Encoding>(*this, tensor);
}
std::unique_ptr<Work> CompressedAllreduce::start_addition(size_t tensor) {
  return std::make_unique<Addition>(*this, tensor);
}

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

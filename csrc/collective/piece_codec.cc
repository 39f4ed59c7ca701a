#include "collective/piece_codec.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "device/quantization.h"
#include "device/topk_message.h"

namespace lightcc {
namespace {

constexpr size_t kWrittenEntries = 64 << 10;  // a step

// Momentum correction (Lin et al. 2018): velocity = momentum * velocity + gradient is what is accumulated in the
// residual, and where an element is sent its velocity ends, too ("momentum factor masking").
class TopKEncoder : public PieceEncoder {
 public:
  explicit TopKEncoder(const Codec& codec) : codec_(codec) {}

  void start(const PieceTask& task) override {
    task_ = task;
    at_ = 0;
    if (codec_.momentum > 0) {
      velocity_.resize(task.count);
      phase_ = Phase::accelerate;
    } else {
      select();
    }
  }

  bool step() override {
    switch (phase_) {
      case Phase::accelerate: accelerate(); break;
      case Phase::select:
        if (!selection_.step()) end_selection();
        break;
      case Phase::write: write(); break;
      case Phase::done: break;
    }
    return phase_ != Phase::done;
  }

 private:
  enum class Phase { accelerate, select, write, done };

  void accelerate() {
    const size_t begin = at_, end = std::min(task_.count, at_ + kCodecBlock);
    const float momentum = float(codec_.momentum);
    for (; at_ < end; ++at_)
      task_.gradient[at_] = momentum * task_.residual->velocity[at_] + task_.scale * task_.gradient[at_];
    std::copy(task_.gradient + begin, task_.gradient + end, velocity_.begin() + long(begin));
    if (at_ < task_.count) return;
    task_.scale = 1;
    select();
  }

  void select() {
    selection_.start({task_.gradient, task_.residual->values.data(), task_.count,
                      piece_elements(codec_, task_.count), task_.scale, codec_.width},
                     task_.residual->warm);
    phase_ = Phase::select;
  }

  void end_selection() {
    const TopKSelected& selected = selection_.selected();
    if (codec_.momentum > 0 && selected.finite) {
      size_t entry = 0;
      for (size_t block = 0; block < selected.counts.size(); ++block)
        for (uint32_t i = 0; i < selected.counts[block]; ++i)
          velocity_[block * kCodecBlock + selected.indices[entry++]] = 0;
      std::copy_n(velocity_.begin(), task_.count, task_.residual->velocity.begin());
    }
    at_ = 0;
    phase_ = Phase::write;
  }

  void write() {
    const TopKSelected& selected = selection_.selected();
    const size_t end = std::min(selected.indices.size(), at_ + kWrittenEntries);
    write_topk_message(selected, codec_.width, at_, end, task_.body);
    at_ = end;
    if (at_ == selected.indices.size()) phase_ = Phase::done;
  }

  const Codec codec_;
  TopKSelection selection_;
  PieceTask task_{};
  std::vector<float> velocity_;  // of this step, until all sums are known to be finite
  Phase phase_ = Phase::done;
  size_t at_ = 0;                // elements accelerated, then entries written
};

template <class Format> class QuantizedEncoder : public PieceEncoder {
 public:
  void start(const PieceTask& task) override {
    encoding_.start({task.gradient, task.residual->values.data(), task.count, task.scale}, task.body);
  }
  bool step() override { return encoding_.step(); }

 private:
  QuantizedEncoding<Format> encoding_;
};

template <class Format> class QuantizedPieceMessage : public PieceMessage {
 public:
  QuantizedPieceMessage(ConstSpan body, size_t count) : message_(body, count) {}
  void add_to(float* out, size_t block) const override { message_.add_to(out, block); }

 private:
  const QuantizedMessage<Format> message_;
};

class TopKPieceMessage : public PieceMessage {
 public:
  TopKPieceMessage(ConstSpan body, size_t count, DType width) : message_(body, count, width) {}
  void add_to(float* out, size_t block) const override { message_.add_to(out, block); }

 private:
  const TopKMessage message_;
};

[[noreturn]] void no_codec() { throw Error(Code::internal, "a tensor is to be compressed, and by no codec"); }

}  // namespace

size_t piece_elements(const Codec& codec, size_t count) {
  if (codec.kind != CodecKind::topk) return count;
  return std::min(count, size_t(std::ceil(codec.ratio * double(count))));
}

size_t piece_bytes(const Codec& codec, size_t count) {
  if (count == 0) return 0;
  switch (codec.kind) {
    case CodecKind::topk: return topk_message_bytes(count, piece_elements(codec, count), codec.width);
    case CodecKind::int8: return quantized_bytes<Int8>(count);
    case CodecKind::int4: return quantized_bytes<Int4>(count);
    case CodecKind::none: break;
  }
  no_codec();
}

std::unique_ptr<PieceEncoder> make_piece_encoder(const Codec& codec) {
  switch (codec.kind) {
    case CodecKind::topk: return std::make_unique<TopKEncoder>(codec);
    case CodecKind::int8: return std::make_unique<QuantizedEncoder<Int8>>();
    case CodecKind::int4: return std::make_unique<QuantizedEncoder<Int4>>();
    case CodecKind::none: break;
  }
  no_codec();
}

std::unique_ptr<PieceMessage> read_piece(const Codec& codec, ConstSpan body, size_t count) {
  switch (codec.kind) {
    case CodecKind::topk: return std::make_unique<TopKPieceMessage>(body, count, codec.width);
    case CodecKind::int8: return std::make_unique<QuantizedPieceMessage<Int8>>(body, count);
    case CodecKind::int4: return std::make_unique<QuantizedPieceMessage<Int4>>(body, count);
    case CodecKind::none: break;
  }
  no_codec();
}

}  // namespace lightcc

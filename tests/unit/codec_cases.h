// What codecs are tested with: the inputs of those of CPUs (unit/device), and for those of GPUs random pieces step by
// step beside the CPU's, as plain C++ (unit/device/cuda/cuda_codec_test.cc) and on a GPU (tests/gpu/codec_bits.cc).
// Memory says where the kernels' memory is: allocate(bytes), release(memory), write(to, from, bytes) and
// read(to, from, bytes), all static.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collective/piece_codec.h"
#include "device/cuda/codec_pieces.h"
#include "device/float32.h"
#include "device/topk_message.h"

namespace lightcc::test {

// Bytes with others around them, which must not change.
template <class Memory>
class Buffer {
 public:
  // shift: bytes from a multiple of 256 on.
  explicit Buffer(size_t bytes, size_t shift = 0) : bytes_(bytes), before_(kAround + shift) {
    memory_ = static_cast<std::byte*>(Memory::allocate(before_ + bytes_ + kAround));
    std::vector<std::byte> all(before_ + bytes_ + kAround, kGuard);
    std::fill_n(all.begin() + long(before_), bytes_, std::byte{0});
    Memory::write(memory_, all.data(), all.size());
  }
  ~Buffer() { Memory::release(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* get() const { return memory_ + before_; }
  size_t size() const { return bytes_; }
  void set(const void* from) { Memory::write(get(), from, bytes_); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> out(bytes_);
    Memory::read(out.data(), get(), bytes_);
    return out;
  }
  bool is_intact() const {
    std::vector<std::byte> all(before_ + bytes_ + kAround);
    Memory::read(all.data(), memory_, all.size());
    std::fill_n(all.begin() + long(before_), bytes_, kGuard);
    return std::ranges::all_of(all, [](std::byte b) { return b == kGuard; });
  }

 private:
  static constexpr size_t kAround = 256;
  static constexpr std::byte kGuard{0x5a};
  const size_t bytes_, before_;
  std::byte* memory_;
};

// ---- gradients

enum class Draw {
  normal, heavy_tailed, zeros, equal, signed_zeros, subnormal, few_values, sparse, outliers_in_a_tile, one_nan,
  one_infinity, overflowing, smallest_and_largest
};
inline constexpr int kDraws = 13;

inline std::vector<float> draw(Draw kind, size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) {
    const float one = normal(random);
    switch (kind) {
      case Draw::heavy_tailed: x = one * std::exp(3 * normal(random)); break;
      case Draw::zeros: x = 0; break;
      case Draw::equal: x = 0.75f; break;
      case Draw::signed_zeros: x = random() % 8 ? std::copysign(0.0f, one) : one; break;
      case Draw::subnormal: x = one * 1e-40f; break;
      case Draw::few_values: x = float(int(random() % 5) - 2); break;
      case Draw::sparse: x = random() % 500 ? 0 : one; break;
      case Draw::overflowing: x = std::copysign(random() % 100 ? std::fabs(one) : 3e38f, one); break;
      case Draw::smallest_and_largest:
        x = std::copysign(random() % 2 ? 1e-38f : 6e4f + std::fabs(one) * 1e3f, one);
        break;
      default: x = one;
    }
  }
  const size_t at = random() % count;
  if (kind == Draw::one_nan) out[at] = std::bit_cast<float>(0x7fc00000u | uint32_t(random() & 0x803fffffu));
  if (kind == Draw::one_infinity) out[at] = std::copysign(std::numeric_limits<float>::infinity(), out[at]);
  if (kind == Draw::outliers_in_a_tile)
    for (size_t i = at; i < std::min(count, at + 2000); ++i) out[i] *= 100;
  return out;
}

// What a codec is given: it encodes what was left behind and the scaled gradient, added up.
struct Input {
  std::vector<float> gradient, residual;
  float scale = 1;
  std::vector<float> sums() const {
    std::vector<float> all(gradient.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const float scaled = scale * gradient[i];
      all[i] = residual[i] + scaled;
    }
    return all;
  }
};

// ---- a piece

inline std::string first_difference(const std::vector<std::byte>& want, const std::vector<std::byte>& got,
                                    const char* what) {
  const auto differs = std::ranges::mismatch(want, got).in1;
  if (differs == want.end() && want.size() == got.size()) return "";
  return std::string(what) + " differs from byte " + std::to_string(differs - want.begin()) + " of " +
         std::to_string(want.size()) + " on";
}

// One piece, encoded step by step by the CPU's encoder and by kernels.
template <class Memory>
class EncodeTrial {
 public:
  // most: elements.
  EncodeTrial(CodecKind kind, unsigned seed, size_t most)
      : random_(seed),
        count_(count_of(most)),
        codec_(codec_of(kind)),
        type_(DType(std::vector{DType::float32, DType::float16, DType::bfloat16}[random_() % 3])),
        scale_(random_() % 3 ? 1.0f : 0.1f),
        gradient_(count_ * size_of(type_), random_() % 2 * size_of(type_) * (random_() % 8)),
        residual0_(count_ * 4, shift()),
        residual1_(count_ * 4, shift()),
        velocity0_(codec_.momentum > 0 ? count_ * 4 : 4),
        velocity1_(codec_.momentum > 0 ? count_ * 4 : 4),
        state_(sizeof(gpu::CodecState)),
        body_(piece_bytes(codec_, count_), random_() % 4),
        encoder_(make_piece_encoder(codec_)) {
    residual_.values.resize(count_);
    if (codec_.momentum > 0) residual_.velocity.resize(count_);
    name_ = text_of(codec_) + " of " + std::to_string(count_) + " " + name_of(type_) + ", seed " + std::to_string(seed);
  }

  const std::string& name() const { return name_; }
  size_t count() const { return count_; }
  const Codec& codec() const { return codec_; }

  // Draws the next gradient and has the CPU encode it.
  void begin_step() {
    const Draw kind = Draw(random_() % 2 ? 0 : random_() % kDraws);
    std::vector<float> floats = draw(kind, count_, random_);
    if (random_() % 4 == 0) magnitude_ *= random_() % 2 ? 1000.0f : 0.001f;
    else if (random_() % 2) magnitude_ *= 1.2f;
    if (magnitude_ < 1e-9f || magnitude_ > 1e9f) magnitude_ = 1;
    for (float& x : floats) x *= magnitude_;
    std::vector<std::byte> stored(count_ * size_of(type_));
    from_float32(type_, floats.data(), stored.data(), count_);
    gradient_.set(stored.data());
    to_float32(type_, stored.data(), floats.data(), count_);
    want_.resize(body_.size());
    encoder_->start({floats.data(), count_, scale_, &residual_, want_.data()});
    while (encoder_->step()) {}
    drawn_ = ", draw " + std::to_string(int(kind)) + " times " + std::to_string(magnitude_);
  }

  CudaEncode piece() const {
    const bool moves = codec_.momentum > 0;
    const auto floats = [](const Buffer<Memory>& buffer) { return reinterpret_cast<float*>(buffer.get()); };
    CudaEncode piece{};
    piece.gradient = gradient_.get();
    piece.residual[0] = floats(residual0_);
    piece.residual[1] = floats(residual1_);
    piece.velocity[0] = moves ? floats(velocity0_) : nullptr;
    piece.velocity[1] = moves ? floats(velocity1_) : nullptr;
    piece.state = state_.get();
    piece.body = body_.get();
    piece.count = count_;
    piece.k = piece_elements(codec_, count_);
    piece.scale = scale_;
    piece.momentum = float(codec_.momentum);
    piece.dtype = int(type_);
    piece.half = codec_.width == DType::float16;
    return piece;
  }

  // "", or how what the kernels have written is not what the CPU has.
  std::string difference() const {
    const std::vector<std::byte> state_bytes = state_.read();
    gpu::CodecState state;
    std::memcpy(&state, state_bytes.data(), sizeof state);
    std::string found = first_difference(want_, body_.read(), "the message");
    const auto compare = [&](const std::vector<float>& want, const Buffer<Memory>& first, const Buffer<Memory>& second,
                             const char* what) {
      const auto* bytes = reinterpret_cast<const std::byte*>(want.data());
      if (found.empty() && !want.empty())
        found = first_difference({bytes, bytes + want.size() * 4}, (state.holds ? second : first).read(), what);
    };
    compare(residual_.values, residual0_, residual1_, "the residual");
    compare(residual_.velocity, velocity0_, velocity1_, "the velocity");
    for (const auto* buffer : {&gradient_, &residual0_, &residual1_, &velocity0_, &velocity1_, &state_, &body_})
      if (found.empty() && !buffer->is_intact()) found = "memory around a buffer has changed";
    return found.empty() ? "" : name_ + drawn_ + ": " + found;
  }
  const std::vector<std::byte>& message() const { return want_; }
  // How the next guess begins; any bits may be there.
  void set_state(uint32_t threshold, float gap) {
    const std::vector<std::byte> bytes = state_.read();
    gpu::CodecState state;
    std::memcpy(&state, bytes.data(), sizeof state);
    state.threshold = threshold;
    state.gap = gap;
    state_.set(&state);
  }

 private:
  size_t count_of(size_t most) {
    const size_t around[] = {1, 2, 255, 4096, 8192, 65536};
    std::uniform_real_distribution<> logarithm(0, std::log(double(most)));
    const size_t any = size_t(std::exp(logarithm(random_))), border = around[random_() % 6] + random_() % 3;
    return std::clamp<size_t>(random_() % 4 ? any : border, 1, most);
  }
  Codec codec_of(CodecKind kind) {
    Codec codec{.kind = kind};
    const double ratios[] = {1.0 / double(count_), 0.001, 0.01, 0.01, 0.1, 0.5, 1};
    if (kind != CodecKind::topk) return codec;
    codec.ratio = ratios[random_() % 7];
    if (random_() % 2) codec.width = DType::float16;
    if (random_() % 4 == 0) codec.momentum = 0.9;
    return codec;
  }
  size_t shift() { return random_() % 4 ? 0 : 4 * (random_() % 4); }

  std::mt19937 random_;
  const size_t count_;
  const Codec codec_;
  const DType type_;
  const float scale_;
  Buffer<Memory> gradient_, residual0_, residual1_, velocity0_, velocity1_, state_, body_;
  const std::unique_ptr<PieceEncoder> encoder_;
  ResidualPiece residual_;
  std::vector<std::byte> want_;
  std::string name_, drawn_;
  float magnitude_ = 1;
};

// The messages of some nodes, decoded by the CPU and by kernels.
template <class Memory>
class DecodeTrial {
 public:
  DecodeTrial(CodecKind kind, unsigned seed, size_t most) : random_(seed) {
    using Trial = EncodeTrial<Memory>;
    const uint32_t nodes = 1 + random_() % 9;
    // Each encodes another gradient of the same piece: the seed decides the shape, a step more the numbers.
    Trial trial(kind, seed, most);
    count_ = trial.count();
    codec_ = trial.codec();
    type_ = std::vector{DType::float32, DType::float16, DType::bfloat16}[random_() % 3];
    post_ = random_() % 2 ? 1.0 : 0.3;
    const size_t bytes = piece_bytes(codec_, count_);
    stride_ = bytes + random_() % 5;
    bodies_bytes_.resize(stride_ * nodes);  // some may remain unused
    for (int tries = 0; nodes_ < nodes && tries < kTries; ++tries) {
      trial.begin_step();
      if (nodes_ > 0 && !is_finite(trial.message())) continue;  // of two NaNs a CPU may take either
      std::copy(trial.message().begin(), trial.message().end(), bodies_bytes_.begin() + long(stride_ * nodes_++));
    }
    bodies_ = std::make_unique<Buffer<Memory>>(bodies_bytes_.size(), random_() % 4);
    out_ = std::make_unique<Buffer<Memory>>(count_ * size_of(type_), random_() % 2 * size_of(type_));
    bodies_->set(bodies_bytes_.data());
    name_ = trial.name() + ", " + std::to_string(nodes_) + " messages";
  }

  const std::string& name() const { return name_; }

  CudaDecode piece() const {
    CudaDecode piece{};
    piece.bodies = bodies_->get();
    piece.stride = stride_;
    piece.out = out_->get();
    piece.count = count_;
    piece.k = piece_elements(codec_, count_);
    piece.nodes = nodes_;
    piece.scale = post_;
    piece.dtype = int(type_);
    piece.half = codec_.width == DType::float16;
    return piece;
  }

  // Overwrites some bytes of the messages.
  void forge() {
    for (unsigned n = 1 + random_() % 8; n > 0; --n)
      bodies_bytes_[random_() % bodies_bytes_.size()] = std::byte(random_());
    bodies_->set(bodies_bytes_.data());
  }
  bool is_refused_by_cpu() const {
    try {
      sums();
      return false;
    } catch (const std::exception&) {
      return true;
    }
  }
  std::string difference() const {
    std::vector<std::byte> want(count_ * size_of(type_));
    std::vector<float> all = sums();
    const scaling::Factor post(post_);
    for (float& x : all)
      if (post_ != 1) x = std::bit_cast<float>(scaling::Float32::scaled(std::bit_cast<uint32_t>(x), post));
    from_float32(type_, all.data(), want.data(), count_);
    std::string found = first_difference(want, out_->read(), "what is decoded");
    if (found.empty()) found = damage();
    return found.empty() ? "" : name_ + ": " + found;
  }
  std::string damage() const {
    return out_->is_intact() && bodies_->is_intact() ? "" : "memory around a buffer has changed";
  }

 private:
  static constexpr int kTries = 30;  // what is left behind may be so large that no sum is finite any more

  std::vector<float> sums() const {
    std::vector<float> all(count_);
    for (uint32_t node = 0; node < nodes_; ++node) {
      const auto message =
          read_piece(codec_, {bodies_bytes_.data() + stride_ * node, piece_bytes(codec_, count_)}, count_);
      for (size_t block = 0; block < blocks_of(count_); ++block) message->add_to(all.data(), block);
    }
    return all;
  }
  bool is_finite(const std::vector<std::byte>& message) const {
    std::vector<float> all(count_);
    const auto one = read_piece(codec_, message, count_);
    for (size_t block = 0; block < blocks_of(count_); ++block) one->add_to(all.data(), block);
    return std::ranges::all_of(all, [](float x) { return std::isfinite(x); });
  }

  std::mt19937 random_;
  size_t count_ = 0, stride_ = 0;
  uint32_t nodes_ = 0;
  Codec codec_;
  DType type_ = DType::float32;
  double post_ = 1;
  std::vector<std::byte> bodies_bytes_;
  std::unique_ptr<Buffer<Memory>> bodies_, out_;
  std::string name_;
};

}  // namespace lightcc::test

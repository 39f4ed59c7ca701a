// SipHash-2-4 with 64 bits (Aumasson, Bernstein: SipHash, a fast short-input PRF, 2012), fed piece by piece.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

namespace harp {

struct Key {
  uint64_t k0, k1;
};

class SipHash {
 public:
  explicit SipHash(const Key& key)
      : v0_(key.k0 ^ 0x736f6d6570736575), v1_(key.k1 ^ 0x646f72616e646f6d), v2_(key.k0 ^ 0x6c7967656e657261),
        v3_(key.k1 ^ 0x7465646279746573) {}

  void update(std::span<const uint8_t> bytes) {
    if (bytes.empty()) return;
    const uint8_t* at = bytes.data();
    size_t left = bytes.size();
    total_ += left;
    if (held_ > 0) {
      const size_t more = std::min(left, sizeof word_ - held_);
      std::memcpy(reinterpret_cast<uint8_t*>(&word_) + held_, at, more);
      held_ += more;
      at += more;
      left -= more;
      if (held_ < sizeof word_) return;
      compress(word_);
    }
    for (; left >= sizeof word_; at += sizeof word_, left -= sizeof word_) {
      uint64_t word;
      std::memcpy(&word, at, sizeof word);
      compress(word);
    }
    word_ = 0;
    held_ = left;
    if (left > 0) std::memcpy(&word_, at, left);
  }

  uint64_t finish() {
    const uint64_t tail = held_ == 0 ? 0 : word_ & (~uint64_t(0) >> 8 * (sizeof word_ - held_));
    compress(uint64_t(total_) << 56 | tail);
    v2_ ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void compress(uint64_t word) {
    v3_ ^= word;
    round();
    round();
    v0_ ^= word;
  }
  void round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v1_;
    v0_ += v3_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ = std::rotl(v2_, 32);
  }
  uint64_t v0_, v1_, v2_, v3_;
  uint64_t word_ = 0;  // bytes that do not fill a word yet
  size_t held_ = 0, total_ = 0;
};

}  // namespace harp

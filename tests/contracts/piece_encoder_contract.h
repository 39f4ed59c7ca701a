// What every PieceEncoder must do, and the PieceMessage that reads what it has written (collective/piece_codec.h). A
// codec adds a row in tests/unit/collective/piece_encoder_contract_test.cc, the one file that includes this.
//
// 1. What is received and what is left behind add up to the sum, to the last bit, step after step.
// 2. What is left behind of an element is within the codec's bound.
// 3. A message has the announced length: the encoder writes all of it and nothing around it.
// 4. The same input becomes the same bits, whatever the encoder has done before.
// 5. A sum that is not finite arrives as such and leaves the residual as it was.
// 6. No peer's bytes make a reader write outside of its piece: a message of another length is refused, and any other
//    damage is refused or changes values.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/piece_codec.h"
#include "device/codec.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {

struct CodecCase {
  const char* name;
  Codec codec;
  // How much may be left behind of each element of a piece with these sums.
  std::vector<float> (*most_left)(const std::vector<float>& sums, const Codec&);
};
inline void PrintTo(const CodecCase& row, std::ostream* out) { *out << row.name; }

class PieceEncoderContract : public testing::TestWithParam<CodecCase> {
 protected:
  using Floats = std::vector<float>;
  using Bytes = std::vector<std::byte>;
  static constexpr size_t kAround = 100;  // elements or bytes around what may be written
  static constexpr float kScale = 0.25f;
  // One element, some of a block, a block, and a block and some of the next.
  static constexpr size_t kCounts[] = {1, 2, 255, 256, 257, 1000, kCodecBlock, kCodecBlock + 77};

  static const Codec& codec() { return GetParam().codec; }

  static ResidualPiece residual_of(size_t count) {
    ResidualPiece residual;
    residual.values.resize(count);
    if (codec().momentum > 0) residual.velocity.resize(count);
    return residual;
  }
  static Floats gradient_of(size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats gradient(count);
    for (float& x : gradient) x = normal(random);
    return gradient;
  }
  // As piece_codec.h says it: what is left behind, and the gradient with what momentum adds to it.
  static Floats sums_of(const Floats& gradient, const ResidualPiece& residual) {
    Floats sums(gradient.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      const float velocity = residual.velocity.empty() ? 0.0f : float(codec().momentum) * residual.velocity[i];
      sums[i] = residual.values[i] + (velocity + kScale * gradient[i]);
    }
    return sums;
  }
  static Bytes encode(PieceEncoder& encoder, Floats gradient, ResidualPiece& residual) {
    Bytes body(piece_bytes(codec(), gradient.size()));
    encoder.start({gradient.data(), gradient.size(), kScale, &residual, body.data()});
    while (encoder.step()) {}
    return body;
  }
  static Bytes encode(Floats gradient, ResidualPiece& residual) {
    return encode(*make_piece_encoder(codec()), std::move(gradient), residual);
  }
  // Adds a message to `to`, from the last block to the first. Nothing around the piece may change.
  static Floats added(const Bytes& body, const Floats& to) {
    Floats row(to.size() + 2 * kAround, 42);
    std::copy(to.begin(), to.end(), row.begin() + kAround);
    const auto written_outside = [&] {
      for (size_t i = 0; i < kAround; ++i)
        if (row[i] != 42 || row[kAround + to.size() + i] != 42) return true;
      return false;
    };
    try {
      const auto message = read_piece(codec(), body, to.size());
      for (size_t block = blocks_of(to.size()); block-- > 0;) message->add_to(row.data() + kAround, block);
    } catch (const Error&) {
      EXPECT_FALSE(written_outside());
      throw;
    }
    EXPECT_FALSE(written_outside());
    return {row.begin() + kAround, row.end() - kAround};
  }
  static Floats received(const Bytes& body, size_t count) { return added(body, Floats(count)); }
  static bool is_refused(const Bytes& body, size_t count) {
    try {
      received(body, count);
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal) << error.what();
      return true;
    }
  }
  static bool same_bits(const Floats& a, const Floats& b) {
    const auto same = [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); };
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
  }
};

TEST_P(PieceEncoderContract, WhatIsReceivedAndWhatIsLeftBehindAddUpToTheSum) {
  for (const size_t count : kCounts) {
    const auto encoder = make_piece_encoder(codec());
    ResidualPiece residual = residual_of(count);
    for (unsigned step = 0; step < 3; ++step) {
      const Floats gradient = gradient_of(count, step);
      const Floats sums = sums_of(gradient, residual);
      const Floats values = received(encode(*encoder, gradient, residual), count);
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(sums[i], values[i] + residual.values[i]) << i << " of " << count << " in step " << step;
    }
  }
}

TEST_P(PieceEncoderContract, WhatIsLeftBehindIsWithinTheCodecsBound) {
  for (const size_t count : kCounts) {
    ResidualPiece residual = residual_of(count);
    const Floats gradient = gradient_of(count, 1);
    const Floats bounds = GetParam().most_left(sums_of(gradient, residual), codec());
    encode(gradient, residual);
    for (size_t i = 0; i < count; ++i)
      ASSERT_LE(std::fabs(residual.values[i]), bounds[i]) << i << " of " << count;
  }
}

TEST_P(PieceEncoderContract, AMessageIsAddedToWhatIsThere) {
  const size_t count = kCodecBlock + 77;
  ResidualPiece residual = residual_of(count);
  const Bytes body = encode(gradient_of(count, 1), residual);
  const Floats to = gradient_of(count, 2), values = received(body, count), sums = added(body, to);
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(sums[i], to[i] + values[i]) << i;
}

TEST_P(PieceEncoderContract, NoElementsBecomeNoBytes) {
  EXPECT_EQ(piece_bytes(codec(), 0), 0u);
  EXPECT_EQ(piece_elements(codec(), 0), 0u);
}

TEST_P(PieceEncoderContract, OfAPieceAtLeastOneElementIsSentAndAtMostAll) {
  for (const size_t count : kCounts) {
    EXPECT_GE(piece_elements(codec(), count), 1u) << count;
    EXPECT_LE(piece_elements(codec(), count), count);
  }
}

TEST_P(PieceEncoderContract, AllOfTheAnnouncedLengthIsWrittenAndNothingAroundIt) {
  for (const size_t count : kCounts) {
    Bytes written[2];
    for (int time = 0; time < 2; ++time) {
      const std::byte before = time == 0 ? std::byte(0x00) : std::byte(0xff);
      const size_t length = piece_bytes(codec(), count);
      Bytes memory(length + 2 * kAround, before);
      Floats gradient = gradient_of(count, 1);
      ResidualPiece residual = residual_of(count);
      const auto encoder = make_piece_encoder(codec());
      encoder->start({gradient.data(), count, kScale, &residual, memory.data() + kAround});
      while (encoder->step()) {}
      for (size_t i = 0; i < kAround; ++i) {
        ASSERT_EQ(memory[i], before) << "before the message of " << count;
        ASSERT_EQ(memory[kAround + length + i], before) << "behind the message of " << count;
      }
      written[time].assign(memory.begin() + kAround, memory.end() - kAround);
    }
    EXPECT_EQ(written[0], written[1]) << "a byte of the message of " << count << " was not written";
  }
}

TEST_P(PieceEncoderContract, TheSameInputBecomesTheSameBitsWhateverCameBefore) {
  for (const size_t count : kCounts) {
    const auto used = make_piece_encoder(codec());
    ResidualPiece other = residual_of(3000);
    encode(*used, gradient_of(3000, 5), other);
    ResidualPiece first = residual_of(count), second = residual_of(count);
    EXPECT_EQ(encode(gradient_of(count, 1), first), encode(*used, gradient_of(count, 1), second)) << count;
    EXPECT_TRUE(same_bits(first.values, second.values)) << count;
    EXPECT_TRUE(same_bits(first.velocity, second.velocity)) << count;
  }
}

TEST_P(PieceEncoderContract, ASumThatIsNotFiniteArrivesAsSuchAndLeavesTheResidualAsItWas) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
  for (const size_t count : {size_t(1), size_t(300), kCodecBlock + 77}) {
    for (const size_t at : {size_t(0), count / 2, count - 1}) {
      for (const float bad : {kNotANumber, kInfinity, -kInfinity}) {
        const auto encoder = make_piece_encoder(codec());
        ResidualPiece residual = residual_of(count);
        encode(*encoder, gradient_of(count, 1), residual);
        const Floats values = residual.values, velocity = residual.velocity;
        Floats gradient = gradient_of(count, 2);
        gradient[at] = bad;
        const Bytes body = encode(*encoder, gradient, residual);
        EXPECT_FALSE(std::isfinite(received(body, count)[at])) << bad << " at " << at << " of " << count;
        EXPECT_TRUE(same_bits(values, residual.values)) << bad << " at " << at << " of " << count;
        EXPECT_TRUE(same_bits(velocity, residual.velocity)) << bad << " at " << at << " of " << count;
      }
    }
  }
}

TEST_P(PieceEncoderContract, ALargePieceTakesSeveralSteps) {
  constexpr size_t kBlocks = 16;
  Floats gradient = gradient_of(kBlocks * kCodecBlock, 1);
  ResidualPiece residual = residual_of(gradient.size());
  Bytes body(piece_bytes(codec(), gradient.size()));
  const auto encoder = make_piece_encoder(codec());
  encoder->start({gradient.data(), gradient.size(), kScale, &residual, body.data()});
  size_t steps = 1;
  while (encoder->step()) ++steps;
  EXPECT_GE(steps, kBlocks / 4);
  EXPECT_FALSE(encoder->step()) << "there is work after the end";
}

TEST_P(PieceEncoderContract, AMessageOfAnotherLengthIsRefused) {
  for (const size_t count : {size_t(1), size_t(300)}) {
    ResidualPiece residual = residual_of(count);
    const Bytes body = encode(gradient_of(count, 1), residual);
    ASSERT_FALSE(is_refused(body, count));
    for (size_t length = 0; length < body.size(); ++length)
      EXPECT_TRUE(is_refused({body.begin(), body.begin() + ptrdiff_t(length)}, count)) << length << " bytes";
    Bytes longer = body;
    longer.push_back({});
    EXPECT_TRUE(is_refused(longer, count)) << "a byte more";
  }
}

// received() looks at what is around the piece; the sanitizer looks at what is read.
TEST_P(PieceEncoderContract, ADamagedMessageIsRefusedOrChangesValuesOfItsPieceAlone) {
  std::mt19937 random(7);
  for (const size_t count : {size_t(1), size_t(300), kCodecBlock + 77}) {
    ResidualPiece residual = residual_of(count);
    const Bytes body = encode(gradient_of(count, 1), residual);
    for (int time = 0; time < 200; ++time) {
      Bytes damaged = body;
      for (unsigned flips = 1 + random() % 8; flips > 0; --flips) {
        const size_t most = flips % 2 ? damaged.size() : std::min<size_t>(damaged.size(), 16);  // a head is here
        damaged[random() % most] ^= std::byte(1 << random() % 8);
      }
      is_refused(damaged, count);
    }
  }
}

}  // namespace lightcc

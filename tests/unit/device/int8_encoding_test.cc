// Int8Encoding against its definition: every instruction set, one result, to the bit, and nothing is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "device/int8.h"
#include "unit/isas.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max(), kSmallestNormal = std::numeric_limits<float>::min();

// ---- the oracle

struct Input {
  std::vector<float> gradient, residual;
  float prescale = 1;
  std::vector<float> sums() const {
    std::vector<float> all(gradient.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const float scaled = prescale * gradient[i];
      all[i] = residual[i] + scaled;
    }
    return all;
  }
};

struct Encoded {
  std::vector<float> scales;
  std::vector<int8_t> values;
  std::vector<float> residual;
  bool finite = true;
};

float scale_of(std::span<const float> group) {
  float largest = 0;
  for (float x : group) {
    if (!std::isfinite(x)) return kNaN;
    largest = std::max(largest, std::fabs(x));
  }
  if (largest == 0) return 0;
  float scale = std::max(largest / 127, kSmallestNormal);
  while (!std::isfinite(127 * scale)) scale = std::nextafter(scale, 0.0f);
  return scale;
}

Encoded oracle(const Input& in) {
  Encoded out;
  const std::vector<float> sums = in.sums();
  for (size_t at = 0; at < sums.size(); at += 256) {
    const std::span<const float> group(&sums[at], std::min<size_t>(256, sums.size() - at));
    const float scale = scale_of(group);
    out.scales.push_back(scale);
    out.finite = out.finite && std::isfinite(scale);
    for (float x : group) {
      const auto value = static_cast<int8_t>(scale > 0 ? std::nearbyint(x / scale) : 0);
      const float sent = static_cast<float>(value) * scale;
      out.values.push_back(value);
      out.residual.push_back(x - sent);
    }
  }
  if (!out.finite) out.residual = in.residual;
  return out;
}

// Runs it with other elements around the piece and other bytes around the body, which must not change.
Encoded run(Isa isa, const Input& in) {
  constexpr size_t kAround = 3;
  constexpr float kGuard = 42;
  constexpr std::byte kGuardByte{42};
  const size_t count = in.gradient.size(), blocks = (count + 65535) / 65536, groups = (count + 255) / 256;
  const auto guarded = [&](const std::vector<float>& all) {
    std::vector<float> row(kAround, kGuard);
    row.insert(row.end(), all.begin(), all.end());
    row.insert(row.end(), kAround, kGuard);
    return row;
  };
  std::vector<float> gradient = guarded(in.gradient), residual = guarded(in.residual);
  EXPECT_EQ(4 * groups + count, int8_message_bytes(count));
  std::vector<std::byte> body(int8_message_bytes(count) + 2 * kAround, kGuardByte);

  Int8Encoding encoding(isa);
  encoding.start({gradient.data() + kAround, residual.data() + kAround, count, in.prescale}, body.data() + kAround);
  size_t steps = 1;
  while (encoding.step() && steps < 1000 + blocks) ++steps;
  EXPECT_EQ(encoding.finite() ? blocks : 2 * blocks, steps) << "a step takes a block";
  EXPECT_FALSE(encoding.step());
  for (size_t i = 0; i < kAround; ++i) {
    for (const auto* all : {&gradient, &residual}) EXPECT_EQ(kGuard, (*all)[i]) << "before the piece";
    for (const auto* all : {&gradient, &residual}) EXPECT_EQ(kGuard, (*all)[kAround + count + i]) << "behind the piece";
    EXPECT_EQ(kGuardByte, body[i]) << "before the body";
    EXPECT_EQ(kGuardByte, body[body.size() - 1 - i]) << "behind the body";
  }
  Encoded out{std::vector<float>(groups), std::vector<int8_t>(count), {}, encoding.finite()};
  std::memcpy(out.scales.data(), &body[kAround], 4 * groups);
  std::memcpy(out.values.data(), &body[kAround + 4 * groups], count);
  out.residual.assign(residual.begin() + kAround, residual.end() - kAround);
  return out;
}

template <class T>
void expect_equal(const std::vector<T>& want, const std::vector<T>& got, const std::string& what) {
  ASSERT_EQ(want.size(), got.size()) << what;
  if (std::memcmp(want.data(), got.data(), want.size() * sizeof(T)) == 0) return;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(0, std::memcmp(&want[i], &got[i], sizeof(T))) << what << " " << i << ": " << +want[i] << ", not "
                                                            << +got[i];
  }
}

// Float64 has room for the sum of what is sent and what is left behind: if it were not acc, that would show.
void expect_nothing_lost(const Input& in, const Encoded& got, const std::string& what) {
  const std::vector<float> sums = in.sums();
  for (size_t i = 0; i < sums.size(); ++i) {
    const float scale = got.scales[i / 256], sent = static_cast<float>(got.values[i]) * scale;
    ASSERT_TRUE(std::isfinite(sent)) << what << " " << i;
    ASSERT_EQ(double(sums[i]), double(sent) + double(got.residual[i])) << what << " " << i;
    ASSERT_LE(std::fabs(got.residual[i]), (0.5 + 0x1p-14) * double(scale)) << what << " " << i;
    ASSERT_GE(got.values[i], -127) << what << " " << i;
  }
}

void check(const Input& in, const std::string& name) {
  const Encoded want = oracle(in);
  for (Isa isa : isas()) {
    const std::string what = name + ", " + std::to_string(in.gradient.size()) + ", " + name_of(isa);
    const Encoded got = run(isa, in);
    EXPECT_EQ(want.finite, got.finite) << what;
    expect_equal(want.scales, got.scales, what + ", scale");
    expect_equal(want.values, got.values, what + ", value");
    expect_equal(want.residual, got.residual, what + ", residual");
    if (got.finite) expect_nothing_lost(in, got, what);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// ---- distributions

using Draw = std::function<float(size_t i, std::mt19937_64&)>;
struct Distribution {
  const char* name;
  Draw draw;
};

float normal(std::mt19937_64& random) {
  std::normal_distribution<float> distribution;
  return distribution(random);
}
float sign(std::mt19937_64& random) { return random() % 2 ? 1.0f : -1.0f; }
float below(uint64_t bits, std::mt19937_64& random) {
  return sign(random) * std::bit_cast<float>(static_cast<uint32_t>(random() % bits));
}

const Distribution kDistributions[] = {
    {"normal", [](size_t, auto& random) { return normal(random); }},
    {"equal", [](size_t, auto&) { return 0.3f; }},
    {"zero", [](size_t, auto& random) { return 0 * sign(random); }},
    {"groups of zeros", [](size_t i, auto& random) { return i / 256 % 2 ? 0 * sign(random) : normal(random); }},
    // Factor 1: what lies between two integers goes to the even one.
    {"halves", [](size_t i, auto& random) { return i % 256 ? 0.5f * float(random() % 254) * sign(random) : 127; }},
    {"sparse", [](size_t, auto& random) { return random() % 500 ? 0 : normal(random); }},
    {"wide", [](size_t, auto& random) { return sign(random) * std::exp2(12 * normal(random)); }},
    {"subnormal", [](size_t, auto& random) { return below(0x800000, random); }},
    {"a few smallest", [](size_t, auto& random) { return below(400, random); }},
    {"about the smallest scale", [](size_t, auto& random) { return 128 * kSmallestNormal * normal(random); }},
    {"up to the largest", [](size_t, auto& random) { return below(0x7f800000, random); }},
    {"the largest", [](size_t, auto& random) { return kLargest * sign(random); }},
};

Input input(const Distribution& from, size_t count, uint64_t seed, float prescale = 1) {
  std::mt19937_64 random(seed);
  Input in{std::vector<float>(count), std::vector<float>(count), prescale};
  for (size_t i = 0; i < count; ++i) in.gradient[i] = from.draw(i, random);
  // Often what is left behind is nothing, so that sums are what has been drawn.
  if (seed % 2 == 0) return in;
  std::uniform_real_distribution<float> share(-1, 0);
  for (size_t i = 0; i < count; ++i) in.residual[i] = in.gradient[i] * share(random);
  return in;
}

constexpr size_t kCounts[] = {
    1,   2,   3,   7,   15,  16,  17,  31,  33,   63,     65,     100,    127,    129,    254,     255,     257,
    256, 258, 300, 511, 512, 513, 767, 769, 1000, 65'280, 65'281, 65'535, 65'536, 65'537, 65'793, 131'073, 150'001};

TEST(Int8Encoding, EqualsItsDefinition) {
  for (size_t count : kCounts) {
    for (const Distribution& from : kDistributions) {
      check(input(from, count, count / 2, count % 3 ? 1.0f : 0.375f), from.name);
      if (HasFatalFailure()) return;
    }
  }
}

// Every number near each multiple of half a scale, where a quotient that is rounded another way would show.
TEST(Int8Encoding, RoundsQuotientsToNearestEven) {
  for (float largest : {127.0f, 100.0f, 1.1f, 0x1.fffffep+0f, 3e-39f, kLargest}) {
    const float step = scale_of(std::span(&largest, 1)) / 2;
    Input in;
    for (int half = -253; half <= 253; ++half) {
      float x = static_cast<float>(half) * step;
      for (int i = 0; i < 3; ++i) x = std::nextafter(x, -kInfinite);
      for (int i = 0; i < 7; ++i, x = std::nextafter(x, kInfinite)) {
        if (in.gradient.size() % 256 == 0) in.gradient.push_back(largest);
        in.gradient.push_back(x);
      }
    }
    in.residual.resize(in.gradient.size());
    check(in, "halves of " + std::to_string(step));
    if (HasFatalFailure()) return;
  }
}

// The error of one step is sent by later ones: over a training the sum of what was sent is the sum of the gradients.
TEST(Int8Encoding, FeedsBackWhatItLeftBehind) {
  const size_t count = 1000;
  std::mt19937_64 random(3);
  Input in{std::vector<float>(count), std::vector<float>(count), 0.25f};
  std::vector<double> gradients(count), sent(count);
  for (int step = 0; step < 50; ++step) {
    for (size_t i = 0; i < count; ++i) {
      in.gradient[i] = static_cast<float>(int(random() % 2001) - 1000) / 1024;  // their sums are exact
      gradients[i] += 0.25 * in.gradient[i];
    }
    const Encoded got = run(best_isa(), in);
    in.residual = got.residual;
    for (size_t i = 0; i < count; ++i) sent[i] += static_cast<float>(got.values[i]) * got.scales[i / 256];
  }
  for (size_t i = 0; i < count; ++i) {
    ASSERT_NEAR(gradients[i], sent[i], 0.25 / 127) << i;
    ASSERT_NEAR(gradients[i], sent[i] + in.residual[i], 1e-5) << i;
  }
}

// ---- what is not finite

TEST(Int8Encoding, OfASumThatIsNotFiniteSaysSoAndLeavesTheResidual) {
  for (size_t count : {1, 40, 300, 65'537, 131'073}) {
    for (size_t at : {size_t(0), size_t(17), count / 2, size_t(65'535), size_t(65'536), count - 1}) {
      if (at >= count) continue;
      for (float value : {kNaN, kInfinite, -kInfinite, kLargest}) {
        Input in = input(kDistributions[0], count, 11);
        in.gradient[at] = value;
        if (value == kLargest) in.residual[at] = kLargest;  // their sum is too large
        const Encoded want = oracle(in);
        ASSERT_FALSE(want.finite);
        ASSERT_TRUE(std::isnan(want.scales[at / 256]));
        check(in, "not finite at " + std::to_string(at));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Int8Encoding, ManyAreNotFinite) {
  Input in = input(kDistributions[0], 140'000, 13);
  for (size_t i = 0; i < 140'000; i += 701) in.gradient[i] = i % 3 ? kInfinite : std::bit_cast<float>(0xffabcdef);
  in.residual[5] = kNaN;
  in.residual[6] = std::bit_cast<float>(0xff800123);  // a NaN that arithmetic would change
  check(in, "many not finite");
}

TEST(Int8Encoding, ForgetsThePieceBefore) {
  Input bad = input(kDistributions[0], 70'000, 15);
  bad.gradient[69'999] = kNaN;
  std::vector<std::byte> body(int8_message_bytes(70'000));
  Int8Encoding encoding;
  encoding.start({bad.gradient.data(), bad.residual.data(), 70'000}, body.data());
  while (encoding.step()) {}
  EXPECT_FALSE(encoding.finite());
  Input good = input(kDistributions[0], 300, 15);
  encoding.start({good.gradient.data(), good.residual.data(), 300}, body.data());
  EXPECT_FALSE(encoding.step());
  EXPECT_TRUE(encoding.finite());
}

// ---- arguments

TEST(Int8Encoding, OfNothingDoesNothing) {
  Int8Encoding encoding;
  EXPECT_FALSE(encoding.step()) << "nothing has been started";
  EXPECT_EQ(0u, int8_message_bytes(0));
  encoding.start({nullptr, nullptr, 0}, nullptr);
  EXPECT_FALSE(encoding.step());
  EXPECT_TRUE(encoding.finite());
}

TEST(Int8Encoding, RefusesWhatTheMachineLacks) {
  for (Isa isa : {Isa::avx2, Isa::avx512, static_cast<Isa>(9)}) {
    if (has(isa)) continue;
    EXPECT_THROW(Int8Encoding{isa}, Error) << name_of(isa);
    EXPECT_THROW(Int8Message({}, 0, isa), Error) << name_of(isa);
  }
}

}  // namespace
}  // namespace lightcc

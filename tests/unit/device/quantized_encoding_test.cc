// QuantizedEncoding against its definition: every format and instruction set, one result, to the bit, and nothing is
// lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "device/quantization.h"
#include "unit/codec_cases.h"
#include "unit/isas.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using test::Input;

constexpr float kLargest = std::numeric_limits<float>::max(), kSmallestNormal = std::numeric_limits<float>::min();

// ---- the oracle

struct Encoded {
  std::vector<float> scales;
  std::vector<int8_t> values;
  std::vector<float> residual;
  bool finite = true;
};

template <class Format> float scale_of(std::span<const float> group) {
  float largest = 0;
  for (float x : group) {
    if (!std::isfinite(x)) return kNaN;
    largest = std::max(largest, std::fabs(x));
  }
  if (largest == 0) return 0;
  float scale = std::max(largest / Format::kLargest, kSmallestNormal);
  while (!std::isfinite(Format::kLargest * scale)) scale = std::nextafter(scale, 0.0f);
  return scale;
}

template <class Format> Encoded oracle(const Input& in) {
  Encoded out;
  const std::vector<float> sums = in.sums();
  for (size_t at = 0; at < sums.size(); at += Format::kGroup) {
    const std::span<const float> group(&sums[at], std::min(Format::kGroup, sums.size() - at));
    const float scale = scale_of<Format>(group);
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

// The integers of a message.
template <class Format> std::vector<int8_t> values_of(const std::byte* from, size_t count) {
  std::vector<int8_t> values(count);
  for (size_t i = 0; i < count; ++i) {
    if (Format::kLargest == 127) {
      values[i] = int8_t(from[i]);
    } else {
      const int half = int(from[i / 2]) >> (i % 2 ? 4 : 0) & 15;
      values[i] = int8_t(half < 8 ? half : half - 16);
    }
  }
  return values;
}

// Runs it with other elements around the piece and other bytes around the body, which must not change.
template <class Format> Encoded run(Isa isa, const Input& in) {
  constexpr size_t kAround = 3;
  constexpr float kGuard = 42;
  constexpr std::byte kGuardByte{42};
  const size_t count = in.gradient.size(), blocks = (count + 65535) / 65536;
  const size_t groups = (count + Format::kGroup - 1) / Format::kGroup;
  const auto guarded = [&](const std::vector<float>& all) {
    std::vector<float> row(kAround, kGuard);
    row.insert(row.end(), all.begin(), all.end());
    row.insert(row.end(), kAround, kGuard);
    return row;
  };
  std::vector<float> gradient = guarded(in.gradient), residual = guarded(in.residual);
  const size_t bytes = 4 * groups + (Format::kLargest == 127 ? count : (count + 1) / 2);
  EXPECT_EQ(bytes, quantized_bytes<Format>(count));
  std::vector<std::byte> body(bytes + 2 * kAround, kGuardByte);

  QuantizedEncoding<Format> encoding(isa);
  encoding.start({gradient.data() + kAround, residual.data() + kAround, count, in.scale}, body.data() + kAround);
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
  Encoded out{std::vector<float>(groups), values_of<Format>(&body[kAround + 4 * groups], count), {}, encoding.finite()};
  std::memcpy(out.scales.data(), &body[kAround], 4 * groups);
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
template <class Format> void expect_nothing_lost(const Input& in, const Encoded& got, const std::string& what) {
  const std::vector<float> sums = in.sums();
  for (size_t i = 0; i < sums.size(); ++i) {
    const float scale = got.scales[i / Format::kGroup], sent = static_cast<float>(got.values[i]) * scale;
    ASSERT_TRUE(std::isfinite(sent)) << what << " " << i;
    ASSERT_EQ(double(sums[i]), double(sent) + double(got.residual[i])) << what << " " << i;
    ASSERT_LE(std::fabs(got.residual[i]), (0.5 + 0x1p-14) * double(scale)) << what << " " << i;
    ASSERT_LE(std::abs(got.values[i]), Format::kLargest) << what << " " << i;
  }
}

template <class Format> void check(const Input& in, const std::string& name) {
  const Encoded want = oracle<Format>(in);
  for (Isa isa : isas()) {
    const std::string what = std::string(Format::kName) + ", " + name + ", " + std::to_string(in.gradient.size()) +
                             ", " + name_of(isa);
    const Encoded got = run<Format>(isa, in);
    EXPECT_EQ(want.finite, got.finite) << what;
    expect_equal(want.scales, got.scales, what + ", scale");
    expect_equal(want.values, got.values, what + ", value");
    expect_equal(want.residual, got.residual, what + ", residual");
    if (got.finite) expect_nothing_lost<Format>(in, got, what);
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

Input input(const Distribution& from, size_t count, uint64_t seed, float scale = 1) {
  std::mt19937_64 random(seed);
  Input in{std::vector<float>(count), std::vector<float>(count), scale};
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

template <class Format> class QuantizedEncodingOf : public testing::Test {};
using Formats = testing::Types<Int8, Int4>;
TYPED_TEST_SUITE(QuantizedEncodingOf, Formats);

TYPED_TEST(QuantizedEncodingOf, EqualsItsDefinition) {
  for (size_t count : kCounts) {
    for (const Distribution& from : kDistributions) {
      check<TypeParam>(input(from, count, count / 2, count % 3 ? 1.0f : 0.375f), from.name);
      if (this->HasFatalFailure()) return;
    }
  }
}

// Every number near each multiple of half a scale, where a quotient that is rounded another way would show.
TYPED_TEST(QuantizedEncodingOf, RoundsQuotientsToNearestEven) {
  for (float largest : {127.0f, 100.0f, 1.1f, 0x1.fffffep+0f, 3e-39f, kLargest}) {
    const float step = scale_of<TypeParam>(std::span(&largest, 1)) / 2;
    const int most = 2 * TypeParam::kLargest - 1;
    Input in;
    for (int half = -most; half <= most; ++half) {
      float x = static_cast<float>(half) * step;
      for (int i = 0; i < 3; ++i) x = std::nextafter(x, -kInfinite);
      for (int i = 0; i < 7; ++i, x = std::nextafter(x, kInfinite)) {
        if (in.gradient.size() % TypeParam::kGroup == 0) in.gradient.push_back(largest);
        in.gradient.push_back(x);
      }
    }
    in.residual.resize(in.gradient.size());
    check<TypeParam>(in, "halves of " + std::to_string(step));
    if (this->HasFatalFailure()) return;
  }
}

// The error of one step is sent by later ones: over a training the sum of what was sent is the sum of the gradients.
TYPED_TEST(QuantizedEncodingOf, FeedsBackWhatItLeftBehind) {
  const size_t count = 1000;
  std::mt19937_64 random(3);
  Input in{std::vector<float>(count), std::vector<float>(count), 0.25f};
  std::vector<double> gradients(count), sent(count);
  for (int step = 0; step < 50; ++step) {
    for (size_t i = 0; i < count; ++i) {
      in.gradient[i] = static_cast<float>(int(random() % 2001) - 1000) / 1024;  // their sums are exact
      gradients[i] += 0.25 * in.gradient[i];
    }
    const Encoded got = run<TypeParam>(best_isa(), in);
    in.residual = got.residual;
    for (size_t i = 0; i < count; ++i) sent[i] += static_cast<float>(got.values[i]) * got.scales[i / TypeParam::kGroup];
  }
  for (size_t i = 0; i < count; ++i) {
    ASSERT_NEAR(gradients[i], sent[i], 0.25 / TypeParam::kLargest) << i;
    ASSERT_NEAR(gradients[i], sent[i] + in.residual[i], 1e-5) << i;
  }
}

// ---- what is not finite

TYPED_TEST(QuantizedEncodingOf, OfASumThatIsNotFiniteSaysSoAndLeavesTheResidual) {
  for (size_t count : {1, 40, 300, 65'537, 131'073}) {
    for (size_t at : {size_t(0), size_t(17), count / 2, size_t(65'535), size_t(65'536), count - 1}) {
      if (at >= count) continue;
      for (float value : {kNaN, kInfinite, -kInfinite, kLargest}) {
        Input in = input(kDistributions[0], count, 11);
        in.gradient[at] = value;
        if (value == kLargest) in.residual[at] = kLargest;  // their sum is too large
        const Encoded want = oracle<TypeParam>(in);
        ASSERT_FALSE(want.finite);
        ASSERT_TRUE(std::isnan(want.scales[at / TypeParam::kGroup]));
        check<TypeParam>(in, "not finite at " + std::to_string(at));
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(QuantizedEncodingOf, ManyAreNotFinite) {
  Input in = input(kDistributions[0], 140'000, 13);
  for (size_t i = 0; i < 140'000; i += 701) in.gradient[i] = i % 3 ? kInfinite : std::bit_cast<float>(0xffabcdef);
  in.residual[5] = kNaN;
  in.residual[6] = std::bit_cast<float>(0xff800123);  // a NaN that arithmetic would change
  check<TypeParam>(in, "many not finite");
}

TYPED_TEST(QuantizedEncodingOf, ForgetsThePieceBefore) {
  Input bad = input(kDistributions[0], 70'000, 15);
  bad.gradient[69'999] = kNaN;
  std::vector<std::byte> body(quantized_bytes<TypeParam>(70'000));
  QuantizedEncoding<TypeParam> encoding;
  encoding.start({bad.gradient.data(), bad.residual.data(), 70'000}, body.data());
  while (encoding.step()) {}
  EXPECT_FALSE(encoding.finite());
  Input good = input(kDistributions[0], 300, 15);
  encoding.start({good.gradient.data(), good.residual.data(), 300}, body.data());
  EXPECT_FALSE(encoding.step());
  EXPECT_TRUE(encoding.finite());
}

// ---- arguments

TYPED_TEST(QuantizedEncodingOf, OfNothingDoesNothing) {
  QuantizedEncoding<TypeParam> encoding;
  EXPECT_FALSE(encoding.step()) << "nothing has been started";
  EXPECT_EQ(0u, quantized_bytes<TypeParam>(0));
  encoding.start({nullptr, nullptr, 0}, nullptr);
  EXPECT_FALSE(encoding.step());
  EXPECT_TRUE(encoding.finite());
}

TYPED_TEST(QuantizedEncodingOf, RefusesWhatTheMachineLacks) {
  for (Isa isa : {Isa::avx2, Isa::avx512, static_cast<Isa>(9)}) {
    if (has(isa)) continue;
    EXPECT_THROW(QuantizedEncoding<TypeParam>{isa}, Error) << name_of(isa);
    EXPECT_THROW(QuantizedMessage<TypeParam>({}, 0, isa), Error) << name_of(isa);
  }
}

}  // namespace
}  // namespace lightcc

// The body of an int8 or int4 message: what was encoded is added up, by every instruction set to the same bits, and a
// body of another length is refused.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "device/quantization.h"
#include "unit/isas.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

template <class Format>
std::vector<std::byte> bytes_of(const std::vector<float>& scales, const std::vector<int8_t>& values) {
  std::vector<std::byte> body(quantized_bytes<Format>(values.size()));
  std::memcpy(body.data(), scales.data(), 4 * scales.size());
  std::byte* const to = &body[4 * scales.size()];
  for (size_t i = 0; i < values.size(); ++i) {
    if (Format::kLargest == 127) to[i] = std::byte(values[i]);
    else to[i / 2] |= std::byte((values[i] & 15) << (i % 2 ? 4 : 0));
  }
  return body;
}

// From the last block to the first, as a caller may. What lies around the piece must not change.
template <class Format>
std::vector<float> added(const QuantizedMessage<Format>& message, const std::vector<float>& to) {
  std::vector<float> row(to.size() + 200, 42);
  std::copy(to.begin(), to.end(), row.begin() + 100);
  for (size_t b = message.blocks(); b-- > 0;) message.add_to(&row[100], b);
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(42, row[i]) << "before the piece";
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(42, row[100 + to.size() + i]) << "behind the piece";
  return {row.begin() + 100, row.end() - 100};
}

template <class Format> class QuantizedMessageOf : public testing::Test {};
using Formats = testing::Types<Int8, Int4>;
TYPED_TEST_SUITE(QuantizedMessageOf, Formats);

TYPED_TEST(QuantizedMessageOf, AddsValuesTimesScales) {
  constexpr size_t kGroup = TypeParam::kGroup;
  constexpr int kLeast = -TypeParam::kLargest - 1;  // which no rank of ours sends
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (size_t count : {1, 3, 17, 255, 256, 257, 1000, 65'535, 65'536, 65'537, 131'072, 140'001}) {
    std::vector<float> scales((count + kGroup - 1) / kGroup), to(count), want(count);
    std::vector<int8_t> values(count);
    for (float& x : scales) x = std::exp2(20 * normal(random));
    for (size_t i = 0; i < count; ++i) {
      values[i] = static_cast<int8_t>(kLeast + int(random() % (-2 * kLeast)));
      to[i] = std::exp2(20 * normal(random));
      const float sent = static_cast<float>(values[i]) * scales[i / kGroup];
      want[i] = to[i] + sent;
    }
    const std::vector<std::byte> body = bytes_of<TypeParam>(scales, values);
    for (size_t shift : {0, 1}) {
      std::vector<std::byte> shifted(body.size() + shift);
      std::copy(body.begin(), body.end(), shifted.begin() + int64_t(shift));
      for (Isa isa : isas()) {
        const QuantizedMessage<TypeParam> message(ConstSpan(shifted).subspan(shift), count, isa);
        ASSERT_EQ((count + 65'535) / 65'536, message.blocks());
        const std::vector<float> got = added(message, to);
        ASSERT_EQ(0, std::memcmp(want.data(), got.data(), 4 * count)) << count << " " << name_of(isa);
      }
    }
  }
}

TYPED_TEST(QuantizedMessageOf, CarriesWhatWasEncoded) {
  const size_t count = 70'001;
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> gradient(count), residual(count);
  for (float& x : gradient) x = normal(random);
  const std::vector<float> sums = gradient;
  std::vector<std::byte> body(quantized_bytes<TypeParam>(count));
  QuantizedEncoding<TypeParam> encoding;
  encoding.start({gradient.data(), residual.data(), count}, body.data());
  while (encoding.step()) {}
  const std::vector<float> got = added(QuantizedMessage<TypeParam>(body, count), std::vector<float>(count));
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(sums[i], got[i] + residual[i]) << i;
}

// A diverged rank is seen by all: of a group with a sum that is not finite no element is finite, and no other is hurt.
TYPED_TEST(QuantizedMessageOf, OfWhatIsNotFiniteIsNotFinite) {
  constexpr size_t kGroup = TypeParam::kGroup;
  for (float bad : {kNaN, kInfinite, -kInfinite}) {
    const size_t count = 700;
    std::vector<float> gradient(count, 1), residual(count);
    gradient[300] = bad;
    std::vector<std::byte> body(quantized_bytes<TypeParam>(count));
    QuantizedEncoding<TypeParam> encoding;
    encoding.start({gradient.data(), residual.data(), count}, body.data());
    while (encoding.step()) {}
    for (Isa isa : isas()) {
      const std::vector<float> got = added(QuantizedMessage<TypeParam>(body, count, isa), std::vector<float>(count));
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(i / kGroup != 300 / kGroup, std::isfinite(got[i])) << i;
    }
  }
}

TYPED_TEST(QuantizedMessageOf, TakesAnyScale) {
  const std::vector<float> scales{kInfinite, kNaN, std::bit_cast<float>(0xff812345), -1e-45f, -2};
  const std::vector<int8_t> values(5 * TypeParam::kGroup, 1);
  for (Isa isa : isas()) {
    const std::vector<std::byte> body = bytes_of<TypeParam>(scales, values);
    const QuantizedMessage<TypeParam> message(body, values.size(), isa);
    const std::vector<float> got = added(message, std::vector<float>(values.size()));
    for (size_t i = 0, group = TypeParam::kGroup; i < group; ++i) {
      ASSERT_EQ(kInfinite, got[i]);
      ASSERT_TRUE(std::isnan(got[group + i]));
      ASSERT_TRUE(std::isnan(got[2 * group + i]));
      ASSERT_EQ(-1e-45f, got[3 * group + i]);
      ASSERT_EQ(-2, got[4 * group + i]);
    }
  }
}

TYPED_TEST(QuantizedMessageOf, OfAnotherLengthIsRefused) {
  const auto expect_refused = [](size_t bytes, size_t count) {
    const std::vector<std::byte> body(bytes);
    try {
      const QuantizedMessage<TypeParam> message(body, count);
      ADD_FAILURE() << bytes << " bytes for " << count << " elements were accepted";
    } catch (const Error& error) {
      EXPECT_EQ(Code::internal, error.code());
      EXPECT_NE(std::string(error.what()).find("malformed"), std::string::npos) << error.what();
    }
  };
  for (size_t count : {0, 1, 255, 256, 257, 65'536, 65'537}) {
    const size_t right = quantized_bytes<TypeParam>(count);
    EXPECT_NO_THROW(QuantizedMessage<TypeParam>(std::vector<std::byte>(right), count));
    for (size_t wrong : {right + 1, right + 4, right + 5, 2 * right + 1}) expect_refused(wrong, count);
    if (count == 0) continue;
    for (size_t wrong : {right - 1, right - 4, right - 5, size_t(0)}) expect_refused(wrong, count);
  }
}

}  // namespace
}  // namespace lightcc

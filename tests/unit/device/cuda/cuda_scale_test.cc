// The arithmetic of the kernel that scales (device/cuda/scale.h), run as plain C++, against reduce(): bit for bit.
#include "device/cuda/scale.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>

#include "device/device.h"
#include "labels.h"
#include "unit/scale_cases.h"

LABEL(alone);

namespace lightcc {
namespace {

std::vector<std::byte> reduced(DType dtype, const std::vector<std::byte>& in, double factor) {
  std::vector<std::byte> result(in.size());
  void* const out[] = {result.data()};
  const void* const inputs[] = {in.data()};
  reduce({dtype, ReduceOp::sum, factor, 1}, out, inputs, in.size() / size_of(dtype));
  return result;
}

// As a grid of so many threads does it.
void scale(DType dtype, void* to, const void* from, size_t count, double factor, size_t threads) {
  const scaling::Factor by(factor);
  const bool known = scaling::with_format(static_cast<int>(dtype), [&](auto format) {
    using Format = decltype(format);
    using Stored = typename Format::Stored;
    auto* const out = static_cast<Stored*>(to);
    const auto* const in = static_cast<const Stored*>(from);
    for (size_t thread = 0; thread < threads; ++thread)
      scaling::scale_share<Format>(thread, threads, out, in, count, by);
  });
  ASSERT_TRUE(known);
}

void expect_same(DType dtype, double factor, const std::vector<std::byte>& in) {
  const std::vector<std::byte> want = reduced(dtype, in, factor);
  std::vector<std::byte> got(in.size());
  const size_t size = size_of(dtype);
  scale(dtype, got.data(), in.data(), in.size() / size, factor, 1);
  for (size_t i = 0; i < in.size(); i += size) {
    if (std::memcmp(&got[i], &want[i], size) == 0) continue;
    const auto hex = [&](const std::vector<std::byte>& bytes) {
      uint64_t x = 0;
      std::memcpy(&x, &bytes[i], size);
      return x;
    };
    FAIL() << name_of(dtype) << " times " << factor << std::hex << ": of " << hex(in) << " comes " << hex(got)
           << ", of reduce() " << hex(want);
  }
}

class CudaScale : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Types, CudaScale, testing::Range(0, kDTypes),
                         [](auto& info) { return name_of(static_cast<DType>(info.param)); });

TEST_P(CudaScale, GivesTheBitsOfReduce) {
  const std::vector<std::byte> in = test::scale_elements(dtype());
  for (double factor : test::scale_factors()) expect_same(dtype(), factor, in);
  std::mt19937_64 random(2);
  for (int i = 0; i < 20; ++i) expect_same(dtype(), std::bit_cast<double>(random() & ~(uint64_t{1} << 62)), in);
}

// Of elements that are no NaN themselves: of two NaNs a CPU may take either.
TEST_P(CudaScale, HandsOnTheNanOfAFactor) {
  const std::vector<std::byte> all = test::scale_elements(dtype());
  std::vector<std::byte> in;
  const size_t size = size_of(dtype());
  for (size_t i = 0; i < all.size(); i += size) {
    const bool may_be_nan = is_floating(dtype()) && (all[i + size - 1] & std::byte{0x7f}) >= std::byte{0x7c};
    if (!may_be_nan) in.insert(in.end(), &all[i], &all[i] + size);
  }
  for (uint64_t nan : {0x7ff8000000000000u, 0xfff8000000000000u, 0x7ff0000000000001u, 0xfffabcdef1234567u})
    expect_same(dtype(), std::bit_cast<double>(nan), in);
}

// However both addresses lie to the border of a vector, and whatever the number of threads; in place too.
TEST_P(CudaScale, ReachesEveryElementAndNoOther) {
  const size_t size = size_of(dtype()), per_vector = sizeof(scaling::Vector) / size;
  const std::vector<std::byte> in = test::scale_elements(dtype());
  for (size_t from_at = 0; from_at < per_vector; ++from_at) {
    for (size_t to_at = 0; to_at < per_vector; ++to_at) {
      for (size_t count : {size_t(0), size_t(1), per_vector - 1, per_vector, 3 * per_vector + 1, size_t(100)}) {
        const std::vector<std::byte> part(in.begin() + from_at * size, in.begin() + (from_at + count) * size);
        const std::vector<std::byte> result = reduced(dtype(), part, 0.3);
        std::vector<std::byte> to(in.begin(), in.begin() + (to_at + count + per_vector) * size), want = to;
        if (from_at == to_at) std::memcpy(to.data(), in.data(), to.size());
        std::copy(result.begin(), result.end(), want.begin() + to_at * size);
        scale(dtype(), to.data() + to_at * size, in.data() + from_at * size, count, 0.3, 7);
        ASSERT_EQ(to, want) << count << " elements from " << from_at << " to " << to_at;
        if (from_at != to_at) continue;
        to.assign(in.begin(), in.begin() + to.size());
        scale(dtype(), to.data() + to_at * size, to.data() + to_at * size, count, 0.3, 7);
        ASSERT_EQ(to, want) << count << " elements in place at " << to_at;
      }
    }
  }
}

TEST_P(CudaScale, StoresWhatTheTypeStores) {
  size_t size = 0;
  EXPECT_TRUE(scaling::with_format(GetParam(), [&](auto format) { size = sizeof(typename decltype(format)::Stored); }));
  EXPECT_EQ(size, size_of(dtype()));
}

TEST(CudaScaleTypes, ThereAreNoOthers) {
  for (int dtype : {-1, kDTypes}) EXPECT_FALSE(scaling::with_format(dtype, [](auto) { FAIL(); }));
}

}  // namespace
}  // namespace lightcc

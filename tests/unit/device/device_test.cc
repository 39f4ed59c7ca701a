// reduce() against an oracle that computes one element at a time and knows nothing of blocks, vectors or
// the conversions in device/half.h.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "base/error.h"
#include "device/cpu.h"
#include "device/half.h"
#include "unit/isas.h"
#include "labels.h"

LABEL(alone, "Half.*:Types/Reduce.*");

namespace lightcc {
namespace {

// ---- the oracle -----------------------------------------------------------------------------------

// A binary format of `digits` significant bits, computed with in T, kept in the unsigned type Bits.
template <class BitsType, class NumberType, int digits, int least_exponent, int most_exponent>
struct Floating {
  using Bits = BitsType;
  using T = NumberType;
  static constexpr int kFraction = digits - 1;
  static constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  static constexpr Bits kInfinity = static_cast<Bits>(kSign - 1) >> kFraction << kFraction;

  static T decode(Bits b) {
    const Bits magnitude = b & static_cast<Bits>(kSign - 1);
    T value;
    if (magnitude > kInfinity) value = std::numeric_limits<T>::quiet_NaN();
    else if (magnitude == kInfinity) value = std::numeric_limits<T>::infinity();
    else if (magnitude >> kFraction == 0) value = std::ldexp(static_cast<T>(magnitude), least_exponent - kFraction);
    else value = std::ldexp(static_cast<T>((magnitude & ((Bits{1} << kFraction) - 1)) | Bits{1} << kFraction),
                            static_cast<int>(magnitude >> kFraction) - 1 + least_exponent - kFraction);
    return b & kSign ? -value : value;
  }
  // The nearest number of the format, ties to even (nearbyint's default mode).
  static T round(T x) {
    if (!std::isfinite(x) || x == 0) return x;
    const int exponent = std::max(std::ilogb(x), least_exponent);
    const T rounded = std::ldexp(std::nearbyint(std::ldexp(x, kFraction - exponent)), exponent - kFraction);
    const bool fits = std::fabs(rounded) < std::ldexp(T{1}, most_exponent) * 2;
    return fits ? rounded : std::copysign(std::numeric_limits<T>::infinity(), x);
  }
  static T scaled(T x, double factor) { return x * static_cast<T>(factor); }
  static T combined(ReduceOp op, T a, T b) {
    if (op == ReduceOp::sum) return a + b;
    if (op == ReduceOp::product) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
  }
  static bool same(T expected, Bits got) {
    const T value = decode(got);
    return std::isnan(expected) ? std::isnan(value) : value == expected;
  }
};
using Float16 = Floating<uint16_t, float, 11, -14, 15>;
using Bfloat16 = Floating<uint16_t, float, 8, -126, 127>;
using Float64 = Floating<uint64_t, double, 53, -1022, 1023>;
struct Float32 : Floating<uint32_t, float, 24, -126, 127> {
  static float round(float x) { return x; }  // it is what is computed with
};
struct Float64Exact : Float64 {
  static double round(double x) { return x; }
};

template <class Type>
struct Integer {
  using Bits = Type;
  using T = Type;
  static T decode(Bits b) { return b; }
  static T round(T x) { return x; }
  static T scaled(T x, double factor) {
    if (factor == 1) return x;
    const double value = std::trunc(static_cast<double>(x) * factor);
    if (value < std::ldexp(-1.0, std::numeric_limits<T>::digits)) return std::numeric_limits<T>::min();
    if (std::is_unsigned_v<T> && value < 0) return 0;
    if (value >= std::ldexp(1.0, std::numeric_limits<T>::digits)) return std::numeric_limits<T>::max();
    return static_cast<T>(value);
  }
  static T combined(ReduceOp op, T a, T b) {
    if (op == ReduceOp::sum) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    if (op == ReduceOp::product) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
  }
  static bool same(T expected, Bits got) { return expected == got; }
};

struct Boolean {
  using Bits = uint8_t;
  using T = bool;
  static T decode(Bits b) { return b != 0; }
  static T round(T x) { return x; }
  static T scaled(T x, double) { return x; }
  static T combined(ReduceOp op, T a, T b) {
    return op == ReduceOp::sum || op == ReduceOp::max ? a || b : a && b;
  }
  static bool same(T expected, Bits got) { return got == (expected ? 1 : 0); }
};

// ---- one test body for every dtype -------------------------------------------------------------------

constexpr DType kTypes[] = {DType::uint8, DType::int8, DType::uint16, DType::int16, DType::int32, DType::int64,
                            DType::float16, DType::float32, DType::float64, DType::boolean, DType::bfloat16,
                            DType::uint32, DType::uint64};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 63, 64, 65, 1000, 4097};
constexpr size_t kMost = 4097;

template <class Body>
void with_oracle(DType dtype, Body body) {
  switch (dtype) {
    case DType::uint8: return body(Integer<uint8_t>{});
    case DType::int8: return body(Integer<int8_t>{});
    case DType::uint16: return body(Integer<uint16_t>{});
    case DType::int16: return body(Integer<int16_t>{});
    case DType::int32: return body(Integer<int32_t>{});
    case DType::int64: return body(Integer<int64_t>{});
    case DType::float16: return body(Float16{});
    case DType::float32: return body(Float32{});
    case DType::float64: return body(Float64Exact{});
    case DType::boolean: return body(Boolean{});
    case DType::bfloat16: return body(Bfloat16{});
    case DType::uint32: return body(Integer<uint32_t>{});
    case DType::uint64: return body(Integer<uint64_t>{});
  }
}

// Every bit pattern may occur: NaN, infinities, subnormals. Half of them are small, so that sums stay finite.
template <class Oracle>
std::vector<typename Oracle::Bits> numbers(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<typename Oracle::Bits> all(n);
  for (auto& x : all) {
    x = static_cast<typename Oracle::Bits>(random());
    if (random() % 2 == 0) x = static_cast<typename Oracle::Bits>(x >> (8 * sizeof x / 4 + random() % 2));
  }
  return all;
}

template <class Oracle>
std::vector<typename Oracle::T> expected(const Reduction& r,
                                         const std::vector<std::vector<typename Oracle::Bits>>& in) {
  std::vector<typename Oracle::T> all;
  for (size_t i = 0; i < in[0].size(); ++i) {
    const auto load = [&](size_t j) { return Oracle::scaled(Oracle::decode(in[j][i]), r.pre); };
    typename Oracle::T sum = load(0);
    for (size_t j = 1; j < in.size(); ++j) sum = Oracle::combined(r.op, sum, load(j));
    all.push_back(Oracle::round(Oracle::scaled(sum, r.post)));
  }
  return all;
}

template <class Oracle>
void expect_same(const std::vector<typename Oracle::T>& want, const typename Oracle::Bits* got, size_t n,
                 const std::string& what) {
  for (size_t i = 0; i < n; ++i) {
    ASSERT_TRUE(Oracle::same(want[i], got[i])) << what << ", element " << i << " of " << n << ": expected " << +want[i]
                                               << ", got " << +Oracle::decode(got[i]);
  }
}

std::string text_of(const Reduction& r, Isa isa, size_t inputs, size_t outputs, size_t streamed = 0) {
  return std::string(name_of(r.dtype)) + " " + name_of(r.op) + " pre " + std::to_string(r.pre) + " post " +
         std::to_string(r.post) + ", " + std::to_string(inputs) + " to " + std::to_string(outputs) + " (" +
         std::to_string(streamed) + " streamed), " + name_of(isa);
}

// Pointers are shifted by 1, 2, 3 ... elements: aligned to the element and to nothing else. The element after
// each output must not change.
template <class Oracle>
void check(const Reduction& r, size_t inputs, size_t outputs, std::span<const size_t> lengths) {
  using Bits = typename Oracle::Bits;
  std::vector<std::vector<Bits>> data, shifted;
  std::vector<const void*> in;
  for (size_t j = 0; j < inputs; ++j) {
    data.push_back(numbers<Oracle>(kMost, 1000 * inputs + j));
    shifted.emplace_back(j + 1);
    shifted[j].insert(shifted[j].end(), data[j].begin(), data[j].end());
  }
  for (size_t j = 0; j < inputs; ++j) in.push_back(shifted[j].data() + j + 1);
  const auto want = expected<Oracle>(r, data);
  for (Isa isa : isas()) {
    for (size_t n : lengths) {
      constexpr Bits untouched = 42;
      std::vector<std::vector<Bits>> result(outputs, std::vector<Bits>(n + outputs + 1, untouched));
      std::vector<void*> out;
      for (size_t k = 0; k < outputs; ++k) out.push_back(result[k].data() + k);
      reduce_with(isa, r, out, in, n);
      for (size_t k = 0; k < outputs; ++k) {
        expect_same<Oracle>(want, result[k].data() + k, n, text_of(r, isa, inputs, outputs));
        ASSERT_EQ(result[k][k + n], untouched) << text_of(r, isa, inputs, outputs) << ", wrote past " << n;
      }
    }
  }
}

class Reduce : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Reduce, testing::ValuesIn(kTypes), [](auto& info) { return name_of(info.param); });

TEST_P(Reduce, EqualsTheOracle) {
  with_oracle(GetParam(), [](auto oracle) {
    for (ReduceOp op : kOps) {
      for (size_t inputs = 1; inputs <= 5; ++inputs) {
        for (size_t outputs = 1; outputs <= 4; ++outputs) {
          check<decltype(oracle)>({GetParam(), op}, inputs, outputs, kLengths);
        }
      }
    }
  });
}

TEST_P(Reduce, FactorsAreApplied) {
  const std::pair<double, double> factors[] = {{0.3, 1}, {1, 1.0 / 3}, {2.5, -0.7}, {1e30, 1}, {0, 1}};
  const size_t lengths[] = {1, 65, 4097};
  with_oracle(GetParam(), [&](auto oracle) {
    for (ReduceOp op : kOps) {
      for (auto [pre, post] : factors) {
        for (size_t inputs : {1, 2, 5}) check<decltype(oracle)>({GetParam(), op, pre, post}, inputs, 2, lengths);
      }
    }
  });
}

// Outputs 0 and 2 are input j; output 1 is another input, if there is one.
TEST_P(Reduce, OutputsMayBeInputs) {
  with_oracle(GetParam(), [](auto oracle) {
    using Oracle = decltype(oracle);
    for (Isa isa : isas()) {
      for (auto [post, streamed] : {std::pair{1.0, 0u}, {0.5, 0u}, {1.0, 1u}, {0.5, 3u}}) {
        for (size_t inputs = 1; inputs <= 6; ++inputs) {
          for (size_t j = 0; j < inputs; ++j) {
            std::vector<std::vector<typename Oracle::Bits>> data;
            for (size_t i = 0; i < inputs; ++i) data.push_back(numbers<Oracle>(kMost, 77 * inputs + i));
            const Reduction r{GetParam(), ReduceOp::sum, 1.0, post};
            const auto want = expected<Oracle>(r, data);
            std::vector<const void*> in;
            for (auto& x : data) in.push_back(x.data());
            void* out[] = {data[j].data(), data[(j + 1) % inputs].data(), data[j].data()};
            reduce_with(isa, r, out, in, kMost, streamed);
            const std::string what = text_of(r, isa, inputs, 3, streamed) + " in place";
            expect_same<Oracle>(want, data[j].data(), kMost, what);
            expect_same<Oracle>(want, data[(j + 1) % inputs].data(), kMost, what);
          }
        }
      }
    }
  });
}

// ---- instruction sets against each other -------------------------------------------------------------------

// Where floating point is special, at every fourth element or so; the same value may meet itself.
template <class Oracle>
void sprinkle(std::vector<typename Oracle::Bits>& all, uint64_t seed) {
  if constexpr (requires { Oracle::kInfinity; }) {
    using Bits = typename Oracle::Bits;
    constexpr Bits infinity = Oracle::kInfinity, one = 1;
    constexpr Bits quiet = infinity | one << (Oracle::kFraction - 1), signalling = infinity | 1;
    constexpr Bits subnormal = (one << Oracle::kFraction) - 1, largest = infinity - 1;
    constexpr Bits special[] = {infinity, quiet, signalling, 0, 1, subnormal, subnormal + 1, largest};
    std::mt19937_64 random(seed);
    for (Bits& x : all) {
      const uint64_t r = random();
      if (r % 4 == 0) x = static_cast<Bits>(special[r / 4 % 8] | (r & 32 ? Oracle::kSign : 0));
    }
  }
}

// Of two NaNs either may win, since a compiler may swap the sides of a sum; arithmetic makes a second one from others.
template <class Oracle>
bool may_be_any_nan(const std::vector<std::vector<typename Oracle::Bits>>& in, size_t i) {
  size_t nans = 0;
  if constexpr (requires { Oracle::kInfinity; }) {
    for (const auto& x : in) nans += std::isnan(Oracle::decode(x[i]));
  }
  return nans >= 2 || (nans == 1 && in.size() > 2);
}

// The plain loop's bits are what every set must give, whatever is streamed. Outputs begin off every border but the
// element's, lie in one row with guards between them, and nothing else in the row may change.
template <class Oracle>
void compare_sets(const Reduction& r, size_t inputs, size_t outputs, size_t n) {
  using Bits = typename Oracle::Bits;
  constexpr Bits guard = 42;
  constexpr size_t kGap = 5;
  std::vector<std::vector<Bits>> values, shifted;
  std::vector<const void*> from;
  for (size_t j = 0; j < inputs; ++j) {
    values.push_back(numbers<Oracle>(n, 31 * inputs + j));
    sprinkle<Oracle>(values[j], 17 * n + j);
    shifted.emplace_back(j + 1);
    shifted[j].insert(shifted[j].end(), values[j].begin(), values[j].end());
  }
  for (size_t j = 0; j < inputs; ++j) from.push_back(shifted[j].data() + j + 1);
  const auto run = [&](Isa isa, size_t streamed) {
    std::vector<Bits> row(outputs * (n + kGap) + kGap, guard);
    std::vector<void*> to;
    for (size_t k = 0; k < outputs; ++k) to.push_back(row.data() + kGap + k * (n + kGap));
    reduce_with(isa, r, to, from, n, streamed);
    return row;
  };
  const std::vector<Bits> plain = run(Isa::plain, 0);
  for (Isa isa : isas()) {
    for (size_t streamed : {size_t(0), size_t(1), outputs}) {
      const std::vector<Bits> row = run(isa, streamed);
      for (size_t i = 0; i < row.size(); ++i) {
        if (row[i] == plain[i]) continue;
        const size_t element = i < kGap ? n : (i - kGap) % (n + kGap);
        const bool either = element < n && may_be_any_nan<Oracle>(values, element);
        ASSERT_TRUE(either && Oracle::same(Oracle::decode(plain[i]), row[i]))
            << text_of(r, isa, inputs, outputs, streamed) << ", " << n << " elements: element " << element << " is "
            << +row[i] << ", plain " << +plain[i];
      }
    }
  }
}

TEST_P(Reduce, EveryInstructionSetGivesThePlainBits) {
  const std::pair<double, double> factors[] = {{1, 1}, {0.3, 1}, {1, -1.0 / 3}, {2.5, 0.7}};
  with_oracle(GetParam(), [&](auto oracle) {
    for (ReduceOp op : kOps) {
      for (auto [pre, post] : factors) {
        for (size_t inputs = 1; inputs <= 6; ++inputs) {
          for (size_t outputs = 1; outputs <= 4; ++outputs) {
            const Reduction r{GetParam(), op, pre, post};
            const bool also_long = outputs == 2 && pre == 1 && inputs % 2 == 0;  // so that inputs are fetched ahead
            for (size_t n : {size_t(1), size_t(65), 777 + inputs, also_long ? size_t(70'001) : size_t(16)}) {
              compare_sets<decltype(oracle)>(r, inputs, outputs, n);
            }
          }
        }
      }
    }
  });
}

// ---- what the header promises, number by number ----------------------------------------------------------

template <class T>
T reduced(const Reduction& r, const std::vector<T>& in) {
  T out{};
  void* to[] = {&out};
  std::vector<const void*> from;
  for (const T& x : in) from.push_back(&x);
  reduce(r, to, from, 1);
  return out;
}

TEST_P(Reduce, NeutralNumbersChangeNoResult) {
  with_oracle(GetParam(), [](auto oracle) {
    using Oracle = decltype(oracle);
    using Bits = typename Oracle::Bits;
    for (ReduceOp op : kOps)
      for (double pre : {1.0, 0.5, 3.0, -1.0, 0.0}) {
        if (op == ReduceOp::product && pre != 1) continue;
        const Reduction r{GetParam(), op, pre, 1};
        const std::vector<std::vector<Bits>> data{numbers<Oracle>(1000, 1), numbers<Oracle>(1000, 2)};
        std::vector<Bits> neutral(1001, Bits(42)), out(1000);
        fill_neutral(r, neutral.data(), 1000);
        EXPECT_EQ(neutral[1000], Bits(42)) << "wrote past its end";
        for (size_t at = 0; at < 3; ++at) {  // its place among the inputs
          std::vector<const void*> in{data[0].data(), data[1].data()};
          in.insert(in.begin() + int(at), neutral.data());
          void* to = out.data();
          reduce(r, {&to, 1}, in, out.size());
          expect_same<Oracle>(expected<Oracle>(r, data), out.data(), out.size(), text_of(r, best_isa(), 3, 1));
        }
      }
  });
}

TEST(ReduceNumbers, Float16RoundsOnce) {
  // 2049 is no float16: rounding after each step would give 2048 for ever.
  const std::vector<uint16_t> in{float16_of_float(2048), float16_of_float(1), float16_of_float(1)};
  EXPECT_EQ(float_of_float16(reduced<uint16_t>({DType::float16, ReduceOp::sum}, in)), 2050);
  // 40000 + 40000 is no float16 either, but half of it is.
  const std::vector<uint16_t> large{float16_of_float(40000), float16_of_float(40000)};
  EXPECT_EQ(float_of_float16(reduced<uint16_t>({DType::float16, ReduceOp::sum, 1, 0.5}, large)), 40000);
  EXPECT_EQ(reduced<uint16_t>({DType::float16, ReduceOp::sum}, large), 0x7c00) << "infinity";
}

TEST(ReduceNumbers, Bfloat16RoundsOnceToNearestEven) {
  const auto sum = [](float a, float b, float c) {
    const std::vector<uint16_t> in{bfloat16_of_float(a), bfloat16_of_float(b), bfloat16_of_float(c)};
    return float_of_bfloat16(reduced<uint16_t>({DType::bfloat16, ReduceOp::sum}, in));
  };
  EXPECT_EQ(sum(256, 1, 0), 256) << "257 lies in the middle; 256 is even";
  EXPECT_EQ(sum(258, 1, 0), 260) << "259 lies in the middle; 260 is even";
  EXPECT_EQ(sum(256, 1, 1), 258) << "rounded once";
}

TEST(ReduceNumbers, NanWinsFromEitherSide) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (ReduceOp op : kOps) {
    EXPECT_TRUE(std::isnan(reduced<float>({DType::float32, op}, {nan, 1}))) << name_of(op);
    EXPECT_TRUE(std::isnan(reduced<float>({DType::float32, op}, {1, nan}))) << name_of(op);
    EXPECT_TRUE(std::isnan(reduced<float>({DType::float32, op}, {1, nan, -infinity, infinity, 2}))) << name_of(op);
  }
  EXPECT_EQ(reduced<float>({DType::float32, ReduceOp::sum}, {infinity, 1}), infinity);
  EXPECT_EQ(reduced<float>({DType::float32, ReduceOp::min}, {-infinity, 1}), -infinity);
  EXPECT_TRUE(std::isnan(reduced<float>({DType::float32, ReduceOp::sum}, {infinity, -infinity})));
}

TEST(ReduceNumbers, IntegersWrapAroundWithoutFactor) {
  EXPECT_EQ(reduced<int8_t>({DType::int8, ReduceOp::sum}, {100, 100}), -56);
  EXPECT_EQ(reduced<uint16_t>({DType::uint16, ReduceOp::product}, {65535, 65535}), 1);
  EXPECT_EQ(reduced<int64_t>({DType::int64, ReduceOp::sum}, {INT64_MAX, 1}), INT64_MIN);
  EXPECT_EQ(reduced<int64_t>({DType::int64, ReduceOp::sum}, {INT64_MAX, -1}), INT64_MAX - 1) << "exact, not in double";
}

TEST(ReduceNumbers, IntegersWithFactorAreTruncatedTowardsZero) {
  EXPECT_EQ(reduced<int32_t>({DType::int32, ReduceOp::sum, 1, 0.5}, {3, 4}), 3);
  EXPECT_EQ(reduced<int32_t>({DType::int32, ReduceOp::sum, 1, 0.5}, {-3, -4}), -3);
  EXPECT_EQ(reduced<int32_t>({DType::int32, ReduceOp::sum, 0.5, 1}, {3, 5}), 3) << "each input on its own";
}

TEST(ReduceNumbers, IntegersOutOfRangeSaturate) {
  EXPECT_EQ(reduced<int8_t>({DType::int8, ReduceOp::sum, 10, 1}, {100}), 127);
  EXPECT_EQ(reduced<uint8_t>({DType::uint8, ReduceOp::sum, -1, 1}, {5}), 0);
  EXPECT_EQ(reduced<int64_t>({DType::int64, ReduceOp::sum, 1, 1e300}, {-5}), INT64_MIN);
  EXPECT_EQ(reduced<int64_t>({DType::int64, ReduceOp::sum, 1, 1.5}, {INT64_MAX}), INT64_MAX);
  EXPECT_EQ(reduced<int32_t>({DType::int32, ReduceOp::sum, 1, std::nan("")}, {7}), 0);
}

TEST(ReduceNumbers, BoolIgnoresFactors) {
  EXPECT_EQ(reduced<uint8_t>({DType::boolean, ReduceOp::sum, 0, 0.5}, {1, 1}), 1);
  EXPECT_EQ(reduced<uint8_t>({DType::boolean, ReduceOp::product, 0, 0}, {1, 255}), 1) << "any byte but 0 is true";
}

TEST(ReduceNumbers, RefusesWhatHasNoKernel) {
  EXPECT_THROW(reduced<float>({DType::float32, ReduceOp::average}, {1, 2}), Error);
  EXPECT_THROW(reduced<uint8_t>({DType::boolean, ReduceOp::adasum}, {1, 1}), Error);
  EXPECT_THROW(reduced<float>({DType::float32, ReduceOp::sum}, {}), Error);
}

// ---- conversions -----------------------------------------------------------------------------------------

TEST(Half, EveryPatternWidensRight) {
  for (uint32_t b = 0; b < 65536; ++b) {
    const uint16_t bits = static_cast<uint16_t>(b);
    ASSERT_TRUE(Float32::same(Float16::decode(bits), std::bit_cast<uint32_t>(float_of_float16(bits)))) << bits;
    ASSERT_TRUE(Float32::same(Bfloat16::decode(bits), std::bit_cast<uint32_t>(float_of_bfloat16(bits)))) << bits;
    ASSERT_EQ(std::signbit(float_of_float16(bits)), b >= 32768);
  }
}

// Every float16 and its neighbours among the floats, the middles between two of them included.
TEST(Half, NarrowsToNearestEven) {
  for (uint32_t b = 0; b < 65536; ++b) {
    for (uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (uint32_t bits : {b << 16 | low, (b << 16) + (low << 3), std::bit_cast<uint32_t>(Float16::decode(b)) + low}) {
        const float f = std::bit_cast<float>(bits);
        ASSERT_TRUE(Float16::same(Float16::round(f), float16_of_float(f))) << f;
        ASSERT_TRUE(Bfloat16::same(Bfloat16::round(f), bfloat16_of_float(f))) << f;
        ASSERT_EQ(float16_of_float(f) >> 15, bits >> 31) << f;
      }
    }
  }
}

// Down to the bits of a NaN, so that a host without the instruction agrees with one that has it.
TEST(Half, FastConversionEqualsPlainBitForBit) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const void* in[] = {all.data()};
  const auto scaled = [&](Isa isa, DType dtype, double post) {
    std::vector<uint16_t> result(all.size());
    void* out[] = {result.data()};
    reduce_with(isa, {dtype, ReduceOp::sum, 1, post}, out, in, all.size());
    return result;
  };
  for (Isa isa : isas()) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      for (double post : {1.0, 1.0 / 3}) {
        EXPECT_EQ(scaled(isa, dtype, post), scaled(Isa::plain, dtype, post)) << name_of(isa) << ' ' << name_of(dtype);
      }
    }
  }
}

TEST(Sets, OneThatTheMachineLacksIsRefused) {
  EXPECT_TRUE(has(Isa::plain));
  EXPECT_TRUE(has(best_isa()));
  float x = 1;
  void* out[] = {&x};
  const void* in[] = {&x};
  for (Isa isa : {Isa::avx2, Isa::avx512, static_cast<Isa>(9)}) {
    if (has(isa)) continue;
    EXPECT_THROW(reduce_with(isa, {DType::float32, ReduceOp::sum}, out, in, 1), Error) << name_of(isa);
  }
}

// ---- copy --------------------------------------------------------------------------------------------------

TEST(Copy, MovesAndCounts) {
  const std::vector<char> from(1000, 'x');
  std::vector<char> to(1001, '.');
  const uint64_t before = copied_bytes();
  copy(to.data(), from.data(), 1000);
  EXPECT_EQ(copied_bytes() - before, 1000u);
  EXPECT_EQ(std::string(to.data(), 1001), std::string(1000, 'x') + ".");
  copy(nullptr, nullptr, 0);
  EXPECT_EQ(copied_bytes() - before, 1000u);
}

TEST(Copy, StreamsFromAndToAnywhere) {
  std::vector<char> from(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7);
  for (size_t to_at : {0, 1, 15, 63, 64}) {
    for (size_t from_at : {0, 3, 64}) {
      for (size_t bytes : {0, 1, 62, 63, 64, 65, 127, 128, 1000, 4096}) {
        std::vector<char> to(5000, '.');
        const uint64_t before = copied_bytes();
        copy(to.data() + to_at, from.data() + from_at, bytes, true);
        EXPECT_EQ(copied_bytes() - before, bytes);
        std::vector<char> want(5000, '.');
        std::memcpy(want.data() + to_at, from.data() + from_at, bytes);
        ASSERT_EQ(to, want) << bytes << " bytes from " << from_at << " to " << to_at;
      }
    }
  }
}

TEST(Cache, IsOutgrownByMuchAndNotByLittle) {
  EXPECT_FALSE(outgrows_cache(0));
  EXPECT_FALSE(outgrows_cache(256 << 10));
  EXPECT_TRUE(outgrows_cache(size_t(64) << 20)) << "no machine's ranks may count on more than 128 MiB";
}

TEST(Copy, CountsFromManyThreads) {
  const uint64_t before = copied_bytes();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      char from[16] = {}, to[16];
      for (int i = 0; i < 1000; ++i) copy(to, from, sizeof to);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(copied_bytes() - before, 4u * 1000 * 16);
}

}  // namespace
}  // namespace lightcc

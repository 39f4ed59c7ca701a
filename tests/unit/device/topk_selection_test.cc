// TopKSelection against an oracle that sorts: every instruction set, every warm start, one result, to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"
#include "device/topk.h"
#include "device/topk_message.h"
#include "unit/codec_cases.h"
#include "unit/isas.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using test::Input;

constexpr float kLargest = std::numeric_limits<float>::max();

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
uint32_t magnitude_of(float x) { return bits_of(x) & 0x7fffffffu; }

// ---- the oracle

struct LoopOutput {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> indices;
  std::vector<float> values, residual;
  bool finite = true;
};

LoopOutput oracle(const Input& in, size_t k, DType type) {
  LoopOutput out;
  const std::vector<float> sums = in.sums();
  std::vector<size_t> order(sums.size());
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + int64_t(k) - 1, order.end(), [&](size_t a, size_t b) {
    return std::pair(~magnitude_of(sums[a]), a) < std::pair(~magnitude_of(sums[b]), b);
  });
  std::sort(order.begin(), order.begin() + int64_t(k));
  out.residual = sums;
  out.counts.resize((sums.size() + 65535) / 65536);
  for (size_t i = 0; i < k; ++i) {
    const size_t at = order[i];
    ++out.counts[at / 65536];
    out.indices.push_back(static_cast<uint16_t>(at % 65536));
    out.values.push_back(sums[at]);
    float sent = sums[at];
    if (type == DType::float16 && std::isfinite(sent)) sent = std::clamp(sent, -65504.0f, 65504.0f);
    if (type == DType::float16) sent = float_of_float16(float16_of_float(sent));
    out.residual[at] = sums[at] - sent;
  }
  out.finite = std::all_of(sums.begin(), sums.end(), [](float x) { return std::isfinite(x); });
  if (!out.finite) out.residual = in.residual;
  return out;
}

template <class Expected, class Got>
void expect_equal(const Expected& want, const Got& got, const std::string& what) {
  ASSERT_EQ(want.size(), got.size()) << what;
  if (std::memcmp(want.data(), got.data(), want.size() * sizeof(want[0])) == 0) return;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(0, std::memcmp(&want[i], &got[i], sizeof want[i])) << what << " " << i << ": " << want[i] << ", not "
                                                                 << got[i];
  }
}

// The gradient's memory is the selection's. Elements around the piece must not change.
TopKSelected run(TopKSelection& selection, const Input& in, size_t k, DType type, TopKWarmStart& warm,
                 std::vector<float>& residual) {
  constexpr size_t kAround = 3;
  constexpr float kGuard = 42;
  const size_t count = in.gradient.size();
  std::vector<float> gradient(kAround, kGuard);
  gradient.insert(gradient.end(), in.gradient.begin(), in.gradient.end());
  gradient.insert(gradient.end(), kAround, kGuard);
  std::vector<float> row(kAround, kGuard);
  row.insert(row.end(), in.residual.begin(), in.residual.end());
  row.insert(row.end(), kAround, kGuard);
  selection.start({gradient.data() + kAround, row.data() + kAround, count, k, in.scale, type}, warm);
  size_t steps = 1;
  while (selection.step() && steps < 1000 + count) ++steps;
  EXPECT_LT(steps, 1000 + count) << "no end";
  EXPECT_GT(steps, count / 65536) << "a step takes a block at most";
  EXPECT_FALSE(selection.step());
  for (size_t i = 0; i < kAround; ++i) {
    for (const auto* all : {&gradient, &row}) EXPECT_EQ(kGuard, (*all)[i]) << "before the piece";
    for (const auto* all : {&gradient, &row}) EXPECT_EQ(kGuard, (*all)[kAround + count + i]) << "behind the piece";
  }
  residual.assign(row.begin() + kAround, row.end() - kAround);
  return selection.selected();
}

void expect_output(const LoopOutput& want, const TopKSelected& got, const std::vector<float>& residual,
                   const std::string& what) {
  EXPECT_EQ(want.finite, got.finite) << what;
  expect_equal(want.counts, got.counts, what + ", count of block");
  expect_equal(want.indices, got.indices, what + ", index");
  expect_equal(want.values, got.values, what + ", value");
  expect_equal(want.residual, residual, what + ", residual");
}

// What any bits in a warm start may do: no guess, one all but right, far too low, too high, and nonsense.
std::vector<TopKWarmStart> warm_starts(const LoopOutput& want) {
  float right = kLargest;
  for (float x : want.values) right = std::min(right, std::fabs(x));
  return {{},          {right, 0.1f},  {right / 100, 0.5f}, {right * 1.2f, 0.1f}, {kLargest, 0.005f}, {1e-40f, 0.5f},
          {kNaN, kNaN}, {-1, -kInfinite}, {kInfinite, 0.1f},  {right, 7}};
}

// With so many of the warm starts for each instruction set, by turns.
void check(const Input& in, size_t k, DType type, const std::string& name, size_t starts) {
  const LoopOutput want = oracle(in, k, type);
  const std::vector<TopKWarmStart> all = warm_starts(want);
  size_t turn = in.gradient.size() + k + name.size();
  for (Isa isa : isas()) {
    TopKSelection selection(isa);
    for (size_t i = 0; i < starts; ++i) {
      const TopKWarmStart first = all[turn++ % all.size()];
      TopKWarmStart warm = first;
      std::vector<float> residual;
      const TopKSelected got = run(selection, in, k, type, warm, residual);
      const std::string what = name + ", " + std::to_string(k) + " of " + std::to_string(in.gradient.size()) + ", " +
                               name_of(type) + ", " + name_of(isa) + ", guess " + std::to_string(first.threshold);
      expect_output(want, got, residual, what);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// ---- distributions

using Draw = std::function<float(size_t i, size_t count, std::mt19937_64&)>;
struct Distribution {
  const char* name;
  Draw draw;
};

float normal(std::mt19937_64& random) {
  std::normal_distribution<float> distribution;
  return distribution(random);
}
float sign(std::mt19937_64& random) { return random() % 2 ? 1.0f : -1.0f; }

const Distribution kDistributions[] = {
    {"normal", [](size_t, size_t, auto& random) { return normal(random); }},
    {"equal", [](size_t, size_t, auto&) { return 0.25f; }},
    {"equal but for signs", [](size_t, size_t, auto& random) { return 3 * sign(random); }},
    {"zero", [](size_t, size_t, auto& random) { return 0 * sign(random); }},
    {"few values", [](size_t, size_t, auto& random) { return sign(random) * static_cast<float>(random() % 4); }},
    {"subnormal", [](size_t, size_t, auto& random) { return std::bit_cast<float>(uint32_t(random() % 0x800000)); }},
    {"ascending", [](size_t i, size_t, auto& random) { return sign(random) * static_cast<float>(i) * 1e-3f; }},
    {"descending", [](size_t i, size_t count, auto&) { return static_cast<float>(count - i) * 1e-3f; }},
    {"sparse", [](size_t, size_t, auto& random) { return random() % 500 ? 0 : normal(random); }},
    {"in one place", [](size_t i, size_t n, auto& random) { return i < n - n / 64 ? 0 : 1 + 0.1f * normal(random); }},
    {"wide", [](size_t, size_t, auto& random) { return sign(random) * std::exp2(12 * normal(random)); }},
    {"beyond float16", [](size_t, size_t, auto& random) { return 65504 + 30 * normal(random); }},
    {"far beyond it", [](size_t, size_t, auto& random) { return sign(random) * 3e37f * float(1 + random() % 8); }},
};

Input input(const Distribution& from, size_t count, uint64_t seed, float scale = 1) {
  std::mt19937_64 random(seed);
  Input in{std::vector<float>(count), std::vector<float>(count), scale};
  for (float& x : in.gradient) x = from.draw(static_cast<size_t>(&x - in.gradient.data()), count, random);
  // Often what is left behind is nothing, so that equal sums stay equal.
  if (seed % 2) {
    for (size_t i = 0; i < count; ++i) in.residual[i] = in.gradient[i] * 0.3f * normal(random);
  }
  return in;
}

std::vector<size_t> ks(size_t count) {
  const std::set<size_t> all{1, (count + 99) / 100, (count + 1) / 2, count};
  return {all.begin(), all.end()};
}

class TopK : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Values, TopK, testing::Values(DType::float32, DType::float16),
                         [](auto& info) { return name_of(info.param); });

TEST_P(TopK, EqualsTheOracleForEverySmallSize) {
  for (size_t count = 1; count <= 200; ++count) {
    for (const Distribution& from : kDistributions) {
      const Input in = input(from, count, count, count % 3 ? 1.0f : 0.125f);
      for (size_t k : ks(count)) check(in, k, GetParam(), from.name, 2);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(TopK, EqualsTheOracleAroundBlocks) {
  for (size_t count : {65536, 65537}) {
    for (const Distribution& from : kDistributions) {
      const Input in = input(from, count, count / 2);
      for (size_t k : ks(count)) check(in, k, GetParam(), from.name, 1);
      if (HasFatalFailure()) return;
    }
  }
}

// So large that candidates do not have room, and few are wanted: the k largest so far are the bound for the rest.
TEST_P(TopK, EqualsTheOracleWhenCandidatesHaveNoRoom) {
  int prunes = 0;
  for (const Distribution& from : kDistributions) {
    const Input in = input(from, 150'001, 5, 0.5f);
    for (size_t k : {1, 1000}) check(in, k, GetParam(), from.name, 2);
    if (HasFatalFailure()) return;
    TopKSelection selection;
    TopKWarmStart low{1e-40f, 0.5f};
    std::vector<float> residual;
    prunes += run(selection, in, 1000, GetParam(), low, residual).prunes;
  }
  EXPECT_GT(prunes, 5);
}

// ---- a training

// Gradients whose scale drifts, jumps and vanishes: all ways to a result are taken, and which one does not matter.
TEST_P(TopK, EveryWayLeadsToTheSame) {
  const size_t count = 150'000, k = 300;
  std::mt19937_64 random(7);
  Input in{std::vector<float>(count), std::vector<float>(count), 1.0f / 1024};
  std::vector<TopKWarmStart> warm(isas().size());
  int warmed = 0, cold = 0, misses = 0, prunes = 0, at_once = 0;
  for (int step = 0; step < 40; ++step) {
    const float jump = step % 20 == 7 ? 1000.0f : step % 20 == 14 ? 1e-3f : 1.0f;
    for (float& x : in.gradient) x = jump * normal(random) * (step == 33 ? 0 : 1);
    if (step % 20 == 10) std::fill(in.residual.begin(), in.residual.end(), 0);
    const LoopOutput want = oracle(in, k, GetParam());
    for (size_t i = 0; i < isas().size(); ++i) {
      TopKSelection selection(isas()[i]);
      std::vector<float> residual;
      const TopKSelected got = run(selection, in, k, GetParam(), warm[i], residual);
      expect_output(want, got, residual, "step " + std::to_string(step) + ", " + name_of(isas()[i]));
      if (HasFatalFailure()) return;
      (got.warm ? warmed : cold) += 1;
      misses += got.passes > 1;
      prunes += got.prunes;
      at_once += got.warm && got.passes == 1 && got.prunes == 0;
    }
    in.residual = want.residual;
  }
  EXPECT_GT(at_once, int(24 * isas().size())) << "the usual way";
  EXPECT_GT(warmed, 0);
  EXPECT_GT(cold, 0);
  EXPECT_GT(misses, 0);
  EXPECT_GT(prunes, 0);
}

TEST(TopKWarmStart, IsTheThresholdOfTheLastStep) {
  const Input in = input(kDistributions[0], 100'000, 3);
  TopKSelection selection;
  TopKWarmStart warm;
  std::vector<float> residual;
  run(selection, in, 1000, DType::float32, warm, residual);
  const LoopOutput want = oracle(in, 1000, DType::float32);
  float least = kLargest;
  for (float x : want.values) least = std::min(least, std::fabs(x));
  EXPECT_LE(warm.threshold, least);
  EXPECT_GT(warm.threshold, 0.99f * least);
  const TopKSelected again = run(selection, in, 1000, DType::float32, warm, residual);
  EXPECT_TRUE(again.warm);
  EXPECT_EQ(1, again.passes);
}

// ---- what is not finite

TEST_P(TopK, OfASumThatIsNotFiniteSaysSoAndLeavesTheResidual) {
  for (size_t count : {1, 40, 65537, 131'073}) {
    for (size_t at : {size_t(0), size_t(17), count / 2, size_t(65535), size_t(65536), count - 1}) {
      if (at >= count) continue;
      for (float value : {kNaN, kInfinite, -kInfinite, kLargest}) {
        Input in = input(kDistributions[0], count, 11);
        in.gradient[at] = value;
        if (value == kLargest) in.residual[at] = kLargest;  // their sum is too large
        for (size_t k : {size_t(1), count / 100 + 1}) {
          ASSERT_FALSE(oracle(in, 1, GetParam()).finite);
          check(in, k, GetParam(), "not finite at " + std::to_string(at), 1);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(TopK, MoreThanKAreNotFinite) {
  Input in = input(kDistributions[0], 70'000, 13);
  for (size_t i = 0; i < 70'000; i += 7) in.gradient[i] = i % 3 ? kInfinite : kNaN;
  for (size_t k : {1, 100, 5000, 20'000}) check(in, k, GetParam(), "many not finite", 4);
}

TEST(TopKSelection, AStepThatWillBeSkippedDoesNotChangeTheWarmStart) {
  Input in = input(kDistributions[0], 100'000, 15);
  TopKSelection selection;
  TopKWarmStart warm;
  std::vector<float> residual;
  run(selection, in, 1000, DType::float32, warm, residual);
  const TopKWarmStart before = warm;
  in.gradient[500] = kNaN;
  EXPECT_FALSE(run(selection, in, 1000, DType::float32, warm, residual).finite);
  EXPECT_EQ(before.threshold, warm.threshold);
}

// ---- arguments

TEST(TopKSelection, RefusesWhatItCannotDo) {
  float g = 1, r = 0;
  TopKSelection selection;
  TopKWarmStart warm;
  EXPECT_FALSE(selection.step()) << "nothing has been started";
  EXPECT_THROW(selection.start({&g, &r, 1, 0}, warm), Error);
  EXPECT_THROW(selection.start({&g, &r, 1, 2}, warm), Error);
  EXPECT_THROW(selection.start({&g, &r, 0, 0}, warm), Error);
  EXPECT_THROW(selection.start({&g, &r, 1, 1, 1, DType::bfloat16}, warm), Error);
  for (Isa isa : {Isa::avx2, Isa::avx512, static_cast<Isa>(9)}) {
    if (has(isa)) continue;
    EXPECT_THROW(TopKSelection{isa}, Error) << name_of(isa);
  }
}

}  // namespace
}  // namespace lightcc

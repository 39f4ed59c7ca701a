// Adasum against an oracle that follows the definition in collective/adasum.h: plain recursion in double on whole
// vectors. Its kernels, its schedules over loop links, and the engine over shared memory.
#include "collective/adasum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "collective/algorithms.h"
#include "collective/execution.h"
#include "device/adasum.h"
#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(alone, "Adasum.EqualsTheDefinition*");
LABEL(on_hosts, "AdasumEngine.*-*SideBySide*");
LABEL(as_placed, "AdasumEngine.SideBySide*");

namespace lightcc {
namespace {

using namespace test;
using Vector = std::vector<double>;

constexpr DType kFloats[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

// ---- the oracle -----------------------------------------------------------------------------------------

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Where terms cancel, rounding errors grow against what is left of them, and it is the direction of this rest that the
// next level looks at. `kept` is the smallest |sum| / (|a| + |b|) of all levels: a small one excuses large errors.
struct Oracle {
  double kept = 1;

  Vector combine(const Vector& a, const Vector& b) {
    const double ab = dot(a, b), aa = dot(a, a), bb = dot(b, b);
    const double p = aa == 0 ? 1 : 1 - ab / (2 * aa), q = bb == 0 ? 1 : 1 - ab / (2 * bb);
    Vector sum(a.size());
    for (size_t i = 0; i < a.size(); ++i) sum[i] = p * a[i] + q * b[i];
    if (aa + bb > 0) kept = std::min(kept, std::sqrt(dot(sum, sum)) / (std::sqrt(aa) + std::sqrt(bb)));
    return sum;
  }

  Vector tree(const std::vector<Vector>& leaves, size_t begin, size_t end) {
    if (end - begin == 1) return leaves[begin];
    const size_t middle = (begin + end) / 2;
    return combine(tree(leaves, begin, middle), tree(leaves, middle, end));
  }

  Vector operator()(const std::vector<Vector>& all) {
    std::vector<Vector> leaves;
    const size_t pairs = all.size() - std::bit_floor(all.size());
    for (size_t i = 0; i < pairs; ++i) leaves.push_back(combine(all[2 * i], all[2 * i + 1]));
    leaves.insert(leaves.end(), all.begin() + int64_t(2 * pairs), all.end());
    return tree(leaves, 0, leaves.size());
  }
};

// ---- numbers ----------------------------------------------------------------------------------------------

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 0x1p-11;
    case DType::bfloat16:
      return 0x1p-8;
    case DType::float32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

std::vector<std::byte> encode(DType dtype, const Vector& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto put = [&](auto value) { std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value); };
    switch (dtype) {
      case DType::float16:
        put(float16_of_float(float(values[i])));
        break;
      case DType::bfloat16:
        put(bfloat16_of_float(float(values[i])));
        break;
      case DType::float32:
        put(float(values[i]));
        break;
      default:
        put(values[i]);
    }
  }
  return bytes;
}

Vector decode(DType dtype, const std::vector<std::byte>& bytes) {
  Vector values(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto get = [&](auto value) {
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      return value;
    };
    switch (dtype) {
      case DType::float16:
        values[i] = float_of_float16(get(uint16_t{}));
        break;
      case DType::bfloat16:
        values[i] = float_of_bfloat16(get(uint16_t{}));
        break;
      case DType::float32:
        values[i] = get(float{});
        break;
      default:
        values[i] = get(double{});
    }
  }
  return values;
}
Vector rounded(DType dtype, const Vector& values) { return decode(dtype, encode(dtype, values)); }

// What ranks have: alike, unlike, opposite, or nothing at all.
Vector numbers(size_t count, int rank, uint64_t seed) {
  std::mt19937_64 common(seed), own(seed * 1000 + uint64_t(rank));
  std::normal_distribution<double> normal, own_normal;  // each keeps a number for its next call
  constexpr double kShared[] = {0, 1, 1, 0.5, -1};
  const double shared = kShared[own() % 5], alone = own() % 5 ? double(own() % 3) : 0;
  Vector values(count);
  for (double& value : values) value = shared * normal(common) + alone * own_normal(own);
  return values;
}

// ---- kernels -------------------------------------------------------------------------------------------------

TEST(AdasumKernels, DotProductsAndTheirBitsOnEveryInstructionSet) {
  for (DType dtype : kFloats)
    for (size_t count : {0, 1, 7, 8, 9, 63, 1023, 1024, 1025, 5003}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << count);
      const uint64_t seed = run_seed() + count;
      const auto a = encode(dtype, numbers(count, 0, seed)), b = encode(dtype, numbers(count, 1, seed));
      double plain[kDotProducts] = {1, 2, 3}, fast[kDotProducts] = {1, 2, 3};
      add_dot_products_with(Isa::plain, dtype, a.data(), b.data(), count, plain);
      add_dot_products(dtype, a.data(), b.data(), count, fast);
      EXPECT_EQ(std::memcmp(plain, fast, sizeof plain), 0);
      const Vector x = decode(dtype, a), y = decode(dtype, b);
      const double room = 1e-13 * double(count + 10) * (1 + std::max(dot(x, x), dot(y, y)));
      EXPECT_NEAR(plain[0], 1 + dot(x, x), room);
      EXPECT_NEAR(plain[1], 2 + dot(x, y), room);
      EXPECT_NEAR(plain[2], 3 + dot(y, y), room);
    }
}

TEST(AdasumKernels, ScaledSumsAndTheirBitsOnEveryInstructionSet) {
  for (DType dtype : kFloats)
    for (size_t count : {0, 1, 7, 1024, 1025, 5003}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << count);
      const auto a = encode(dtype, numbers(count, 0, run_seed())), b = encode(dtype, numbers(count, 1, run_seed()));
      const Vector x = decode(dtype, a), y = decode(dtype, b);
      Vector expected(count);
      for (size_t i = 0; i < count; ++i)
        expected[i] =
            dtype == DType::float64 ? 0.75 * x[i] + 1.3 * y[i] : double(0.75f * float(x[i]) + float(1.3) * float(y[i]));
      for (Isa isa : {Isa::plain, best_isa()}) {
        for (int aliased : {-1, 0, 1}) {  // with neither, with a, with b
          auto p = a, q = b;
          std::vector<std::byte> room(a.size());
          auto& out = aliased < 0 ? room : aliased == 0 ? p : q;
          add_scaled_with(isa, dtype, p.data(), 0.75, q.data(), 1.3, out.data(), count);
          EXPECT_EQ(out, encode(dtype, expected)) << "aliased " << aliased;
        }
      }
    }
}

TEST(AdasumKernels, ADTypeWithoutFractionsIsRefused) {
  int32_t x = 1;
  double sums[kDotProducts] = {};
  EXPECT_THROW(add_dot_products(DType::int32, &x, &x, 1, sums), Error);
  EXPECT_THROW(add_scaled(DType::boolean, &x, 1, &x, 1, &x, 1), Error);
}

TEST(Adasum, FactorsOfEqualOrthogonalAndVanishingVectors) {
  const auto factors = [](double aa, double ab, double bb) {
    const double dots[] = {aa, ab, bb};
    const AdasumFactors by = adasum_factors(dots);
    return std::pair(by.a, by.b);
  };
  EXPECT_EQ(factors(3, 3, 3), std::pair(0.5, 0.5));
  EXPECT_EQ(factors(3, 0, 5), std::pair(1.0, 1.0));
  EXPECT_EQ(factors(0, 0, 5), std::pair(1.0, 1.0));
  EXPECT_EQ(factors(0, 0, 0), std::pair(1.0, 1.0));
  EXPECT_EQ(factors(1, 2, 4), std::pair(0.0, 0.75)) << "b = 2 a: 1.5 a";
  EXPECT_EQ(factors(1, -1, 1), std::pair(1.5, 1.5));
}

// ---- schedules ---------------------------------------------------------------------------------------------

struct Case {
  const char* algorithm;
  DType dtype;
  std::vector<TensorPlace> tensors;
  int64_t count;  // with what lies between and behind the tensors
  bool in_place;
  double pre, post;
  uint64_t seed;
};

std::vector<Case> cases_of(uint64_t seed) {
  std::vector<Case> cases;
  for (const char* algorithm : {"adasum_whole", "adasum_halving"})
    for (DType dtype : kFloats)
      for (int64_t count : {0, 1, 2, 9, 301, 9001}) {
        ++seed;
        const bool scaled = seed % 3 == 0;
        cases.push_back(
            {algorithm, dtype, {{0, count}}, count, seed % 2 == 0, scaled ? 0.5 : 1, scaled ? 3.0 : 1, seed});
        if (count < 9) continue;
        const int64_t third = count / 3;  // gaps, one tensor of one element, the last one to the end
        cases.push_back({algorithm,
                         dtype,
                         {{0, third - 1}, {third, 1}, {third + 2, third}, {2 * third + 2, count - 2 * third - 2}},
                         count,
                         seed % 2 == 1,
                         1,
                         1,
                         seed});
      }
  return cases;
}

Collective collective(const Case& one, int rank, int size) {
  Collective c{};
  c.kind = Kind::allreduce, c.index = rank, c.size = size, c.dtype = one.dtype, c.op = ReduceOp::adasum;
  c.pre = one.pre, c.post = one.post, c.count = one.count, c.tensors = one.tensors;
  return c;
}

// As this rank holds it; what no tensor owns is NaN and must not spread.
Vector input_of(const Case& one, int rank) {
  Vector values(size_t(one.count), std::nan(""));
  for (const TensorPlace& tensor : one.tensors) {
    const Vector part = numbers(size_t(tensor.count), rank, one.seed + uint64_t(tensor.offset));
    std::copy(part.begin(), part.end(), values.begin() + tensor.offset);
  }
  return rounded(one.dtype, values);
}
Vector part_of(const Vector& all, const TensorPlace& tensor) {
  return {all.begin() + tensor.offset, all.begin() + tensor.offset + tensor.count};
}

// "" or what is wrong. Every level rounds, relative to the numbers in it, and the oracle's dot products do.
std::string compare(const Case& one, int size, const std::vector<std::byte>& output) {
  const Vector got = decode(one.dtype, output);
  for (const TensorPlace& tensor : one.tensors) {
    std::vector<Vector> inputs;
    double largest = 0;
    for (int rank = 0; rank < size; ++rank) {
      inputs.push_back(part_of(input_of(one, rank), tensor));
      for (double& value : inputs.back()) largest += std::fabs(value *= one.pre) / double(tensor.count);
    }
    Oracle adasum;
    const Vector expected = adasum(inputs);
    for (double value : expected) largest = std::max(largest, std::fabs(value));
    const double room = 16 * (epsilon(one.dtype) + double(tensor.count) * 0x1p-53) * largest * one.post / adasum.kept;
    for (int64_t i = 0; i < tensor.count; ++i) {
      const double wanted = expected[size_t(i)] * one.post, is = got[size_t(tensor.offset + i)];
      if (!(std::fabs(is - wanted) <= room))
        return std::string(one.algorithm) + " " + name_of(one.dtype) + " count " + std::to_string(one.count) +
               " seed " + std::to_string(one.seed) + ": element " + std::to_string(tensor.offset + i) + " is " +
               std::to_string(is) + ", not " + std::to_string(wanted);
    }
  }
  return "";
}

std::shared_ptr<const Schedule> planned(const Case& one, const Collective& c) {
  return std::make_shared<const Schedule>(plan(*find_algorithm(Kind::allreduce, one.algorithm), c, one_host(c.size)));
}

// All cases one after the other over the same links; no rank waits for the others in between.
void run_cases(int size, const LoopFaults& faults) {
  SCOPED_TRACE(testing::Message() << size << " ranks, records of " << faults.record_bytes << ", seed " << faults.seed);
  const std::vector<Case> cases = cases_of(faults.seed);
  std::vector<std::vector<std::vector<std::byte>>> outputs(cases.size());
  for (auto& one : outputs) one.resize(size_t(size));
  LoopNetwork transport(size, faults);
  const auto thrown = run_ranks(transport, size, [&](int rank) {
    const std::vector<Link*> links = transport.links(rank);
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto input = encode(cases[i].dtype, input_of(cases[i], rank));
      auto& output = outputs[i][size_t(rank)] = cases[i].in_place ? input : std::vector<std::byte>(input.size());
      Collective c = collective(cases[i], rank, size);
      c.input = cases[i].in_place ? output.data() : input.data();
      c.output = output.data();
      Execution execution(planned(cases[i], c), c, links);
      drive(execution);
    }
  });
  for (int rank = 0; rank < size; ++rank) ASSERT_EQ(test::text_of(thrown[size_t(rank)]), "") << "rank " << rank;
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(compare(cases[i], size, outputs[i][0]), "");
    for (const TensorPlace& tensor : cases[i].tensors) {
      if (tensor.count == 0) continue;
      const size_t element = size_of(cases[i].dtype), begin = size_t(tensor.offset) * element;
      for (int rank = 1; rank < size; ++rank)
        ASSERT_EQ(std::memcmp(outputs[i][0].data() + begin, outputs[i][size_t(rank)].data() + begin,
                              size_t(tensor.count) * element),
                  0)
            << "rank " << rank << " has other bits";
    }
  }
}

TEST(Adasum, EqualsTheDefinitionOverGentleLinks) {
  for (int size = 1; size <= 9 && !HasFailure(); ++size) run_cases(size, {.seed = run_seed() + uint64_t(size)});
}
TEST(Adasum, EqualsTheDefinitionOverFaultyLinks) {
  for (int size = 1; size <= (kWatched ? 6 : 9) && !HasFailure(); ++size)
    run_cases(size, {1000, 1, 0.1, 0.2, run_seed() + uint64_t(size)});
}

// Within a round nothing may be written that another step of it reads or writes.
TEST(Adasum, NoStepDisturbsAnotherOfItsRound) {
  struct Access {
    size_t step;
    bool writes;
    Memory memory;
    int64_t begin, end;
  };
  for (const char* algorithm : {"adasum_whole", "adasum_halving"})
    for (int size = 1; size <= 17; ++size)
      for (int rank = 0; rank < size; ++rank)
        for (int64_t count : {0, 1, 5, 100}) {
          const Case one{algorithm, DType::float32, {{0, count / 2}, {count / 2, count - count / 2}}, count, true, 1, 1,
                         1};
          const auto schedule = planned(one, collective(one, rank, size));
          for (const auto& round : *schedule) {
            std::vector<Access> accesses;
            for (size_t s = 0; s < round.size(); ++s) {
              const Step& step = round[s];
              const auto add = [&](bool writes, Place at, int64_t n) {
                EXPECT_FALSE(writes && at.memory == Memory::input);
                const bool data = at.memory == Memory::input || at.memory == Memory::output;
                EXPECT_TRUE(!data || at.offset + n <= count);
                if (n) accesses.push_back({s, writes, data ? Memory::output : at.memory, at.offset, at.offset + n});
              };
              if (step.reads()) add(false, step.from, step.count);
              if (step.writes()) add(true, step.to, step.count);
              if (step.kind == Step::Action::combine) add(false, step.theirs, step.count);
              if (step.kind == Step::Action::combine) add(false, {Memory::dots, step.dots}, 6);
              if (step.kind == Step::Action::recv_dot) add(true, {Memory::dots, 0}, 6);
            }
            for (const Access& a : accesses)
              for (const Access& b : accesses) {
                const bool apart = a.memory != b.memory || a.begin >= b.end || b.begin >= a.end;
                ASSERT_TRUE(apart || !a.writes || (a.step == b.step && a.begin == b.begin))
                    << algorithm << ", rank " << rank << " of " << size << ", count " << count;
              }
          }
        }
}

// Start-ups and volume on 16 ranks for 16 x 8 elements: as halving-doubling, and log2(p)^2 / 2 rounds for dot products.
TEST(Adasum, RoundsAndVolumeAreThoseOfThePaper) {
  Case one{"adasum_halving", DType::float32, {{0, 128}}, 128, false, 1, 1, 1};
  const auto sent = [](const Schedule& rounds) {
    std::pair<int64_t, int64_t> counts;  // of data, of dot products
    for (const auto& round : rounds)
      for (const Step& step : round)
        if (step.kind == Step::Action::send)
          (step.from.memory == Memory::dots ? counts.second : counts.first) += step.count;
    return counts;
  };
  EXPECT_EQ(sent(*planned(one, collective(one, 3, 16))), std::pair(int64_t(2 * 15 * 8), int64_t((1 + 2 + 3 + 4) * 3)));
  one.algorithm = "adasum_whole";
  EXPECT_EQ(sent(*planned(one, collective(one, 3, 16))), std::pair(int64_t(4 * 128), int64_t(0)));
}

TEST(Adasum, NeverBlocksAndSaysWhomItWaitsFor) {
  LoopNetwork transport(2, {.capacity = 1});
  const std::vector<Link*> links = transport.links(0);
  std::vector<float> data{3, 4};
  const Case one{"adasum_whole", DType::float32, {{0, 2}}, 2, true, 1, 1, 1};
  Collective c = collective(one, 0, 2);
  c.input = c.output = data.data();
  Execution waits(planned(one, c), c, links);
  EXPECT_TRUE(waits.step());
  EXPECT_FALSE(waits.step());
  EXPECT_FALSE(waits.done());
  EXPECT_EQ(waits.waiting_for(), 1);
  Link& peer = *transport.link(1, 0);
  const float theirs[] = {-4, 3};
  std::memcpy(peer.reserve(sizeof theirs), theirs, sizeof theirs);
  peer.commit(sizeof theirs);
  EXPECT_TRUE(waits.step());
  EXPECT_TRUE(waits.done());
  EXPECT_EQ(data, (std::vector<float>{-1, 7})) << "orthogonal vectors are added";
}

TEST(Adasum, ACutLinkRaisesAndNobodyHangs) {
  for (const char* algorithm : {"adasum_whole", "adasum_halving"})
    for (int64_t records : {0, 1, 3, 9}) {
      constexpr int kSize = 5;  // 0 is folded into 1, which exchanges with 2
      SCOPED_TRACE(testing::Message() << algorithm << " cut after " << records);
      const Case one{algorithm, DType::float32, {{0, 999}}, 999, true, 1, 1, 7};
      LoopNetwork transport(kSize, {.record_bytes = 64, .capacity = 2});
      transport.cut(1, 2, records);
      const auto thrown = run_ranks(transport, kSize, [&](int rank) {
        auto data = encode(one.dtype, input_of(one, rank));
        Collective c = collective(one, rank, kSize);
        c.input = c.output = data.data();
        const std::vector<Link*> links = transport.links(rank);
        Execution execution(planned(one, c), c, links);
        drive(execution);
      });
      for (int rank : {1, 2}) EXPECT_EQ(code_of(thrown[size_t(rank)]), Code::peer_lost);
      for (int rank = 0; rank < kSize; ++rank)
        EXPECT_TRUE(!thrown[size_t(rank)] || code_of(thrown[size_t(rank)]) == Code::peer_lost);
    }
}

// ---- the engine --------------------------------------------------------------------------------------------

RequestPtr adasum_request(Engine& engine, const std::string& name, const std::vector<Tensor>& tensors, int group = 0) {
  auto one = request(engine, Kind::allreduce, name, tensors, group);
  one->what.op = ReduceOp::adasum;
  return one;
}

std::vector<float> floats(size_t count, int rank, uint64_t seed) {
  const Vector values = numbers(count, rank, seed);
  return {values.begin(), values.end()};
}
Vector expected_of(size_t count, const std::vector<int>& ranks, uint64_t seed) {
  std::vector<Vector> all;
  for (int rank : ranks) all.push_back(rounded(DType::float32, numbers(count, rank, seed)));
  return Oracle()(all);
}
void expect_near(const float* got, const Vector& expected, const std::string& what) {
  double largest = 1;
  for (double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(got[i], expected[i], 16 * 0x1p-24 * largest) << what << ", element " << i;
}
std::vector<int> everyone(int size) {
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Many small requests that fuse into a few batches, a group of two dtypes, and a large tensor: each for itself.
TEST(AdasumEngine, TensorsThatTravelTogetherAreCombinedOneByOne) {
  for (int size : {1, 2, 3, 4}) {
    SCOPED_TRACE(testing::Message() << size << " ranks");
    Ranks ranks(size);
    constexpr size_t kCounts[] = {1, 3, 0, 100, 17, 1000, 5, 70'001, 16, 31, kWatched ? 100'003 : 400'003};
    const uint64_t seed = run_seed();
    const std::vector<int> all = everyone(size);
    for (bool group : {false, true})
      ranks.each([&](Engine& engine, int rank) {
        std::vector<std::vector<float>> tensors;
        std::vector<Tensor> described;
        for (size_t i = 0; i < std::size(kCounts); ++i) tensors.push_back(floats(kCounts[i], rank, seed + i));
        for (auto& tensor : tensors) described.push_back(in_place(tensor));
        std::vector<RequestPtr> requests;
        if (group)
          requests.push_back(adasum_request(engine, "group", described));
        else
          for (size_t i = 0; i < described.size(); ++i)
            requests.push_back(adasum_request(engine, std::to_string(i), {described[i]}));
        for (auto& one : requests) engine.submit(one, false);
        for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
        for (size_t i = 0; i < tensors.size(); ++i)
          expect_near(tensors[i].data(), expected_of(kCounts[i], all, seed + i), "tensor " + std::to_string(i));
      });
    EXPECT_GT(ranks.count(Counters::fused_batches), 0u);
  }
}

// As gradients lie: side by side in the arena, with room between them that holds rubbish.
TEST(AdasumEngine, SideBySideInSharedMemory) {
  constexpr int kSize = 3;
  Ranks ranks(kSize);
  const uint64_t seed = run_seed();
  ranks.each([&](Engine& engine, int rank) {
    constexpr size_t kTensors = 20, kCount = 37, kStride = 48;  // elements
    float* slots = reinterpret_cast<float*>(engine.arena()->allocate(kTensors * kStride * sizeof(float)));
    std::fill_n(slots, kTensors * kStride, std::nanf(""));
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < kTensors; ++i) {
      const auto values = floats(kCount, rank, seed + i);
      std::copy(values.begin(), values.end(), slots + i * kStride);
      requests.push_back(adasum_request(engine, std::to_string(i), {in_place(slots + i * kStride, kCount)}));
      engine.submit(requests.back(), false);
    }
    for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
    for (size_t i = 0; i < kTensors; ++i)
      expect_near(slots + i * kStride, expected_of(kCount, everyone(kSize), seed + i), "slot " + std::to_string(i));
    engine.arena()->release(reinterpret_cast<std::byte*>(slots));
  });
}

TEST(AdasumEngine, ProcessSetsAndSumsBesideIt) {
  Ranks ranks(4);
  const uint64_t seed = run_seed();
  ranks.each([&](Engine& engine, int rank) {
    const std::vector<int> members{0, 1, 3};
    const int group = add_group(engine, members);
    auto x = floats(1000, rank, seed), y = floats(1000, rank, seed + 1);
    std::vector<float> ones(10, 1);
    auto all = adasum_request(engine, "x", {in_place(x)}),
         sum = request(engine, Kind::allreduce, "sum", {in_place(ones)});
    engine.submit(all, false);
    engine.submit(sum, false);
    if (rank != 2) {
      auto some = adasum_request(engine, "y", {in_place(y)}, group);
      ASSERT_EQ(run(engine, some), Code::ok) << some->text;
      expect_near(y.data(), expected_of(1000, members, seed + 1), "y");
    }
    ASSERT_EQ(finish(engine, all), Code::ok) << all->text;
    ASSERT_EQ(finish(engine, sum), Code::ok) << sum->text;
    expect_near(x.data(), expected_of(1000, everyone(4), seed), "x");
    EXPECT_EQ(ones, std::vector<float>(10, 4));
    remove_group(engine, group);
  });
}

// To the last bit: alike stays, orthogonal adds up, nothing changes nothing, and a NaN stays in its tensor.
TEST(AdasumEngine, CasesWithKnownResultsAreExact) {
  for (int size : {2, 3, 4}) {
    SCOPED_TRACE(testing::Message() << size << " ranks");
    Ranks ranks(size);
    ranks.each([&](Engine& engine, int rank) {
      auto alike = floats(501, 0, 5), lonely = floats(501, 0, 6), broken = floats(501, rank, 7);
      std::vector<float> own(501), none(501);
      own[size_t(rank)] = 2;
      if (rank != 1) std::fill(lonely.begin(), lonely.end(), 0.0f);
      if (rank == 1) broken[500] = std::nanf("");
      const auto before = alike, one_of = floats(501, 0, 6);
      done(engine,
           adasum_request(engine, "group",
                          {in_place(alike), in_place(broken), in_place(own), in_place(none), in_place(lonely)}));
      EXPECT_EQ(alike, before);
      EXPECT_EQ(lonely, one_of);
      EXPECT_EQ(none, std::vector<float>(501));
      for (int i = 0; i < 501; ++i) ASSERT_EQ(own[size_t(i)], i < size ? 2.0f : 0.0f);
      for (float value : broken) ASSERT_TRUE(std::isnan(value));
    });
  }
}

}  // namespace
}  // namespace lightcc

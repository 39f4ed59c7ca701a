// Reductions in shared memory, every way it can take, against a plain loop. All ranks must end with the same bits.
#include "collective/shared.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "device/device.h"
#include "device/half.h"
#include "labels.h"
#include "unit/simulated.h"

LABEL(alone, "SharedBackend.OutputsThatNoCacheKeeps");

namespace lightcc {
namespace {

using Bytes = std::vector<std::byte>;

// The plain version: one element at a time, in rank order, rounded once.
template <class Stored, class Wide>
Bytes reduced(const Collective& c, const std::vector<Bytes>& inputs, Wide (*load)(Stored), Stored (*store)(Wide)) {
  Bytes output(inputs[0].size());
  for (size_t at = 0; at < output.size(); at += sizeof(Stored)) {
    Wide sum{};
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      Stored stored;
      std::memcpy(&stored, inputs[rank].data() + at, sizeof stored);
      const auto value = Wide(Wide(c.pre) == 1 ? load(stored) : Wide(c.pre * double(load(stored))));
      if (rank == 0) sum = value;
      else if (c.op == ReduceOp::sum) sum = Wide(sum + value);
      else if (c.op == ReduceOp::min) sum = std::min(sum, value);
      else if (c.op == ReduceOp::max) sum = std::max(sum, value);
      else sum = Wide(sum * value);
    }
    const Stored stored = store(c.post == 1 ? sum : Wide(c.post * double(sum)));
    std::memcpy(output.data() + at, &stored, sizeof stored);
  }
  return output;
}
template <class T> T same(T value) { return value; }

Bytes expected(const Collective& c, const std::vector<Bytes>& inputs) {
  switch (c.dtype) {
    case DType::float32: return reduced<float, float>(c, inputs, same, same);
    case DType::float16: return reduced<uint16_t, float>(c, inputs, float_of_float16, float16_of_float);
    case DType::int64: return reduced<int64_t, int64_t>(c, inputs, same, same);
    default: return reduced<uint8_t, bool>(c, inputs, [](uint8_t x) { return x != 0; },
                                           [](bool x) { return uint8_t(x); });
  }
}

// Random, and inexact in the floating-point types: another order of summing would give other bits.
Bytes random_input(DType dtype, int64_t count, std::mt19937_64& random) {
  Bytes bytes(size_t(count) * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const auto put = [&](auto value) { std::memcpy(bytes.data() + size_t(i) * sizeof value, &value, sizeof value); };
    const auto fraction = float(int32_t(random())) * 0x1p-29f;
    switch (dtype) {
      case DType::float32: put(fraction); break;
      case DType::float16: put(float16_of_float(fraction)); break;
      case DType::int64: put(int64_t(random() % 2001) * 2 - 2000); break;
      default: put(uint8_t(random() % 2));
    }
  }
  return bytes;
}

// A rank's tensor: in its arena, or private and exactly as long as it says.
class Memory {
 public:
  Memory(LocalRanks& host, size_t bytes, bool in_arena) : arena_(*host.arena()) {
    if (in_arena) shared_ = arena_.allocate(bytes);
    else own_.resize(bytes);
  }
  ~Memory() {
    if (shared_) arena_.release(shared_);
  }
  Memory(const Memory&) = delete;
  std::byte* data() { return shared_ ? shared_ : own_.data(); }

 private:
  Arena& arena_;
  std::byte* shared_ = nullptr;
  Bytes own_;
};

enum class Where { arenas, private_, one_in_arena, one_private, output_private };

class SharedRanks {
 public:
  SharedRanks(int size, uint64_t seed) : hosts_(LocalRanks::threads(size)), links_(size_t(size)), random_(seed) {
    std::vector<int> members;
    for (int rank = 0; rank < size; ++rank) members.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      LocalRanks& host = *hosts_[size_t(rank)];
      std::vector<Link*> links;
      for (int peer = 0; peer < size; ++peer) {
        links_[size_t(rank)].push_back(peer == rank ? nullptr : host.data_link(0, 0, peer));
        links.push_back(links_[size_t(rank)].back().get());
      }
      backends_.push_back(std::make_unique<SharedBackend>(host, 0, 0, members, links));
    }
  }
  int size() const { return int(hosts_.size()); }

  // One collective on all ranks; every rank's output must be what the plain loop says. counts[r]: what rank r
  // keeps of a reducescatter; empty: an allreduce.
  void expect_right(Collective c, const std::vector<int64_t>& counts, Where where, bool in_place) {
    const size_t element = size_of(c.dtype);
    c.size = size(), c.kind = counts.empty() ? Kind::allreduce : Kind::reducescatter;
    int64_t total = c.count;
    if (!counts.empty()) total = std::accumulate(counts.begin(), counts.end(), c.count = 0), c.counts = counts;
    std::vector<Bytes> inputs, outputs(size_t(c.size));
    for (int rank = 0; rank < c.size; ++rank) inputs.push_back(random_input(c.dtype, total, random_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < c.size; ++rank)
      threads.emplace_back([&, rank, c]() mutable {
        LocalRanks& host = *hosts_[size_t(rank)];
        const bool shared = where == Where::arenas || where == Where::output_private ||
                            (where == Where::one_in_arena && rank == 0) ||
                            (where == Where::one_private && rank < c.size - 1);
        const size_t in_bytes = size_t(total) * element;
        const size_t out_bytes = counts.empty() ? in_bytes : size_t(counts[size_t(rank)]) * element;
        Memory input(host, in_bytes, shared), separate(host, out_bytes, shared && where != Where::output_private);
        std::byte* output = in_place ? input.data() : separate.data();
        if (in_place && !counts.empty())
          output += size_t(std::accumulate(counts.begin(), counts.begin() + rank, int64_t(0))) * element;
        if (in_bytes) std::memcpy(input.data(), inputs[size_t(rank)].data(), in_bytes);
        c.index = rank, c.input = input.data(), c.output = output;
        auto work = backends_[size_t(rank)]->start(c, nullptr);
        try {
          test::drive(*work);
        } catch (const Error& error) {
          ADD_FAILURE() << "rank " << rank << " waits for " << work->waiting_for() << ": " << error.what();
        }
        outputs[size_t(rank)].assign(output, output + out_bytes);
        // Nobody looks at it any more, or TSan sees it.
        if (in_bytes) std::memset(input.data(), 0xee, in_bytes);
      });
    for (std::thread& thread : threads) thread.join();
    const Bytes right = expected(c, inputs);
    size_t begin = 0;
    for (int rank = 0; rank < c.size; ++rank) {
      const size_t n = counts.empty() ? right.size() : size_t(counts[size_t(rank)]) * element;
      ASSERT_EQ(outputs[size_t(rank)].size(), n);
      ASSERT_TRUE(std::equal(outputs[size_t(rank)].begin(), outputs[size_t(rank)].end(), right.begin() + long(begin)))
          << "rank " << rank << " has a wrong result";
      if (!counts.empty()) begin += n;
    }
  }

 private:
  std::vector<std::unique_ptr<LocalRanks>> hosts_;
  std::vector<std::vector<std::unique_ptr<Link>>> links_;
  std::vector<std::unique_ptr<SharedBackend>> backends_;
  std::mt19937_64 random_;
};

constexpr DType kDTypesHere[] = {DType::float32, DType::float16, DType::int64, DType::boolean};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min, ReduceOp::sum};

Collective collective(DType dtype, int64_t count, unsigned turn) {
  Collective c{};
  c.dtype = dtype, c.count = count;
  c.op = dtype == DType::boolean ? ReduceOp::sum : kOps[turn % 4];
  if (dtype != DType::boolean && turn % 3 == 0) c.pre = 0.5, c.post = 2;
  return c;
}

class Shared : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Shared, testing::Range(1, 6), testing::PrintToStringParamName());

// Counts below a line, below kFlatBytes, of several blocks, uneven, and larger than a ring.
TEST_P(Shared, AllreduceIsRightWhereverMemoryIs) {
  const uint64_t seed = test::run_seed();
  SharedRanks ranks(GetParam(), seed);
  unsigned turn = 0;
  for (int64_t count : {0, 1, 7, 4097, 100'003, 1 << 20})
    for (DType dtype : kDTypesHere)
      for (Where where : {Where::arenas, Where::private_, Where::one_in_arena, Where::output_private})
        for (bool in_place : {true, false}) {
          if (where == Where::output_private && in_place) continue;
          const bool large = count == 1 << 20;
          if (large && (in_place != (where == Where::arenas) || dtype == DType::int64)) continue;  // for time's sake
          if (large && test::kWatched) continue;
          SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << count << " " << name_of(dtype) << ", where "
                                          << int(where) << (in_place ? ", in place" : ""));
          ranks.expect_right(collective(dtype, count, turn++), {}, where, in_place);
        }
}

TEST_P(Shared, ReducescatterEvenUnevenAndWithRanksThatKeepNothing) {
  const uint64_t seed = test::run_seed();
  SharedRanks ranks(GetParam(), seed);
  unsigned turn = 0;
  for (int64_t count : {1, 7, 4097, 100'003})
    for (DType dtype : kDTypesHere)
      for (Where where : {Where::arenas, Where::private_, Where::one_in_arena, Where::one_private,
                          Where::output_private}) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << count << " " << name_of(dtype) << ", where "
                                        << int(where));
        const bool in_place = where != Where::output_private && turn % 2 == 0;
        std::vector<int64_t> even, uneven(size_t(ranks.size()), 0);
        for (int rank = 0; rank < ranks.size(); ++rank)
          even.push_back(count / ranks.size() + (rank < count % ranks.size()));
        uneven[turn % uneven.size()] = count;
        ranks.expect_right(collective(dtype, 0, turn++), even, where, in_place);
        ranks.expect_right(collective(dtype, 0, turn++), uneven, where, in_place);
      }
}

TEST(SharedBackend, MemoryThatAllRanksMapIsNeverCopied) {
  SharedRanks ranks(3, 1);
  const uint64_t before = staged_bytes();
  ranks.expect_right(collective(DType::float32, 100'003, 1), {}, Where::arenas, true);
  ranks.expect_right(collective(DType::float32, 100'003, 1), {}, Where::arenas, false);
  EXPECT_EQ(staged_bytes(), before);
  ranks.expect_right(collective(DType::float32, 100'003, 1), {}, Where::private_, true);
  const uint64_t bytes = 100'003 * sizeof(float);
  EXPECT_LE(staged_bytes() - before, 2 * 2 * bytes + 100) << "a rank copies its own shard too";
  EXPECT_GT(staged_bytes(), before);
}

// Outputs may lie anywhere; a single input that others do not map is enough for all to publish.
TEST_P(Shared, ReducescatterReadsMappedInputsWhereTheyLie) {
  SharedRanks ranks(GetParam(), test::run_seed());
  std::vector<int64_t> even(size_t(ranks.size()), 100'003), one_has_all(size_t(ranks.size()), 0);
  one_has_all.back() = 300'001;
  const uint64_t before = staged_bytes();
  for (const auto& counts : {even, one_has_all})
    for (Where where : {Where::arenas, Where::output_private}) {
      ranks.expect_right(collective(DType::float32, 0, 1), counts, where, false);
      ranks.expect_right(collective(DType::float32, 0, 1), counts, Where::arenas, true);
    }
  EXPECT_EQ(staged_bytes(), before);
  for (Where where : {Where::one_in_arena, Where::one_private})
    ranks.expect_right(collective(DType::float32, 0, 1), even, where, false);
  EXPECT_EQ(staged_bytes() - before, 2 * uint64_t(ranks.size()) * uint64_t(ranks.size() - 1) * 100'003 * sizeof(float));
}

TEST(SharedBackend, NamesWhomItWaitsFor) {
  auto hosts = LocalRanks::threads(3);
  std::vector<std::unique_ptr<Link>> links;
  std::vector<Link*> to{nullptr, nullptr, nullptr};
  for (int peer : {1, 2}) links.push_back(hosts[0]->data_link(0, 0, peer)), to[size_t(peer)] = links.back().get();
  SharedBackend backend(*hosts[0], 0, 0, {0, 1, 2}, to);
  for (int64_t count : {10, 100'000}) {
    std::vector<float> data(size_t(count), 1.0f);
    Collective c = collective(DType::float32, count, 1);
    c.size = 3, c.index = 0, c.input = c.output = data.data();
    c.counts = {count, 0, 0};
    for (Kind kind : {Kind::allreduce, Kind::reducescatter}) {
      c.kind = kind;
      auto work = backend.start(c, nullptr);
      while (work->step()) {}
      EXPECT_FALSE(work->done());
      EXPECT_EQ(work->waiting_for(), 1) << count;
    }
  }
}

// Large, and not in place: the outputs are streamed.
TEST(SharedBackend, OutputsThatNoCacheKeeps) {
  constexpr int64_t kCount = (24 << 20) / 8 + 5;
  ASSERT_TRUE(outgrows_cache(3 * size_t(kCount) * sizeof(int64_t)));
  SharedRanks ranks(3, test::run_seed());
  for (Where where : {Where::arenas, Where::private_})
    ranks.expect_right(collective(DType::int64, kCount, 1), {}, where, false);
}

TEST(SharedBackend, RunsAllButBarriers) {
  auto hosts = LocalRanks::threads(1);
  SharedBackend backend(*hosts[0], 0, 0, {0}, {nullptr});
  EXPECT_STREQ(backend.name(), "shared");
  for (int kind = 0; kind < kKinds; ++kind) {
    Collective c{};
    c.kind = Kind(kind), c.size = 1;
    EXPECT_EQ(backend.accepts(c), c.kind <= Kind::reducescatter) << kind;
  }
}

}  // namespace
}  // namespace lightcc

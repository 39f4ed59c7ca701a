// Compressed all-reduce on hosts that are threads, step after step, against a plain loop that does the same: equal bits
// in what is summed up and in what is left behind, on any hosts and however tensors are fused.
#include "collective/compressed.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <random>

#include "collective/piece_codec.h"
#include "device/float32.h"
#include "unit/simulated.h"
#include "unit/thread_peers.h"

namespace lightcc {
namespace {

using namespace test;
using HostSizes = std::vector<int>;  // how many ranks each has
using Floats = std::vector<float>;

constexpr Codec topk(double ratio, DType width = DType::float32, double momentum = 0) {
  return {CodecKind::topk, width, ratio, momentum};
}

// What the ranks do, as one would write it down. Sums of whole numbers are exact, so a node's is in any order.
class Oracle {
 public:
  Oracle(HostSizes hosts, Codec codec) : hosts_(std::move(hosts)), codec_(codec) {
    for (const int members : hosts_) lanes_ = std::max(lanes_, members);
  }

  // inputs: by rank. A tensor's name stands for it from step to step.
  Floats step(const std::string& tensor, const std::vector<Floats>& inputs, int64_t line) {
    const int64_t count = int64_t(inputs[0].size());
    auto& residuals = residuals_[tensor];
    residuals.resize(hosts_.size(), Floats(size_t(count)));
    Floats out(inputs[0].size(), 0.0f);
    size_t rank = 0;
    for (size_t node = 0; node < hosts_.size(); ++node) {
      Floats& residual = residuals[node];
      for (int member = 0; member < hosts_[node]; ++member, ++rank)
        for (size_t i = 0; i < out.size(); ++i) residual[i] += inputs[rank][i];
      for (int lane = 0; lane < lanes_; ++lane)
        send(residual, border(count, lane, lanes_, line), border(count, lane + 1, lanes_, line), out);
    }
    return out;
  }
  const std::vector<Floats>& residuals(const std::string& tensor) { return residuals_[tensor]; }
  int lanes() const { return lanes_; }

 private:
  void send(Floats& residual, int64_t begin, int64_t end, Floats& out) const {
    std::vector<size_t> order;
    for (int64_t i = begin; i < end; ++i) order.push_back(size_t(i));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return std::fabs(residual[a]) > std::fabs(residual[b]); });
    order.resize(piece_elements(codec_, order.size()));
    for (const size_t i : order) out[i] += std::exchange(residual[i], 0.0f);
  }

  const HostSizes hosts_;
  const Codec codec_;
  int lanes_ = 1;
  std::map<std::string, std::vector<Floats>> residuals_;  // by node
};

struct Memory { bool in_arena, in_place; };

// One vector of a rank, in memory that the ranks of a host map, or private.
class Vector {
 public:
  Vector(Peers& peers, DType dtype, size_t count, bool in_arena) : arena_(*peers.arena()), dtype_(dtype) {
    const size_t bytes = count * size_of(dtype);
    private_.resize(in_arena ? 0 : bytes + 1, std::byte(0xee));
    data_ = in_arena ? arena_.allocate(bytes + 1) : private_.data();
    in_arena_ = in_arena;
  }
  ~Vector() {
    if (in_arena_) arena_.release(data_);
  }
  Vector(const Vector&) = delete;
  std::byte* data() { return data_; }
  void write(int64_t at, const Floats& values) {
    from_float32(dtype_, values.data(), data_ + at * int64_t(size_of(dtype_)), values.size());
  }
  Floats read(int64_t at, size_t count) const {
    Floats values(count);
    to_float32(dtype_, data_ + at * int64_t(size_of(dtype_)), values.data(), count);
    return values;
  }

 private:
  Arena& arena_;
  const DType dtype_;
  std::vector<std::byte> private_;
  std::byte* data_;
  bool in_arena_;
};

class SimulatedWorld {
 public:
  explicit SimulatedWorld(const HostSizes& hosts)
      : size_(std::accumulate(hosts.begin(), hosts.end(), 0)),
        network_(size_, {16 << 10, 4, 0.1, 0.1, run_seed()}),
        residuals_(size_t(size_)) {
    peers_ = thread_peers(hosts, network_);
    std::vector<int> order(static_cast<size_t>(size_));
    std::iota(order.begin(), order.end(), 0);
    for (int rank = 0; rank < size_; ++rank) {
      groups_.push_back(std::make_unique<Group>(0, order, rank, peers_[size_t(rank)]->topology()));
      links_.push_back(std::make_shared<NodeLinks>(*peers_[size_t(rank)], *groups_.back(), nodes_of(*groups_.back())));
      backends_.push_back(std::make_unique<CompressedBackend>(links_.back()));
    }
  }
  int size() const { return size_; }

  // One collective of these tensors. inputs: by tensor and rank. Returns the outputs, by tensor and rank.
  using Tensors = std::vector<std::string>;
  std::vector<std::vector<Floats>> run(const Codec& codec, DType dtype, const Tensors& names,
                                       const std::vector<std::vector<Floats>>& inputs, Memory memory, double post = 1) {
    std::vector<std::vector<Floats>> outputs(names.size(), std::vector<Floats>(size_t(size_)));
    const auto thrown = run_ranks(network_, size_, [&](int rank) {
      Collective c{};
      c.kind = Kind::allreduce;
      c.index = rank;
      c.size = size_;
      c.dtype = dtype;
      c.post = post;
      c.codec = codec;
      for (size_t t = 0; t < names.size(); ++t) {
        const int64_t count = int64_t(inputs[t][0].size());
        c.tensors.push_back({c.count, count});
        auto& residual = residuals_[size_t(rank)][names[t]];
        if (!residual) residual = std::make_shared<Residual>();
        c.residuals.push_back(residual);
        c.count = int64_t(round_up(size_t(c.count + count) * size_of(dtype)) / size_of(dtype));
      }
      Vector input(*peers_[size_t(rank)], dtype, size_t(c.count), memory.in_arena);
      Vector other(*peers_[size_t(rank)], dtype, size_t(c.count), memory.in_arena);
      Vector& output = memory.in_place ? input : other;
      for (size_t t = 0; t < names.size(); ++t) input.write(c.tensors[t].offset, inputs[t][size_t(rank)]);
      c.input = input.data();
      c.output = output.data();
      try {
        finish(rank, *backends_[size_t(rank)]->start(c, nullptr));
      } catch (...) {
        one_has_failed_ = true;
        throw;
      }
      for (size_t t = 0; t < names.size(); ++t) {
        const Floats& in = inputs[t][size_t(rank)];
        outputs[t][size_t(rank)] = output.read(c.tensors[t].offset, in.size());
        if (memory.in_place) continue;
        EXPECT_EQ(input.read(c.tensors[t].offset, in.size()), in) << "the input was written";
      }
    });
    for (const auto& one : thrown)
      if (one) std::rethrow_exception(one);
    return outputs;
  }

  // What the ranks of a node have left behind of a tensor, put together; what nobody has is NaN.
  Floats left_behind(const std::string& name, int node, size_t count) {
    Floats all(count, std::nanf(""));
    for (int rank = 0; rank < size_; ++rank)
      if (links_[size_t(rank)]->node() == node)
        for (const ResidualPiece& piece : residual(rank, name).pieces())
          std::copy(piece.values.begin(), piece.values.end(), all.begin() + piece.first);
    return all;
  }
  Residual& residual(int rank, const std::string& name) { return *residuals_[size_t(rank)].at(name); }
  Peers& peers(int rank) { return *peers_[size_t(rank)]; }
  std::shared_ptr<NodeLinks> links(int rank) { return links_[size_t(rank)]; }

 private:
  void finish(int rank, Work& work) {
    const auto deadline = Clock::now() + kDeadline;
    while (!work.done()) {
      const bool moved = work.step();
      if (!moved && !work.done()) {
        const int member = work.waiting_for();
        EXPECT_TRUE(member >= 0 && member < size_ && member != rank) << member;
      }
      peers_[size_t(rank)]->step();
      peers_[size_t(rank)]->flush_and_wake();
      if (one_has_failed_) throw Error(Code::peer_lost, "another rank has ended");
      if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
      if (!moved) std::this_thread::yield();
    }
  }

  const int size_;
  LoopNetwork network_;
  std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::shared_ptr<NodeLinks>> links_;
  std::vector<std::unique_ptr<CompressedBackend>> backends_;
  std::vector<std::map<std::string, std::shared_ptr<Residual>>> residuals_;  // by rank
  std::atomic<bool> one_has_failed_ = false;
};

// Whole numbers, so that many are equal in magnitude and all sums are exact; by rank.
std::vector<Floats> gradients(int ranks, size_t count, std::mt19937_64& random, int most = 20) {
  std::vector<Floats> all{size_t(ranks), Floats(count)};
  for (Floats& one : all)
    for (float& value : one) value = float(int(random() % uint64_t(2 * most + 1)) - most);
  return all;
}

class Compressed : public testing::TestWithParam<HostSizes> {};

// From less than a line to several blocks of a codec.
TEST_P(Compressed, SendsWhatAPlainLoopSendsAndLeavesTheRestBehind) {
  const size_t large = kWatched ? 70'000 : 300'000;
  std::mt19937_64 random(run_seed());
  for (const Memory memory : {Memory{false, true}, {false, false}, {true, true}, {true, false}}) {
    SimulatedWorld world(GetParam());
    const Codec codec = topk(0.05);
    Oracle oracle(GetParam(), codec);
    for (int step = 0; step < 3; ++step) {
      const SimulatedWorld::Tensors names{"a", "b", "c", "d"};
      std::vector<std::vector<Floats>> inputs;
      for (const size_t count : {size_t(1), size_t(1'000), large, size_t(33)})
        inputs.push_back(gradients(world.size(), count, random));
      const auto outputs = world.run(codec, DType::float32, names, inputs, memory);
      for (size_t t = 0; t < names.size(); ++t) {
        const Floats expected = oracle.step(names[t], inputs[t], 16);
        for (int rank = 0; rank < world.size(); ++rank)
          ASSERT_EQ(outputs[t][size_t(rank)], expected) << names[t] << ", step " << step << ", rank " << rank;
        for (size_t node = 0; node < GetParam().size(); ++node)
          ASSERT_EQ(world.left_behind(names[t], int(node), expected.size()), oracle.residuals(names[t])[node]);
      }
    }
  }
}

TEST_P(Compressed, HowTensorsAreFusedDoesNotMatter) {
  std::mt19937_64 random(run_seed());
  const Codec codec = topk(0.1, DType::float16);
  SimulatedWorld together(GetParam()), apart(GetParam());
  for (int step = 0; step < 3; ++step) {
    const auto a = gradients(together.size(), 5'001, random, 1'000), b = gradients(together.size(), 333, random, 1'000);
    const auto both = together.run(codec, DType::float32, {"a", "b"}, {a, b}, {true, true}, 0.25);
    EXPECT_EQ(apart.run(codec, DType::float32, {"b"}, {b}, {false, true}, 0.25)[0], both[1]);
    EXPECT_EQ(apart.run(codec, DType::float32, {"a"}, {a}, {false, false}, 0.25)[0], both[0]);
  }
}

TEST_P(Compressed, SixteenBitFloatsAreSummedInFloat32) {
  std::mt19937_64 random(run_seed());
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    SimulatedWorld world(GetParam());
    const Codec codec = topk(0.1);
    Oracle oracle(GetParam(), codec);
    for (int step = 0; step < 2; ++step) {
      const auto inputs = gradients(world.size(), 2'000, random, 3);
      const auto outputs = world.run(codec, dtype, {"a"}, {inputs}, {true, true});
      const Floats expected = oracle.step("a", inputs, 32);
      for (const Floats& output : outputs[0]) ASSERT_EQ(output, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(On, Compressed,
                         testing::Values(HostSizes{1, 1}, HostSizes{2, 2}, HostSizes{3, 1}, HostSizes{1, 1, 1},
                                         HostSizes{2, 3, 1}),
                         [](const auto& info) {
                           std::string name;
                           for (const int ranks : info.param) name += std::to_string(ranks);
                           return name;
                         });

TEST(CompressedBackend, WhatIsNotFiniteReachesAllAndIsNotLeftBehind) {
  SimulatedWorld world({2, 1});
  std::mt19937_64 random(run_seed());
  const Codec codec = topk(0.01);
  auto inputs = gradients(3, 4'000, random);
  world.run(codec, DType::float32, {"a"}, {inputs}, {true, true});
  const Floats before = world.left_behind("a", 0, 4'000);
  inputs[1][17] = std::nanf("");
  inputs[0][3'000] = INFINITY;  // of the other lane
  const auto outputs = world.run(codec, DType::float32, {"a"}, {inputs}, {true, true});
  for (const Floats& output : outputs[0]) {
    EXPECT_TRUE(std::isnan(output[17]));
    EXPECT_TRUE(std::isinf(output[3'000]));
  }
  EXPECT_EQ(world.left_behind("a", 0, 4'000), before);
}

// The sum that a tensor's velocity makes of a constant gradient g is g, g + m g, ...; where it is sent, it ends.
TEST(CompressedBackend, MomentumIsCorrected) {
  SimulatedWorld world({1, 1});
  const Codec codec = topk(0.5, DType::float32, 0.5);
  const std::vector<Floats> inputs(2, {8, 1, 1, 8});
  const auto first = world.run(codec, DType::float32, {"a"}, {inputs}, {true, true});
  EXPECT_EQ(first[0][0], (Floats{16, 0, 0, 16}));
  // left behind: 1 and 1, with velocities of 1; the new ones are 1.5
  const auto second = world.run(codec, DType::float32, {"a"}, {inputs}, {true, true});
  EXPECT_EQ(second[0][0], (Floats{16, 0, 0, 16}));
  EXPECT_EQ(world.left_behind("a", 0, 4), (Floats{0, 2.5, 2.5, 0}));
}

// Step after step, what all have received and what is left behind is what all have given, to rounding.
TEST(CompressedBackend, IntegersLeaveNothingOut) {
  for (const CodecKind kind : {CodecKind::int8, CodecKind::int4}) {
    SimulatedWorld world({2, 1});
    const Codec codec{kind, DType::int8};
    std::mt19937_64 random(run_seed());
    std::vector<double> given(5'000), received(5'000);
    for (int step = 0; step < 4; ++step) {
      const auto inputs = gradients(3, given.size(), random, 1'000);
      const auto outputs = world.run(codec, DType::float32, {"a"}, {inputs}, {step % 2 == 0, true});
      for (const Floats& output : outputs[0]) ASSERT_EQ(output, outputs[0][0]);
      for (size_t i = 0; i < given.size(); ++i) {
        for (const Floats& input : inputs) given[i] += double(input[i]);
        received[i] += double(outputs[0][0][i]);
      }
    }
    const Floats here = world.left_behind("a", 0, given.size()), there = world.left_behind("a", 1, given.size());
    size_t left = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      EXPECT_NEAR(received[i] + double(here[i]) + double(there[i]), given[i], 0.01) << i;
      left += here[i] != 0;
    }
    EXPECT_GT(left, given.size() / 2) << "most sums up to 2,000 are rounded";
  }
}

TEST(CompressedBackend, TakesOnlyWhatBecomesFewerBytes) {
  SimulatedWorld world({1, 1});
  CompressedBackend backend(world.links(0));
  Collective c{};
  c.kind = Kind::allreduce;
  c.size = 2;
  c.dtype = DType::float32;
  c.op = ReduceOp::sum;
  EXPECT_FALSE(backend.accepts(c)) << "nobody asked for it";
  c.codec = topk(0.01);
  EXPECT_TRUE(backend.accepts(c));
  c.codec = topk(0.7);
  EXPECT_FALSE(backend.accepts(c)) << "6 bytes for each of 70 % are more than 4";
  c.codec = topk(0.01);
  c.op = ReduceOp::max;
  EXPECT_FALSE(backend.accepts(c));

  EXPECT_EQ(why_dense(topk(0.01), DType::float32, 1), "all ranks are on one host");
  EXPECT_EQ(why_dense(topk(0.01), DType::float32, 2), "");
  EXPECT_EQ(why_dense(topk(0.01), DType::float32, 100), "");
  EXPECT_EQ(why_dense(topk(0.01), DType::float32, 200),
            "topk of ratio 0.01 as float32 among 200 hosts would send 150 % of the bytes of float32");
  EXPECT_EQ(why_dense(topk(0.01, DType::float16), DType::float32, 190), "");
}

}  // namespace
}  // namespace lightcc

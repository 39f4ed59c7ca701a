// 2D all-reduce on hosts that are threads: any numbers of members, alike or not, on a network with faults, against
// exact whole numbers; equal bits; the lanes and nodes it stands on.
#include "collective/hierarchical.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <random>

#include "base/clock.h"
#include "device/device.h"
#include "unit/simulated.h"
#include "unit/thread_peers.h"

namespace lightcc {
namespace {

using namespace test;
using Hosts = std::vector<int>;

TEST(Nodes, AreHostsOrPiecesOfThem) {
  const Topology topology = Topology::by_leader({0, 0, 0, 3, 0, 3});
  const Group group(0, {5, 4, 3, 2, 1, 0}, 0, topology);  // members 0, 2 on one host, 1, 3, 4, 5 on the other
  using Nodes = std::vector<std::vector<int>>;
  EXPECT_EQ(nodes_of(group), (Nodes{{0, 2}, {1, 3, 4, 5}}));
  EXPECT_EQ(nodes_of(group, 3), (Nodes{{0, 2}, {1, 3, 4}, {5}}));
  EXPECT_EQ(nodes_of(group, 1).size(), 6u);
}

TEST(Lanes, EachHasOneOwnerOnANodeOfAnySize) {
  for (int members = 1; members <= 9; ++members)
    for (int lanes = 1; lanes <= 9; ++lanes) {
      int next = 0;
      for (int member = 0; member < members; ++member) {
        const LaneRange range = lanes_of(lanes, members, member);
        EXPECT_EQ(range.begin, next);
        for (int lane = range.begin; lane < range.end; ++lane) EXPECT_EQ(lane * members / lanes, member);
        next = range.end;
      }
      EXPECT_EQ(next, lanes);
    }
}

constexpr HierarchicalBackend::Limits kLimits{.one_lane_bytes = 1 << 10, .chunk_bytes = 4 << 10};
constexpr HierarchicalBackend::Limits kLargeChunks{.one_lane_bytes = 1 << 10};

enum class Where { private_, inputs_in_arenas, arenas };

// In memory that the ranks of a host map, or private and exactly as long as it says.
class Tensor {
 public:
  Tensor(Peers& peers, const std::vector<std::byte>& bytes, bool in_arena) : arena_(*peers.arena()), own_(bytes) {
    if (!in_arena) return;
    mapped_ = arena_.allocate(bytes.size());
    std::copy(bytes.begin(), bytes.end(), mapped_);
  }
  ~Tensor() {
    if (mapped_) arena_.release(mapped_);
  }
  Tensor(const Tensor&) = delete;
  std::byte* data() { return mapped_ ? mapped_ : own_.data(); }
  std::vector<std::byte> bytes() { return {data(), data() + own_.size()}; }
  void overwrite() { std::fill_n(data(), own_.size(), std::byte(0xee)); }

 private:
  Arena& arena_;
  std::vector<std::byte> own_;
  std::byte* mapped_ = nullptr;
};

// Ranks of a world, each stepped by a thread of its own.
class ThreadedWorld {
 public:
  ThreadedWorld(const Hosts& hosts, const LoopFaults& faults, int members_of_node = 0, std::vector<int> order = {},
        const HierarchicalBackend::Limits& limits = kLimits)
      : size_(std::accumulate(hosts.begin(), hosts.end(), 0)), network_(size_, faults) {
    if (order.empty())
      for (int rank = 0; rank < size_; ++rank) order.push_back(rank);
    peers_ = thread_peers(hosts, network_);
    for (int rank = 0; rank < size_; ++rank) {
      groups_.push_back(std::make_unique<Group>(0, order, rank, peers_[size_t(rank)]->topology()));
      backends_.push_back(std::make_unique<HierarchicalBackend>(
          std::make_shared<NodeLinks>(*peers_[size_t(rank)], *groups_.back(),
                                            nodes_of(*groups_.back(), members_of_node)),
          limits));
    }
  }
  int size() const { return size_; }
  LoopNetwork& network() { return network_; }

  // What each member's output is then. Throws what a rank throws.
  using Bytes = std::vector<std::byte>;
  std::vector<Bytes> run(const std::vector<Problem>& problems, bool in_place, Where where = Where::private_) {
    std::vector<Bytes> outputs{size_t(size_)};
    const auto thrown = run_ranks(network_, size_, [&](int rank) {
      const int member = groups_[size_t(rank)]->index();
      for (const Problem& problem : problems) {
        Tensor input(peers(rank), encode(problem.dtype, problem.input(member)), where != Where::private_);
        Tensor other(peers(rank), encode(problem.dtype, problem.output(member)), where == Where::arenas);
        Tensor& output = in_place ? input : other;
        Collective c = problem.of(member);
        c.input = input.data();
        c.output = output.data();
        try {
          finish(rank, *backends_[size_t(rank)]->start(c, nullptr));
        } catch (...) {
          one_has_failed_ = true;
          throw;
        }
        outputs[size_t(member)] = output.bytes();
        EXPECT_EQ(output.bytes(), encode(problem.dtype, problem.expected(member))) << "member " << member;
        if (!in_place) {
          EXPECT_EQ(input.bytes(), encode(problem.dtype, problem.input(member))) << "the input was written";
        }
        input.overwrite();  // nobody looks at it any more, or TSan sees it
      }
    });
    for (const auto& one : thrown)
      if (one) std::rethrow_exception(one);
    return outputs;
  }
  // The same with up to `ahead` of them in flight, stepped in any order.
  void run_together(const std::vector<Problem>& problems, size_t ahead, Where where) {
    struct InFlight {
      const Problem* problem;
      std::unique_ptr<Tensor> tensor;
      std::unique_ptr<Work> work;
    };
    const auto thrown = run_ranks(network_, size_, [&](int rank) {
      const int member = groups_[size_t(rank)]->index();
      std::mt19937_64 random(run_seed() + uint64_t(rank));
      std::deque<InFlight> in_flight;
      size_t started = 0;
      for (const auto deadline = Clock::now() + kDeadline; started < problems.size() || !in_flight.empty();) {
        if (started < problems.size() && in_flight.size() < ahead) {
          const Problem& problem = problems[started++];
          auto tensor = std::make_unique<Tensor>(peers(rank), encode(problem.dtype, problem.input(member)),
                                                 where != Where::private_);
          Collective c = problem.of(member);
          c.input = c.output = tensor->data();
          in_flight.push_back({&problem, std::move(tensor), backends_[size_t(rank)]->start(c, nullptr)});
        }
        const size_t one = random() % in_flight.size();
        const bool moved = !in_flight[one].work->done() && in_flight[one].work->step();
        for (; !in_flight.empty() && in_flight[0].work->done(); in_flight.pop_front()) {
          const auto& [problem, tensor, work] = in_flight[0];
          EXPECT_EQ(tensor->bytes(), encode(problem->dtype, problem->expected(member))) << "member " << member;
          tensor->overwrite();
        }
        peers_[size_t(rank)]->step();
        peers_[size_t(rank)]->flush_and_wake();
        if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
        if (!moved) std::this_thread::yield();
      }
    });
    for (const auto& one : thrown)
      if (one) std::rethrow_exception(one);
  }
  // Steps the work as an engine does.
  void finish(int rank, Work& work) {
    const auto deadline = Clock::now() + kDeadline;
    while (!work.done()) {
      const bool moved = work.step();
      if (!moved && !work.done()) {
        const int member = work.waiting_for();
        EXPECT_TRUE(member >= 0 && member < size_ && member != groups_[size_t(rank)]->index()) << member;
      }
      peers_[size_t(rank)]->step();
      peers_[size_t(rank)]->flush_and_wake();
      // As an engine does, which sees it in the other's arena.
      if (one_has_failed_) throw Error(Code::peer_lost, "another rank has ended");
      if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
      if (!moved) std::this_thread::yield();
    }
  }
  Peers& peers(int rank) { return *peers_[size_t(rank)]; }
  HierarchicalBackend& backend(int rank) { return *backends_[size_t(rank)]; }

 private:
  const int size_;
  LoopNetwork network_;
  std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<HierarchicalBackend>> backends_;
  std::atomic<bool> one_has_failed_ = false;
};

class Hierarchical : public testing::TestWithParam<Hosts> {};

// Nothing to a few chunks a lane, one after the other without a pause between.
TEST_P(Hierarchical, AddsUpWhatAPlainLoopDoes) {
  const uint64_t seed = run_seed();
  ThreadedWorld world(GetParam(), {1 << 10, 4, 0.1, 0.1, seed});
  std::vector<Problem> problems;
  for (const DType dtype : {DType::int32, DType::float32, DType::float16, DType::int64})
    for (const int64_t count : {0, 1, 33, 900, 7'001, kWatched ? 9'001 : 40'001}) {
      Problem problem(Kind::allreduce, world.size(), count, seed + problems.size());
      problem.dtype = dtype;
      if (problem.op == ReduceOp::product) problem.op = ReduceOp::sum;
      problem.pre = problems.size() % 2 ? 0.5 : 1;
      problem.post = problems.size() % 3 ? 3 : 1;
      problems.push_back(problem);
    }
  for (const bool in_place : {false, true})
    for (const Where where : {Where::private_, Where::inputs_in_arenas, Where::arenas}) {
      const auto outputs = world.run(problems, in_place, where);
      for (const auto& output : outputs) EXPECT_EQ(output, outputs[0]);
    }
}

// What one still lends is another's to leave alone, and its chunks follow those of the one before in each queue.
TEST_P(Hierarchical, SeveralAreInFlight) {
  const int large = kWatched ? 60'000 : 400'000;
  for (const auto& [limits, most] : {std::pair{kLimits, 7'001}, std::pair{kLargeChunks, large}}) {
    ThreadedWorld world(GetParam(), {16 << 10, 4, 0.1, 0.1, run_seed()}, 0, {}, limits);
    std::vector<Problem> problems;
    for (int i = 0; i < 8; ++i) {
      Problem problem(Kind::allreduce, world.size(), i % 4 == 3 ? 33 : most / (1 + i % 3), run_seed() + uint64_t(i));
      problem.op = ReduceOp::sum;
      problem.dtype = i % 2 ? DType::float32 : DType::int32;
      problems.push_back(problem);
    }
    for (const Where where : {Where::private_, Where::arenas}) world.run_together(problems, 3, where);
  }
}

INSTANTIATE_TEST_SUITE_P(On, Hierarchical,
                         testing::Values(Hosts{1, 1}, Hosts{2, 2}, Hosts{3, 1}, Hosts{2, 2, 1}, Hosts{1, 1, 1},
                                         Hosts{2, 3, 1, 2}, Hosts{4, 2}),
                         [](const auto& info) {
                           std::string name;
                           for (const int ranks : info.param) name += std::to_string(ranks);
                           return name;
                         });

TEST(HierarchicalBackend, TheOrderOfTheMembersIsTheGroups) {
  ThreadedWorld world({2, 2}, {}, 0, {3, 0, 2, 1});
  Problem problem(Kind::allreduce, 4, 10'000, run_seed());
  problem.op = ReduceOp::sum;
  problem.dtype = DType::float32;
  world.run({problem}, true);
}

// One host that acts as two and two halves, and hosts that are cut unevenly.
TEST(HierarchicalBackend, PiecesOfAHostAreNodes) {
  for (const Hosts& hosts : {Hosts{5}, Hosts{3, 3}})
    for (const int members_of_node : {1, 2}) {
      ThreadedWorld world(hosts, {}, members_of_node);
      std::vector<Problem> problems;
      for (const int64_t count : {100, 30'000, 5, 20'000}) {
        problems.emplace_back(Kind::allreduce, world.size(), count, run_seed());
        problems.back().op = ReduceOp::max;
      }
      world.run(problems, false);
    }
}

// Between hosts out of the tensor and into it.
TEST_P(Hierarchical, LargeShardsAreExchangedInPlace) {
  const uint64_t seed = run_seed();
  ThreadedWorld world(GetParam(), {8 << 10, 4, 0.1, 0.1, seed}, 0, {}, kLargeChunks);
  std::vector<Problem> problems;
  for (const DType dtype : {DType::int64, DType::float32}) {
    problems.emplace_back(Kind::allreduce, world.size(), kWatched ? 60'001 : 300'001, seed + problems.size());
    problems.back().dtype = dtype;
    problems.back().op = ReduceOp::sum;
  }
  for (const bool in_place : {false, true}) world.run(problems, in_place);
}

// On each host a byte is copied once, when it is gathered. Between hosts none is, but for what the other end has not
// yet received when the all-reduce is done: at most what each rank sends in the last round.
TEST(HierarchicalBackend, NothingIsStagedInMemoryThatTheHostMaps) {
  Problem problem(Kind::allreduce, 4, 40'000, run_seed());
  problem.op = ReduceOp::sum;
  const uint64_t bytes = 40'000 * sizeof(int64_t), gathered = 2 * bytes, last_round = bytes;
  struct Counted { uint64_t copied, staged; };
  const auto counted = [&](Where where, bool in_place) {
    ThreadedWorld world({2, 2}, {}, 0, {}, kLargeChunks);
    const Counted before{copied_bytes(), staged_bytes()};
    world.run({problem}, in_place, where);
    return Counted{copied_bytes() - before.copied, staged_bytes() - before.staged};
  };
  for (bool in_place : {true, false}) {
    const Counted mapped = counted(Where::arenas, in_place);
    EXPECT_EQ(mapped.copied, gathered);
    EXPECT_LE(mapped.staged, last_round);
  }
  EXPECT_GE(counted(Where::inputs_in_arenas, false).staged, gathered) << "not published to be gathered";
  EXPECT_GE(counted(Where::private_, true).staged, 2 * gathered) << "nor to be added up";
}

// Only if asked; of a rank that is alone on its node the one in the middle.
TEST(HierarchicalBackend, TellsWhenItsPhasesWere) {
  ThreadedWorld world({2, 1}, {});
  run_ranks(world.network(), 3, [&](int rank) {
    for (const bool timed : {false, true}) {
      std::vector<int64_t> data(20'000, 1);
      Collective c = Problem(Kind::allreduce, 3, int64_t(data.size()), 1).of(rank);
      c.op = ReduceOp::sum;
      c.input = c.output = data.data();
      c.timed = timed;
      const uint64_t before = now_ns();
      const auto work = world.backend(rank).start(c, nullptr);
      EXPECT_TRUE(work->phases().empty());
      world.finish(rank, *work);
      std::vector<std::string> names;
      uint64_t begin = before, end = before;
      for (const TimedPhase& phase : work->phases()) {
        names.push_back(phase.name);
        EXPECT_TRUE(begin <= phase.begin_ns && end < phase.end_ns && phase.begin_ns < phase.end_ns) << phase.name;
        begin = phase.begin_ns;
        end = phase.end_ns;
      }
      EXPECT_LE(end, now_ns());
      using Names = std::vector<std::string>;
      const Names all = rank < 2 ? Names{"LOCAL_REDUCESCATTER", "CROSS_ALLREDUCE", "LOCAL_ALLGATHER"}
                                 : Names{"CROSS_ALLREDUCE"};
      EXPECT_EQ(names, timed ? all : Names{});
    }
  });
}

// Sums of 16-bit floats are rounded once a node and once more: 1 + n small ones that each would be lost by themselves.
TEST(HierarchicalBackend, SixteenBitFloatsAreRoundedOnceANodeAndOnceMore) {
  ThreadedWorld world({1, 1, 1, 1}, {});
  constexpr int64_t kCount = 10'000;
  const uint16_t one = float16_of_float(1);
  const uint16_t small = float16_of_float(0x1p-12f);  // a quarter of a unit in the last place of 1
  run_ranks(world.network(), 4, [&](int rank) {
    std::vector<uint16_t> data(size_t(kCount), rank == 0 ? one : small);
    Collective c{};
    c.kind = Kind::allreduce;
    c.index = rank;
    c.size = 4;
    c.dtype = DType::float16;
    c.count = kCount;
    c.input = c.output = data.data();
    world.finish(rank, *world.backend(rank).start(c, nullptr));
    // 1 + 3/4 of a unit in the last place rounds up; one after the other each would round to 1.
    for (const uint16_t value : data) ASSERT_EQ(float_of_float16(value), 1 + 0x1p-10f);
  });
}

TEST(HierarchicalBackend, LeavesOthersWhatIsNotItsOwn) {
  ThreadedWorld world({2, 1}, {});
  HierarchicalBackend& backend = world.backend(0);
  Collective c = Problem(Kind::allreduce, 3, 100, 1).of(0);
  c.op = ReduceOp::sum;
  EXPECT_TRUE(backend.accepts(c));
  c.op = ReduceOp::adasum;
  EXPECT_FALSE(backend.accepts(c));
  EXPECT_THROW(backend.start(c, nullptr), Error);
  c.kind = Kind::allgather;
  EXPECT_FALSE(backend.accepts(c));
  const Group group(0, {0, 1, 2}, 0, world.peers(0).topology());
  HierarchicalBackend larger(std::make_shared<NodeLinks>(world.peers(0), group, nodes_of(group)),
                             {.least_bytes = 1024});
  Collective floats = Problem(Kind::allreduce, 3, 255, 1).of(0);
  floats.op = ReduceOp::sum;
  floats.dtype = DType::float32;
  EXPECT_FALSE(larger.accepts(floats));
  floats.count = 256;
  EXPECT_TRUE(larger.accepts(floats));
}

// Whoever is left hears of it, in whatever queue the chunk is.
TEST(HierarchicalBackend, ALostHostEndsIt) {
  for (const int64_t after : {0, 3, 20}) {
    ThreadedWorld world({2, 2}, {});
    for (int here : {0, 1})
      for (int there : {2, 3}) world.network().cut(here, there, after);
    Problem problem(Kind::allreduce, 4, 50'000, run_seed());
    problem.op = ReduceOp::sum;
    try {
      world.run({problem}, true);
      ADD_FAILURE() << "nobody noticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::peer_lost) << error.what();
    }
  }
}

}  // namespace
}  // namespace lightcc

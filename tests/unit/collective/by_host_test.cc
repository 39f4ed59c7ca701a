// Algorithms that know who shares a host: right on any placement, without I/O and over shared memory and a network with
// faults; how often a byte crosses between hosts, and who shares that work.
#include "collective/by_host.h"

#include <gtest/gtest.h>

#include <deque>

#include "collective/links.h"
#include "collective/selector.h"
#include "labels.h"
#include "net/group.h"
#include "unit/simulated_network.h"
#include "unit/thread_peers.h"

LABEL(alone, "ByHost.AnyPlacement*:ByHost.LongBlocksGo*");

namespace lightcc {
namespace {

using namespace test;

// All others are asked only about numbers.
bool knows_hosts(const Algorithm& a) {
  return a.kind == Kind::allgather || a.kind == Kind::reducescatter || a.kind == Kind::broadcast;
}

TEST(ByHost, AnyPlacementOnHosts) {
  uint64_t seed = run_seed();
  for (const Algorithm& algorithm : algorithms()) {
    if (!knows_hosts(algorithm)) continue;
    for (int size = 1; size <= 17; ++size)
      for (const Hosts& hosts : placements(size, ++seed))
        for (int64_t count : {0, 3, 37, 101}) {
          Problem problem(algorithm.kind, size, count, ++seed);
          if (problem.reduces()) problem.pre = seed % 2 ? 0.5 : 1;
          if (problem.reduces()) problem.post = seed % 3 ? 3 : 1;
          for (problem.root = 0; problem.root < (algorithm.kind == Kind::broadcast ? size : 1); ++problem.root) {
            check(algorithm, problem, hosts);
            if (HasFatalFailure()) return;
          }
        }
  }
}

// Blocks that are cut, and waves of one distance after the other.
TEST(ByHost, LongBlocksGoInPieces) {
  for (const Algorithm& algorithm : algorithms()) {
    if (!algorithm.by_host) continue;
    for (const Hosts& hosts : {Hosts{{0, 1, 2}}, Hosts{{0, 2}, {1, 3}}, Hosts{{0, 2, 4}, {1}, {3, 5}},
                               Hosts{{0}, {1, 2, 3}}}) {
      const int size = int(in_host_order(hosts).size());
      Problem problem(algorithm.kind, size, 3 * 65536 + 1000, run_seed());
      for (int64_t& count : problem.counts) count = problem.count - count % 999;
      problem.counts[1] = 7;
      problem.root = size - 1;
      problem.post = 2;
      check(algorithm, problem, hosts);
      if (HasFatalFailure()) return;
      EXPECT_GT(plan(algorithm, problem.of(0), hosts).size(), 2u);
    }
  }
}

// What all ranks together send to other hosts, and the most that one rank sends there.
struct Crossing { int64_t all = 0, most = 0; };
Crossing crossing(const Algorithm& algorithm, const Problem& problem, const Hosts& hosts) {
  const auto host_of = [&](int member) {
    return std::find_if(hosts.begin(), hosts.end(), [&](const auto& host) {
      return std::find(host.begin(), host.end(), member) != host.end();
    });
  };
  Crossing crossing;
  for (int rank = 0; rank < problem.size; ++rank) {
    int64_t count = 0;
    for (const auto& round : plan(algorithm, problem.of(rank), hosts))
      for (const Step& step : round)
        count += step.kind == Step::Action::send && host_of(rank) != host_of(step.peer) ? step.count : 0;
    crossing.all += count;
    crossing.most = std::max(crossing.most, count);
  }
  return crossing;
}

TEST(ByHost, EachByteEntersAHostOnce) {
  for (const Algorithm& algorithm : algorithms()) {
    if (!algorithm.by_host) continue;
    for (int size : {4, 6, 9, 12})
      for (const Hosts& hosts : placements(size, run_seed())) {
        SCOPED_TRACE(testing::Message() << name_of(algorithm.kind) << " on " << text_of(hosts));
        for (const int64_t count : {5, 100'000}) {  // each member's
          Problem problem(algorithm.kind, size, count * size, 1);
          problem.counts.assign(size_t(size), count);
          const Crossing crosses = crossing(algorithm, problem, hosts);
          EXPECT_EQ(crosses.all, count * size * int64_t(hosts.size() - 1));
          if (algorithm.kind == Kind::allgather) {
            EXPECT_EQ(crosses.most, count * int64_t(hosts.size() - 1));
          } else if (algorithm.kind == Kind::broadcast && count * size / 65536 >= int64_t(hosts.size())) {
            EXPECT_EQ(crosses.most, hosts.size() > 1 ? count * size : 0) << "a host sends more often than it has heard";
          }
        }
      }
  }
}

// Uneven hosts too: members of the larger ones take turns.
TEST(ByHost, CounterpartsAreSpreadEvenly) {
  const Hosts hosts{{0}, {1}, {2}, {3, 4, 5}, {6, 7}};
  Problem problem(Kind::reducescatter, 8, 0, 1);
  problem.counts.assign(8, 10);
  std::vector<int64_t> sent;
  for (int rank = 3; rank <= 5; ++rank) {
    int64_t count = 0;
    for (const auto& round : plan(*find_algorithm(Kind::reducescatter, "by_host"), problem.of(rank), hosts))
      for (const Step& step : round)
        count += step.kind == Step::Action::send && (step.peer < 3 || step.peer > 5) ? step.count : 0;
    sent.push_back(count);
  }
  std::sort(sent.begin(), sent.end());
  EXPECT_EQ(sent, (std::vector<int64_t>{10, 20, 20}));
}

// In turns or side by side: a flat ring leaves each host once.
TEST(ByHost, RingsAreOrderedByHost) {
  for (const Kind kind : {Kind::allgather, Kind::reducescatter}) {
    Problem problem(kind, 8, 0, 1);
    problem.counts.assign(8, 10);
    const Algorithm& ring = *find_algorithm(kind, "ring");
    for (const Hosts& hosts : {Hosts{{0, 1, 2, 3}, {4, 5, 6, 7}}, Hosts{{0, 2, 4, 6}, {1, 3, 5, 7}}})
      EXPECT_EQ(crossing(ring, problem, hosts).all, 2 * 7 * 10) << name_of(kind) << " " << text_of(hosts);
  }
}

// Ranks of a world that is placed on hosts, each stepped by a thread of its own.
class PlacedWorld {
 public:
  // order: the members of the group, by rank; not all ranks need be in it.
  PlacedWorld(const std::vector<int>& hosts, const LoopFaults& faults, std::vector<int> order)
      : size_(std::accumulate(hosts.begin(), hosts.end(), 0)), network_(size_, faults), order_(std::move(order)) {
    peers_ = thread_peers(hosts, network_);
    for (const int rank : order_) {
      Peers& peers = *peers_[size_t(rank)];
      groups_.push_back(std::make_unique<Group>(0, order_, rank, peers.topology()));
      auto& links = links_.emplace_back();
      std::vector<Link*> to;
      for (int member = 0; member < int(order_.size()); ++member) {
        const bool other = order_[size_t(member)] != rank;
        links.push_back(other ? peers.data_link(0, 0, order_[size_t(member)]) : nullptr);
        to.push_back(links.back().get());
      }
      backends_.push_back(std::make_unique<LinksBackend>(to, groups_.back()->hosts()));
    }
  }
  int members() const { return int(order_.size()); }

  // All in flight at once; what each member's outputs are.
  std::vector<std::vector<std::byte>> run(const std::vector<Problem>& problems, const Algorithm& algorithm) {
    std::vector<std::vector<std::byte>> outputs{order_.size()};
    const auto thrown = run_ranks(network_, members(), [&](int member) {
      Peers& peers = *peers_[size_t(order_[size_t(member)])];
      struct Started { std::vector<std::byte> input, output; std::unique_ptr<Work> work; };
      std::deque<Started> started;
      for (const Problem& problem : problems) {
        Started& one = started.emplace_back(Started{encode(problem.dtype, problem.input(member)),
                                                    encode(problem.dtype, problem.output(member)), nullptr});
        Collective c = problem.of(member);
        c.input = one.input.data();
        c.output = one.output.data();
        one.work = backends_[size_t(member)]->start(c, &algorithm);
      }
      const auto deadline = Clock::now() + kDeadline;
      for (bool done = false; !done;) {
        bool moved = false;
        done = true;
        for (Started& one : started) {
          moved |= !one.work->done() && one.work->step();
          if (one.work->done()) continue;
          done = false;
          const int other = one.work->waiting_for();
          EXPECT_TRUE(other >= -1 && other < members() && other != member) << other;
        }
        peers.step();
        peers.flush_and_wake();
        if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
        if (!moved) std::this_thread::yield();
      }
      for (size_t i = 0; i < problems.size(); ++i)
        EXPECT_EQ(started[i].output, encode(problems[i].dtype, problems[i].expected(member)))
            << algorithm.name << " of " << name_of(algorithm.kind) << ", member " << member << ", problem " << i;
      outputs[size_t(member)] = started.back().output;
    });
    for (const auto& one : thrown) EXPECT_EQ(text_of(one), "");
    return outputs;
  }

 private:
  const int size_;
  LoopNetwork network_;
  const std::vector<int> order_;
  std::vector<std::unique_ptr<Peers>> peers_;      // by rank
  std::vector<std::unique_ptr<Group>> groups_;     // by member
  std::vector<std::vector<std::unique_ptr<Link>>> links_;
  std::vector<std::unique_ptr<LinksBackend>> backends_;
};

struct Placed { std::vector<int> hosts, order; };
const Placed kPlaced[] = {{{2, 2}, {0, 1, 2, 3}},          {{2, 2}, {0, 2, 1, 3}},       {{3, 1}, {3, 0, 2, 1}},
                          {{2, 2, 1}, {4, 2, 0, 1, 3}},    {{2, 2, 2}, {5, 0, 1, 2}},    {{3, 3}, {0, 4, 2}},
                          {{3}, {2, 0, 1}}};

TEST(ByHost, OverSharedMemoryAndANetworkWithFaults) {
  const uint64_t seed = run_seed();
  for (const Placed& placed : kPlaced) {
    PlacedWorld world(placed.hosts, {1 << 10, 4, 0.1, 0.1, seed}, placed.order);
    for (const Algorithm& algorithm : algorithms()) {
      if (algorithm.adasum) continue;
      std::vector<Problem> problems;
      for (const DType dtype : {DType::int32, DType::float32, DType::float16, DType::int64})
        for (const int64_t count : {0, 1, 33, 2'001}) {
          Problem problem(algorithm.kind, world.members(), count, seed + problems.size());
          problem.dtype = dtype;
          problem.root = int(problems.size()) % world.members();
          if (problem.op == ReduceOp::product) problem.op = ReduceOp::sum;
          problem.pre = problems.size() % 2 ? 0.5 : 1;
          problem.post = problems.size() % 3 ? 3 : 1;
          problems.push_back(problem);
        }
      const auto outputs = world.run(problems, algorithm);
      if (algorithm.kind != Kind::allreduce) continue;
      for (const auto& output : outputs) EXPECT_EQ(output, outputs[0]);
    }
  }
}

// Pieces, over links that hold less than one.
TEST(ByHost, LongBlocksOverSharedMemoryAndANetwork) {
  PlacedWorld world({2, 1, 2}, {.record_bytes = 32 << 10}, {4, 0, 2, 1, 3});
  for (const Algorithm& algorithm : algorithms()) {
    if (!algorithm.by_host) continue;
    Problem problem(algorithm.kind, 5, kWatched ? 140'000 : 300'000, 1);
    problem.counts.assign(5, problem.count);
    problem.counts[3] = 1;
    problem.op = ReduceOp::sum;
    problem.dtype = DType::float32;
    world.run({problem}, algorithm);
  }
}

// 1 + 3 small ones that each would be lost by themselves, on two hosts of two: rounded once a host and once more.
TEST(ByHost, SixteenBitFloatsAreRoundedOnceAHostAndOnceMore) {
  const uint16_t one = float16_of_float(1);
  const uint16_t small = float16_of_float(0x1p-12f);  // a quarter of a unit in the last place of 1
  LoopNetwork network(4);
  const auto thrown = run_ranks(network, 4, [&](int rank) {
    LinksBackend backend(network.links(rank), {{0}, {1, 2, 3}});
    const std::vector<uint16_t> input(4, rank == 0 ? one : small);
    uint16_t output = 0;
    Collective c{};
    c.kind = Kind::reducescatter;
    c.index = rank;
    c.size = 4;
    c.dtype = DType::float16;
    c.counts.assign(4, 1);
    c.input = input.data();
    c.output = &output;
    drive(*backend.start(c, find_algorithm(Kind::reducescatter, "by_host")));
    if (float_of_float16(output) != 1 + 0x1p-10f) throw std::runtime_error(std::to_string(float_of_float16(output)));
  });
  for (const auto& one_thrown : thrown) EXPECT_EQ(text_of(one_thrown), "");
}

TEST(ByHost, RulesAreForHostsOfSeveral) {
  const auto by_host = [](const Hosts& hosts, bool allgather) {
    std::vector<Kind> kinds;
    for (const Rule& rule : rules_for(hosts, allgather))
      if (rule.algorithm && find_algorithm(rule.kind, rule.algorithm)->by_host &&
          std::find(kinds.begin(), kinds.end(), rule.kind) == kinds.end())
        kinds.push_back(rule.kind);
    return kinds;
  };
  using Kinds = std::vector<Kind>;
  EXPECT_EQ(by_host({{0, 1}, {2}}, true), (Kinds{Kind::reducescatter, Kind::allgather, Kind::broadcast}));
  EXPECT_EQ(by_host({{0, 1}, {2}}, false), (Kinds{Kind::reducescatter, Kind::broadcast}));
  Hosts many{{0, 1}};
  for (int host = 2; host < 66; ++host) many.push_back({host});
  EXPECT_EQ(by_host(many, false), (Kinds{Kind::broadcast})) << "a reduce-scatter would keep a sum of each in scratch";
  EXPECT_EQ(by_host({{0}, {1}, {2}}, true), Kinds{});
}

}  // namespace
}  // namespace lightcc

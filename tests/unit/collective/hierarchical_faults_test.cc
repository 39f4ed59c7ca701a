// 2D all-reduce over TCP whose hosts and connections fail, on purpose in each of its phases. A phase is caught when its
// first chunk has begun: there are many, so that chunks of all earlier phases are under way as well.
#include <gtest/gtest.h>

#include <atomic>

#include "base/clock.h"
#include "collective/hierarchical.h"
#include "unit/loopback.h"
#include "net/tcp/tcp_transport.h"
#include "unit/simulated.h"
#include "unit/thread_peers.h"

namespace lightcc {
namespace {

using namespace test;

constexpr HierarchicalBackend::Limits kSmallChunks{.one_lane_bytes = 1 << 10, .chunk_bytes = 4 << 10};
constexpr const char* kPhases[] = {"LOCAL_REDUCESCATTER", "CROSS_ALLREDUCE", "LOCAL_ALLGATHER"};
constexpr int kSize = 4;
constexpr int64_t kCount = 60'000;

bool has_begun(const Work& work, const std::string& phase) {
  const auto phases = work.phases();
  return std::any_of(phases.begin(), phases.end(), [&](const TimedPhase& one) { return one.name == phase; });
}

// Two hosts of two ranks, each stepped by a thread of its own, which holds all that is its rank's.
class TwoHosts {
 public:
  TwoHosts() : hosts_({2, 2}) {
    for (int rank = 0; rank < kSize; ++rank) {
      listeners_.push_back(listen_on_own_loopback());
      const Address at = local_address(listeners_.back().get());
      tcp_peers_.push_back({hosts_.names[size_t(rank)], {at}});
      contacts_.push_back(contact_of(hosts_.names[size_t(rank)], {at}));
    }
  }

  struct Rank {
    TcpTransport* tcp;
    std::unique_ptr<Peers> peers;
    std::unique_ptr<Group> group;
    std::unique_ptr<HierarchicalBackend> backend;
  };
  Rank rank(int number) {
    const size_t i = size_t(number);
    auto tcp = std::make_unique<TcpTransport>(JobCredentials{"job", "1", "a secret", 0}, number, tcp_peers_,
                                              std::move(listeners_[i]));
    Rank rank{tcp.get(), nullptr, nullptr, nullptr};
    std::vector<NamedTransport> transports;
    transports.push_back({"tcp", std::move(tcp)});
    rank.peers = std::make_unique<Peers>(number, hosts_.topology, contacts_, std::move(hosts_.local_ranks[i]),
                                         std::move(transports), nullptr);
    rank.group = std::make_unique<Group>(0, std::vector<int>{0, 1, 2, 3}, number, hosts_.topology);
    rank.backend = std::make_unique<HierarchicalBackend>(
        std::make_shared<NodeLinks>(*rank.peers, *rank.group, nodes_of(*rank.group)), kSmallChunks);
    return rank;
  }

 private:
  ThreadHosts hosts_;
  std::vector<Fd> listeners_;
  std::vector<TcpPeer> tcp_peers_;
  std::vector<Contact> contacts_;
};

// One all-reduce in place. at_step is called before each step; false: this rank steps no more.
using AtStep = std::function<bool(TwoHosts::Rank&, const Work&)>;
bool allreduce(TwoHosts::Rank& rank, const Problem& problem, const AtStep& at_step) {
  const int member = rank.group->index();
  auto data = encode(problem.dtype, problem.input(member));
  Collective c = problem.of(member);
  c.input = c.output = data.data();
  c.timed = true;
  const auto work = rank.backend->start(c, nullptr);
  const auto deadline = Clock::now() + kDeadline;
  while (!work->done()) {
    if (!at_step(rank, *work)) return false;
    const bool moved = work->step();
    rank.peers->step();
    rank.peers->flush_and_wake();
    if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
    if (!moved) std::this_thread::yield();
  }
  EXPECT_EQ(data, encode(problem.dtype, problem.expected(member))) << "member " << member;
  return true;
}

Problem sum(uint64_t seed) {
  Problem problem(Kind::allreduce, kSize, kCount, seed);
  problem.op = ReduceOp::sum;
  problem.dtype = DType::float32;
  return problem;
}

// A whole host goes without a word; each of the other's ranks says who. There are no heartbeats here: that a host which
// was never heard is missed as well, tests/multihost/test_faults.py shows.
TEST(HierarchicalFaults, AHostThatIsLostInAPhaseIsNamed) {
  for (const std::string phase : kPhases) {
    SCOPED_TRACE(phase);
    TwoHosts hosts;
    const Problem problem = sum(run_seed());
    std::atomic<uint64_t> lost_ns{0};
    std::vector<std::exception_ptr> thrown(kSize);
    std::vector<double> after_s(kSize);
    std::vector<std::thread> threads;
    for (int number = 0; number < kSize; ++number)
      threads.emplace_back([&, number] {
        TwoHosts::Rank rank = hosts.rank(number);
        try {
          allreduce(rank, problem, [](auto&, auto&) { return true; });  // so that there are connections to break
          const bool over = allreduce(rank, problem, [&](TwoHosts::Rank&, const Work& work) {
            return number < 2 || !has_begun(work, phase);
          });
          EXPECT_FALSE(over) << "rank " << number << " has all of it";
        } catch (...) {
          thrown[size_t(number)] = std::current_exception();
          after_s[size_t(number)] = (double(now_ns()) - double(lost_ns)) / 1e9;
          return;
        }
        if (number >= 2) lost_ns = now_ns();
      });
    for (std::thread& thread : threads) thread.join();
    for (int survivor : {0, 1}) {
      EXPECT_EQ(code_of(thrown[size_t(survivor)]), Code::peer_lost);
      const std::string text = text_of(thrown[size_t(survivor)]);
      EXPECT_TRUE(text.find("rank 2") != text.npos || text.find("rank 3") != text.npos) << text;
      EXPECT_LT(after_s[size_t(survivor)], 15);
    }
    for (int lost : {2, 3}) EXPECT_EQ(text_of(thrown[size_t(lost)]), "");
  }
}

// All connections of a host break, and it is silent for a second: nothing is lost and nothing comes twice.
TEST(HierarchicalFaults, ACutInAPhaseChangesNoBit) {
  constexpr auto kSilence = std::chrono::milliseconds(1000);
  for (const std::string phase : kPhases) {
    SCOPED_TRACE(phase);
    TwoHosts hosts;
    const uint64_t seed = run_seed();
    std::atomic<uint64_t> reconnects{0};
    std::atomic<int> over{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < kSize; ++number)
      threads.emplace_back([&, number] {
        TwoHosts::Rank rank = hosts.rank(number);
        try {
          allreduce(rank, sum(seed), [](auto&, auto&) { return true; });
          bool cut = false;
          allreduce(rank, sum(seed + 1), [&](TwoHosts::Rank& own, const Work& work) {
            if (number < 2 || cut || !has_begun(work, phase)) return true;
            own.tcp->break_connections();
            std::this_thread::sleep_for(kSilence);
            return cut = true;
          });
          EXPECT_EQ(cut, number >= 2);
          allreduce(rank, sum(seed + 2), [](auto&, auto&) { return true; });
        } catch (const Error& error) {
          ADD_FAILURE() << "rank " << number << ": " << error.what();
        }
        // Until all have all: whoever goes earlier is lost to the others.
        ++over;
        for (const auto deadline = Clock::now() + kDeadline; over < kSize && Clock::now() < deadline;) {
          rank.peers->step();
          rank.peers->flush_and_wake();
          std::this_thread::yield();
        }
        reconnects += rank.tcp->reconnects();
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(reconnects, 4u) << "both flows of both lanes";
  }
}

}  // namespace
}  // namespace lightcc

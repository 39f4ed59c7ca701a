// Who watches the network and makes the steps where ranks are on several hosts: the engine thread while nobody waits,
// else one of the callers.
#include <thread>

#include "labels.h"
#include "unit/ranks.h"

LABEL(on_hosts);
LABEL(watches_network, "Peers.TheEngineThread*");

namespace lightcc {
namespace {

using namespace test;
using Sleeper = Peers::Sleeper;

constexpr uint64_t kSleepNs = kSecondNs / 10;
constexpr int kTries = 200;
constexpr auto kNever = [] { return false; };

// Whether the sleeper's doorbell is the one for which the network is watched.
bool watches(const Doorbell& doorbell) { return doorbell.polled.load() == 1; }
bool comes_to_watch(const Doorbell& doorbell) {
  for (const uint64_t deadline = now_ns() + kPatienceNs; !watches(doorbell); std::this_thread::yield())
    if (now_ns() > deadline) return false;
  return true;
}

TEST(Peers, ACallerTakesOverTheNetworkFromTheEngineThread) {
  const auto all = thread_peers({1, 1});
  Peers& peers = *all[0];
  std::thread engine([&] { peers.sleep(Sleeper::engine_thread, peers.own().engine, UINT64_MAX, kNever); });
  EXPECT_TRUE(comes_to_watch(peers.own().engine));
  bool watched = false;
  for (int i = 0; i < kTries && !watched; ++i)
    peers.sleep(Sleeper::caller, peers.own().driver, kSleepNs, [&] { return watched = watches(peers.own().driver); });
  EXPECT_TRUE(watched) << "data for the caller would wake the engine thread";
  if (!watched) peers.local_ranks().set_event();
  engine.join();
}

TEST(Peers, TheEngineThreadAndOtherCallersLeaveItToTheCallerWhoWatches) {
  const auto all = thread_peers({1, 1});
  Peers& peers = *all[0];
  std::thread first([&] { peers.sleep(Sleeper::caller, peers.own().driver, UINT64_MAX, kNever); });
  EXPECT_TRUE(comes_to_watch(peers.own().driver));
  for (Sleeper other : {Sleeper::engine_thread, Sleeper::caller}) {
    peers.sleep(other, peers.own().engine, kSleepNs / 10, kNever);
    EXPECT_TRUE(watches(peers.own().driver));
  }
  peers.local_ranks().set_event();
  first.join();
}

TEST(Engine, AllGathersGoByHostUnlessTheConfigurationSaysOtherwise) {
  for (const bool by_host : {true, false}) {
    Config config;
    config.hierarchical_allgather = by_host;
    Ranks ranks(std::vector<int>{2, 1}, config);
    ranks.each([&](Engine& engine, int) {
      const std::string& table = engine.selector_text();
      const size_t begin = table.find("allgather");
      const std::string first_row = table.substr(begin, table.find('\n', begin) - begin);
      EXPECT_EQ(first_row.ends_with("links/by_host"), by_host) << table;
    });
  }
}

// Once it was the engine thread that data woke, which then made a single step and napped, while the caller slept on.
TEST(Engine, CallersMakeTheStepsOfWhatTheyWaitFor) {
  constexpr int64_t kCount = 2 << 20;
  constexpr int kRounds = 12;
  constexpr uint64_t kSteps = (kCount * sizeof(float)) / (1 << 20);  // one moves no more
  Ranks ranks(std::vector<int>{1, 1});
  std::atomic<int> by_engine_thread{0};
  ranks.each([&](Engine& engine, int) {
    const auto steps = [&](Counters::Name name) { return engine.counters().values[name].load(); };
    std::vector<float> data(size_t(kCount), 1);
    done(engine, request(engine, Kind::allreduce, "connects", {in_place(data)}));
    for (int i = 0; i < kRounds; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the engine thread comes to rest
      const uint64_t callers = steps(Counters::caller_steps), background = steps(Counters::background_steps);
      auto one = request(engine, Kind::allreduce, "data", {in_place(data)});
      engine.submit(one, true);
      EXPECT_TRUE(engine.wait(*one, now_ns() + kPatienceNs));  // not in slices: between them nobody waits
      const uint64_t in_background = steps(Counters::background_steps) - background;
      EXPECT_GE(steps(Counters::caller_steps) - callers + in_background, kSteps);
      by_engine_thread += in_background > 2;  // what had come before the caller waited is its own
    }
    EXPECT_EQ(data[0], 1 << (kRounds + 1));
  });
  // On a busy machine a caller may be stopped just before it waits: then the engine thread goes ahead, as it should.
  EXPECT_LE(by_engine_thread, kRounds) << "of " << 2 * kRounds << " waits";
}

}  // namespace
}  // namespace lightcc

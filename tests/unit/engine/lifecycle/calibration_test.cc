// What ranks measure of the network between their hosts, and what follows from it.
#include "engine/lifecycle/calibration.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "collective/network_probe.h"
#include "labels.h"
#include "unit/ranks.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

TEST(Probe, EachHostMeasuresWithItsNeighbours) {
  for (int hosts = 2; hosts <= 9; ++hosts) {
    std::map<int, std::set<int>> partners;
    for (int round = 0; round < kProbeRounds; ++round)
      for (int host = 0; host < hosts; ++host) {
        const int other = probe_partner(host, hosts, round);
        if (other < 0) continue;
        ASSERT_LT(other, hosts);
        EXPECT_NE(other, host);
        EXPECT_EQ(probe_partner(other, hosts, round), host) << "both know it";
        partners[host].insert(other);
      }
    EXPECT_EQ(partners.size(), size_t(hosts)) << "none is left out";
    for (const auto& [host, others] : partners)
      for (int other : others)
        EXPECT_TRUE(other == (host + 1) % hosts || host == (other + 1) % hosts) << "these are no neighbours";
  }
  for (int round = 0; round < kProbeRounds; ++round) EXPECT_EQ(probe_partner(0, 1, round), -1);
}

// What a busy machine needs under a sanitizer.
constexpr uint64_t kAmpleNs = 60 * kSecondNs;

class Calibrations : public testing::Test {
 protected:
  Calibrations() {
    config_.cache_dir = testing::TempDir() + "calibrations_" + std::to_string(getpid());
    std::filesystem::remove_all(config_.cache_dir);
  }
  ~Calibrations() override { std::filesystem::remove_all(config_.cache_dir); }

  // The selector's table, which has to be the same on all ranks, and in which all-reduces have to be right.
  std::string calibrated(Ranks& ranks) {
    std::vector<std::string> tables(size_t(ranks.size()));
    ranks.each([&](Engine& engine, int rank) {
      calibrate(engine, nullptr, kAmpleNs);
      tables[size_t(rank)] = engine.selector_text();
      EXPECT_EQ(engine.counters().values[Counters::requests], 0u) << "of the user's there are none";
      for (const int64_t count : {1, 1000, 100'000, 1'000'000}) {
        std::vector<float> data(size_t(count), float(rank + 1));
        EXPECT_EQ(run(engine, request(engine, Kind::allreduce, "sum", {in_place(data)})), Code::ok);
        const float sum = float(ranks.size() * (ranks.size() + 1) / 2);
        EXPECT_EQ(data, std::vector<float>(size_t(count), sum));
      }
    });
    for (const std::string& table : tables) EXPECT_EQ(table, tables[0]);
    return tables[0];
  }
  std::string calibrated(const std::vector<int>& hosts) {
    Ranks ranks(hosts, config_);
    return calibrated(ranks);
  }
  size_t files() const {
    std::error_code none;
    size_t count = 0;
    for (std::filesystem::directory_iterator one(config_.cache_dir, none), end; one != end; ++one) ++count;
    return count;
  }
  // The content of the only file.
  void keep(const std::string& content) const {
    for (const auto& one : std::filesystem::directory_iterator(config_.cache_dir)) std::ofstream(one.path()) << content;
  }

  Config config_;
};

TEST_F(Calibrations, AllRanksChooseByWhatWasMeasured) {
  for (const std::vector<int>& hosts : {std::vector<int>{1, 1}, {2, 2}, {3, 1, 2}, {1, 1, 1, 1}}) {
    const std::string table = calibrated(hosts);
    EXPECT_NE(table.find("latency_us"), std::string::npos) << table;
    EXPECT_NE(table.find("2d/"), std::string::npos) << table;
  }
}

TEST_F(Calibrations, LaterRunsFindIt) {
  const std::string first = calibrated({2, 1});
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(calibrated({2, 1}), first) << "two measurements would never be the same";
  keep("network=0.5 1e6 0 1e9\n");
  EXPECT_TRUE(calibrated({2, 1}).starts_with("network: {\"hosts\": [2, 1], \"latency_us\": 5e+05, "
                                                  "\"nic_gbit_per_s\": 0.008, \"flow_gbit_per_s\": 0, "
                                                  "\"memory_gbyte_per_s\": 1}\n")) << first;
  calibrated({1, 1});
  EXPECT_EQ(files(), 2u) << "that is another set of hosts";
}

TEST_F(Calibrations, WhatIsNoMeasurementIsMeasuredAgain) {
  calibrated({1, 1});
  for (const char* content : {"", "network=\n", "network=1 2\n", "network=-1 1 0 1\n", "network=nan nan nan nan\n",
                              "network=1e-5 0 0 1e9\n"}) {
    keep(content);
    EXPECT_NE(calibrated({1, 1}).find("latency_us"), std::string::npos);
  }
}

TEST_F(Calibrations, NothingIsMeasuredUnlessItIsWanted) {
  EXPECT_TRUE(calibrated({2}).starts_with("kind")) << "one host";
  config_.calibration = false;
  EXPECT_TRUE(calibrated({1, 1}).starts_with("kind"));
  EXPECT_EQ(files(), 0u);
}

TEST_F(Calibrations, ItWorksWhereNothingCanBeKept) {
  config_.cache_dir = "/proc/no/such/directory";
  EXPECT_NE(calibrated({1, 1}).find("latency_us"), std::string::npos);
}

// A rank that does not answer within a second, because it is stopped or its host is overloaded.
TEST_F(Calibrations, ASlowRankLeavesTheRulesAsTheyAre) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const auto begin = now_ns();
    if (rank == 1)
      engine.with_peers([](Peers&) { std::this_thread::sleep_for(std::chrono::milliseconds(1300)); });
    calibrate(engine);
    EXPECT_LT(now_ns() - begin, kPatienceNs);
    EXPECT_EQ(engine.counters().values[Counters::requests], 0u) << "of the user's there are none";
    std::vector<float> data(1000, 1);
    EXPECT_EQ(run(engine, request(engine, Kind::allreduce, "sum", {in_place(data)})), Code::ok);
    EXPECT_EQ(data, std::vector<float>(1000, 2));
  });
  EXPECT_EQ(ranks[0].selector_text(), ranks[1].selector_text());
}

TEST_F(Calibrations, ARankThatIsGoneIsAnError) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    if (rank == 1) return engine.shutdown();
    EXPECT_THROW(calibrate(engine), Error);
  });
}

// Rank 1 answers as long as it is asked for the rules, and then no more.
TEST_F(Calibrations, CancelledOnesEndAtOnce) {
  for (const int answers : {0, 1}) {
    Ranks ranks(std::vector<int>{1, 1}, config_);
    Cancellation cancellation;
    std::atomic<bool> over{false};
    ranks.each([&](Engine& engine, int rank) {
      if (rank == 1) {
        std::vector<uint8_t> rules(4096);
        if (answers == 1) {
          auto one = request(engine, Kind::broadcast, "lightcc.rules", {in_place(rules)});
          one->what.op = ReduceOp::max;
          EXPECT_EQ(negotiated(engine, one), Code::ok);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const uint64_t begin = now_ns();
        cancellation.cancel(Error(Code::shut_down, "init: a member is gone"));
        while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_LT(now_ns() - begin, 2 * kSecondNs);  // long before the stall would be ended
        return;
      }
      try {
        calibrate(engine, &cancellation);
        ADD_FAILURE() << "it was cancelled";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::shut_down);
        EXPECT_STREQ(error.what(), "init: a member is gone");
      }
      engine.shutdown("", &cancellation);
      over = true;
    });
  }
}

}  // namespace
}  // namespace lightcc

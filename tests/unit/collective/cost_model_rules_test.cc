#include "collective/cost_model_rules.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

Cluster flat_cluster(int hosts, int ranks, double bytes_per_s = 119e6, double latency_s = 50e-6) {
  Cluster cluster;
  cluster.hosts.assign(size_t(hosts), ranks);
  cluster.nic_bytes_per_s = bytes_per_s;
  cluster.latency_s = latency_s;
  return cluster;
}

std::string way(const Rule& rule) { return std::string(rule.backend) + "/" + rule.algorithm; }

// place: 0: the first rule that holds for so many bytes, 1: the second.
std::string chosen(const std::vector<Rule>& rules, int64_t bytes, int place = 0) {
  for (const Rule& rule : rules)
    if ((rule.most_bytes == 0 || bytes <= rule.most_bytes) && place-- == 0) return way(rule);
  return "none";
}

TEST(CostModelRules, TwoLevelsWhereHostsHaveSeveralRanks) {
  for (const int hosts : {2, 4}) {
    const std::vector<Rule> rules = cost_model_rules(flat_cluster(hosts, 4), true);
    EXPECT_EQ(chosen(rules, 64 << 20), "2d/pairwise");
    EXPECT_EQ(chosen(rules, 1 << 12), hosts == 2 ? "2d/recursive_doubling" : "2d/pairwise") << "start-ups rule";
    for (const Rule& rule : cost_model_rules(flat_cluster(hosts, 4), false)) EXPECT_STREQ(rule.backend, "links");
  }
}

TEST(CostModelRules, WithLatencyRulesChangeAtLargerSizes) {
  const auto last_small = [](double latency_s) {
    const std::vector<Rule> rules = cost_model_rules(flat_cluster(16, 1, 3e9, latency_s), true);
    int64_t bytes = 1 << 10;
    while (bytes < (1 << 30) && chosen(rules, bytes) == "2d/recursive_doubling") bytes *= 2;
    return bytes;
  };
  EXPECT_LT(4 * last_small(10e-6), last_small(1e-3));
}

TEST(CostModelRules, NoRingAmongThousandsOfHosts) {
  const std::vector<Rule> rules = cost_model_rules(flat_cluster(2048, 1, 3.1e9, 30e-6), true);
  EXPECT_EQ(chosen(rules, 64 << 20), "2d/halving_doubling");
}

TEST(CostModelRules, TheSecondIsAnother) {
  const std::vector<Rule> rules = cost_model_rules(flat_cluster(4, 2), true);
  for (int64_t bytes = 1 << 10; bytes < int64_t(4) << 30; bytes *= 2) {
    EXPECT_NE(chosen(rules, bytes), chosen(rules, bytes, 1));
    EXPECT_NE(chosen(rules, bytes, 1), "none");
  }
}

// Two measurements of one network differ by some percent.
TEST(CostModelRules, NoiseOfAMeasurementChangesNothingForLargeVectors) {
  const std::vector<Rule> rules = cost_model_rules(flat_cluster(4, 2), true);
  for (const double noise : {0.9, 0.95, 1.05, 1.1}) {
    const std::vector<Rule> again = cost_model_rules(flat_cluster(4, 2, 119e6 * noise, 50e-6 / noise), true);
    for (int64_t bytes = 1 << 20; bytes < int64_t(4) << 30; bytes *= 2)
      EXPECT_EQ(chosen(rules, bytes), chosen(again, bytes)) << bytes;
  }
}

TEST(CostModelRules, TextReadsBackTheSame) {
  for (const int hosts : {2, 3, 64}) {
    const std::vector<Rule> rules = cost_model_rules(flat_cluster(hosts, 2), true);
    const std::vector<Rule> again = parse_allreduce_rules(text_of(rules));
    ASSERT_EQ(rules.size(), again.size());
    for (size_t i = 0; i < rules.size(); ++i) {
      EXPECT_EQ(rules[i].most_bytes, again[i].most_bytes);
      EXPECT_EQ(way(rules[i]), way(again[i]));
    }
    EXPECT_LT(text_of(rules).size(), 4096u);
  }
  EXPECT_TRUE(parse_allreduce_rules("").empty());
  for (const char* text :
       {"x", "12", "12 2d", "12 2d/star", "-1 2d/ring", "12x 2d/ring", "12 shared/ring", "2d/ring 12"})
    EXPECT_THROW(parse_allreduce_rules(text), Error) << text;
}

TEST(CostModelRules, StandBehindWhatCompressesAndBeforeTheOthers) {
  const Rule own[] = {{Kind::allreduce, 2, 0, 0, "links", "pairwise"}};
  const std::vector<Rule> rules = rules_for({{0}, {1}}, true, own);
  EXPECT_STREQ(rules[0].backend, "compressed");
  EXPECT_STREQ(rules[1].algorithm, "pairwise");
  EXPECT_EQ(rules.size(), rules_for({{0}, {1}}, true).size() + 1);
}

}  // namespace
}  // namespace lightcc

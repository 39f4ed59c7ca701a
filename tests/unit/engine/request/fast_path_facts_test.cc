#include "engine/request/fast_path_facts.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(FastPathFacts, WhatIsNotKnownDoesNotStandInTheWay) { EXPECT_TRUE(may_take_fast_path({})); }

TEST(FastPathFacts, EachOfThemAloneIsEnough) {
  const std::pair<const char*, void (*)(FastPathFacts&)> rows[] = {
      {"a caller that goes on", [](FastPathFacts& f) { f.blocks = false; }},
      {"another kind", [](FastPathFacts& f) { f.kind = Kind::broadcast; }},
      {"Adasum", [](FastPathFacts& f) { f.op = ReduceOp::adasum; }},
      {"two tensors", [](FastPathFacts& f) { f.tensors = 2; }},
      {"a GPU", [](FastPathFacts& f) { f.device = DeviceKind::cuda; }},
      {"a codec", [](FastPathFacts& f) { f.is_compressed = true; }},
      {"no elements", [](FastPathFacts& f) { f.is_whole = false; }},
      {"a name in use", [](FastPathFacts& f) { f.has_name_free = false; }},
      {"another request", [](FastPathFacts& f) { f.in_flight = 1; }},
      {"a timeline", [](FastPathFacts& f) { f.shows_negotiation = true; }},
      {"an epoch at its end", [](FastPathFacts& f) { f.epoch_ends = true; }},
      {"three hosts", [](FastPathFacts& f) { f.has_fast_path = false; }},
      {"a group at work", [](FastPathFacts& f) { f.is_idle = false; }},
      {"another backend", [](FastPathFacts& f) { f.prefers_shared = false; }},
      {"a factor between hosts", [](FastPathFacts& f) { f.is_between_hosts = true, f.pre = 0.5; }},
      {"a forced way between hosts", [](FastPathFacts& f) { f.is_between_hosts = f.fixes_ways = true; }},
  };
  for (const auto& [what, change] : rows) {
    FastPathFacts facts;
    change(facts);
    EXPECT_FALSE(may_take_fast_path(facts)) << what;
  }
}

TEST(FastPathFacts, OnAHostAFactorAndAForcedWayAreNoneAndBetweenHostsNoOtherBackendIs) {
  FastPathFacts facts;
  facts.pre = 0.5, facts.fixes_ways = true;
  EXPECT_TRUE(may_take_fast_path(facts));
  facts = {};
  facts.is_between_hosts = true, facts.prefers_shared = false;
  EXPECT_TRUE(may_take_fast_path(facts));
}

}  // namespace
}  // namespace lightcc

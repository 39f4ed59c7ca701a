// Process sets: added and removed by all ranks, at work independently of each other, their ids used again.
#include <algorithm>
#include <numeric>
#include <random>

#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(on_hosts);

namespace lightcc {
namespace {

using namespace test;

std::vector<int> ranks_of(const Engine& engine, int group) {
  const auto found = engine.group(group);
  return found ? found->ranks() : std::vector<int>();
}

bool is_in(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void expect_sum(Engine& engine, int group, size_t count = 10, const std::string& name = "") {
  const std::vector<int> ranks = ranks_of(engine, group);
  std::vector<float> x(count, float(engine.world().rank + 1));
  float sum = 0;
  for (int rank : ranks) sum += float(rank + 1);
  done(engine, request(engine, Kind::allreduce, name, {in_place(x)}, group));
  EXPECT_EQ(x.back(), sum) << "process set " << group;
}

TEST(Groups, MembersWorkAmongThemselves) {
  const std::vector<std::vector<int>> sets{{0, 2}, {1, 3}, {3}, {0, 1, 2, 3}};
  Ranks ranks(4);
  ranks.each([&](Engine& engine, int rank) {
    for (size_t i = 0; i < sets.size(); ++i) EXPECT_EQ(add_group(engine, sets[i]), int(i) + 1);
    EXPECT_EQ(engine.group_ids(), (std::vector{0, 1, 2, 3, 4}));
    for (size_t i = 0; i < sets.size(); ++i) {
      const int group = int(i) + 1;
      EXPECT_EQ(ranks_of(engine, group), sets[i]);
      if (!is_in(sets[i], rank)) {
        std::vector<float> x(1);
        EXPECT_THROW(engine.submit(request(engine, Kind::allreduce, "x", {in_place(x)}, group), true), Error);
        continue;
      }
      for (size_t count : {size_t(1), size_t(100'000)}) expect_sum(engine, group, count);
      std::vector<int64_t> root(5, rank);  // a world rank, in every set
      auto one = request(engine, Kind::broadcast, "x", {in_place(root)}, group);
      one->what.root = sets[i].back();
      done(engine, one);
      EXPECT_EQ(root, std::vector<int64_t>(5, sets[i].back()));
      std::vector<int32_t> mine{rank};
      auto all = done(engine, request(engine, Kind::allgather, "x", {input_of(mine, {1})}, group));
      EXPECT_EQ(result<int32_t>(*all), sets[i]);
    }
    expect_sum(engine, 0);
  });
}

TEST(Groups, IdsAndTheirNumberingAreUsedAgain) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const std::vector<int> sets[] = {{0, 1}, {1, 2}, {0, 2}};
    EXPECT_EQ(add_group(engine, {0, 1, 2}), 1);
    for (int again = 0; again < 6; ++again) {
      const auto& set = sets[again % 3];
      EXPECT_EQ(add_group(engine, set), 2);
      if (is_in(set, rank)) {
        auto probe = request(engine, Kind::barrier, "", {}, 2);
        done(engine, probe);
        EXPECT_EQ(probe->name(), "noname.0");
        for (size_t count : {size_t(3), size_t(50'000)}) expect_sum(engine, 2, count, "x");
      }
      remove_group(engine, 2);
      EXPECT_TRUE(ranks_of(engine, 2).empty());
      EXPECT_EQ(engine.group_ids(), (std::vector{0, 1}));
    }
    remove_group(engine, 1);
    EXPECT_EQ(add_group(engine, {0, 2}), 2) << "the id that was freed first";
    EXPECT_EQ(add_group(engine, {1, 2}), 1);
    expect_sum(engine, 0);
  });
}

TEST(Groups, InterleavedInAnotherOrderOnEachRank) {
  const uint64_t seed = run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const std::vector<std::vector<int>> sets{{0, 1, 2}, {1, 2, 3}, {0, 3}, {0, 1, 2, 3}};
  Ranks ranks(4);
  ranks.each([&](Engine& engine, int rank) {
    for (auto& set : sets) add_group(engine, set);
    std::mt19937_64 random(seed + uint64_t(rank));
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> memory;
      std::vector<RequestPtr> requests;
      memory.reserve(5 * 8);
      for (int group = 0; group <= int(sets.size()); ++group)
        for (int i = 0; i < 8; ++i) {
          if (!is_in(ranks_of(engine, group), rank)) continue;
          auto& x = memory.emplace_back(size_t(i) * 3000 + 1, 1.0f);
          requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(x)}, group));
        }
      std::vector<size_t> order(requests.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (size_t i : order) engine.submit(requests[i], false);
      for (size_t i = 0; i < requests.size(); ++i) {
        ASSERT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
        ASSERT_EQ(memory[i].back(), float(ranks_of(engine, requests[i]->group).size()));
      }
    }
  });
}

TEST(Groups, OneThatWaitsDoesNotHoldUpAnother) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const int pair = add_group(engine, {0, 1}), other = add_group(engine, {1, 2});
    std::vector<float> x(10, 1);
    auto early = request(engine, Kind::allreduce, "early", {in_place(x)}, pair);
    if (rank == 1) engine.submit(early, false);  // rank 0 comes to it last
    for (int i = 0; rank >= 1 && i < 20; ++i) expect_sum(engine, other);
    expect_sum(engine, 0);
    if (rank == 0) engine.submit(early, false);
    if (rank <= 1) {
      EXPECT_EQ(finish(engine, early), Code::ok);
    }
  });
}

TEST(Groups, RanksThatNameOtherMembersAreTold) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    Tensor members{DType::uint8, rank == 2 ? Shape{0, 2} : Shape{0, 1}, nullptr, nullptr};
    auto one = request(engine, Kind::add_group, "", {members});
    EXPECT_EQ(run(engine, one), Code::mismatch);
    EXPECT_NE(one->text.find("rank 2 has [0, 2]"), std::string::npos) << one->text;
    EXPECT_EQ(engine.group_ids(), std::vector{0});
    EXPECT_EQ(add_group(engine, {0, 1}), 1);
  });
}

TEST(Groups, WhatIsInFlightWhenItsSetIsRemovedFails) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    const int group = add_group(engine, {0, 1});
    std::vector<float> x(10, 1);
    auto alone = request(engine, Kind::allreduce, "alone", {in_place(x)}, group);
    if (rank == 1) engine.submit(alone, false);
    remove_group(engine, group);
    if (rank == 1) {
      EXPECT_EQ(finish(engine, alone), Code::invalid_argument);
      EXPECT_NE(alone->text.find("process set was removed"), std::string::npos) << alone->text;
    }
    EXPECT_EQ(add_group(engine, {0, 1}), group);
    expect_sum(engine, group);
  });
}

TEST(Groups, AsManyAsThereIsRoomFor) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int) {
    while (int(engine.group_ids().size()) < LocalRanks::kGroups) add_group(engine, {0, 1});
    EXPECT_EQ(engine.group_ids().back(), LocalRanks::kGroups - 1);
    expect_sum(engine, LocalRanks::kGroups - 1, 100'000);
    expect_sum(engine, 0, 100'000);
  });
}

}  // namespace
}  // namespace lightcc

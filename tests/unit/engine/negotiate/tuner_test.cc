// The tuner against simulated networks: what two candidates cost, with noise, and which it keeps.
#include "engine/negotiate/tuner.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int k1MiB = 20;
constexpr TunerLimits kOneStep{0, 1, 20};

bool is_second(const Tuner& tuner, int size_class) { return tuner.choices() >> size_class & 1; }

// All-reduces by whatever the tuner says, of a network where the candidates have these speeds, up to so many percent
// slower each time, and at times three times slower.
struct Simulation {
  Simulation(TunerLimits limits, double first, double second, uint64_t seed = 1, double noise = 0)
      : tuner(limits), speeds{first, second}, random(seed), noise(noise) {}

  Tuner::Noted run(int64_t bytes) {
    const AutotuneChoices choices = tuner.choices();
    const bool second = choices >> size_class(bytes) & 1;
    std::uniform_real_distribution<double> share(0, noise);
    const double delay = noise > 0 && random() % 40 == 0 ? 3 : 1 + share(random);
    const auto noted = tuner.note(bytes, double(bytes) / speeds[second] * delay, choices);
    taken[size_class(bytes)] += second ? 'B' : 'A';
    if (noted.decision) decisions.push_back(*noted.decision);
    return noted;
  }
  void run(int64_t bytes, int times) {
    for (int i = 0; i < times; ++i) run(bytes);
  }

  Tuner tuner;
  double speeds[2];
  std::mt19937_64 random;
  double noise;
  std::map<int, std::string> taken;  // by class
  std::vector<Tuner::Decision> decisions;
};

TEST(Tuner, SamplesTakeTheCandidatesInTurn) {
  Simulation s({3, 2, 20}, 1e9, 1e9);
  s.run(kMiB, 14);
  EXPECT_EQ(s.taken[k1MiB], "AABBAA" "AABBAABB");
}

// Whatever one class's candidates do to another's all-reduces beside which they run, they do to both of its candidates.
TEST(Tuner, ClassesDoNotChangeInStep) {
  Simulation s({0, 1, 16}, 1e9, 1e9);
  for (int i = 0; i < 16; ++i)
    for (int k = 20; k < 24; ++k) s.run(int64_t(1) << k);
  for (int a = 20; a < 24; ++a) {
    EXPECT_EQ(s.taken[a][0], 'A');
    for (size_t i = 0; i < 16; i += 2) EXPECT_NE(s.taken[a][i], s.taken[a][i + 1]) << "one of each";
    for (int b = 20; b < a; ++b) {
      int same = 0;
      for (size_t i = 0; i < 16; ++i) same += s.taken[a][i] == s.taken[b][i];
      EXPECT_EQ(same, 8) << s.taken[a] << " " << s.taken[b];
    }
  }
}

TEST(Tuner, TheFirstSamplesAreThrownAway) {
  Simulation s({3, 2, 20}, 1e9, 1e9);
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(s.run(kMiB).sample) << i;
  EXPECT_FALSE(s.run(kMiB).sample);
  const auto noted = s.run(kMiB);
  ASSERT_TRUE(noted.sample);
  EXPECT_FALSE(noted.sample->second);
}

TEST(Tuner, ASampleIsBytesASecondOverItsSteps) {
  Tuner tuner({0, 2, 20});
  EXPECT_FALSE(tuner.note(kMiB, 0.001, 0).sample);
  const auto sample = tuner.note(kMiB + 4, 0.003, 0).sample;
  ASSERT_TRUE(sample);
  EXPECT_EQ(sample->size_class, k1MiB);
  EXPECT_FALSE(sample->second);
  EXPECT_DOUBLE_EQ(sample->bytes_per_s, double(2 * kMiB + 4) / 0.004);
}

TEST(Tuner, WhatDiffersClearlySettlesWithThreeSamplesOfEach) {
  for (const bool second : {false, true}) {
    Simulation s(kOneStep, 1e9, second ? 1.1e9 : 0.9e9);
    s.run(kMiB, 5);
    EXPECT_TRUE(s.decisions.empty());
    s.run(kMiB, 1);
    ASSERT_EQ(s.decisions.size(), 1u);
    EXPECT_EQ(s.decisions[0].size_class, k1MiB);
    EXPECT_EQ(s.decisions[0].second, second);
    EXPECT_NEAR(s.decisions[0].first_bytes_per_s, 1e9, 1);
    EXPECT_NEAR(s.decisions[0].second_bytes_per_s, second ? 1.1e9 : 0.9e9, 1);
    EXPECT_EQ(is_second(s.tuner, k1MiB), second);
  }
}

TEST(Tuner, OfEqualOnesTheFirstStays) {
  for (const double second : {1e9, 1.03e9}) {
    Simulation s(kOneStep, 1e9, second);
    s.run(kMiB, 19);
    EXPECT_TRUE(s.decisions.empty());
    s.run(kMiB, 1);
    ASSERT_EQ(s.decisions.size(), 1u);
    EXPECT_FALSE(s.decisions[0].second);
    EXPECT_EQ(s.tuner.choices(), 0u);
  }
}

TEST(Tuner, WithFewSamplesItSettlesByThose) {
  for (const int most : {1, 2, 3}) {
    Simulation s({0, 1, most}, 1e9, 2e9);
    s.run(kMiB, most);
    ASSERT_EQ(s.decisions.size(), 1u) << most;
    EXPECT_EQ(s.decisions[0].second, most > 1) << "one sample is of the first alone";
  }
}

TEST(Tuner, WhatHasSettledNeverChanges) {
  Simulation s(kOneStep, 1e9, 2e9);
  s.run(kMiB, 6);
  ASSERT_EQ(s.decisions.size(), 1u);
  std::swap(s.speeds[0], s.speeds[1]);
  for (int i = 0; i < 200; ++i) {
    EXPECT_FALSE(s.run(kMiB).sample);
    EXPECT_TRUE(is_second(s.tuner, k1MiB));
  }
  s.tuner.settle(k1MiB, false);
  EXPECT_TRUE(is_second(s.tuner, k1MiB));
  EXPECT_EQ(s.decisions.size(), 1u);
}

TEST(Tuner, WhatAnEarlierRunHasFoundHoldsAtOnce) {
  Simulation s(kOneStep, 2e9, 1e9);
  s.tuner.settle(k1MiB, true);
  s.tuner.settle(k1MiB + 1, false);
  EXPECT_EQ(s.tuner.choices(), AutotuneChoices(1) << k1MiB);
  s.run(kMiB, 50);
  s.run(2 * kMiB, 50);
  EXPECT_EQ(s.tuner.choices(), AutotuneChoices(1) << k1MiB);
  EXPECT_TRUE(s.decisions.empty());
}

TEST(Tuner, WhatWasAgreedOnBeforeAChangeIsInNoSample) {
  Tuner tuner({0, 2, 20});
  tuner.note(kMiB, 0.001, 0);
  ASSERT_TRUE(tuner.note(kMiB, 0.001, 0).sample);
  ASSERT_TRUE(is_second(tuner, k1MiB));
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(tuner.note(kMiB, 7, 0).sample);  // still on its way
  EXPECT_FALSE(tuner.note(kMiB, 0.001, tuner.choices()).sample);
  const auto sample = tuner.note(kMiB, 0.001, tuner.choices()).sample;
  ASSERT_TRUE(sample);
  EXPECT_TRUE(sample->second);
  EXPECT_DOUBLE_EQ(sample->bytes_per_s, double(kMiB) / 0.001);
}

TEST(Tuner, SmallOnesAndWhatTookNoTimeAreNotTuned) {
  Simulation s(kOneStep, 1e9, 2e9);
  for (const int64_t bytes : {int64_t(0), int64_t(1), kLeastTunedBytes - 1}) s.run(bytes, 50);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(s.tuner.note(kMiB, 0, 0).sample);
  EXPECT_EQ(s.tuner.choices(), 0u);
  s.run(kLeastTunedBytes, 6);
  EXPECT_EQ(s.decisions.size(), 1u);
}

TEST(Tuner, ClassesAreIndependentOfEachOther) {
  // Mixed at random, each class takes what it would have taken alone.
  std::mt19937_64 random(test::run_seed());
  Simulation mixed({1, 3, 8}, 1e9, 2e9);
  for (int i = 0; i < 2000; ++i) mixed.run(int64_t(1) << (14 + random() % 20));
  for (const auto& [size_class, taken] : mixed.taken) {
    Simulation alone({1, 3, 8}, 1e9, 2e9);
    alone.run(int64_t(1) << size_class, int(taken.size()));
    EXPECT_EQ(taken, alone.taken[size_class]);
  }
  EXPECT_EQ(mixed.taken.size(), 20u);
}

TEST(Tuner, InNoiseTheBetterOneIsKept) {
  const uint64_t seed = test::run_seed();
  int wrong = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    const bool second = i % 2;
    Simulation s({}, 1e9, second ? 1.3e9 : 0.75e9, seed + i, 0.3);
    std::uniform_int_distribution<int64_t> bytes(kMiB, 2 * kMiB - 1);
    for (int step = 0; step < 230; ++step) s.run(bytes(s.random));
    ASSERT_EQ(s.decisions.size(), 1u) << "230 all-reduces are the most that it takes";
    wrong += s.decisions[0].second != second;
  }
  EXPECT_LE(wrong, 2) << "of 200";
}

TEST(Tuner, InNoiseTheFirstStaysWhereBothAreEqual) {
  const uint64_t seed = test::run_seed();
  int seconds = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    Simulation s({}, 1e9, 1e9, seed + i, 0.3);
    s.run(kMiB, 230);
    ASSERT_EQ(s.decisions.size(), 1u);
    seconds += s.decisions[0].second;
  }
  EXPECT_LE(seconds, 40) << "of 200";
}

}  // namespace
}  // namespace lightcc

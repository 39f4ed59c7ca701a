// Engines whose tuner tries two algorithms while they run: sums stay right whatever else happens, and what has been
// found is there in the next run.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <set>
#include <sstream>

#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

const std::vector<std::vector<int>> kPlacements = {{1, 1}, {2, 2}, {1, 3}, {1, 1, 1}};
const std::vector<int64_t> kElementCounts = {4096, 6000, 40'000, 131'072, 300'000};  // floats: classes 14, 17, 19, 20

// A folder for what is kept, and in it the log of samples.
class Folder {
 public:
  Folder() : path_(testing::TempDir() + "engine_tuning_" + std::to_string(getpid())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string log() const { return path_ + "/log.csv"; }

  struct Line { std::string size_class, choice, speed, settled; };
  std::vector<Line> lines() const {
    std::ifstream file(log());
    std::string text;
    std::getline(file, text);
    EXPECT_EQ(text, "size_class_bytes,choice,bytes_per_s,settled");
    std::vector<Line> lines;
    while (std::getline(file, text)) {
      std::istringstream in(text);
      Line& line = lines.emplace_back();
      std::getline(in, line.size_class, ','), std::getline(in, line.choice, ',');
      std::getline(in, line.speed, ','), std::getline(in, line.settled);
      EXPECT_GT(std::stod(line.speed), 0) << text;
    }
    return lines;
  }
  // "16384 2d", ...
  std::set<std::string> sampled() const {
    std::set<std::string> all;
    for (const Line& line : lines()) all.insert(line.size_class + " " + line.choice);
    return all;
  }
  size_t settled() const {
    return size_t(std::ranges::count_if(lines(), [](const Line& line) { return !line.settled.empty(); }));
  }

 private:
  const std::string path_;
};

Config tuned(const Folder& folder, int steps = 1, int most = 20) {
  Config config;
  config.autotune = true;
  config.autotune_log = folder.log();
  config.autotune_warmup_samples = 1;
  config.autotune_steps_per_sample = steps;
  config.autotune_most_samples = most;
  return config;
}

// Several all-reduces in flight: values that add up without rounding.
void step(Engine& engine, int ranks, int number, int set = 0, int joined = -1, std::mt19937_64* order = nullptr,
          const std::vector<int64_t>& counts = kElementCounts) {
  std::vector<std::vector<float>> data;
  std::vector<RequestPtr> sent(counts.size());
  for (const int64_t count : counts) data.emplace_back(size_t(count), float(engine.world().rank + 1 + number));
  std::vector<size_t> places(sent.size());
  std::iota(places.begin(), places.end(), 0);
  if (order) std::shuffle(places.begin(), places.end(), *order);
  for (const size_t i : places) {
    sent[i] = request(engine, Kind::allreduce, "w" + std::to_string(i), {in_place(data[i])});
    sent[i]->set = set;
    engine.submit(sent[i], false);
  }
  float sum = float(ranks * (ranks + 1) / 2 + ranks * number);
  if (joined >= 0) sum -= float(joined + 1 + number);
  for (size_t i = sent.size(); i-- > 0;) {
    ASSERT_EQ(finish(engine, sent[i]), Code::ok) << sent[i]->text;
    ASSERT_TRUE(std::ranges::all_of(data[i], [&](float x) { return x == sum; })) << "w" << i << ", step " << number;
  }
}

void join_now(Engine& engine) {
  auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
  engine.submit(join, false);
  EXPECT_EQ(finish(engine, join), Code::ok);
}

TEST(EngineTuning, SumsAreRightWhileChoicesChange) {
  for (const auto& hosts : kPlacements) {
    Folder folder;
    Config config = tuned(folder, 1, 6);
    config.fusion = false;
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int) {
      for (int i = 0; i < 12; ++i) step(engine, ranks.size(), i);
    });
    EXPECT_EQ(folder.sampled(), (std::set<std::string>{"16384 2d", "16384 links/halving_doubling", "131072 2d",
                                                       "131072 links/halving_doubling", "524288 2d", "1048576 2d",
                                                       "524288 links/halving_doubling", "1048576 links/ring"}));
    EXPECT_EQ(folder.settled(), 4u);
  }
}

// Two batches run at a time, and mostly under unlike choices.
TEST(EngineTuning, BothAlgorithmsRunBesideEachOther) {
  const std::vector<int64_t> counts = {1'100'000, 300'000, 2'300'000, 1'200'000, 500'000, 2'200'000};
  for (const auto& hosts : {std::vector<int>{1, 1}, std::vector<int>{2, 1}}) {
    Folder folder;
    Config config = tuned(folder, 1, 1000);
    config.fusion = false;
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int) {
      for (int i = 0; i < 10; ++i) step(engine, ranks.size(), i, 0, -1, nullptr, counts);
    });
    EXPECT_GE(folder.sampled().size(), 6u);
  }
}

TEST(EngineTuning, PlansAndJoinedRanksGoOnBesideIt) {
  std::mt19937_64 random(run_seed());
  for (const auto& hosts : kPlacements) {
    Folder folder;
    Ranks ranks(hosts, tuned(folder, 1, 1000));
    const uint64_t seed = random();
    ranks.each([&](Engine& engine, int rank) {
      std::mt19937_64 same(seed), own(seed + uint64_t(rank));
      for (int i = 0; i < (kWatched ? 30 : 60) && !testing::Test::HasFailure(); ++i) {
        if (same() % 8) {
          step(engine, ranks.size(), i, 1, -1, same() % 4 ? nullptr : &own);
          continue;
        }
        const int joined = int(same() % uint64_t(ranks.size()));
        if (rank != joined) step(engine, ranks.size(), i, 1, joined);
        join_now(engine);
      }
    });
    EXPECT_GT(ranks.count(Counters::planned), 0u);
    EXPECT_GE(folder.sampled().size(), 2u);
  }
}

TEST(EngineTuning, TheNextRunStartsWithWhatThisOneHasFound) {
  Folder folder;
  Config config = tuned(folder, 1, 6);
  config.cache_dir = folder.path() + "/cache";
  config.fusion = false;
  for (const bool again : {false, true}) {
    Ranks ranks(std::vector<int>{1, 2}, config);
    ranks.each([&](Engine& engine, int) {
      for (int i = 0; i < 12; ++i) step(engine, 3, i);
    });
    EXPECT_EQ(folder.settled(), again ? 0u : 4u);
    EXPECT_EQ(folder.lines().empty(), again);
  }
  Ranks others(std::vector<int>{2, 1}, config);
  others.each([&](Engine& engine, int) {
    for (int i = 0; i < 12; ++i) step(engine, 3, i);
  });
  EXPECT_EQ(folder.settled(), 4u) << "of other hosts nothing is known";
}

TEST(EngineTuning, ALogThatCannotBeWrittenIsNoError) {
  Folder folder;
  Config config = tuned(folder);
  config.autotune_log = folder.path() + "/none/log.csv";
  Ranks ranks(std::vector<int>{1, 1}, config);
  ranks.each([&](Engine& engine, int) {
    for (int i = 0; i < 4; ++i) step(engine, 2, i);
  });
}

}  // namespace
}  // namespace lightcc

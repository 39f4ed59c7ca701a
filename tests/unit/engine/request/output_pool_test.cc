// Memory of outputs that is kept: what is used again, how much is kept and for how long, and that none outlives its
// epoch.
#include "engine/request/output_pool.h"

#include <sys/mman.h>

#include <cstring>
#include <set>

#include "labels.h"
#include "unit/ranks.h"

LABEL(on_hosts, "OutputPool.TheEngines*");
LABEL(as_placed, "OutputPool.*-OutputPool.TheEngines*");

namespace lightcc {
namespace {

using namespace test;

constexpr size_t kMiB = 1 << 20;
constexpr uint64_t kIdleNs = 10 * kSecondNs;

// Whether the system still has memory for this process there.
bool is_mapped(void* block) {
  unsigned char page;
  return mincore(block, 1, &page) == 0;
}

struct Pool : testing::Test {
  uint64_t now = 0;
  OutputPool pool{16 * kMiB, kIdleNs, [this] { return now; }, false};
};

TEST_F(Pool, ABlockIsUsedAgainOnceItIsBack) {
  void* first = pool.allocate(4 * kMiB);
  void* second = pool.allocate(4 * kMiB);
  EXPECT_NE(first, second);
  std::memset(first, 1, 4 * kMiB);
  pool.give_back(first);
  EXPECT_EQ(pool.kept_bytes(), 4 * kMiB);
  EXPECT_NE(pool.allocate(8 * kMiB), first);
  EXPECT_EQ(pool.allocate(4 * kMiB), first);
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

TEST_F(Pool, SizesThatDifferLittleShareBlocks) {
  std::set<void*> blocks;
  for (size_t bytes = 4 * kMiB + 1; bytes < 8 * kMiB; bytes += 10'007) {
    void* block = pool.allocate(bytes);
    static_cast<char*>(block)[bytes - 1] = 1;
    blocks.insert(block);
    pool.give_back(block);
  }
  EXPECT_LE(pool.kept_bytes(), 16 * kMiB);
  EXPECT_LE(blocks.size(), 8u);
}

TEST_F(Pool, WhatIsKeptLongestGoesFirstWhenThereIsTooMuch) {
  void* blocks[] = {pool.allocate(8 * kMiB), pool.allocate(8 * kMiB), pool.allocate(4 * kMiB)};
  for (void* block : blocks) pool.give_back(block);
  EXPECT_EQ(pool.kept_bytes(), 12 * kMiB);
  EXPECT_FALSE(is_mapped(blocks[0]));
  EXPECT_EQ(pool.allocate(8 * kMiB), blocks[1]);
}

TEST_F(Pool, MoreThanMayBeKeptGoesBackAtOnce) {
  void* block = pool.allocate(32 * kMiB);
  pool.give_back(block);
  EXPECT_EQ(pool.kept_bytes(), 0u);
  EXPECT_FALSE(is_mapped(block));
}

TEST_F(Pool, WhatIsIdleGoesBack) {
  void *first = pool.allocate(2 * kMiB), *second = pool.allocate(3 * kMiB);
  pool.give_back(first);
  now = 4 * kSecondNs;
  pool.give_back(second);
  now = kIdleNs - 1;
  pool.trim();
  EXPECT_EQ(pool.kept_bytes(), 5 * kMiB);
  now = kIdleNs;
  pool.trim();
  EXPECT_EQ(pool.kept_bytes(), 3 * kMiB);
  EXPECT_FALSE(is_mapped(first));
  now = kIdleNs + 4 * kSecondNs;
  pool.trim();
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

TEST_F(Pool, AfterItsEpochNothingIsKeptOrUsedAgain) {
  void *kept = pool.allocate(2 * kMiB), *out = pool.allocate(2 * kMiB);
  pool.give_back(kept);
  pool.close();
  EXPECT_FALSE(is_mapped(kept));
  ASSERT_TRUE(is_mapped(out)) << "an output that the program still has";
  static_cast<char*>(out)[2 * kMiB - 1] = 1;
  pool.give_back(out);
  EXPECT_EQ(pool.kept_bytes(), 0u);
  EXPECT_FALSE(is_mapped(out));
}

TEST(OutputPool, GivesBackByItselfWhenIdle) {
  OutputPool pool(16 * kMiB, 1'000'000);
  for (int again = 0; again < 3; ++again) {
    pool.give_back(pool.allocate(2 * kMiB));
    for (uint64_t end = now_ns() + kPatienceNs; pool.kept_bytes() > 0 && now_ns() < end;) std::this_thread::yield();
    EXPECT_EQ(pool.kept_bytes(), 0u);
  }
}

TEST(OutputPool, ClosesWhileItWaits) {
  OutputPool pool(16 * kMiB, 3600 * kSecondNs);
  pool.give_back(pool.allocate(2 * kMiB));
  pool.close();
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

TEST(OutputPool, ServesLargeOutputsUnlessTurnedOff) {
  EXPECT_TRUE(OutputPool(kMiB, kIdleNs).serves(kMiB));
  EXPECT_FALSE(OutputPool(kMiB, kIdleNs).serves(kMiB - 1));
  EXPECT_FALSE(OutputPool(0, kIdleNs).serves(kMiB));
}

RequestPtr gather(Engine& engine, const std::vector<float>& rows) {
  return request(engine, Kind::allgather, "", {input_of(rows, {int64_t(rows.size())})});
}

TEST(OutputPool, TheEnginesOutputsLieInIt) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    const std::vector<float> rows(kMiB, float(rank));
    void* first = nullptr;
    for (int again = 0; again < 3; ++again) {
      auto one = gather(engine, rows);
      done(engine, one);
      auto& result = one->results[0];
      EXPECT_EQ(static_cast<float*>(result.data)[2 * kMiB - 1], 1);
      if (!first) first = result.data;
      EXPECT_EQ(result.data, first);
      EXPECT_EQ(engine.outputs()->kept_bytes(), 0u);
      result.own.reset();
      EXPECT_EQ(engine.outputs()->kept_bytes(), 8 * kMiB);
    }
  });
}

// Whatever a failed epoch has left half written is not handed out again.
TEST(OutputPool, AFailedEpochKeepsNoOutputs) {
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int rank) {
    const std::vector<float> rows(kMiB, float(rank));
    auto one = gather(engine, rows), other = gather(engine, rows);
    done(engine, one);
    done(engine, other);
    one->results[0].own.reset();
    EXPECT_EQ(engine.outputs()->kept_bytes(), 8 * kMiB);
    done(engine, request(engine, Kind::barrier, "", {}));
    if (rank == 0) engine.abort("the test ends it");
    EXPECT_EQ(outcome(engine, request(engine, Kind::barrier, "", {})), Code::shut_down);
    EXPECT_EQ(engine.outputs()->kept_bytes(), 0u);
    EXPECT_EQ(static_cast<float*>(other->results[0].data)[2 * kMiB - 1], 1) << "the program still has it";
    other->results[0].own.reset();
    EXPECT_EQ(engine.outputs()->kept_bytes(), 0u);
  });
}

}  // namespace
}  // namespace lightcc

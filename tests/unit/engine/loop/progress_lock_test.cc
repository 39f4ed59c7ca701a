#include "engine/loop/progress_lock.h"

#include <functional>
#include <mutex>
#include <utility>

#include "engine/lifecycle/lifecycle.h"
#include "labels.h"
#include "unit/group_parts.h"
#include "unit/ranks.h"
#include "unit/thread_peers.h"

LABEL(as_placed);

namespace lightcc {
namespace {

TEST(ProgressLock, HasOneHolder) {
  ProgressLock lock;
  ASSERT_TRUE(lock.try_lock());
  EXPECT_FALSE(lock.try_lock()) << "by its holder";
  std::thread([&] { EXPECT_FALSE(lock.try_lock()) << "by another thread"; }).join();
  lock.assert_held();
  lock.unlock();
  std::thread([&] {
    EXPECT_TRUE(lock.try_lock());
    lock.assert_held();
    lock.unlock();
  }).join();
  EXPECT_TRUE(std::unique_lock(lock, std::try_to_lock).owns_lock());
  EXPECT_TRUE(lock.try_lock()) << "a unique_lock gives it back";
}

class ProgressLockDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!kProgressLockIsAsserted) GTEST_SKIP() << "release builds assert nothing";
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
  }
  const char* text_ = "is called by a thread that does not hold the progress lock";
};

TEST_F(ProgressLockDeathTest, WhoDoesNotHoldItMayNotActAsIfItDid) {
  ProgressLock lock;
  EXPECT_DEATH(lock.assert_held(), text_);
  EXPECT_DEATH(lock.unlock(), text_);
  ASSERT_TRUE(lock.try_lock());
  EXPECT_DEATH(std::thread([&] { lock.assert_held(); }).join(), text_) << "another thread holds it";
  EXPECT_DEATH(std::thread([&] { lock.unlock(); }).join(), text_);
  lock.unlock();
  EXPECT_DEATH(lock.assert_held(), text_) << "nobody holds it any more";
}

TEST_F(ProgressLockDeathTest, AnEnginesStateIsTouchedUnderItOnly) {
  const auto resume_unpaused = [] { test::Ranks(1)[0].resume(); };
  EXPECT_DEATH(resume_unpaused(), std::string("resume\\(\\) ") + text_);

  test::GroupParts parts(std::move(test::thread_peers({1})[0]));
  Inbox inbox(0);
  ProcessSets sets(parts.shared, inbox);
  Lifecycle lifecycle(parts.shared, sets, inbox);
  FastPathFacts facts;
  const std::pair<const char*, std::function<void()>> rows[] = {
      {"apply", [&] { lifecycle.end(Code::internal, "by a thread that does not hold it"); }},
      {"apply", [&] { lifecycle.apply(epoch_event::PeerDied{"rank 1"}); }},
      {"step", [&] { sets.world().step(); }},
      {"negotiator", [&] { sets.world().submit(nullptr); }},
      {"negotiator", [&] { sets.world().control_plane().flush(); }},
      {"negotiator", [&] { sets.plans_text(); }},
      {"note_facts", [&] { sets.world().note_facts(&facts); }},
      {"receive_slots", [&] { sets.world().receive_slots(); }},
      {"use_rules", [&] { sets.world().use_rules({}, {}); }},
      {"rank_left", [&] { sets.world().rank_left(0, "it is done"); }},
      {"fail_all", [&] { sets.fail_all(Code::internal, "by a thread that does not hold it"); }},
      {"end_nccl", [&] { sets.end_nccl(0); }},
      {"announced", [&] { sets.world().announced(Kind::allreduce, true, ""); }},
      {"inspect", [&] { sets.world().inspect(0); }},
      {"report_blocked", [&] { sets.world().report_blocked(""); }},
      {"remind", [&] { sets.world().remind(); }},
  };
  for (const auto& [function, call] : rows) EXPECT_DEATH(call(), std::string(function) + "\\(\\) " + text_);
}

}  // namespace
}  // namespace lightcc

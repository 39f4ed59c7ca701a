#include "engine/loop/progress_lock.h"

#include <mutex>

#include "labels.h"
#include "unit/ranks.h"

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
}

}  // namespace
}  // namespace lightcc

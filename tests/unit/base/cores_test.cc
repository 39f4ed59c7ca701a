#include "base/cores.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace lightcc {
namespace {

namespace fs = std::filesystem;

// A made-up /proc and /sys in a folder of its own.
class Cores : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("lightcc_cores_" + std::to_string(getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  int quota() { return quota_cores(root_.string()); }

  fs::path root_;
};

TEST_F(Cores, NothingThereIsNoQuota) {
  EXPECT_EQ(quota(), 0);
  EXPECT_EQ(usable_cores(root_.string()), bound_cores());
}

TEST_F(Cores, LimitsOfVersion2AreRoundedUp) {
  put("proc/self/cgroup", "0::/");
  put("sys/fs/cgroup/cpu.max", "150000 100000");
  EXPECT_EQ(quota(), 2);
  put("sys/fs/cgroup/cpu.max", "200000 100000");
  EXPECT_EQ(quota(), 2);
  put("sys/fs/cgroup/cpu.max", "1000 100000");
  EXPECT_EQ(quota(), 1);
  EXPECT_EQ(usable_cores(root_.string()), 1);
}

TEST_F(Cores, Version2WithoutALimitHasAllCores) {
  put("proc/self/cgroup", "0::/");
  put("sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(quota(), 0);
}

TEST_F(Cores, TheTightestEnclosingGroupCounts) {
  put("proc/self/cgroup", "0::/pod/box");
  put("sys/fs/cgroup/pod/box/cpu.max", "800000 100000");
  put("sys/fs/cgroup/pod/cpu.max", "300000 100000");
  EXPECT_EQ(quota(), 3);
  put("sys/fs/cgroup/pod/box/cpu.max", "50000 100000");
  EXPECT_EQ(quota(), 1);
}

TEST_F(Cores, APathOfTheHostEndsAtTheContainersOwnGroup) {
  put("proc/self/cgroup", "0::/system.slice/docker-1234.scope");
  put("sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(quota(), 4);
}

TEST_F(Cores, APathOutsideTheMountIsNotFollowed) {
  put("proc/self/cgroup", "0::/../../other");
  put("sys/fs/cgroup/cpu.max", "500000 100000");
  put("sys/other/cpu.max", "100000 100000");
  EXPECT_EQ(quota(), 5);
}

TEST_F(Cores, LimitsOfCgroupsVersion1AreRead) {
  put("proc/self/cgroup", "11:memory:/a\n4:cpu,cpuacct:/a\n3:cpuset:/a");
  put("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000");
  put("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000");
  put("sys/fs/cgroup/cpuset/a/cpu.cfs_quota_us", "1000");  // not the controller that limits time
  put("sys/fs/cgroup/cpuset/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), 3);
  put("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(quota(), 0);
}

TEST_F(Cores, UnreadableLimitsCountAsNone) {
  put("proc/self/cgroup", "\n::\n0\n0::/");
  put("sys/fs/cgroup/cpu.max", "lots of it");
  EXPECT_EQ(quota(), 0);
  put("sys/fs/cgroup/cpu.max", "100000 0");
  EXPECT_EQ(quota(), 0);
}

TEST_F(Cores, ABoundThreadHasOneCore) {
  std::thread([this] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(bound_cores(), 1);
    EXPECT_EQ(usable_cores(root_.string()), 1);
  }).join();
}

TEST(CoreBitmap, HoldsThousandsOfCoresInAFewBytes) {
  EXPECT_EQ(count_of(bitmap_of({})), 0);
  EXPECT_EQ(bitmap_of({0, 63, 64}), (CoreBitmap{uint64_t(1) << 63 | 1, 1}));
  std::vector<int32_t> even, odd;
  for (int32_t core = 0; core < 4096; ++core) (core % 2 ? odd : even).push_back(core);
  EXPECT_LE(bitmap_of(odd).size() * sizeof(uint64_t), 512u);
  EXPECT_EQ(count_of(together(bitmap_of(even), bitmap_of(odd))), 4096);
  EXPECT_EQ(count_of(together(bitmap_of({1, 2}), bitmap_of({2, 200}))), 3);
  EXPECT_EQ(count_of(together(bitmap_of({2, 200}), bitmap_of({1, 2}))), 3);
}

TEST_F(Cores, ThisMachineHasAtLeastOne) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), bound_cores());
}

}  // namespace
}  // namespace lightcc

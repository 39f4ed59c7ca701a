#include "base/cache_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

class CacheFiles : public testing::Test {
 protected:
  CacheFiles() : directory_(testing::TempDir() + "cache_files_" + std::to_string(getpid())) {
    std::filesystem::remove_all(directory_);
  }
  ~CacheFiles() override { std::filesystem::remove_all(directory_); }
  const std::string directory_;
};

TEST_F(CacheFiles, AreFoundAgainBySubject) {
  const CacheFile file = CacheFile::of(directory_ + "/deep/er", "host a, host b");
  EXPECT_EQ(file.get("network"), std::nullopt);
  file.put("network", "1 2 3");
  file.put("tuned", "a=b");
  file.put("network", "4 5 6");
  const CacheFile again = CacheFile::of(directory_ + "/deep/er", "host a, host b");
  EXPECT_EQ(again.get("network"), "4 5 6");
  EXPECT_EQ(again.get("tuned"), "a=b");
  EXPECT_EQ(CacheFile::of(directory_ + "/deep/er", "host a, host c").get("network"), std::nullopt);
  size_t files = 0;
  for ([[maybe_unused]] const auto& one : std::filesystem::directory_iterator(directory_ + "/deep/er")) ++files;
  EXPECT_EQ(files, 1u) << "no draft is left";
}

TEST_F(CacheFiles, KeepNothingWhereTheyCannot) {
  for (const CacheFile& file : {CacheFile(), CacheFile::of("", "x"), CacheFile::of("/proc/no/such", "x")}) {
    file.put("network", "1");
    EXPECT_EQ(file.get("network"), std::nullopt);
  }
}

TEST_F(CacheFiles, OfAnybodysTextAreReadAsFarAsTheyCanBe) {
  std::filesystem::create_directories(directory_);
  std::ofstream(directory_ + "/one") << "=\nno equals sign\nnetwork=5\n\xff\xfe=1\nlast=";
  const CacheFile file(directory_ + "/one");
  EXPECT_EQ(file.get("network"), "5");
  EXPECT_EQ(file.get("last"), "");
  EXPECT_EQ(file.get("no equals sign"), std::nullopt);
}

}  // namespace
}  // namespace lightcc

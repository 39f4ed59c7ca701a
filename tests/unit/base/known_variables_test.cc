// Which names of variables are known, and what is said of the others.
#include "base/known_variables.h"

#include <gtest/gtest.h>

#include "base/config.h"

namespace lightcc {
namespace {

std::string said_of(std::vector<const char*> set, bool harp = false) {
  set.push_back(nullptr);
  return unknown_variables(set.data(), harp);
}

std::string meant(const std::string& name, const std::string& other) {
  return name + " is set, but lightcc knows no variable of that name: did you mean " + other + "?";
}

TEST(KnownVariables, OneThatIsMisspeltIsToldWithTheNearestName) {
  for (auto [name, other] : {std::pair{"HOROVOD_CYCLETIME", "HOROVOD_CYCLE_TIME"},
                             {"HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"},
                             {"LIGHTCC_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"},
                             {"HOROVOD_IFACE", "LIGHTCC_IFACE"},
                             {"LIGHT_TOPK_RATO", "LIGHT_TOPK_RATIO"},
                             {"LIGHTCC_STORE_ADDRESS", "LIGHTCC_STORE_ADDR"}})
    EXPECT_EQ(said_of({(std::string(name) + "=1").c_str()}), meant(name, other));
}

TEST(KnownVariables, OneThatIsNearToNoneIsToldTooIfItsPrefixIsOurs) {
  const std::string none =
      " is set, but lightcc knows no variable of that name: docs/knobs.md lists those that it reads";
  EXPECT_EQ(said_of({"LIGHTCC_TYPO=1", "HOROVOD_EXPERIMENT_NAME=a=b", "PATH=/bin"}),
            "HOROVOD_EXPERIMENT_NAME" + none + "\nLIGHTCC_TYPO" + none) << "in an order of their own";
  EXPECT_EQ(said_of({"LIGHT_THEME=dark", "HARP_SINGER=1", "LIGHTNING_X=1", "LIGHTCC=1"}, true), "") << "of others";
}

TEST(KnownVariables, WhatIsKnownEmptyOrATestsIsSilent) {
  std::vector<std::string> set;
  for (const std::string& name : known_variables()) set.push_back(name + "=1");
  set.insert(set.end(), {"LIGHTCC_TYPO=", "LIGHTCC_TEST_ANYTHING=1", "LIGHTCC_NOTHING"});
  std::vector<const char*> entries;
  for (const std::string& entry : set) entries.push_back(entry.c_str());
  EXPECT_EQ(said_of(entries, true), "");
  EXPECT_GT(known_variables().size(), 100u);
}

TEST(KnownVariables, HarpsAreLookedAtWhereHarpIsInUse) {
  EXPECT_EQ(said_of({"HARP_IFNAM=eth0"}), "");
  EXPECT_EQ(said_of({"HARP_IFNAM=eth0"}, true), meant("HARP_IFNAM", "HARP_IFNAME"));
}

}  // namespace
}  // namespace lightcc

#include "harp_plugin/port/interfaces.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

TEST(Interfaces, PatternsAreNcclSocketIfname) {
  EXPECT_TRUE(matches("eth", "eth0"));
  EXPECT_TRUE(matches("ib,eth", "eth1"));
  EXPECT_FALSE(matches("ib,en", "eth1"));
  EXPECT_FALSE(matches("", "eth0"));
  EXPECT_FALSE(matches("=eth", "eth0"));
  EXPECT_TRUE(matches("=eth1,eth0", "eth0"));
  EXPECT_FALSE(matches("^docker,lo", "lo"));
  EXPECT_TRUE(matches("^docker,lo", "eth0"));
  EXPECT_TRUE(matches("^=lo", "lo0"));
  EXPECT_FALSE(matches("^=lo", "lo"));
}

TEST(Interfaces, LoopbackIsFoundByNameAndByAnyOfItsAddresses) {
  EXPECT_EQ(choose_interfaces("=lo").front().address, "127.0.0.1");
  EXPECT_EQ(choose_interfaces("127.0.0.1").front().name, "lo");
  EXPECT_EQ(choose_interfaces("127.0.0.9").front().address, "127.0.0.9");
  EXPECT_GE(choose_interfaces("lo").front().mtu, 1500u);
}

TEST(Interfaces, WhatIsNotThereIsNamedWithWhatIs) {
  for (const char* wanted : {"nowhere", "192.0.2.1"}) {
    try {
      choose_interfaces(wanted);
      FAIL() << wanted;
    } catch (const lightcc::Error& error) {
      EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("127.0.0.1"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace harp

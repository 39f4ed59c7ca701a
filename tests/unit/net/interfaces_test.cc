// Which network interfaces of a host are preferred, and which of them a user allows.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "labels.h"
#include "net/address.h"

LABEL(alone);

namespace lightcc {
namespace {

std::string names_of(const std::vector<Interface>& interfaces) {
  std::string text;
  for (auto& [name, address] : interfaces) text += (text.empty() ? "" : " ") + name;
  return text;
}
Interface interface(const char* name, const char* address) { return {name, Address::parse(address)}; }

TEST(Interfaces, PhysicalOnesFirstAndLoopbackLast) {
  const auto sorted =
      by_preference({interface("lo", "127.0.0.1"), interface("docker0", "172.17.0.1"), interface("eth1", "10.0.1.1"),
                     interface("br-12ab", "172.18.0.1"), interface("lo", "10.9.9.9"), interface("ib0", "10.0.2.1"),
                     interface("virbr0", "192.168.122.1"), interface("bridge0", "10.0.3.1"),
                     interface("eth0", "10.0.0.1"), interface("veth12", "172.19.0.1")});
  EXPECT_EQ(names_of(sorted), "eth1 ib0 bridge0 eth0 docker0 br-12ab virbr0 veth12 lo lo");
  for (const char* name : {"docker0", "podman1", "virbr0", "veth0a", "cni0", "br-0", "flannel.1", "cali12", "lxcbr0"})
    EXPECT_EQ(names_of(by_preference({interface(name, "10.0.0.1"), interface("wlan0", "10.0.0.2")})),
              std::string("wlan0 ") + name);
}

TEST(Interfaces, ThoseOfThisHostAreUsable) {
  const auto found = interfaces();
  ASSERT_FALSE(found.empty());  // at least loopback
  EXPECT_TRUE(std::any_of(found.begin(), found.end(), [](auto& one) { return one.address.is_loopback(); }));
  EXPECT_EQ(names_of(found), names_of(by_preference(found)));
  for (auto& [name, address] : found) {
    EXPECT_NO_THROW(listen_on(address, {})) << name << " " << address.text();
    EXPECT_NE(address.text().substr(0, 5), "fe80:");
    EXPECT_NE(address.text().substr(0, 8), "169.254.");
  }
}

const std::vector<Interface> kInterfaces{interface("eth0", "10.0.0.1"),      interface("eth1", "10.0.1.1"),
                                         interface("eth10", "10.0.10.1"),    interface("ib0", "10.0.2.1"),
                                         interface("docker0", "172.17.0.1"), interface("lo", "127.0.0.1")};

TEST(Interfaces, AListAllowsByPrefixExactlyOrAllBut) {
  const struct {
    const char *list, *names;
  } rows[] = {{"", "eth0 eth1 eth10 ib0 docker0 lo"},
              {"eth", "eth0 eth1 eth10"},
              {"eth1", "eth1 eth10"},
              {"=eth1", "eth1"},
              {"=ib0,eth1", "ib0 eth1"},
              {"ib,eth1", "ib0 eth1 eth10"},
              {"eth1,eth", "eth1 eth10 eth0"},
              {" ib , eth0,", "ib0 eth0"},
              {"nosuch,lo", "lo"},
              {"^docker,lo", "eth0 eth1 eth10 ib0"},
              {"^eth1", "eth0 ib0 docker0 lo"},
              {"^=eth1", "eth0 eth10 ib0 docker0 lo"},
              {"^nosuch", "eth0 eth1 eth10 ib0 docker0 lo"}};
  for (auto& [list, names] : rows) EXPECT_EQ(names_of(chosen(kInterfaces, list)), names) << list;
}

// One address each, though they have several, and all of one family.
TEST(Interfaces, LinksGoOverAllThatAListNames) {
  const std::vector<Interface> both{
      interface("eth0", "10.0.0.1"),     interface("eth0", "10.0.0.9"), interface("ib0", "10.0.2.1"),
      interface("lo", "127.0.0.1"),      interface("eth0", "fd77::1"),  interface("eth1", "fd78::1"),
      interface("ib0", "fd79::1"),       interface("bond0", "10.1.0.1"), interface("bond0.100", "10.2.0.1"),
      interface("ens10", "10.3.10.1"),   interface("ens2", "10.3.2.1")};
  const struct {
    const char *list, *addresses;
  } rows[] = {{"eth,ib", "10.0.0.1 10.0.2.1"}, {"=ib0,eth0", "10.0.2.1 10.0.0.1"}, {"eth1,ib", "fd78::1 fd79::1"},
              {"=ib0", "10.0.2.1"},            {"^lo", "10.0.0.1"},                {"^=eth0", "10.0.2.1"},
              {"", "10.0.0.1"},
              {"bond0", "10.1.0.1"},
              {"bond", "10.1.0.1 10.2.0.1"},
              {"ens", "10.3.2.1 10.3.10.1"},
              {"eth0,lo", "10.0.0.1"},
              {"lo,eth0", "127.0.0.1"}};
  for (auto& [list, addresses] : rows) {
    std::string text;
    for (const Address& one : link_addresses(chosen(both, list), list)) text += (text.empty() ? "" : " ") + one.text();
    EXPECT_EQ(text, addresses) << list;
  }
}

TEST(Interfaces, AListThatAllowsNoneNamesThoseThereAre) {
  for (const char* list : {"wlan0", "=eth", "=", ",", "^eth,ib,docker,lo"}) try {
      ADD_FAILURE() << list << " allows " << names_of(chosen(kInterfaces, list));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_EQ(error.what(), "'" + std::string(list) +
                                  "' allows no network interface of this host; there are eth0 10.0.0.1, eth1 10.0.1.1, "
                                  "eth10 10.0.10.1, ib0 10.0.2.1, docker0 172.17.0.1, lo 127.0.0.1");
    }
  EXPECT_THROW(chosen({}, "eth0"), Error);
}

}  // namespace
}  // namespace lightcc

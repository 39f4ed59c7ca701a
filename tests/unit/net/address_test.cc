// Addresses to text and back, and listening.
#include "net/address.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(Address, TextThereAndBack) {
  for (const char* text : {"10.0.0.1", "10.0.0.1:4711", "0.0.0.0", "255.255.255.255:65535", "::", "::1", "[::1]:1",
                           "2001:db8::5", "[2001:db8::5]:80", "fe80::1%lo", "[fe80::1%lo]:4711"}) {
    const Address address = Address::parse(text);
    EXPECT_TRUE(address) << text;
    EXPECT_EQ(address.text(), text);
    EXPECT_EQ(Address::parse(address.text()).text(), text);
  }
  EXPECT_EQ(Address::parse("[::1]").text(), "::1");
  EXPECT_EQ(Address::parse("2001:0db8:0:0::0005").text(), "2001:db8::5");
  EXPECT_EQ(Address::parse("fe80::1%1").text(), "fe80::1%lo");  // loopback is the first interface everywhere
  EXPECT_EQ(Address::parse("fe80::1%987654").text(), "fe80::1%987654");
}

TEST(Address, ThePartsOfAnAddress) {
  const Address v4 = Address::parse("10.0.0.1:4711"), v6 = Address::parse("[2001:db8::5]:80");
  EXPECT_EQ(v4.family(), AF_INET);
  EXPECT_EQ(v4.port(), 4711);
  EXPECT_EQ(v4.length(), sizeof(sockaddr_in));
  EXPECT_EQ(v6.family(), AF_INET6);
  EXPECT_EQ(v6.port(), 80);
  EXPECT_EQ(v6.length(), sizeof(sockaddr_in6));
  EXPECT_EQ(Address::parse("10.0.0.1").port(), 0);
  EXPECT_EQ(v4.with_port(0).text(), "10.0.0.1");
  EXPECT_EQ(v6.with_port(65535).text(), "[2001:db8::5]:65535");
  EXPECT_EQ(reinterpret_cast<const sockaddr_in*>(v4.get())->sin_addr.s_addr, htonl(0x0a000001));
}

TEST(Address, NoneIsNeitherAnAddressNorItsText) {
  const Address none;
  EXPECT_FALSE(none);
  EXPECT_EQ(none.text(), "");
  EXPECT_FALSE(none.is_loopback());
  EXPECT_FALSE(none.same_host(Address::parse("0.0.0.0")));
}

TEST(Address, OtherTextIsRefused) {
  using std::string_view_literals::operator""sv;
  for (std::string_view text : {""sv,
                                "10.0.0"sv,
                                "10.0.0.256"sv,
                                "10.0.0.1:"sv,
                                "10.0.0.1:x"sv,
                                "10.0.0.1:65536"sv,
                                "10.0.0.1:-1"sv,
                                "10.0.0.1: 80"sv,
                                " 10.0.0.1"sv,
                                "10.0.0.1 "sv,
                                "10.0.0.1\0"sv,
                                "::1\0x"sv,
                                ":80"sv,
                                ":::1"sv,
                                "[::1"sv,
                                "::1]"sv,
                                "[::1]:"sv,
                                "[::1]80"sv,
                                "[::1]:65536"sv,
                                "[10.0.0.1]:80"sv,
                                "[]"sv,
                                "localhost"sv,
                                "localhost:80"sv,
                                "fe80::1%"sv,
                                "fe80::1%no_such_if"sv,
                                "fe80::1%0"sv,
                                "10.0.0.1%lo"sv,
                                "10.0.0.1/24"sv})
    try {
      ADD_FAILURE() << text << " is read as " << Address::parse(text).text();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_TRUE(std::string(error.what()).starts_with("'" + shown(text) + "' is no address")) << error.what();
    }
}

TEST(Address, AWrappedIpv4AddressIsAnIpv4Address) {
  const Address wrapped = Address::parse("[::ffff:10.0.0.1]:80");
  EXPECT_EQ(wrapped.family(), AF_INET);
  EXPECT_EQ(wrapped.text(), "10.0.0.1:80");
  EXPECT_TRUE(wrapped.same_host(Address::parse("10.0.0.1")));
}

TEST(Address, OtherFamiliesAndShortOnesAreRefused) {
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  EXPECT_THROW(Address(reinterpret_cast<sockaddr*>(&path), sizeof path), Error);
  const Address v6 = Address::parse("::1");
  EXPECT_THROW(Address(v6.get(), sizeof(sockaddr_in)), Error);
}

TEST(Address, TheSameHostWhateverThePort) {
  const auto same = [](const char* a, const char* b) { return Address::parse(a).same_host(Address::parse(b)); };
  EXPECT_TRUE(same("10.0.0.1:1", "10.0.0.1:2"));
  EXPECT_TRUE(same("[::1]:1", "::1"));
  EXPECT_FALSE(same("10.0.0.1", "10.0.0.2"));
  EXPECT_FALSE(same("::1", "::2"));
  EXPECT_FALSE(same("fe80::1%lo", "fe80::1%987654"));
  EXPECT_FALSE(same("0.0.0.0", "::"));
}

TEST(Address, LoopbackIsTold) {
  for (const char* text : {"127.0.0.1", "127.255.0.9:80", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(Address::parse(text).is_loopback()) << text;
  for (const char* text : {"128.0.0.1", "126.0.0.1", "0.0.0.0", "::", "::2", "1::"})
    EXPECT_FALSE(Address::parse(text).is_loopback()) << text;
}

TEST(Address, NamesAreResolvedAndNumbersTaken) {
  const auto numeric = Address::resolve("10.0.0.1", 80);
  ASSERT_EQ(numeric.size(), 1u);
  EXPECT_EQ(numeric[0].text(), "10.0.0.1:80");
  EXPECT_EQ(Address::resolve("::1", 80).at(0).text(), "[::1]:80");
  const auto named = Address::resolve("localhost", 4711);
  ASSERT_FALSE(named.empty());
  for (const Address& address : named) {
    EXPECT_TRUE(address.is_loopback()) << address.text();
    EXPECT_EQ(address.port(), 4711);
  }
  EXPECT_TRUE(Address::resolve("no host has spaces", 80).empty());
}

TEST(Ports, ARangeOneOrAny) {
  const auto text = [](const char* ports) {
    const Ports read = parse_ports(ports);
    return std::to_string(read.first) + " to " + std::to_string(read.last);
  };
  EXPECT_EQ(text("20000-20100"), "20000 to 20100");
  EXPECT_EQ(text("20000"), "20000 to 20000");
  EXPECT_EQ(text("1-65535"), "1 to 65535");
  EXPECT_EQ(text("7-7"), "7 to 7");
  EXPECT_EQ(text("0"), "0 to 0");
  for (const char* ports : {"", "-", "5-", "-5", "5-4", "0-5", "65536", "1-65536", "a", "5 - 6", "5-6-7", "+5"})
    EXPECT_THROW(parse_ports(ports), Error) << ports;
}

int port_of(const Fd& listener) { return local_address(listener.get()).port(); }

TEST(Listen, TheFirstFreePortOfARangeIsTaken) {
  const Address loopback = Address::parse("127.0.0.1");
  // Three neighbouring ports of which the first is ours; others on this machine may hold some at any time.
  for (int attempt = 0; attempt < 50; ++attempt) {
    const Fd first = listen_on(loopback, {});
    const int port = port_of(first);
    if (port > 65533) continue;
    Fd second, third;
    try {
      second = listen_on(loopback, {port + 1, port + 1});
      third = listen_on(loopback, {port + 2, port + 2});
    } catch (const Error&) {
      continue;
    }
    try {
      listen_on(loopback, {port, port + 2});
      FAIL() << "a port that is taken was taken again";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal);
      EXPECT_EQ(error.what(), "cannot listen on 127.0.0.1: no port of " + std::to_string(port) + "-" +
                                  std::to_string(port + 2) + " is free");
    }
    second = Fd();
    EXPECT_EQ(port_of(listen_on(loopback, {port, port + 2})), port + 1);
    return;
  }
  FAIL() << "no three neighbouring ports are free";
}

TEST(Listen, AnAddressOfAnotherHostIsAnErrorAtOnce) {
  EXPECT_THROW(
      try { listen_on(Address::parse("192.0.2.77"), {20000, 20100}); } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("listening on 192.0.2.77:20000: "), std::string::npos) << error.what();
        throw;
      },
      Error);
}

// Connects to the listener at that address and gives what the accepted side sees of both ends.
std::pair<Address, Address> ends(const Fd& listener, const Address& to) {
  const Fd client(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(client.get(), to.get(), to.length()), 0) << to.text() << ": " << std::strerror(errno);
  pollfd wait{listener.get(), POLLIN, 0};
  EXPECT_EQ(poll(&wait, 1, 5000), 1);
  const Fd server(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_EQ(peer_address(server.get()).text(), local_address(client.get()).text());
  return {local_address(server.get()), peer_address(server.get())};
}

TEST(Listen, EveryoneReachesTheAnyAddress) {
  const Fd listener = listen_on(any_address(), {});
  const auto [own, peer] = ends(listener, Address::parse("127.0.0.1").with_port(port_of(listener)));
  EXPECT_EQ(own.text(), "127.0.0.1:" + std::to_string(port_of(listener)));
  EXPECT_EQ(peer.family(), AF_INET);  // not wrapped, though the listener may speak IPv6
  if (any_address().family() != AF_INET6) GTEST_SKIP() << "no IPv6 here";
  const auto [own_v6, peer_v6] = ends(listener, Address::parse("::1").with_port(port_of(listener)));
  EXPECT_EQ(own_v6.text(), "[::1]:" + std::to_string(port_of(listener)));
  EXPECT_TRUE(peer_v6.is_loopback());
}

TEST(Listen, AListenerDoesNotBlockAndIsNotInherited) {
  const Fd listener = listen_on(Address::parse("127.0.0.1"), {});
  EXPECT_LT(accept(listener.get(), nullptr, nullptr), 0);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_TRUE(fcntl(listener.get(), F_GETFD) & FD_CLOEXEC);
}

TEST(Listen, ASocketWithoutAnAddressSaysSo) {
  EXPECT_THROW(local_address(-1), Error);
  const Fd listener = listen_on(Address::parse("127.0.0.1"), {});
  EXPECT_THROW(peer_address(listener.get()), Error);
}

}  // namespace
}  // namespace lightcc

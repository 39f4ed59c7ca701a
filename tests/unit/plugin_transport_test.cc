// Links over network plugins of NCCL's, of one process: HARP's, and a double that is slow, out of order and strict.
#include "net/plugin/plugin_transport.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "base/clock.h"
#include "helpers.h"
#include "link_contract.h"
#include "loopback.h"
#include "net/tcp/tcp_transport.h"
#include "stepped_link.h"

namespace lightcc {
namespace {

constexpr uint64_t kMostNs = 20'000'000'000;

// n ranks, each on a host of its own, with TCP below.
struct PluginCluster {
  explicit PluginCluster(int n, const std::string& plugin = NET_PLUGIN_DOUBLE, int version = 0,
                         PluginTimeouts timeouts = {}) {
    std::vector<Fd> listeners;
    std::vector<TcpPeer> peers;
    std::vector<std::string> names;
    for (int rank = 0; rank < n; ++rank) {
      listeners.push_back(listen_on_own_loopback());
      names.push_back("rank " + std::to_string(rank) + " on host h" + std::to_string(rank));
      peers.push_back({names.back(), {local_address(listeners.back().get())}});
    }
    for (int rank = 0; rank < n; ++rank) {
      PluginOptions options{.name = plugin, .interface = "lo", .version = version};
      auto tcp = std::make_unique<TcpTransport>(JobCredentials{"job", "1.0", "a secret", 0}, rank, peers,
                                                std::move(listeners[size_t(rank)]));
      ranks.push_back(std::make_unique<PluginTransport>(std::make_unique<PluginDevice>(options), rank, names,
                                                        std::move(tcp), timeouts));
    }
  }
  void step() {
    for (auto& rank : ranks)
      if (rank) rank->step(), rank->flush();
  }
  template <class Done> bool until(Done done) {
    for (const uint64_t deadline = now_ns() + kMostNs; now_ns() < deadline; step())
      if (done()) return true;
    return false;
  }
  // What step() throws, "" if nothing for so long.
  std::string thrown_within(uint64_t ns, Code expected) {
    try {
      for (const uint64_t deadline = now_ns() + ns; now_ns() < deadline;) step();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), expected) << error.what();
      return error.what();
    }
    return "";
  }
  std::vector<std::unique_ptr<PluginTransport>> ranks;
};

template <int kVersion, int kLane> struct DoublePair {
  DoublePair()
      : a_(cluster, mutex, cluster.ranks[0]->link(0, kLane, 1)),
        b_(cluster, mutex, cluster.ranks[1]->link(0, kLane, 0)) {}
  Link& a() { return a_; }
  Link& b() { return b_; }
  PluginCluster cluster{2, kVersion < 10 ? NET_PLUGIN_DOUBLE : NET_PLUGIN_HARP, kVersion};
  std::mutex mutex;
  SteppedLink<PluginCluster> a_, b_;
};
using Version8 = DoublePair<8, 0>;
using Version9 = DoublePair<9, Transport::kControl>;
using HarpVersion10 = DoublePair<10, Transport::kControl>;
using HarpVersion12 = DoublePair<12, 0>;
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble8, LinkContract, Version8);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble9, LinkContract, Version9);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginHarp10, LinkContract, HarpVersion10);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginHarp12, LinkContract, HarpVersion12);

// Sends a word from one rank to the other, which shall get it.
void pass(PluginCluster& cluster, Link& from, Link& to, uint64_t word) {
  std::byte* room = nullptr;
  ASSERT_TRUE(cluster.until([&] { return (room = from.reserve(sizeof word)) != nullptr; }));
  std::memcpy(room, &word, sizeof word);
  from.commit(sizeof word);
  const std::byte* record = nullptr;
  ASSERT_TRUE(cluster.until([&] { return (record = to.peek(sizeof word)) != nullptr; }));
  EXPECT_EQ(std::memcmp(record, &word, sizeof word), 0);
  to.consume(sizeof word);
}

TEST(PluginTransport, LinksOfPeersGroupsAndLanesAreApart) {
  PluginCluster cluster(3);
  uint64_t word = 0;
  for (int group : {0, 5})
    for (int lane : {Transport::kControl, 0, 1})
      for (const auto& [a, b] : {std::pair{0, 1}, {0, 2}, {2, 1}}) {
        const auto from = cluster.ranks[size_t(a)]->link(group, lane, b);
        const auto to = cluster.ranks[size_t(b)]->link(group, lane, a);
        pass(cluster, *from, *to, ++word);
        pass(cluster, *to, *from, ++word);
      }
}

TEST(PluginTransport, WhatWasCommittedIsDeliveredBeforeTheEnd) {
  for (const std::string plugin : {NET_PLUGIN_DOUBLE, NET_PLUGIN_HARP}) {
    PluginCluster cluster(2, plugin);
    const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
    pass(cluster, *to, *from, 1);
    constexpr uint64_t kWords = 8;  // for as many there is room at the other end
    for (uint64_t word = 0; word < kWords; ++word) {
      std::byte* room = nullptr;
      ASSERT_TRUE(cluster.until([&] { return (room = from->reserve(sizeof word)) != nullptr; }));
      std::memcpy(room, &word, sizeof word);
      from->commit(sizeof word);
    }
    ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
    cluster.ranks[0]->close();
    cluster.ranks[0].reset();
    cluster.ranks[1]->mark_left(0);
    for (uint64_t word = 0; word < kWords; ++word) {
      const std::byte* record = nullptr;
      ASSERT_TRUE(cluster.until([&] { return (record = to->peek(sizeof word)) != nullptr; })) << word;
      EXPECT_EQ(std::memcmp(record, &word, sizeof word), 0);
      to->consume(sizeof word);
    }
    EXPECT_TRUE(cluster.until([&] { return cluster.ranks[1]->finish(); }));
  }
}

TEST(PluginTransport, WhoFinishesAndGoesIsNoLossBeforeItIsMarked) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 1'000'000});
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0]->close();
  EXPECT_EQ(cluster.thrown_within(100'000'000, Code::ok), "");
}

TEST(PluginTransport, ThePeersCauseIsHeard) {
  PluginCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  cluster.ranks[0]->end(Error(Code::timeout, "the stall of tensor 'x' was ended"));
  cluster.ranks[0]->step();
  const std::string heard = cluster.thrown_within(kMostNs, Code::timeout);
  EXPECT_TRUE(contains(heard, "the stall of tensor 'x' was ended")) << heard;
}

void tell_double(const char* function, int value) {
  void* library = dlopen(NET_PLUGIN_DOUBLE, RTLD_NOW | RTLD_LOCAL);
  reinterpret_cast<void (*)(int)>(dlsym(library, function))(value);
  dlclose(library);  // it stays loaded where it was
}

TEST(PluginTransport, APluginThatFailsNamesThePeerAndTheReason) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 50'000'000});
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  tell_double("net_plugin_double_break", 1);
  const std::string text = cluster.thrown_within(kMostNs, Code::peer_lost);
  tell_double("net_plugin_double_break", 0);
  EXPECT_TRUE(contains(text, "rank 1 on host h1 cannot be reached any more: receiving by NCCL's network plugin double "
                             "failed with a system error"))
      << text;
}

TEST(PluginTransport, ARetiredGroupIsDeliveredAndForgotten) {
  PluginCluster cluster(2);
  auto from = cluster.ranks[0]->link(3, 0, 1), to = cluster.ranks[1]->link(3, 0, 0);
  pass(cluster, *from, *to, 1);
  from.reset(), to.reset();
  for (auto& rank : cluster.ranks) rank->retire(3);
  for (int turn = 0; turn < 200; ++turn) cluster.step();
  const auto next = cluster.ranks[0]->link(4, 0, 1), its_end = cluster.ranks[1]->link(4, 0, 0);
  pass(cluster, *next, *its_end, 2);
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish() && cluster.ranks[1]->finish(); }));
}

std::string refusal_of(const PluginOptions& options) {
  try {
    PluginDevice device(options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PluginDevice, ChoosesByInterfaceOrNumberAndNamesWhatIsMissing) {
  EXPECT_EQ(PluginDevice({.name = NET_PLUGIN_DOUBLE, .interface = "double2"}).index(), 2);
  EXPECT_EQ(PluginDevice({.name = NET_PLUGIN_DOUBLE, .interface = "for GPUs"}).index(), 1);
  EXPECT_EQ(PluginDevice({.name = NET_PLUGIN_DOUBLE, .interface = "eth0", .index = 3}).index(), 2);
  EXPECT_EQ(PluginDevice({.name = NET_PLUGIN_DOUBLE}).name(), "double");
  tell_double("net_plugin_double_devices", 1);
  EXPECT_TRUE(contains(refusal_of({.name = NET_PLUGIN_DOUBLE}), "has no device on this host that sends from host"));
  tell_double("net_plugin_double_devices", 3);
  const std::string missing = refusal_of({.name = "nowhere"});
  EXPECT_TRUE(contains(missing, "LIGHTCC_NET_PLUGIN=nowhere")) << missing;
  EXPECT_TRUE(contains(missing, "libnccl-net-nowhere.so")) << missing;
  EXPECT_TRUE(contains(refusal_of({.name = "libc.so.6"}), "has no ncclNetPlugin_v8 to _v12"));
  EXPECT_TRUE(contains(refusal_of({.name = NET_PLUGIN_DOUBLE, .version = 12}), "has no ncclNetPlugin_v12"));
}

}  // namespace
}  // namespace lightcc

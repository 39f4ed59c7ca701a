// Links over network plugins of NCCL's, of one process: HARP's, and a double that is slow, out of order and strict.
#include "net/plugin/plugin_transport.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "contracts/link_contract.h"
#include "unit/loopback.h"
#include "net/tcp/tcp_transport.h"
#include "unit/stepped_link.h"
#include "contracts/transport_contract.h"

namespace lightcc {
namespace {

template <class Result, class... Arguments> Result ask_double(const char* function, Arguments... arguments) {
  void* library = dlopen(NET_PLUGIN_DOUBLE, RTLD_NOW | RTLD_LOCAL);
  const auto call = reinterpret_cast<Result (*)(Arguments...)>(dlsym(library, function));
  if constexpr (std::is_void_v<Result>) {
    call(arguments...);
    dlclose(library);  // it stays loaded where it was
  } else {
    const Result result = call(arguments...);
    dlclose(library);
    return result;
  }
}

enum Broken { everything = 1, sending = 2, registering = 4 };
struct Break {  // while it lives
  explicit Break(int what) { ask_double<void>("net_plugin_double_break", what); }
  ~Break() { ask_double<void>("net_plugin_double_break", 0); }
};

// With TCP below.
struct PluginCluster : TransportCluster {
  explicit PluginCluster(int n, const std::string& plugin = NET_PLUGIN_DOUBLE, int version = 0,
                         PluginTimeouts timeouts = {}, const std::string& plugin_of_rank_0 = "") {
    std::vector<Fd> listeners;
    std::vector<TcpPeer> peers;
    std::vector<std::string> names;
    for (int rank = 0; rank < n; ++rank) {
      listeners.push_back(listen_on_own_loopback());
      names.push_back(name_of(rank));
      peers.push_back({names.back(), {local_address(listeners.back().get())}});
    }
    for (int rank = 0; rank < n; ++rank) {
      const bool is_odd = rank == 0 && !plugin_of_rank_0.empty();
      PluginOptions options{.name = is_odd ? plugin_of_rank_0 : plugin, .interface = "lo", .version = version};
      auto tcp = std::make_unique<TcpTransport>(JobCredentials{"job", "1.0", "a secret", 0}, rank, peers,
                                                std::move(listeners[size_t(rank)]));
      ranks.push_back(std::make_unique<PluginTransport>(std::make_unique<PluginDevice>(options), rank, names,
                                                        std::move(tcp), timeouts));
    }
  }
  ~PluginCluster() {
    ranks.clear();
    EXPECT_EQ(ask_double<int>("net_plugin_double_violations"), 0);
  }
};
struct HarpPluginCluster : PluginCluster {
  explicit HarpPluginCluster(int n) : PluginCluster(n, NET_PLUGIN_HARP) {}
};
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble, TransportContract, PluginCluster);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginHarp, TransportContract, HarpPluginCluster);

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
using Version6 = DoublePair<6, 0>;
using Version7 = DoublePair<7, Transport::kControl>;
using Version8 = DoublePair<8, 0>;
using Version9 = DoublePair<9, Transport::kControl>;
using HarpVersion11 = DoublePair<11, Transport::kControl>;  // up to 10 its threads stay, as it is not told to end
using HarpVersion12 = DoublePair<12, 0>;
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble6, LinkContract, Version6);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble7, LinkContract, Version7);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble8, LinkContract, Version8);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginDouble9, LinkContract, Version9);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginHarp11, LinkContract, HarpVersion11);
INSTANTIATE_TYPED_TEST_SUITE_P(PluginHarp12, LinkContract, HarpVersion12);

std::string thrown_by_either(PluginCluster& cluster, Code expected, uint64_t most_ns = TransportCluster::kMostNs) {
  for (const uint64_t deadline = now_ns() + most_ns; now_ns() < deadline;)
    for (int rank : {0, 1})
      if (const std::string text = cluster.thrown_by(rank, expected, 1'000'000); !text.empty()) return text;
  return "";
}

// A plugin may call sent what it has only buffered, for more messages than receives are posted. Who leaves waits for
// the peer to receive them, as long as it has the time.
TEST(PluginTransport, WhatThePluginHasBufferedIsReceivedAfterItsSenderHasClosed) {
  PluginCluster cluster(2);
  const auto from = cluster.link(0, 1, 0, Transport::kControl), to = cluster.link(1, 0, 0, Transport::kControl);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  constexpr uint64_t kFrames = 45;
  for (uint64_t word = 0; word < kFrames; ++word) {
    ASSERT_TRUE(cluster.send(*from, word));
    for (int turn = 0; turn < 30; ++turn) cluster.step();  // as many arrive as are posted
  }
  for (int turn = 0; turn < 30; ++turn, cluster.step()) EXPECT_FALSE(cluster.ranks[0]->finish());
  cluster.ranks[1]->mark_left(0);
  cluster.ranks[0]->close();
  for (uint64_t word = 0; word < kFrames; ++word) ASSERT_TRUE(cluster.receive(*to, word)) << word;
}

TEST(PluginTransport, WhatIsCommittedIsSentWhileTheNextIsBeingWritten) {
  PluginCluster cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  for (uint64_t word = 0; word < 40; word += 2) {
    ASSERT_TRUE(cluster.send(*from, word));
    std::byte* room = nullptr;
    ASSERT_TRUE(cluster.until([&] { return (room = from->reserve(sizeof word)) != nullptr; }));
    ASSERT_TRUE(cluster.receive(*to, word)) << "it waits for what is not committed";
    const uint64_t next = word + 1;
    std::memcpy(room, &next, sizeof next);
    from->commit(sizeof next);
    ASSERT_TRUE(cluster.receive(*to, next));
  }
}

TEST(PluginTransport, WhoFinishesAndGoesIsNoLossBeforeItIsMarked) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 1'000'000});
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0]->close();
  EXPECT_EQ(thrown_by_either(cluster, Code::ok, 100'000'000), "");
}

TEST(PluginTransport, APluginThatFailsNamesThePeerAndTheReason) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 50'000'000});
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  const Break broken(everything);
  const std::string text = cluster.thrown_by(0, Code::peer_lost);
  EXPECT_TRUE(contains(text, "rank 1 on host h1 cannot be reached any more: receiving by NCCL's network plugin double "
                             "failed with a system error"))
      << text;
}

TEST(PluginTransport, WhoCannotSendReceivesAndDoesNotSayThatItHasFinished) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 20'000'000'000});
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  ASSERT_TRUE(cluster.send(*to, 2));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[1]->finish(); }));
  const Break broken(sending);
  for (int i = 0; i < 100; ++i) {
    ASSERT_NE(from->reserve(8), nullptr) << "there is room, for nobody";
    from->commit(8);
    cluster.ranks[0]->flush();
  }
  EXPECT_TRUE(cluster.receive(*from, 2));
}

TEST(PluginTransport, RecordsThatWereNotSentAreMissed) {
  PluginCluster cluster(2, NET_PLUGIN_DOUBLE, 0, {.verdict_ns = 300'000'000});
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  const Break broken(sending);
  ASSERT_NE(from->reserve(8), nullptr);
  from->commit(8);
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); })) << "it ends all the same";
  cluster.ranks[0]->close();
  cluster.ranks[0].reset();
  EXPECT_THROW(cluster.until([&] { return to->peek(8) != nullptr; }), Error);
}

TEST(PluginTransport, MemoryThatCannotBeRegisteredIsAnError) {
  PluginCluster cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  const Break broken(registering);
  ASSERT_NE(to->reserve(8), nullptr);
  to->commit(8);
  const std::string text = thrown_by_either(cluster, Code::internal);
  EXPECT_TRUE(contains(text, "registering memory by NCCL's network plugin double failed with a system error")) << text;
  for (auto& rank : cluster.ranks) rank->end(Error(Code::internal, text));
  for (int turn = 0; turn < 50; ++turn) cluster.step();
}

TEST(PluginTransport, RanksWithDifferentPluginsSayWhich) {
  PluginCluster cluster(2, NET_PLUGIN_HARP, 0, {}, NET_PLUGIN_DOUBLE);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_NE(to->reserve(8), nullptr);
  const std::string text = thrown_by_either(cluster, Code::invalid_argument);
  EXPECT_TRUE(contains(text, "rank 1 on host h1 has NCCL's network plugin 'HARP', this rank 'double'")) << text;
}

size_t stream_sockets() {
  size_t count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int type = 0;
    socklen_t bytes = sizeof type;
    count += getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_STREAM;
  }
  return count;
}

TEST(PluginTransport, LinksThatAreNotUsedOpenNoConnection) {
  PluginCluster cluster(3);
  const size_t before = stream_sockets();
  std::vector<std::unique_ptr<Link>> links;
  for (int rank : {0, 1, 2})
    for (int peer : {0, 1, 2})
      if (rank != peer) links.push_back(cluster.ranks[size_t(rank)]->link(0, 0, peer));
  for (int turn = 0; turn < 50; ++turn) cluster.step();
  EXPECT_EQ(stream_sockets(), before);
  EXPECT_FALSE(cluster.ranks[2]->busy());
}

TEST(PluginDevice, BeginsOnceInAProcessHoweverManyEpochsThereAre) {
  const PluginOptions options{.name = NET_PLUGIN_DOUBLE, .version = 9};
  PluginDevice first(options);
  const int before = ask_double<int>("net_plugin_double_started");
  for (int epoch = 0; epoch < 3; ++epoch) PluginDevice again(options);
  EXPECT_EQ(ask_double<int>("net_plugin_double_started"), before);
}

std::string logged;
void keep(nccl::LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level != nccl::kLogWarn) return;
  char text[300];
  va_list words;
  va_start(words, format);
  std::vsnprintf(text, sizeof text, format, words);
  va_end(words);
  logged = text;
}

TEST(NetPlugin, ASizeThatDoesNotFitAnOldVersionIsNamed) {
  for (int version : {6, 7, 8, 9}) {
    NetPlugin plugin(NET_PLUGIN_DOUBLE, version, keep);
    void *context = nullptr, *listener = nullptr, *sender = nullptr, *memory = nullptr, *request = nullptr;
    uint8_t handle[nccl::kHandleBytes];
    ASSERT_EQ(plugin.init(&context, 0), nccl::kSuccess);
    ASSERT_EQ(plugin.listen(context, 1, handle, &listener), nccl::kSuccess);
    while (!sender) ASSERT_EQ(plugin.connect(context, 1, handle, &sender), nccl::kSuccess);
    size_t bytes = 3'000'000'000;
    int tag = 0;
    const auto is_named = [&](nccl::Result result) {
      const bool named = contains(logged, "3000000000 bytes: in version " + std::to_string(version));
      return result == nccl::kInvalidArgument && named && contains(std::exchange(logged, ""), "at most 2147483647");
    };
    const auto registered = plugin.reg_mr(sender, handle, bytes, nccl::kHostPointers, &memory);
    EXPECT_EQ(is_named(registered), version < 8) << version;
    if (version < 9) {
      EXPECT_TRUE(is_named(plugin.isend(sender, handle, bytes, tag, memory, &request))) << version;
      void* data = handle;
      EXPECT_TRUE(is_named(plugin.irecv(sender, 1, &data, &bytes, &tag, &memory, &request))) << version;
    }
    if (registered == nccl::kSuccess) plugin.dereg_mr(sender, memory);
    plugin.close_send(sender);
    plugin.close_listen(listener);
  }
}

template <class Table> Table* harps_table(const char* symbol) {
  void* library = dlopen(NET_PLUGIN_HARP, RTLD_NOW | RTLD_LOCAL);
  auto* const table = static_cast<Table*>(dlsym(library, symbol));
  dlclose(library);  // it stays loaded
  return table;
}

template <class Table> void expect_negative_sizes_named(const char* symbol) {
  const auto& path = harps_table<Table>(symbol)->path;
  int bytes = -5, tag = 0;
  void *data = &tag, *memory = nullptr, *request = &tag;
  const auto is_named = [&](nccl::Result result) {
    return result == nccl::kInvalidArgument && contains(std::exchange(logged, ""), "a size of -5 bytes");
  };
  EXPECT_TRUE(is_named(path.isend(&tag, data, bytes, tag, nullptr, &request))) << symbol;
  EXPECT_EQ(request, nullptr);
  EXPECT_TRUE(is_named(path.irecv(&tag, 1, &data, &bytes, &tag, &memory, &request))) << symbol;
  if constexpr (std::is_same_v<decltype(Table::path), nccl::DataPathV7>) {
    EXPECT_TRUE(is_named(path.reg_mr(&tag, data, bytes, nccl::kHostPointers, &memory))) << symbol;
  }
}

TEST(HarpsPlugin, ANegativeSizeOfAnOldVersionIsNamed) {
  NetPlugin plugin(NET_PLUGIN_HARP, 12, keep);
  void* context = nullptr;
  ASSERT_EQ(plugin.init(&context, 0), nccl::kSuccess) << logged;
  expect_negative_sizes_named<nccl::NetV6>("ncclNetPlugin_v6");
  expect_negative_sizes_named<nccl::NetV7>("ncclNetPlugin_v7");
  expect_negative_sizes_named<nccl::NetV8>("ncclNetPlugin_v8");
  plugin.finalize(context);
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
  ask_double<void>("net_plugin_double_devices", 1);
  EXPECT_TRUE(contains(refusal_of({.name = NET_PLUGIN_DOUBLE}), "has no device on this host that sends from host"));
  ask_double<void>("net_plugin_double_devices", 3);
  const std::string missing = refusal_of({.name = "nowhere"});
  EXPECT_TRUE(contains(missing, "LIGHTCC_NET_PLUGIN=nowhere")) << missing;
  EXPECT_TRUE(contains(missing, "libnccl-net-nowhere.so")) << missing;
  EXPECT_TRUE(contains(refusal_of({.name = "libc.so.6"}), "has no ncclNetPlugin_v6 to _v12"));
  EXPECT_TRUE(contains(refusal_of({.name = NET_PLUGIN_DOUBLE, .version = 12}), "has no ncclNetPlugin_v12"));
}

}  // namespace
}  // namespace lightcc

// The engine against a port that does what the test says: fences, back pressure, sleep. And its lock-free parts.
#include "harp_plugin/engine/engine.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>

#include "harp/api_world.h"
#include "harp_plugin/api/config.h"
#include "harp_plugin/api/stats_page.h"
#include "harp_plugin/port/mem.h"
#include "labels.h"

LABEL(idle, "Engine.SixtyFourIdle*:Engine.OpeningAndClosing*");

namespace harp {
namespace {

// A port of mem behind switches.
struct Switches {
  std::atomic<bool> takes{true}, lets_go{true}, breaks{false};
  std::atomic<uint64_t> arms{0}, refused{0};
};
class SwitchedPort : public Port {
 public:
  SwitchedPort(std::unique_ptr<Port> inner, Switches& switches) : inner_(std::move(inner)), switches_(switches) {}
  const Caps& caps() const override { return inner_->caps(); }
  size_t tx(std::span<const TxPacket> packets) override {
    if (switches_.takes) return inner_->tx(packets);
    for (const TxPacket& packet : packets) switches_.refused += packet.payload_bytes > 0;
    return 0;
  }
  uint64_t tx_done() override { return switches_.lets_go ? inner_->tx_done() : 0; }
  size_t rx(std::span<RxPacket> to, std::span<const Expected> expected) override {
    if (switches_.breaks.exchange(false)) throw lightcc::Error(lightcc::Code::internal, "the port broke");
    return inner_->rx(to, expected);
  }
  void release(std::span<const RxPacket> packets) override { inner_->release(packets); }
  int descriptor() const override { return inner_->descriptor(); }
  bool arm() override {
    ++switches_.arms;
    return inner_->arm();
  }
  void disarm() override { inner_->disarm(); }

 private:
  std::unique_ptr<Port> inner_;
  Switches& switches_;
};

struct Side {
  Side(std::shared_ptr<MemNetwork> network, bool runs_inline, uint64_t peer_timeout_ns = 4 * kSecond) {
    auto port = std::make_unique<SwitchedPort>(open_mem(network), switches);
    Options options;
    options.payload = port->caps().payload;
    options.receive_packets = port->caps().receive_packets;
    options.peer_timeout_ns = peer_timeout_ns;
    engine = std::make_unique<Engine>(
        std::move(port), options,
        Engine::Settings{.runs_inline = runs_inline,
                         .oversubscribed = true,
                         .core = std::nullopt,
                         .name_of_peer = [](const Address&) { return std::string("the peer"); },
                         .random = [dice = std::make_shared<std::mt19937_64>(7)] { return (*dice)(); }});
  }
  Switches switches;
  std::unique_ptr<Engine> engine;
};

struct EnginePair {
  explicit EnginePair(bool runs_inline, uint64_t peer_timeout_ns = 4 * kSecond)
      : a(network, runs_inline, peer_timeout_ns), b(network, runs_inline, peer_timeout_ns),
        out(std::make_unique<Channel>(*a.engine, Mode::message, 256)) {
    const Nonce nonce = b.engine->listen(queue);
    a.engine->connect(*out, b.engine->caps().address, nonce);
    EXPECT_EQ(until_done([&] {
      poll();
      return out->open() && !queue.with([](auto& waiting) { return waiting.empty(); }) ? HARP_OK : HARP_PENDING;
    }), HARP_OK);
    in = queue.with([](auto& waiting) { return std::move(waiting.front()); });
  }
  ~EnginePair() {
    a.switches.takes = a.switches.lets_go = true;
    if (out) a.engine->close(*out);
    b.engine->close(*in);
  }
  void poll() {
    a.engine->poll();
    b.engine->poll();
  }
  bool done(const Request* request) {
    poll();
    return request->state.load(std::memory_order_acquire) == Request::done;
  }
  bool becomes_done(const Request* request) {
    return until_done([&] { return done(request) ? HARP_OK : HARP_PENDING; }) == HARP_OK;
  }
  bool stays_posted(const Request* request, std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    for (; std::chrono::steady_clock::now() < end; sched_yield())
      if (done(request)) return false;
    return true;
  }
  std::shared_ptr<MemNetwork> network = make_mem_network();
  Side a, b;
  AcceptQueue queue;
  std::unique_ptr<Channel> out, in;
};

class EngineModes : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Modes, EngineModes, testing::Bool(),
                         [](const auto& info) { return info.param ? "inline" : "threads"; });

TEST_P(EngineModes, CloseWaitsUntilThePortHasLetGo) {
  EnginePair pair(GetParam());
  pair.a.switches.lets_go = false;
  std::vector<uint8_t> data(100'000);
  pair.out->submit(true, data.data(), 100'000);
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    pair.a.engine->close(*pair.out);
    closed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(closed) << "the port still reads the message";
  pair.a.switches.lets_go = true;
  closer.join();
  pair.out.reset();
}

TEST_P(EngineModes, CloseWaitsForPacketsThatThePortDidNotTake) {
  EnginePair pair(GetParam());
  pair.a.switches.takes = false;
  std::vector<uint8_t> data(5000);  // eager: it is sent without a grant
  pair.out->submit(true, data.data(), 5000);
  ASSERT_EQ(until_done([&] { return pair.poll(), pair.a.switches.refused ? HARP_OK : HARP_PENDING; }), HARP_OK);
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    pair.a.engine->close(*pair.out);
    closed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(closed) << "a packet that points into the message waits for the port";
  pair.a.switches.takes = true;
  closer.join();
  pair.out.reset();
}

TEST_P(EngineModes, AFailedSendIsReportedOnlyAfterTheFence) {
  EnginePair pair(GetParam());
  pair.a.switches.lets_go = false;
  std::vector<uint8_t> data(100'000);
  Request* request = pair.out->submit(true, data.data(), 100'000);
  ASSERT_TRUE(pair.stays_posted(request, std::chrono::milliseconds(20)));
  pair.b.engine->close(*pair.in);
  EXPECT_TRUE(pair.stays_posted(request, std::chrono::milliseconds(100)));
  pair.a.switches.lets_go = true;
  ASSERT_TRUE(pair.becomes_done(request));
  EXPECT_TRUE(request->status == Status::peer_failed || request->status == Status::peer_closed);
  EXPECT_NE(pair.out->why().find("peer "), std::string::npos) << "why is there before the request is done";
  pair.in = std::make_unique<Channel>(*pair.b.engine, Mode::message, 256);  // for the end of the pair to close
  pair.b.engine->connect(*pair.in, pair.a.engine->caps().address, Nonce{});
}

TEST_P(EngineModes, WhereThePortBreaksRequestsEndAtOnceThoughThePeerIsHeard) {
  EnginePair pair(GetParam());
  std::vector<uint8_t> got(100'000);
  Request* request = pair.out->submit(false, got.data(), 100'000);
  ASSERT_TRUE(pair.stays_posted(request, std::chrono::milliseconds(20)));
  const auto broke = std::chrono::steady_clock::now();
  pair.a.switches.breaks = true;
  ASSERT_TRUE(pair.becomes_done(request));
  Request* later = pair.out->submit(true, got.data(), 10);
  ASSERT_TRUE(pair.becomes_done(later));
  EXPECT_LT(std::chrono::steady_clock::now() - broke, std::chrono::seconds(4)) << "it waited for the peer's time-out";
  for (const Request* one : {request, later}) EXPECT_EQ(one->status, Status::local_fault);
  EXPECT_NE(pair.out->why().find("the port broke"), std::string::npos) << pair.out->why();
}

TEST_P(EngineModes, PacketsThatThePortDidNotTakeAreOfferedAgain) {
  EnginePair pair(GetParam());
  std::vector<uint8_t> data(1 << 20), got(1 << 20);
  std::mt19937 dice(3);
  for (uint8_t& byte : data) byte = uint8_t(dice());
  Request* received = pair.in->submit(false, got.data(), 1 << 20);
  Request* sent = pair.out->submit(true, data.data(), 1 << 20);
  const auto end = std::chrono::steady_clock::now() + kApiPatience;
  while (!(pair.done(received) && pair.done(sent)) && std::chrono::steady_clock::now() < end) {
    pair.a.switches.takes = dice() % 3 == 0;
    sched_yield();
  }
  EXPECT_EQ(sent->state, Request::done);
  EXPECT_EQ(received->state, Request::done);
  EXPECT_EQ(got, data);
}

// In inline mode nobody polls here; in threaded mode polling does nothing.
TEST_P(EngineModes, SignsOfLifeAreGivenWhileTheApplicationComputes) {
  EnginePair pair(GetParam(), 2 * kSecond);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_EQ(pair.out->over(), Status::ok) << pair.out->why();
  EXPECT_EQ(pair.in->over(), Status::ok) << pair.in->why();
  std::vector<uint8_t> data(100), got(100);
  Request* received = pair.in->submit(false, got.data(), 100);
  Request* sent = pair.out->submit(true, data.data(), 100);
  // Also submissions are served without polling.
  EXPECT_EQ(until_done([&] { return received->state == Request::done ? HARP_OK : HARP_PENDING; }), HARP_OK);
  EXPECT_EQ(until_done([&] { return sent->state == Request::done ? HARP_OK : HARP_PENDING; }), HARP_OK);
}

TEST(Engine, WakesFromSleepForEverySubmission) {
  EnginePair pair(false);
  std::vector<uint8_t> data(100), got(100);
  for (int i = 0; i < 300; ++i) {
    // Now and then long enough that both engines sleep, else at the moment when they are about to.
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Request* received = pair.in->submit(false, got.data(), 100);
    Request* sent = pair.out->submit(true, data.data(), 100);
    ASSERT_TRUE(pair.becomes_done(received)) << i;
    ASSERT_TRUE(pair.becomes_done(sent)) << i;
    pair.in->retire(*received);
    pair.out->retire(*sent);
  }
  EXPECT_GT(pair.a.switches.arms, 0u) << "it never slept: this test shows nothing";
}

uint64_t cpu_us() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto us = [](const timeval& t) { return uint64_t(t.tv_sec) * 1'000'000 + uint64_t(t.tv_usec); };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

TEST(Engine, SixtyFourIdleConnectionsCostNextToNothing) {
  constexpr uint64_t kIdleUs = 20'000;  // of a second, both sides
  for (const char* port : {"udp", "shm"}) {
    for (int inline_mode : {1, 2}) {
      World world({.port = port, .inline_mode = inline_mode});
      for (int i = 0; i < 64; ++i) world.connect();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      uint64_t used = UINT64_MAX;
      for (int attempt = 0; attempt < 20 && used >= kIdleUs; ++attempt) {  // a busy machine makes each wake-up dearer
        const uint64_t before = cpu_us();
        std::this_thread::sleep_for(std::chrono::seconds(1));
        used = cpu_us() - before;
      }
      RecordProperty(std::string(port) + std::to_string(inline_mode) + "_us", std::to_string(used));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
      EXPECT_LT(used, kIdleUs) << port << " inline_mode " << inline_mode << ": both sides, 1 % of a core each";
#endif
    }
  }
}

size_t entries(const char* directory) {
  const auto all = std::filesystem::directory_iterator(directory);
  return size_t(std::distance(begin(all), end(all)));
}

TEST(Engine, OpeningAndClosingLeavesNothingBehind) {
  const Opening opening{.port = "shm"};
  for (int i = 0; i < 3; ++i) World(opening).connect();  // what a library keeps after its first use
  const size_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (int i = 0; i < 100; ++i) {
    World world({.port = i % 5 ? "shm" : "udp", .inline_mode = 1 + i / 2 % 2, .engines = 1 + i % 3});
    world.connect(i % 3 ? HARP_MESSAGE : HARP_STREAM);
  }
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  // A thread that was joined may be listed for a moment longer.
  EXPECT_EQ(until_done([&] { return entries("/proc/self/task") <= threads ? HARP_OK : HARP_PENDING; }), HARP_OK);
  const std::string own = std::to_string(getpid()) + "-";
  for (const std::string& page : stats_pages()) EXPECT_EQ(page.find("/" + own), std::string::npos) << page;
}

}  // namespace
}  // namespace harp

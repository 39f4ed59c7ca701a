// What every Port of HARP must do (harp_plugin/port/port.h). The tests, and a row for each port, are in
// tests/harp/port_contract_test.cc; here is what they share with the tests of single ports.
// A port may lose packets, so a test sends again what has not come, until a deadline.
#pragma once
#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "harp_plugin/port/port.h"
#include "harp_plugin/port/region.h"

namespace harp {

using OpenPort = std::function<std::unique_ptr<Port>()>;

struct PortKind {
  const char* name;
  std::function<OpenPort()> network;  // what opens ports that reach each other
  bool regions = false;               // payloads are sent from a Region
  std::string (*missing)() = nullptr;  // why it cannot be tested here; "": it can
};

inline void PrintTo(const PortKind& kind, std::ostream* out) { *out << kind.name; }

namespace contract {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(300);  // it ends only what has failed, on any machine
constexpr auto kResend = std::chrono::milliseconds(50);  // without progress

// Of this process.
inline size_t open_descriptors() {
  size_t count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

// Waits until no more are open than before: some are closed by threads of their own (base/close_elsewhere.h).
inline void expect_no_more_descriptors(size_t before) {
  const auto deadline = Clock::now() + kPatience;
  while (open_descriptors() > before && Clock::now() < deadline) usleep(1000);
  EXPECT_LE(open_descriptors(), before);
}

// Bytes that differ from packet to packet and place to place.
inline uint8_t pattern(uint64_t seed, size_t i) { return static_cast<uint8_t>((seed * 131 + i * 7 + i / 251) >> 1); }

// A packet whose number is in its head.
inline TxPacket make(const Address& to, uint32_t number, const uint8_t* payload, uint32_t bytes, bool tagged = false) {
  TxPacket packet;
  packet.to = &to;
  packet.payload = payload;
  packet.payload_bytes = bytes;
  packet.head_bytes = kHeaderBytes;
  packet.tagged = tagged;
  write_header({.type = Type::data, .conn = 1, .number = number, .message = 2, .total = bytes}, packet.head.data());
  for (size_t i = 0; tagged && i < kTagBytes; ++i) packet.tag[i] = pattern(number + 7, i);
  return packet;
}

inline uint32_t number_of(const RxPacket& packet) {
  const auto header = read_header(std::span(packet.head, packet.head_bytes));
  return header ? header->number : UINT32_MAX;
}

// Head and payload in one piece, as a port without parts would see them.
inline std::vector<uint8_t> bytes_of(const RxPacket& packet) {
  std::vector<uint8_t> all(packet.head, packet.head + packet.head_bytes);
  all.insert(all.end(), packet.payload, packet.payload + packet.payload_bytes);
  return all;
}
inline std::vector<uint8_t> bytes_of(const TxPacket& packet) {
  std::vector<uint8_t> all(packet.head.begin(), packet.head.begin() + packet.head_bytes);
  all.insert(all.end(), packet.payload, packet.payload + packet.payload_bytes);
  if (packet.tagged) all.insert(all.end(), packet.tag.begin(), packet.tag.end());
  return all;
}

}  // namespace contract

class PortContract : public testing::TestWithParam<PortKind> {
 protected:
  void SetUp() override {
    if (const std::string missing = GetParam().missing ? GetParam().missing() : ""; !missing.empty())
      GTEST_SKIP() << missing;
    open_ = GetParam().network();
  }

  std::unique_ptr<Port> open() {
    auto port = open_();
    if (auto* user = dynamic_cast<RegionUser*>(port.get()); user && region_) user->add_region(region_);
    return port;
  }
  // Memory to send from, filled with the pattern of `seed`. Before the ports are opened.
  uint8_t* memory(size_t bytes, uint64_t seed = 1) {
    if (GetParam().regions) {
      region_ = make_region(bytes);
    } else {
      plain_.resize(bytes);
    }
    uint8_t* data = region_ ? region_->data() : plain_.data();
    for (size_t i = 0; i < bytes; ++i) data[i] = contract::pattern(seed, i);
    return data;
  }

  // One call of each, so that both ends go on whatever they wait for.
  static void pump(Port& port, const std::function<void(const RxPacket&)>& take, bool release = true) {
    std::array<RxPacket, 64> got;
    const size_t count = port.rx(got, {});
    for (size_t i = 0; i < count; ++i) take(got[i]);
    if (release) port.release(std::span(got).first(count));
    port.tx_done();
  }

  // Sends all of it, and again what does not come; returns the numbers in the order in which they came first.
  static std::vector<uint32_t> deliver(Port& from, Port& to, std::vector<TxPacket> packets) {
    using namespace contract;
    static uint32_t last_conn = 100;
    const uint32_t conn = ++last_conn;  // by this, what comes late from before is told apart
    for (TxPacket& packet : packets) {
      Header header = *read_header(packet.head);
      header.conn = conn;
      write_header(header, packet.head.data());
    }
    std::vector<uint32_t> order;
    std::vector<bool> seen(packets.size());
    const auto deadline = Clock::now() + kPatience;
    auto progress = Clock::now();
    size_t next = 0;
    while (order.size() < packets.size() && Clock::now() < deadline) {
      if (next < packets.size()) {
        const size_t batch = std::min<size_t>(64, packets.size() - next);
        next += from.tx(std::span(packets).subspan(next, batch));
      } else if (Clock::now() - progress > kResend) {
        for (size_t i = 0; i < packets.size(); ++i) {
          if (!seen[i]) from.tx(std::span(packets).subspan(i, 1));
        }
        progress = Clock::now();
      }
      pump(to, [&](const RxPacket& packet) {
        const auto header = read_header(std::span(packet.head, packet.head_bytes));
        ASSERT_TRUE(header);
        if (header->conn != conn) return;
        const uint32_t number = header->number;
        ASSERT_LT(number, packets.size());
        EXPECT_EQ(bytes_of(packet), bytes_of(packets[number])) << "packet " << number;
        EXPECT_EQ(packet.local, 0);
        if (seen[number]) return;
        seen[number] = true;
        order.push_back(number);
        progress = Clock::now();
      });
      if (&from != &to) pump(from, [](const RxPacket&) {});
    }
    EXPECT_EQ(order.size(), packets.size()) << "the rest did not come";
    return order;
  }

  // Waits until the port has let go of everything.
  static void settle(Port& port, uint64_t taken, const std::function<void()>& meanwhile = [] {}) {
    const auto deadline = contract::Clock::now() + contract::kPatience;
    uint64_t before = 0;
    while (contract::Clock::now() < deadline) {
      const uint64_t done = port.tx_done();
      ASSERT_GE(done, before);
      ASSERT_LE(done, taken);
      if (done == taken) return;
      before = done;
      meanwhile();
    }
    FAIL() << before << " of " << taken << " packets are done";
  }

  OpenPort open_;
  std::shared_ptr<Region> region_;
  std::vector<uint8_t> plain_;
};

}  // namespace harp

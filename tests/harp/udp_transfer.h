// What the tests of the port udp share: ports on the loopback, and messages that go from one memory to another.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "contracts/port_contract.h"
#include "harp_plugin/port/udp.h"

namespace harp {

inline constexpr uint32_t kFull = 1440;
inline constexpr uint32_t kConn = 77;

inline std::unique_ptr<UdpPort> open_on_loopback(bool combine, int locals = 1, uint32_t mtu = 1500) {
  return open_udp({.address = "127.0.0.1", .locals = locals, .mtu = mtu, .gso = combine, .gro = combine});
}

// A message that is sent in segments from one memory and expected in another, with bytes around it that stay.
class Transfer {
 public:
  static constexpr size_t kAround = 256;
  static constexpr uint8_t kUntouched = 0xa5;

  Transfer(uint32_t bytes, uint16_t message)
      : message_(message), source_(bytes), target_(bytes + 2 * kAround, kUntouched) {
    for (size_t i = 0; i < bytes; ++i) source_[i] = contract::pattern(message, i);
  }
  uint32_t segments() const { return (total() + kFull - 1) / kFull; }
  Header header(uint32_t segment) const {
    return {.type = Type::data,
            .conn = kConn,
            .number = segment,
            .message = message_,
            .offset = segment * kFull / kOffsetUnit,
            .total = total()};
  }
  TxPacket packet(uint32_t segment, const Address& to) const {
    const uint32_t offset = segment * kFull;
    TxPacket packet = contract::make(to, segment, source_.data() + offset, std::min(kFull, total() - offset));
    write_header(header(segment), packet.head.data());
    return packet;
  }
  std::vector<Expected> expected() {
    std::vector<Expected> all;
    for (uint32_t i = 0; i < segments(); ++i)
      all.push_back(
          {kConn, message_, i * kFull / kOffsetUnit, total(), place(i), std::min(kFull, total() - i * kFull)});
    return all;
  }
  uint8_t* place(uint32_t segment) { return target_.data() + kAround + segment * kFull; }
  bool only_places_touched() const {
    const auto untouched = [](uint8_t byte) { return byte == kUntouched; };
    return std::all_of(target_.begin(), target_.begin() + kAround, untouched) &&
           std::all_of(target_.end() - kAround, target_.end(), untouched);
  }

 private:
  uint32_t total() const { return static_cast<uint32_t>(source_.size()); }
  const uint16_t message_;
  std::vector<uint8_t> source_, target_;
};

// What comes until there are `count` packets or patience ends. The n-th packet is expected to be the n-th of
// `expected`.
inline std::vector<RxPacket> receive(Port& port, size_t count, std::span<const Expected> expected = {}) {
  std::vector<RxPacket> all;
  std::array<RxPacket, 64> got;
  const auto deadline = contract::Clock::now() + contract::kPatience;
  while (all.size() < count && contract::Clock::now() < deadline) {
    const size_t n = port.rx(got, expected.subspan(std::min(all.size(), expected.size())));
    all.insert(all.end(), got.begin(), got.begin() + static_cast<long>(n));
  }
  return all;
}

inline void send(Port& port, std::span<const TxPacket> packets) {
  const auto deadline = contract::Clock::now() + contract::kPatience;
  while (!packets.empty() && contract::Clock::now() < deadline) packets = packets.subspan(port.tx(packets));
  ASSERT_TRUE(packets.empty());
}

// true: packets are sent in groups and received as aggregates; false: each alone.
class UdpTest : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<UdpPort> open(int locals = 1) { return open_on_loopback(GetParam(), locals); }
};

}  // namespace harp

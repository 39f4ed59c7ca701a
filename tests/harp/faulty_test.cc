#include "harp/faulty.h"

#include <bit>

#include "contracts/port_contract.h"
#include "harp_plugin/port/mem.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::bytes_of;
using contract::make;
using contract::number_of;

// A sender whose faults are those given, a receiver without, and a clock in our hands.
struct Faulted {
  explicit Faulted(const Faults& faults)
      : network(make_mem_network()),
        sender(open_faulty(open_mem(network, 1440), faults, [this] { return now_ns; })),
        receiver(open_mem(network, 1440)) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = contract::pattern(1, i);
  }
  TxPacket packet(uint32_t number, bool tagged = false) {
    return make(receiver->caps().address, number, data.data() + number % 1024, 500, tagged);
  }
  void send(uint32_t number, bool tagged = false) { EXPECT_EQ(sender->tx(std::array{packet(number, tagged)}), 1u); }
  std::vector<std::vector<uint8_t>> came() {
    std::vector<std::vector<uint8_t>> all;
    std::array<RxPacket, 64> got;
    while (const size_t count = receiver->rx(got, {})) {
      for (size_t i = 0; i < count; ++i) all.push_back(bytes_of(got[i]));
      receiver->release(std::span(got).first(count));
      sender->tx_done();
    }
    return all;
  }
  std::vector<uint32_t> numbers() {
    std::vector<uint32_t> all;
    for (const auto& bytes : came()) all.push_back(read_header(bytes)->number);
    return all;
  }

  uint64_t now_ns = 0;
  std::shared_ptr<MemNetwork> network;
  std::unique_ptr<FaultyPort> sender;
  std::unique_ptr<Port> receiver;
  std::vector<uint8_t> data = std::vector<uint8_t>(4096);
};

size_t different_bits(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  size_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += static_cast<size_t>(std::popcount(static_cast<unsigned>(a[i] ^ b[i])));
  return count;
}

TEST(Faulty, LosesTheShareItWasToldAndCountsIt) {
  Faulted link({.seed = 7, .loss = 0.25});
  size_t came = 0;
  for (uint32_t i = 0; i < 4000; ++i) {
    link.send(i);
    came += link.came().size();
  }
  const FaultCounters& counters = link.sender->counters();
  EXPECT_EQ(counters.sent, 4000u);
  EXPECT_EQ(came + counters.lost, 4000u);
  EXPECT_NEAR(static_cast<double>(counters.lost), 1000, 150);
  EXPECT_EQ(link.sender->tx_done(), 4000u);
}

TEST(Faulty, TheSameSeedHasTheSameFaults) {
  const auto run = [](uint64_t seed) {
    Faulted link({.seed = seed, .loss = 0.1, .duplicate = 0.1, .reorder = 0.1});
    std::vector<uint32_t> all;
    for (uint32_t i = 0; i < 300; ++i) {
      link.send(i);
      for (const uint32_t number : link.numbers()) all.push_back(number);
    }
    return all;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(Faulty, ADuplicateIsTheSamePacketTwice) {
  Faulted link({.duplicate = 1});
  link.send(5);
  const auto came = link.came();
  ASSERT_EQ(came.size(), 2u);
  EXPECT_EQ(came[0], bytes_of(link.packet(5)));
  EXPECT_EQ(came[1], came[0]);
  EXPECT_EQ(link.sender->counters().duplicated, 1u);
  EXPECT_EQ(link.sender->tx_done(), 1u);
}

TEST(Faulty, AReorderedPacketLetsOthersPass) {
  Faulted link({.seed = 3, .reorder = 0.2});
  for (uint32_t i = 0; i < 200; ++i) link.send(i);
  const auto numbers = link.numbers();
  EXPECT_FALSE(std::is_sorted(numbers.begin(), numbers.end()));
  EXPECT_GE(numbers.size(), 190u);  // the last ones wait for more to pass
  EXPECT_GT(link.sender->counters().reordered, 10u);
}

TEST(Faulty, FlipsOneBitOfACopy) {
  Faulted link({.seed = 11, .flip = 1});
  const auto data = link.data;
  size_t in_head = 0;
  size_t in_tag = 0;
  for (uint32_t i = 0; i < 2000; ++i) {
    link.send(i, true);
    const auto came = link.came();
    ASSERT_EQ(came.size(), 1u);
    const auto sent = bytes_of(link.packet(i, true));
    ASSERT_EQ(came[0].size(), sent.size());
    EXPECT_EQ(different_bits(came[0], sent), 1u);
    in_head += !std::equal(sent.begin(), sent.begin() + kHeaderBytes, came[0].begin());
    in_tag += !std::equal(sent.end() - kTagBytes, sent.end(), came[0].end() - kTagBytes);
  }
  EXPECT_EQ(link.data, data);
  EXPECT_GT(in_head, 10u);
  EXPECT_GT(in_tag, 5u);
  EXPECT_EQ(link.sender->counters().flipped, 2000u);
}

TEST(Faulty, DelaysByItsClock) {
  Faulted link({.delay_ns = 1000});
  link.send(1);
  link.now_ns = 999;
  link.sender->tx_done();
  EXPECT_TRUE(link.came().empty());
  EXPECT_EQ(link.sender->tx_done(), 1u);  // the payload was copied
  link.now_ns = 1000;
  link.sender->tx_done();
  EXPECT_EQ(link.numbers(), std::vector<uint32_t>{1});
}

TEST(Faulty, WhatItKeepsDoesNotChangeWithTheSendersMemory) {
  Faulted link({.delay_ns = 10});
  const auto sent = bytes_of(link.packet(3));
  link.send(3);
  std::fill(link.data.begin(), link.data.end(), uint8_t{0});
  link.now_ns = 10;
  link.sender->tx_done();
  const auto came = link.came();
  ASSERT_EQ(came.size(), 1u);
  EXPECT_EQ(came[0], sent);
}

TEST(Faulty, JitterReorders) {
  Faulted link({.seed = 5, .delay_ns = 100, .jitter_ns = 1000});
  for (uint32_t i = 0; i < 50; ++i) {
    link.now_ns += 10;
    link.send(i);
  }
  link.now_ns += 2000;
  link.sender->tx_done();
  auto numbers = link.numbers();
  EXPECT_EQ(numbers.size(), 50u);
  EXPECT_FALSE(std::is_sorted(numbers.begin(), numbers.end()));
}

}  // namespace
}  // namespace harp

#include "harp_plugin/port/packet_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "harp_plugin/port/done_counter.h"
#include "harp_plugin/port/frame_pool.h"
#include "labels.h"

LABEL(alone, "DoneCounter.*:FramePool.*");

namespace harp {
namespace {

TEST(DoneCounter, CountsOnlyWhatIsDoneFromTheStart) {
  DoneCounter counter;
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(counter.add(), i);
  counter.done(2);
  counter.done(1);
  EXPECT_EQ(counter.count(), 0u);
  counter.done(0);
  EXPECT_EQ(counter.count(), 3u);
  counter.add_done();
  EXPECT_EQ(counter.count(), 3u);
  counter.done(3);
  EXPECT_EQ(counter.count(), 5u);
}

TEST(DoneCounter, AgreesWithAPlainOneInAnyOrder) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    DoneCounter counter;
    std::vector<bool> plain;
    std::vector<uint64_t> open;
    for (int step = 0; step < 20'000; ++step) {
      const int dice = static_cast<int>(random() % 10);
      if (dice < 5 + (step / 5000 % 2 ? 0 : 1)) {  // grows, and shrinks
        open.push_back(counter.add());
        plain.push_back(false);
      } else if (dice < 7) {
        counter.add_done();
        plain.push_back(true);
      } else if (!open.empty()) {
        std::swap(open[random() % open.size()], open.back());
        plain[open.back()] = true;
        counter.done(open.back());
        open.pop_back();
      }
    }
    const auto first = std::find(plain.begin(), plain.end(), false);
    EXPECT_EQ(counter.count(), static_cast<uint64_t>(first - plain.begin()));
    EXPECT_EQ(counter.added(), plain.size());
  }
}

TEST(FramePool, OneThatGivesNothingBackLeavesFramesToOthers) {
  FramePool pool(64, 128);
  size_t greedy = 0;
  while (pool.take(greedy)) ++greedy;
  EXPECT_EQ(greedy, 32u);
  size_t other = 0;
  while (pool.take(other)) ++other;
  EXPECT_EQ(other, 16u);
}

// Sleeps in the most naive way, so that nothing but the ring's protocol can wake it: a lost wake-up stays a sleep.
TEST(PacketRing, NoWakeUpIsLost) {
  constexpr uint32_t kPackets = 50'000;
  const auto shared = std::make_unique<PacketRing>();
  std::atomic<uint32_t> rung{0};
  std::atomic<bool> failed{false};
  std::thread receiving([&] {
    PacketReceiver receiver(shared.get());
    std::array<uint32_t, 8> slots;
    for (uint32_t next = 0; next < kPackets && !failed;) {
      if (receiver.arm()) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (rung.exchange(0) == 0) {
          std::this_thread::yield();
          if (std::chrono::steady_clock::now() > deadline) {
            failed = true;
            return;
          }
        }
      }
      receiver.disarm();
      const size_t count = receiver.take(slots);
      for (size_t i = 0; i < count; ++i) {
        const PacketSlot* slot = receiver.read(slots[i]);
        if (!slot || slot->header.offset != next++) failed = true;
        receiver.give_back(slots[i]);
      }
      receiver.flush();
    }
  });
  PacketSender sender(shared.get());
  for (uint32_t next = 0; next < kPackets && !failed;) {
    sender.collect([](const Sent&) {});
    if (!sender.has_room(true)) {
      std::this_thread::yield();
      continue;
    }
    PacketSlot& slot = sender.put({});
    slot.header = {.offset = next++, .region = kInline, .payload_bytes = 0, .head_bytes = kHeaderBytes};
    if (sender.publish()) rung = 1;
    if (next % 3 == 0) std::this_thread::yield();
  }
  receiving.join();
  EXPECT_FALSE(failed);
}

TEST(PacketRing, ASlotIsNotFilledAgainBeforeItIsReturned) {
  const auto shared = std::make_unique<PacketRing>();
  PacketSender sender(shared.get());
  PacketReceiver receiver(shared.get());
  std::array<uint32_t, 1> kept;
  sender.put({}).header = {.offset = 42, .region = kInline, .payload_bytes = 0, .head_bytes = kHeaderBytes};
  sender.publish();
  ASSERT_EQ(receiver.take(kept), 1u);
  std::array<uint32_t, 64> slots;
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 50; ++i) sender.put({}).header = {};
    sender.publish();
    const size_t count = receiver.take(slots);
    ASSERT_EQ(count, 50u);
    for (size_t i = 0; i < count; ++i) {
      EXPECT_NE(slots[i], kept[0]);
      receiver.give_back(slots[i]);
    }
    receiver.flush();
    sender.collect([](const Sent&) {});
  }
  EXPECT_EQ(receiver.read(kept[0])->header.offset, 42u);
}

TEST(PacketRing, LentPayloadsLeaveSlotsForAcknowledgements) {
  const auto shared = std::make_unique<PacketRing>();
  PacketSender sender(shared.get());
  while (sender.has_room(true)) sender.put({});
  EXPECT_TRUE(sender.has_room(false));
  EXPECT_EQ(sender.out(), kRingSlots - kReservedSlots);
}

}  // namespace
}  // namespace harp

// What every Link must do, whatever carries it. A transport adds a row:
//   struct ShmPair { ShmPair(); Link& a(); Link& b(); };   // the two ends of one link
//   INSTANTIATE_TYPED_TEST_SUITE_P(Shm, LinkContract, ShmPair);
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "net/link.h"

namespace lightcc {

template <class Pair>
class LinkContract : public testing::Test {
 protected:
  // Asks until there is an answer; nullptr after the deadline.
  template <class Ask>
  static auto wait_for(Ask ask) -> decltype(ask()) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (;;) {
      if (auto* answer = ask()) return answer;
      if (std::chrono::steady_clock::now() > deadline) return nullptr;
      std::this_thread::yield();
    }
  }
  static bool holds_within(std::function<bool()> condition) {
    static constexpr bool kHolds = true;
    return wait_for([&] { return condition() ? &kHolds : nullptr; }) != nullptr;
  }
  static std::byte value(size_t record, size_t i) { return std::byte((record * 31 + i * 7 + 1) & 0xff); }
  static void fill(std::byte* to, size_t record, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = value(record, i);
  }
  static bool holds(const std::byte* from, size_t record, size_t n) {
    for (size_t i = 0; i < n; ++i)
      if (from[i] != value(record, i)) return false;
    return true;
  }
  // Both wait; false after the deadline or when the bytes are wrong.
  static bool send(Link& link, size_t record, size_t n) {
    std::byte* to = wait_for([&] { return link.reserve(n); });
    if (!to) return false;
    fill(to, record, n);
    link.commit(n);
    return true;
  }
  static bool receive(Link& link, size_t record, size_t n) {
    const std::byte* from = wait_for([&] { return link.peek(n); });
    if (!from || !holds(from, record, n)) return false;
    link.consume(n);
    return true;
  }
  // Sends records of n bytes until there is no room; returns how many, or `most` if that never happened.
  static size_t flood(Link& link, size_t n, size_t most) {
    size_t sent = 0;
    for (; sent < most; ++sent) {
      std::byte* to = link.reserve(n);
      if (!to) break;
      fill(to, sent, n);
      link.commit(n);
    }
    return sent;
  }
  static size_t size_in(const Link& link, size_t record) {  // odd sizes, 1 among them, the largest now and then
    return record % 7 == 6 ? link.record_bytes() : std::min(link.record_bytes(), record * 13 % 97 + 1);
  }
  static constexpr size_t kMost = 4096;
};
TYPED_TEST_SUITE_P(LinkContract);

TYPED_TEST_P(LinkContract, RecordsArriveInOrderBothWays) {
  TypeParam pair;
  for (size_t record = 0; record < 100; ++record) {
    const size_t n = this->size_in(pair.a(), record);
    ASSERT_TRUE(this->send(pair.a(), record, n) && this->send(pair.b(), record + 5, n)) << record;
    ASSERT_TRUE(this->receive(pair.b(), record, n) && this->receive(pair.a(), record + 5, n)) << record;
  }
}

TYPED_TEST_P(LinkContract, NothingArrivesBeforeCommit) {
  TypeParam pair;
  EXPECT_EQ(pair.b().peek(8), nullptr);
  std::byte* to = this->wait_for([&] { return pair.a().reserve(8); });
  ASSERT_NE(to, nullptr);
  this->fill(to, 1, 8);
  EXPECT_EQ(pair.b().peek(8), nullptr);
  pair.a().commit(8);
  EXPECT_TRUE(this->receive(pair.b(), 1, 8));
  EXPECT_EQ(pair.b().peek(8), nullptr) << "the record came twice";
}

TYPED_TEST_P(LinkContract, ARecordStaysUntilConsumed) {
  TypeParam pair;
  ASSERT_TRUE(this->send(pair.a(), 1, 33));
  const std::byte* first = this->wait_for([&] { return pair.b().peek(33); });
  ASSERT_NE(first, nullptr);
  std::vector<std::byte> kept(33);
  this->flood(pair.a(), 33, 3);
  EXPECT_EQ(pair.b().peek(33), first);
  EXPECT_TRUE(this->holds(first, 1, 33));
  pair.b().consume(33);
}

TYPED_TEST_P(LinkContract, AFullLinkHasNoRoomAndLosesNothing) {
  for (size_t n : {size_t(1), size_t(100), size_t(1) << 40}) {
    TypeParam pair;
    n = std::min(n, pair.a().record_bytes());
    for (int again = 0; again < 3; ++again) {
      const size_t most = n < 1000 ? (size_t(64) << 20) / n : this->kMost;
      const size_t sent = this->flood(pair.a(), n, most);
      ASSERT_LT(sent, most) << "never full of records of " << n;
      EXPECT_TRUE(this->send(pair.b(), 7, n)) << "the other direction is full too";
      EXPECT_TRUE(this->receive(pair.a(), 7, n));
      for (size_t record = 0; record < sent; ++record)
        ASSERT_TRUE(this->receive(pair.b(), record, n)) << record << " of " << sent;
      EXPECT_EQ(pair.b().peek(n), nullptr);
      ASSERT_TRUE(this->send(pair.a(), 1, n)) << "no room although all is consumed";
      ASSERT_TRUE(this->receive(pair.b(), 1, n));
    }
  }
}

TYPED_TEST_P(LinkContract, MemoryIsAlignedAndTheLargestRecordFits) {
  TypeParam pair;
  const size_t largest = pair.a().record_bytes();
  EXPECT_EQ(largest, pair.b().record_bytes());
  for (size_t n : {largest, size_t(1), std::min<size_t>(largest, 63), largest}) {
    std::byte* to = this->wait_for([&] { return pair.a().reserve(n); });
    ASSERT_NE(to, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(to) % kLine, 0u);
    this->fill(to, n, n);
    pair.a().commit(n);
    EXPECT_TRUE(this->receive(pair.b(), n, n));
  }
}

TYPED_TEST_P(LinkContract, TwoThreadsStreamBothWays) {
  TypeParam pair;
  constexpr size_t kRecords = 500;
  const auto run = [&](Link& link, size_t mine, size_t theirs) {
    size_t sent = 0, received = 0;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while ((sent < kRecords || received < kRecords) && std::chrono::steady_clock::now() < deadline) {
      if (sent < kRecords) {
        const size_t n = this->size_in(link, sent);
        if (std::byte* to = link.reserve(n)) {
          this->fill(to, sent++ + mine, n);
          link.commit(n);
          continue;
        }
      }
      if (received < kRecords) {
        const size_t n = this->size_in(link, received);
        if (const std::byte* from = link.peek(n)) {
          if (!this->holds(from, received + theirs, n)) return false;
          ++received;
          link.consume(n);
          continue;
        }
      }
      std::this_thread::yield();
    }
    return sent == kRecords && received == kRecords;
  };
  bool b_is_right = false;
  std::thread b([&] { b_is_right = run(pair.b(), 1000, 0); });
  EXPECT_TRUE(run(pair.a(), 0, 1000));
  b.join();
  EXPECT_TRUE(b_is_right);
}

// What follows is for links that can carry bulk; others pass by having none.

TYPED_TEST_P(LinkContract, BulkArrivesWhereItIsPostedHoweverItWasSent) {
  TypeParam pair;
  BulkLink *const a = pair.a().bulk(), *const b = pair.b().bulk();
  ASSERT_EQ(a == nullptr, b == nullptr);
  if (!a) return;
  constexpr size_t kRecords = 60;
  std::vector<std::byte> sent[kRecords], received[kRecords];
  for (size_t record = 0; record < kRecords; ++record) {
    const size_t n = this->size_in(pair.a(), record);
    sent[record].resize(n);
    received[record].resize(n);
    this->fill(sent[record].data(), record, n);
    const bool in_place = record % 3 != 0, posted = record % 4 != 0, posted_first = record % 8 > 4;
    if (posted && posted_first) b->post(received[record].data(), n);
    if (in_place) {
      ASSERT_TRUE(this->holds_within([&] { return a->send_from(sent[record].data(), n); }));
    } else {
      ASSERT_TRUE(this->send(pair.a(), record, n));
    }
    if (posted && !posted_first) b->post(received[record].data(), n);
    const std::byte* from = this->wait_for([&] { return pair.b().peek(n); });
    ASSERT_NE(from, nullptr) << record;
    ASSERT_EQ(from == received[record].data(), posted) << record;
    ASSERT_TRUE(this->holds(from, record, n)) << record;
    pair.b().consume(n);
  }
  a->release();
}

TYPED_TEST_P(LinkContract, PostsStandForTheNextRecordsInTheirOrder) {
  TypeParam pair;
  BulkLink* const b = pair.b().bulk();
  if (!b) return;
  constexpr size_t kRecords = 40, kAhead = 5;
  std::vector<std::vector<std::byte>> memory;
  for (size_t record = 0; record < kRecords; ++record) memory.emplace_back(this->size_in(pair.a(), record));
  size_t posted = 0;
  for (size_t record = 0; record < kRecords; ++record) {
    for (; posted < std::min(kRecords, record + kAhead); ++posted)
      b->post(memory[posted].data(), memory[posted].size());
    ASSERT_TRUE(this->send(pair.a(), record, memory[record].size()));
    ASSERT_TRUE(this->receive(pair.b(), record, memory[record].size())) << record;
    ASSERT_TRUE(this->holds(memory[record].data(), record, memory[record].size())) << record;
  }
}

TYPED_TEST_P(LinkContract, AfterReleaseNeitherEndUsesTheCallersMemory) {
  TypeParam pair;
  BulkLink *const a = pair.a().bulk(), *const b = pair.b().bulk();
  if (!a) return;
  const size_t n = std::min<size_t>(pair.a().record_bytes(), 1000);
  for (size_t round = 0; round < 20; ++round) {
    std::vector<std::byte> sent(n), posted(n, std::byte(0x55));
    b->post(posted.data(), n);
    this->fill(sent.data(), round, n);
    ASSERT_TRUE(this->holds_within([&] { return a->send_from(sent.data(), n); }));
    a->release();
    std::fill(sent.begin(), sent.end(), std::byte(0xaa));
    if (round % 2 == 0) {
      b->release();
      std::fill(posted.begin(), posted.end(), std::byte(0x55));
    }
    const std::byte* from = this->wait_for([&] { return pair.b().peek(n); });
    ASSERT_NE(from, nullptr);
    ASSERT_TRUE(this->holds(from, round, n)) << "round " << round;
    ASSERT_EQ(from == posted.data(), round % 2 == 1);
    pair.b().consume(n);
    if (round % 2 == 0) {
      ASSERT_EQ(std::count(posted.begin(), posted.end(), std::byte(0x55)), int64_t(n)) << "it was written";
    }
  }
}

TYPED_TEST_P(LinkContract, WhatIsLentAfterTheMarkAndWhatIsPostedStayInUse) {
  TypeParam pair;
  BulkLink *const a = pair.a().bulk(), *const b = pair.b().bulk();
  if (!a) return;
  const size_t n = std::min<size_t>(pair.a().record_bytes(), 1000);
  for (size_t round = 0; round < 20; ++round) {
    std::vector<std::byte> first(n), second(n), posted(n, std::byte(0x55));
    this->fill(first.data(), 2 * round, n);
    this->fill(second.data(), 2 * round + 1, n);
    ASSERT_TRUE(this->holds_within([&] { return a->send_from(first.data(), n); }));
    const uint64_t mark = a->lent();
    bool is_lent = false;  // not where there is room for one record alone
    for (int tries = 0; tries < 100 && !is_lent; ++tries) is_lent = a->send_from(second.data(), n);
    a->release_lent(mark);
    std::fill(first.begin(), first.end(), std::byte(0xaa));
    ASSERT_TRUE(this->receive(pair.b(), 2 * round, n));
    if (!is_lent) {
      ASSERT_TRUE(this->holds_within([&] { return a->send_from(second.data(), n); }));
    }
    b->post(posted.data(), n);
    b->release_lent(b->lent());
    ASSERT_TRUE(this->receive(pair.b(), 2 * round + 1, n));
    EXPECT_TRUE(this->holds(posted.data(), 2 * round + 1, n));
    a->release_lent(a->lent());
  }
}

// As in an all-reduce: both send what they have and receive the answer in the same memory.
TYPED_TEST_P(LinkContract, TheAnswerMayArriveWhereTheQuestionStillLies) {
  TypeParam pair;
  if (!pair.a().bulk()) return;
  const size_t n = pair.a().record_bytes();
  constexpr size_t kRecords = 100;
  bool b_is_right = false;
  std::thread b([&] {
    std::vector<std::byte> memory(n);
    b_is_right = true;
    for (size_t record = 0; record < kRecords && b_is_right; ++record) {
      pair.b().bulk()->post(memory.data(), n);
      b_is_right = this->receive(pair.b(), record, n);
      this->fill(memory.data(), record + 1000, n);
      b_is_right = b_is_right && this->holds_within([&] { return pair.b().bulk()->send_from(memory.data(), n); });
      pair.b().bulk()->release();
    }
  });
  std::vector<std::byte> memory(n);
  for (size_t record = 0; record < kRecords; ++record) {
    this->fill(memory.data(), record, n);
    EXPECT_TRUE(this->holds_within([&] { return pair.a().bulk()->send_from(memory.data(), n); }));
    pair.a().bulk()->post(memory.data(), n);
    ASSERT_NE(this->wait_for([&] { return pair.a().peek(n); }), nullptr) << record;
    pair.a().consume(n);
    EXPECT_TRUE(this->holds(memory.data(), record + 1000, n)) << record;
  }
  b.join();
  EXPECT_TRUE(b_is_right);
}

REGISTER_TYPED_TEST_SUITE_P(LinkContract, RecordsArriveInOrderBothWays, NothingArrivesBeforeCommit,
                            ARecordStaysUntilConsumed, AFullLinkHasNoRoomAndLosesNothing,
                            MemoryIsAlignedAndTheLargestRecordFits, TwoThreadsStreamBothWays,
                            BulkArrivesWhereItIsPostedHoweverItWasSent, PostsStandForTheNextRecordsInTheirOrder,
                            AfterReleaseNeitherEndUsesTheCallersMemory,
                            WhatIsLentAfterTheMarkAndWhatIsPostedStayInUse,
                            TheAnswerMayArriveWhereTheQuestionStillLies);

}  // namespace lightcc

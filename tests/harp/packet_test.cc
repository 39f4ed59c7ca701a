// The codec: bit layout, round trips, and that nothing wrong gets through.
#include "harp_plugin/core/packet.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using Bytes = std::vector<uint8_t>;
constexpr uint64_t k32 = uint64_t(1) << 32;

Header some_header() {
  return {.type = Type::grant,
          .flags = kTagged | kWithAck,
          .conn = 0x11223344,
          .number = 0x55667788,
          .message = 0x99aa,
          .offset = 0xbbccddee,
          .total = 0x01020304,
          .path = 0x0506};
}

Bytes header_bytes(const Header& header) {
  Bytes bytes(kHeaderBytes);
  write_header(header, bytes.data());
  return bytes;
}

AckBody some_ack(std::initializer_list<Range> ranges) {
  AckBody ack;
  ack.delay_ns = 7000;
  for (const Range& range : ranges) ack.ranges[ack.count++] = range;
  return ack;
}

template <typename Body>
Bytes body_bytes(size_t (*write)(const Body&, uint8_t*), const Body& body) {
  Bytes bytes(2 * kMostControlBytes, 0xee);
  bytes.resize(write(body, bytes.data()));
  return bytes;
}

void put32(Bytes& bytes, size_t at, uint32_t value) { std::memcpy(&bytes.at(at + 3) - 3, &value, 4); }

// Every shorter body, and one with a byte too much, is refused.
template <typename Read>
void expect_exact_length(const Bytes& bytes, Read read) {
  EXPECT_TRUE(read(std::span(bytes)));
  for (size_t n = 0; n < bytes.size(); ++n) {
    const Bytes part(bytes.begin(), bytes.begin() + n);  // its own memory: ASan sees a read past the end
    EXPECT_FALSE(read(std::span(part))) << n << " of " << bytes.size() << " bytes";
  }
  Bytes more = bytes;
  more.push_back(0);
  EXPECT_FALSE(read(std::span(more)));
}

TEST(Packet, TheHeaderHasItsDocumentedLayout) {
  const Bytes expected = {0x12, 0x09, 0x44, 0x33, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55, 0xaa,
                          0x99, 0xee, 0xdd, 0xcc, 0xbb, 0x04, 0x03, 0x02, 0x01, 0x06, 0x05};
  EXPECT_EQ(header_bytes(some_header()), expected);
}

TEST(Packet, AHeaderReadsAsItWasWritten) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const Header header{.type = static_cast<Type>(random() % 8),
                        .flags = static_cast<uint8_t>(random()),
                        .conn = static_cast<uint32_t>(random()),
                        .number = static_cast<uint32_t>(random()),
                        .message = static_cast<uint16_t>(random()),
                        .offset = static_cast<uint32_t>(random()),
                        .total = static_cast<uint32_t>(random()),
                        .path = static_cast<uint16_t>(random())};
    EXPECT_EQ(read_header(header_bytes(header)), header);
  }
}

TEST(Packet, ABrokenHeaderIsRefused) {
  const Bytes good = header_bytes(some_header());
  for (size_t n = 0; n < kHeaderBytes; ++n) {
    const Bytes part(good.begin(), good.begin() + n);
    EXPECT_FALSE(read_header(part)) << n;
  }
  for (unsigned first = 0; first < 256; ++first) {
    Bytes bytes = good;
    bytes[0] = static_cast<uint8_t>(first);
    const bool known = first >> 4 == kVersion && (first & 15) <= 7;
    EXPECT_EQ(read_header(bytes).has_value(), known) << first;
  }
}

TEST(Packet, AnAckReadsAsItWasWritten) {
  const AckBody ack = some_ack({{k32 + 5, k32 + 9}, {k32 - 3, k32 + 3}, {k32 - 7, k32 - 7}});
  const Bytes bytes = body_bytes(write_ack, ack);
  const Bytes expected = {7, 0, 0, 0, 3, 9, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0};
  EXPECT_EQ(bytes, expected);
  for (const uint64_t next : {k32 + 10, k32 - 100, k32 + 1000}) {
    const auto read = read_ack(bytes, next);
    ASSERT_TRUE(read);
    EXPECT_EQ(read->delay_ns, 7000u);
    ASSERT_EQ(read->count, 3u);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(read->ranges[i], ack.ranges[i]) << i;
  }
  expect_exact_length(bytes, [](auto part) { return read_ack(part, k32 + 10).has_value(); });
}

TEST(Packet, AckOfSixteenRangesAndALongDelay) {
  AckBody ack;
  ack.delay_ns = UINT64_MAX;
  for (uint64_t i = 0; i < kMostRanges; ++i) ack.ranges[ack.count++] = {100 - 3 * i, 101 - 3 * i};
  const Bytes bytes = body_bytes(write_ack, ack);
  const auto read = read_ack(bytes, 102);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->delay_ns, UINT32_MAX * 1000ull);
  EXPECT_EQ(read->ranges, ack.ranges);
  Bytes more = bytes;
  more[4] = kMostRanges + 1;
  more.resize(more.size() + 8, 1);
  EXPECT_FALSE(read_ack(more, 102));
}

TEST(Packet, AnAckThatContradictsItselfIsRefused) {
  const auto refused = [](const Bytes& bytes, uint64_t expected) { return !read_ack(bytes, expected); };
  const Bytes good = body_bytes(write_ack, some_ack({{10, 12}, {3, 5}}));  // gap at 13, second length at 17
  ASSERT_FALSE(refused(good, 13));
  Bytes bytes = good;
  bytes[4] = 0;
  EXPECT_TRUE(refused(bytes, 13)) << "no range";
  bytes.resize(5);
  EXPECT_TRUE(refused(bytes, 13)) << "no range, none there";
  for (const size_t length_at : {9u, 17u}) {
    bytes = good;
    put32(bytes, length_at, 0);
    EXPECT_TRUE(refused(bytes, 13)) << "an empty range at " << length_at;
  }
  bytes = good;
  put32(bytes, 13, 0);
  EXPECT_TRUE(refused(bytes, 13)) << "no gap";
  bytes = good;
  put32(bytes, 17, 6);  // 0..5
  EXPECT_FALSE(refused(bytes, 13));
  put32(bytes, 17, 7);
  EXPECT_TRUE(refused(bytes, 13)) << "the second range reaches below 0";
  bytes = good;
  put32(bytes, 9, 14);
  EXPECT_TRUE(refused(bytes, 13)) << "the first range reaches below 0";
  for (const uint32_t gap : {9u, 10u, 11u, UINT32_MAX}) {  // 9 leaves number 0, 10 leaves none
    bytes = good;
    put32(bytes, 13, gap);
    put32(bytes, 17, 1);
    EXPECT_EQ(refused(bytes, 13), gap > 9) << "gap " << gap;
  }
  bytes = good;
  put32(bytes, 9, UINT32_MAX);
  EXPECT_TRUE(refused(bytes, 13));
  put32(bytes, 17, UINT32_MAX);
  EXPECT_TRUE(refused(bytes, 13));
}

TEST(Packet, AGrantReadsAsItWasWritten) {
  GrantBody grant;
  grant.first = 0xfffe;
  grant.count = kMostGrants;
  for (uint32_t i = 0; i < kMostGrants; ++i) grant.capacity[i] = i * 0x01010101;
  Bytes bytes = body_bytes(write_grant, grant);
  ASSERT_EQ(bytes.size(), 4 + 4 * kMostGrants);
  for (size_t n = 0; n < bytes.size(); ++n) {
    const Bytes part(bytes.begin(), bytes.begin() + n);
    size_t used = 0;
    EXPECT_FALSE(read_grant(part, &used)) << n;
  }
  bytes.resize(bytes.size() + 5, 9);  // an ACK may follow
  size_t used = 0;
  const auto read = read_grant(bytes, &used);
  ASSERT_TRUE(read);
  EXPECT_EQ(used, 4 + 4 * kMostGrants);
  EXPECT_EQ(read->first, 0xfffe);
  EXPECT_EQ(read->count, kMostGrants);
  EXPECT_EQ(read->capacity, grant.capacity);
  bytes.resize(1000, 1);
  for (const size_t count : {size_t(0), kMostGrants + 1, size_t(255)}) {
    bytes[2] = static_cast<uint8_t>(count);
    EXPECT_FALSE(read_grant(bytes, &used)) << count;
  }
}

TEST(Packet, LargestGrantWithLargestAckFitsAControlPacket) {
  GrantBody grant;
  grant.count = kMostGrants;
  AckBody ack;
  for (uint64_t i = 0; i < kMostRanges; ++i) ack.ranges[ack.count++] = {100 - 2 * i, 100 - 2 * i};
  const size_t bytes = body_bytes(write_grant, grant).size() + body_bytes(write_ack, ack).size();
  EXPECT_LE(kHeaderBytes + bytes, kMostControlBytes);
}

TEST(Packet, ACreditReadsAsItWasWritten) {
  Bytes bytes = body_bytes(write_credit, CreditBody{0x01020304});
  EXPECT_EQ(bytes, (Bytes{4, 3, 2, 1}));
  size_t used = 0;
  for (size_t n = 0; n < 4; ++n) EXPECT_FALSE(read_credit(Bytes(bytes.begin(), bytes.begin() + n), &used));
  bytes.push_back(5);
  const auto read = read_credit(bytes, &used);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->limit, 0x01020304u);
  EXPECT_EQ(used, 4u);
}

OpenBody some_open() {
  OpenBody open;
  for (size_t i = 0; i < open.nonce.size(); ++i) open.nonce[i] = static_cast<uint8_t>(i + 1);
  open.conn = 0xa1a2a3a4;
  open.first_number = k32 - 10;
  open.payload = 1440;
  open.receive_packets = 128;
  open.eager_bytes = 8192;
  open.eager_messages = 16;
  open.stream_frames = 256;
  open.mode = Mode::stream;
  open.paths = 8;
  return open;
}

TEST(Packet, AnOpenReadsAsItWasWritten) {
  const Bytes bytes = body_bytes(write_open, some_open());
  EXPECT_EQ(bytes.size(), 50u);
  EXPECT_EQ(read_open(bytes), some_open());
  expect_exact_length(bytes, [](auto part) { return read_open(part).has_value(); });
}

TEST(Packet, OpenAtItsBounds) {
  const auto accepted = [](auto change) {
    OpenBody open = some_open();
    change(open);
    return read_open(body_bytes(write_open, open)).has_value();
  };
  EXPECT_FALSE(accepted([](OpenBody& open) { open.conn = 0; }));
  for (const uint32_t payload : {16u, 65520u}) EXPECT_TRUE(accepted([=](OpenBody& open) { open.payload = payload; }));
  for (const uint32_t payload : {0u, 1u, 15u, 17u, 1441u, 65519u, 65536u, 0xfffffff0u}) {
    EXPECT_FALSE(accepted([=](OpenBody& open) { open.payload = payload; })) << payload;
  }
  EXPECT_FALSE(accepted([](OpenBody& open) { open.receive_packets = 0; }));
  EXPECT_TRUE(accepted([](OpenBody& open) { open.first_number = UINT64_MAX >> 2; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.first_number = uint64_t(1) << 62; }));
  EXPECT_TRUE(accepted([](OpenBody& open) { open.eager_messages = 1024; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.eager_messages = 1025; }));
  EXPECT_TRUE(accepted([](OpenBody& open) { open.stream_frames = 16384; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.stream_frames = 16385; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.stream_frames = 0; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.mode = static_cast<Mode>(2); }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.paths = 0; }));
  EXPECT_FALSE(accepted([](OpenBody& open) { open.paths = 9; }));
}

TEST(Packet, ACloseReadsAsItWasWritten) {
  Bytes bytes = body_bytes(write_close, CloseBody{CloseReason::failed});
  EXPECT_EQ(bytes, Bytes{1});
  EXPECT_EQ(bytes.size(), kCloseBytes);
  expect_exact_length(bytes, [](auto part) { return read_close(part).has_value(); });
  const auto read = read_close(bytes);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->reason, CloseReason::failed);
  bytes[0] = 2;
  EXPECT_FALSE(read_close(bytes));
}

TEST(Packet, ExpandFindsTheNearestNumber) {
  for (const uint64_t base : {uint64_t(0), uint64_t(1) << 15, uint64_t(1) << 16, uint64_t(1) << 31, k32, 3 * k32}) {
    for (int64_t near = -3; near <= 3; ++near) {
      const uint64_t expected = base + static_cast<uint64_t>(near);
      if (near < 0 && base == 0) continue;
      for (const int64_t distance : {-32000, -5, -1, 0, 1, 5, 32000}) {
        const uint64_t number = expected + static_cast<uint64_t>(distance);
        if (distance < 0 && number > expected) continue;  // below 0
        EXPECT_EQ(expand(static_cast<uint32_t>(number), expected), number) << expected;
        EXPECT_EQ(expand(static_cast<uint16_t>(number), expected), number) << expected;
      }
    }
  }
  EXPECT_EQ(expand(uint32_t(0xfffffffe), k32 + 2), k32 - 2);
  EXPECT_EQ(expand(uint32_t(1), k32 - 2), k32 + 1);
  EXPECT_EQ(expand(uint32_t(0xffffffff), 0), k32 - 1) << "no number is below 0";
  EXPECT_EQ(expand(uint16_t(0xffff), 0), 0xffffu);
}

// Any bytes: refused or, written again, the same ones.
TEST(Packet, WhatIsReadIsWhatIsWritten) {
  std::mt19937_64 random(2);
  int accepted = 0;
  for (int i = 0; i < 200000; ++i) {
    Bytes bytes(random() % 80);
    for (auto& byte : bytes) byte = random() % 4 != 0 ? random() % 3 : random() % 256;
    if (bytes.size() > 8 && i % 2 == 0) {  // of a length that is right for its count
      bytes[4] = static_cast<uint8_t>(1 + random() % 9);
      bytes.resize(5 + 8 * bytes[4], 1);
    }
    const uint64_t expected = random() % 3 * k32 + random() % 100;
    if (const auto ack = read_ack(bytes, expected)) {
      EXPECT_EQ(body_bytes(write_ack, *ack), bytes);
      for (uint32_t r = 0; r < ack->count; ++r) {
        EXPECT_LE(ack->ranges[r].first, ack->ranges[r].last);
        EXPECT_TRUE(r == 0 || ack->ranges[r].last + 1 < ack->ranges[r - 1].first);
      }
      ++accepted;
    }
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace harp

// Both ends of a TCP link's rings, connected by a wire that the test cuts where it likes.
#include "net/tcp/tcp_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>

#include "base/error.h"
#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr size_t kCapacity = 4096;

// What one stream has to send, at most `most` bytes of it.
std::string take(TcpStream& stream, size_t most) {
  std::string bytes;
  std::array<iovec, TcpStream::kPieces> pieces;
  while (bytes.size() < most) {
    const size_t count = stream.to_send(pieces);
    if (count == 0) break;
    size_t sent = 0;
    for (size_t i = 0; i < count && bytes.size() < most; ++i) {
      const size_t n = std::min(pieces[i].iov_len, most - bytes.size());
      bytes.append(static_cast<const char*>(pieces[i].iov_base), n);
      sent += n;
    }
    stream.sent(sent);
  }
  return bytes;
}
void carry(TcpStream& from, TcpStream& to, size_t most = SIZE_MAX) { to.feed(take(from, most)); }

std::byte value(size_t record, size_t i) { return std::byte((record * 131 + i * 7 + 1) & 0xff); }
bool put(TcpStream& stream, size_t record, size_t n) {
  std::byte* to = stream.reserve(n);
  if (!to) return false;
  for (size_t i = 0; i < n; ++i) to[i] = value(record, i);
  stream.commit(n);
  return true;
}
bool get(TcpStream& stream, size_t record, size_t n) {
  const std::byte* from = stream.peek(n);
  if (!from) return false;
  for (size_t i = 0; i < n; ++i)
    if (from[i] != value(record, i)) return ADD_FAILURE() << "record " << record << ", byte " << i, false;
  stream.consume(n);
  return true;
}

TEST(TcpStream, ARecordArrivesWhenItsLastByteHas) {
  TcpStream a(kCapacity), b(kCapacity);
  ASSERT_TRUE(put(a, 1, 100));
  const std::string bytes = take(a, SIZE_MAX);
  EXPECT_EQ(bytes.size(), sizeof(FrameHeader) + 128) << "padded to whole lines";
  for (size_t i = 0; i + 1 < bytes.size(); ++i) {
    b.feed(bytes.substr(i, 1));
    ASSERT_EQ(b.peek(100), nullptr) << i;
  }
  b.feed(bytes.substr(bytes.size() - 1));
  EXPECT_TRUE(get(b, 1, 100));
  EXPECT_EQ(take(a, SIZE_MAX), "") << "it was sent twice";
}

TEST(TcpStream, ItIsFullUntilTheOtherEndHasConsumedAndSaidSo) {
  TcpStream a(kCapacity), b(kCapacity);
  size_t records = 0;
  while (put(a, records, 64)) ++records;
  EXPECT_EQ(records, kCapacity / 64);
  carry(a, b);
  EXPECT_FALSE(put(a, records, 64)) << "received is not consumed";
  for (size_t i = 0; i < records; ++i) ASSERT_TRUE(get(b, i, 64));
  EXPECT_FALSE(put(a, records, 64));
  carry(b, a);
  EXPECT_TRUE(put(a, records, 64));
}

TEST(TcpStream, AFewBytesConsumedAreNotWorthAFrame) {
  TcpStream a(kCapacity), b(kCapacity);
  ASSERT_TRUE(put(a, 1, 64));
  carry(a, b);
  ASSERT_TRUE(get(b, 1, 64));
  EXPECT_EQ(take(b, SIZE_MAX), "");
}

// Sizes of records, of what the wire takes at a time, and where it is cut are drawn at random.
TEST(TcpStream, NothingIsLostOrTwiceThereHoweverOftenTheConnectionBreaks) {
  for (uint64_t round = 0; round < 200; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937_64 random(test::run_seed() + round);
    TcpStream ends[2] = {TcpStream(kCapacity), TcpStream(kCapacity)};
    std::string wire[2];  // on its way from end i
    constexpr size_t kRecords = 200;
    std::vector<size_t> sizes;
    for (size_t i = 0; i < kRecords; ++i) sizes.push_back(1 + random() % (kCapacity / 4));
    size_t sent[2] = {0, 0}, got[2] = {0, 0};
    for (int turn = 0; (got[0] < kRecords || got[1] < kRecords) && turn < 1'000'000; ++turn) {
      const size_t me = random() % 2, other = 1 - me;
      switch (random() % 5) {
        case 0:
          if (sent[me] < kRecords && put(ends[me], sent[me] + me * 1000, sizes[sent[me]])) ++sent[me];
          break;
        case 1:
          if (got[me] < kRecords && get(ends[me], got[me] + other * 1000, sizes[got[me]])) ++got[me];
          break;
        case 2: wire[me] += take(ends[me], 1 + random() % 3000); break;
        case 3: {
          const size_t n = std::min<size_t>(wire[other].size(), random() % 3000);
          ends[me].feed(wire[other].substr(0, n));
          wire[other].erase(0, n);
          break;
        }
        default:
          if (random() % 20) break;
          const uint64_t received[2] = {ends[0].received(), ends[1].received()};
          for (size_t i : {0, 1}) ends[i].restart(received[1 - i]), wire[i].clear();
      }
    }
    ASSERT_EQ(got[0], kRecords);
    ASSERT_EQ(got[1], kRecords);
  }
}

// Two streams and the bytes between them, carried in random pieces; now and then the connection breaks.
struct Wires {
  explicit Wires(uint64_t seed) : random(seed) {}
  void turn() {
    const size_t me = random() % 2, other = 1 - me;
    switch (random() % 16) {
      case 0:
        for (size_t i : {0, 1}) received[i] = ends[i].received();
        for (size_t i : {0, 1}) ends[i].restart(received[1 - i]), wire[i].clear();
        ++breaks;
        break;
      case 1:
      case 2:
      case 3:
      case 4: wire[me] += take(ends[me], 1 + random() % 3000); break;
      default:
        const size_t n = std::min<size_t>(wire[other].size(), random() % 3000);
        ends[me].feed(wire[other].substr(0, n));
        wire[other].erase(0, n);
    }
  }
  std::mt19937_64 random;
  TcpStream ends[2] = {TcpStream(kCapacity), TcpStream(kCapacity)};
  std::string wire[2];  // on its way from end i
  uint64_t received[2] = {0, 0};
  int breaks = 0;
};

// Records from the ring and from vectors that are overwritten once they are released, into the ring and into vectors.
TEST(TcpStream, BulkIsRightHoweverOftenTheConnectionBreaks) {
  constexpr size_t kRecords = 60;
  int breaks = 0;
  for (uint64_t round = 0; breaks < 10'000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Wires wires(test::run_seed() + round);
    auto& random = wires.random;
    std::vector<size_t> sizes;
    for (size_t i = 0; i < kRecords; ++i) sizes.push_back(1 + random() % (kCapacity / 4));
    std::vector<std::byte> lent[2][kRecords], posted[2][kRecords];
    size_t sent[2] = {0, 0}, post[2] = {0, 0}, got[2] = {0, 0};
    struct Mark { uint64_t lent; size_t sent; } marks[2] = {};
    const auto put_bulk = [&](size_t me) {
      const size_t record = sent[me], n = sizes[record];
      auto& data = lent[me][record];
      for (size_t i = 0; i < n; ++i) data.push_back(value(record + me * 1000, i));
      if (wires.ends[me].send_from(data.data(), n)) ++sent[me];
      else data.clear();
    };
    const auto end_use = [&](size_t me, size_t before) {
      for (size_t record = 0; record < before; ++record) std::vector<std::byte>().swap(lent[me][record]);
    };
    for (int turn = 0; (got[0] < kRecords || got[1] < kRecords) && turn < 1'000'000; ++turn) {
      wires.turn();
      const size_t me = random() % 2, other = 1 - me;
      TcpStream& end = wires.ends[me];
      switch (random() % 8) {
        case 0:
          if (sent[me] < kRecords && put(end, sent[me] + me * 1000, sizes[sent[me]])) ++sent[me];
          break;
        case 1:
          if (sent[me] < kRecords) put_bulk(me);
          break;
        case 2:
          post[me] = std::max(post[me], got[me]);
          if (post[me] == kRecords || post[me] - got[me] == 3) break;
          posted[me][post[me]].resize(sizes[post[me]]);
          end.post(posted[me][post[me]].data(), sizes[post[me]]);
          ++post[me];
          break;
        case 3:
          if (random() % 16 == 1) marks[me] = {end.lent(), sent[me]};
          if (random() % 16 == 2) end.release_lent(marks[me].lent), end_use(me, marks[me].sent);
          if (random() % 16 != 0) break;
          end.release();
          end_use(me, sent[me]);
          for (size_t record = got[me]; record < post[me]; ++record) std::vector<std::byte>().swap(posted[me][record]);
          post[me] = got[me];
          break;
        default:
          if (got[me] < kRecords && get(end, got[me] + other * 1000, sizes[got[me]])) ++got[me];
      }
    }
    ASSERT_EQ(got[0], kRecords);
    ASSERT_EQ(got[1], kRecords);
    breaks += wires.breaks;
  }
}

TEST(TcpStream, WhatIsLentLeavesBeforeWhatIsPostedOverItArrives) {
  constexpr size_t kBytes = 1000;
  for (size_t crossing : {size_t(0), size_t(1), kBytes / 2, kBytes * 2}) {  // how much of it is on its way then
    TcpStream a(kCapacity), b(kCapacity);
    std::vector<std::byte> memory(kBytes);
    for (size_t i = 0; i < kBytes; ++i) memory[i] = value(1, i);
    ASSERT_TRUE(a.send_from(memory.data(), kBytes));
    a.post(memory.data(), kBytes);
    const std::string first = take(a, crossing);
    ASSERT_TRUE(put(b, 2, kBytes));  // no answer: b has seen nothing
    carry(b, a);
    ASSERT_EQ(a.peek(kBytes), memory.data());
    EXPECT_TRUE(get(a, 2, kBytes));
    b.feed(first);
    carry(a, b);
    EXPECT_TRUE(get(b, 1, kBytes)) << crossing;
  }
}

// One end sends what it has and receives the answer in the same memory, the other answers out of the memory in which
// it received, and in which the next question shall arrive.
TEST(TcpStream, AnAnswerMayArriveWhereTheQuestionLies) {
  constexpr size_t kTurns = 20, kParts = 3, kBytes = kCapacity / 4;
  int breaks = 0;
  for (uint64_t round = 0; breaks < 10'000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Wires wires(test::run_seed() + round);
    const size_t n = kBytes - wires.random() % 100;
    std::vector<std::byte> memory[2][kParts];
    size_t sent[2] = {0, 0}, got[2] = {0, 0};
    for (auto& ends : memory)
      for (auto& part : ends) part.resize(n);
    const auto fill = [&](size_t end, size_t record) {
      for (size_t i = 0; i < n; ++i) memory[end][record % kParts][i] = value(record + end * 1000, i);
    };
    for (size_t record = 0; record < kParts; ++record) wires.ends[1].post(memory[1][record].data(), n);
    for (int turn = 0; got[0] < kTurns * kParts && turn < 1'000'000; ++turn) {
      wires.turn();
      for (size_t me : {0, 1}) {
        const size_t may_send = me == 0 ? std::min(got[0] + kParts, kTurns * kParts) : got[1];
        if (sent[me] < may_send) {
          fill(me, sent[me]);
          std::byte* const data = memory[me][sent[me] % kParts].data();
          if (wires.ends[me].send_from(data, n)) {
            wires.ends[me].post(data, n);
            ++sent[me];
          }
        }
        if (me == 1 ? got[1] - sent[1] < kParts : got[0] < sent[0])
          if (get(wires.ends[me], got[me] + (1 - me) * 1000, n)) ++got[me];
      }
    }
    ASSERT_EQ(got[0], kTurns * kParts);
    breaks += wires.breaks;
  }
}

TEST(TcpStream, AFinComesLastAndIsAnswered) {
  TcpStream a(kCapacity), b(kCapacity);
  ASSERT_TRUE(put(a, 1, 64));
  a.finish();
  const std::string bytes = take(a, SIZE_MAX);
  b.feed(bytes.substr(0, bytes.size() - 1));
  EXPECT_FALSE(b.peer_finished());
  b.feed(bytes.substr(bytes.size() - 1));
  EXPECT_TRUE(b.peer_finished());
  EXPECT_FALSE(a.delivered());
  carry(b, a);
  EXPECT_TRUE(a.delivered()) << "received, though not consumed";
  EXPECT_TRUE(get(b, 1, 64));
}

TEST(TcpStream, AFinThatWasLostIsSentAgain) {
  TcpStream a(kCapacity), b(kCapacity);
  ASSERT_TRUE(put(a, 1, 64));
  a.finish();
  take(a, SIZE_MAX);
  a.restart(b.received()), b.restart(a.received());
  EXPECT_FALSE(a.delivered());
  carry(a, b);
  EXPECT_TRUE(b.peer_finished());
  carry(b, a);
  EXPECT_TRUE(a.delivered());
}

struct Bad { const char* what; FrameHeader header; };
class TcpStreamRefuses : public testing::TestWithParam<Bad> {};
TEST_P(TcpStreamRefuses, WhatIsNoFrame) {
  TcpStream a(kCapacity), b(kCapacity);
  ASSERT_TRUE(put(a, 1, 64));
  carry(a, b);  // b has received 64 bytes and sent none
  const FrameHeader& header = GetParam().header;
  EXPECT_THROW(b.feed({reinterpret_cast<const char*>(&header), sizeof header}), Error);
}
INSTANTIATE_TEST_SUITE_P(
    Frames, TcpStreamRefuses,
    testing::Values(Bad{"Kind", {64, 0, 0, 0, FrameHeader::Type(7)}}, Bad{"Before", {0, 0, 0, 64, FrameHeader::data}},
                    Bad{"Beyond", {128, 0, 0, 64, FrameHeader::data}},
                    Bad{"PastTheWrap", {64, 0, 0, kCapacity, FrameHeader::data}},
                    Bad{"MoreThanIsFree", {kCapacity, 0, 0, 128, FrameHeader::data}},
                    Bad{"FarAway", {UINT64_MAX - kCapacity + 1, 0, 0, 64, FrameHeader::data}},
                    Bad{"ConsumedWhatWasNotSent", {64, 64, 64, 0, FrameHeader::data}},
                    Bad{"ReceivedWhatWasNotSent", {64, 0, 64, 0, FrameHeader::data}},
                    Bad{"GoodbyeWithBytes", {64, 0, 0, 64, FrameHeader::fin}},
                    Bad{"GoodbyeElsewhere", {128, 0, 0, 0, FrameHeader::fin}}),
    [](const auto& info) { return std::string(info.param.what); });

TEST(TcpStream, ARestartFromWhatWasNeverSentIsRefused) {
  TcpStream a(kCapacity);
  ASSERT_TRUE(put(a, 1, 64));
  EXPECT_THROW(a.restart(65), Error);
  a.restart(64);
  EXPECT_THROW(a.restart(0), Error) << "it had received more before";
}

}  // namespace
}  // namespace lightcc

// The frames of a BootstrapExchange: bytes to frames however they arrive, and the texts that both sides use.
#include "net/bootstrap/exchange_frames.h"

#include <gtest/gtest.h>

#include <numeric>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr size_t kMost = 1000;

void expect_refused(const std::string& bytes) {
  FrameReader reader(kMost);
  reader.feed(bytes);
  try {
    reader.take();
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::internal);
  }
}

TEST(ExchangeFrames, ComeBackByteByByte) {
  for (int kind = 0; kind < kFrameKinds; ++kind)
    for (const std::string& body : {std::string(), std::string("a\0b", 3), std::string(kMost, 'x')}) {
      const std::string bytes = framed(FrameKind(kind), body);
      EXPECT_EQ(bytes.size(), kFrameHeadBytes + body.size());
      FrameReader reader(kMost);
      for (const char byte : bytes) {
        EXPECT_FALSE(reader.take()) << "before its end";
        reader.feed({&byte, 1});
      }
      const auto frame = reader.take();
      ASSERT_TRUE(frame);
      EXPECT_EQ(frame->kind, FrameKind(kind));
      EXPECT_EQ(frame->body, body);
      EXPECT_FALSE(reader.take());
    }
}

TEST(ExchangeFrames, SeveralMayArriveAtOnce) {
  FrameReader reader(kMost);
  reader.feed(framed(FrameKind::greeting, "one") + framed(FrameKind::all, "") + framed(FrameKind::note, "th"));
  EXPECT_EQ(reader.take()->body, "one");
  EXPECT_EQ(reader.take()->kind, FrameKind::all);
  EXPECT_EQ(reader.take()->body, "th");
  EXPECT_FALSE(reader.take());
}

TEST(ExchangeFrames, WhatIsTooLongIsRefusedByItsHead) {
  for (uint64_t length : {uint64_t(kMost + 1), uint64_t(1) << 32, UINT64_MAX, UINT64_MAX - kFrameHeadBytes + 1})
    expect_refused(WireWriter().put(length).put(FrameKind::note).take());
}

TEST(ExchangeFrames, OfNoKindIsRefused) {
  for (uint32_t kind : {uint32_t(kFrameKinds), UINT32_MAX})
    expect_refused(WireWriter().put(uint64_t(0)).put(kind).take());
}

TEST(ExchangeFrames, AFailureTravelsWithItsCodeAndText) {
  for (int code = 0; code <= int(Code::internal); ++code) {
    FrameReader reader(kMost);
    reader.feed(failure_frame(Error(Code(code), "rank 3 has left")));
    const auto frame = reader.take();
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->kind, FrameKind::failure);
    const Error error = failure_in(*frame);
    EXPECT_EQ(error.code(), Code(code));
    EXPECT_STREQ(error.what(), "rank 3 has left");
  }
}

TEST(ExchangeFrames, ADamagedFailureIsAnErrorOfItsOwn) {
  const std::string text = failure_frame(Error(Code::timeout, "why")).substr(kFrameHeadBytes);
  for (size_t length = 0; length < text.size(); ++length)
    EXPECT_THROW(failure_in({FrameKind::failure, text.substr(0, length)}), Error) << length;
  for (int code : {-1, int(Code::internal) + 1})
    EXPECT_THROW(failure_in({FrameKind::failure, WireWriter().put(code).put(std::string_view("why")).take()}), Error);
}

TEST(ExchangeTexts, TwentyRanksAreNamedAndTheOthersCounted) {
  std::vector<int> ranks(23);
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::string twenty = "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19";
  EXPECT_EQ(text_of_some(ranks), twenty + " and 3 more");
  ranks.resize(20);
  EXPECT_EQ(text_of_some(ranks), twenty);
  EXPECT_EQ(text_of_some({1, 4}), "ranks 1, 4");
  EXPECT_EQ(text_of_some({4}), "rank 4");
}

TEST(ExchangeTexts, TheTimeoutIsShownInTenthsOfASecond) {
  const struct { uint64_t ms; const char* seconds; } rows[] = {{30'000, "30 s"}, {1'500, "1.5 s"}, {1'049, "1 s"},
                                                               {1'050, "1.1 s"}, {999, "1 s"},     {40, "0 s"},
                                                               {60, "0.1 s"},    {0, "0 s"}};
  for (auto& row : rows)
    EXPECT_EQ(start_timeout(row.ms * 1'000'000), std::string("HOROVOD_START_TIMEOUT (") + row.seconds + ")") << row.ms;
}

}  // namespace
}  // namespace lightcc

// Bytes to values and back; bytes that lie about themselves are refused.
#include "base/wire.h"

#include <gtest/gtest.h>

#include "base/types.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(Wire, WhatIsPutIsGot) {
  const std::vector<int64_t> numbers{1, -2, INT64_MAX};
  const std::string bytes =
      WireWriter().put(uint8_t(7)).put(-5).put(0.25).put("text").put(numbers).put(DType::bfloat16).put("").take();
  WireReader reader(bytes);
  EXPECT_EQ(reader.get<uint8_t>(), 7);
  EXPECT_EQ(reader.get<int>(), -5);
  EXPECT_EQ(reader.get<double>(), 0.25);
  EXPECT_EQ(reader.text(), "text");
  EXPECT_EQ(reader.values<int64_t>(), numbers);
  EXPECT_EQ(reader.get_enum<DType>(kDTypes), DType::bfloat16);
  EXPECT_FALSE(reader.empty());
  EXPECT_EQ(reader.text(), "");
  EXPECT_TRUE(reader.empty());
}

TEST(Wire, BytesOfAKnownNumberTravelAsTheyAre) {
  const std::array<uint8_t, 3> bytes{1, 0, 255};
  const std::string wire = WireWriter().put(bytes).put(uint8_t(9)).take();
  EXPECT_EQ(wire, std::string("\1\0\xff\t", 4));
  WireReader reader(wire);
  EXPECT_EQ(reader.bytes<3>(), bytes);
  EXPECT_EQ(reader.get<uint8_t>(), 9);
  EXPECT_THROW(WireReader(wire).bytes<5>(), Error);
}

TEST(Wire, EveryReadBeyondTheEndThrows) {
  const std::string three = "abc";
  EXPECT_THROW(WireReader(three).get<int32_t>(), Error);
  EXPECT_THROW(WireReader("").get<uint8_t>(), Error);
  EXPECT_THROW(WireReader(three).text(), Error);
  const std::string text = WireWriter().put("hello").take();
  EXPECT_THROW(WireReader(std::string_view(text).substr(0, text.size() - 1)).text(), Error);
}

TEST(Wire, ACountThatTheBytesCannotHoldThrowsBeforeMemoryIsTaken) {
  const std::string huge = WireWriter().put(UINT32_MAX).put(int64_t(0)).take();
  EXPECT_THROW(WireReader(huge).values<int64_t>(), Error);
  EXPECT_THROW(WireReader(huge).text(), Error);
  EXPECT_THROW(WireReader(huge).length(1), Error);
  const std::string two = WireWriter().put(uint32_t(2)).put(int64_t(0)).take();
  EXPECT_THROW(WireReader(two).values<int64_t>(), Error);
  EXPECT_EQ(WireReader(two).length(4), 2u);
}

TEST(Wire, AnEnumOutOfItsRangeThrows) {
  for (int32_t value : {-1, kDTypes, INT32_MIN, INT32_MAX}) {
    const std::string bytes = WireWriter().put(value).take();
    EXPECT_THROW(WireReader(bytes).get_enum<DType>(kDTypes), Error) << value;
  }
}

}  // namespace
}  // namespace lightcc

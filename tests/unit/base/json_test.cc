// JSON is valid whatever the bytes that go into it.
#include "base/json.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(Json, StringsOfAnyBytes) {
  EXPECT_EQ(json_string("plain"), R"("plain")");
  EXPECT_EQ(json_string("a\"b\\c/d"), R"("a\"b\\c/d")");
  EXPECT_EQ(json_string("1\n2\t3\r"), R"("1\n2\u00093\u000d")");
  EXPECT_EQ(json_string(std::string_view("\0\x1f\x7f", 3)), R"("\u0000\u001f\u007f")");
  EXPECT_EQ(json_string("ä€😀"), "\"ä€😀\"");
}

TEST(Json, WhatIsNotUtf8IsReplacedByteByByte) {
  const std::string bad = "\\ufffd";
  EXPECT_EQ(json_string("\xff"), '"' + bad + '"');
  EXPECT_EQ(json_string("a\x80z"), "\"a" + bad + "z\"");                          // goes on without a beginning
  EXPECT_EQ(json_string("\xc3"), '"' + bad + '"');                                // ends early
  EXPECT_EQ(json_string("\xc3\"\n"), '"' + bad + R"(\"\n")");                     // and does not swallow a quote
  EXPECT_EQ(json_string("\xc0\xaf"), '"' + bad + bad + '"');                      // a longer form of '/'
  EXPECT_EQ(json_string("\xe0\x9f\xbf"), '"' + bad + bad + bad + '"');            // a longer form of U+07FF
  EXPECT_EQ(json_string("\xed\xa0\x80"), '"' + bad + bad + bad + '"');            // U+D800
  EXPECT_EQ(json_string("\xf4\x90\x80\x80"), '"' + bad + bad + bad + bad + '"');  // U+110000
  EXPECT_EQ(json_string("\xf4\x8f\xbf\xbf"), "\"\xf4\x8f\xbf\xbf\"");             // U+10FFFF
  EXPECT_EQ(json_string("\xef\xbf\xbd\xe2\x82"), "\"\xef\xbf\xbd" + bad + bad + '"');
}

TEST(Json, ObjectsAreWrittenWithTheirFields) {
  EXPECT_TRUE(JsonObject().empty());
  EXPECT_EQ(JsonObject().text(), "{}");
  EXPECT_EQ(JsonObject().add("a\"", "b").add("n", -3).text(), R"({"a\"":"b","n":-3})");
}

TEST(Json, NumbersKeepAllTheirDigits) {
  EXPECT_EQ(JsonObject().add("most", INT64_MAX).add("least", INT64_MIN).text(),
            R"({"most":9223372036854775807,"least":-9223372036854775808})");
}

}  // namespace
}  // namespace lightcc

// The messages between ranks that share tables, as bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "corpus.h"
#include "embedding/message.h"
#include "labels.h"

LABEL(alone);

namespace lightcc::embedding {
namespace {

// A call over tables of so many keys each; every second one's keys have checks.
std::string bytes_of_call(Op op, const std::vector<int64_t>& keys) {
  RankSegment call;
  call.head.op = op;
  for (size_t i = 0; i < keys.size(); ++i) {
    TablePart part;
    part.head.id = i, part.head.keys = keys[i], part.head.checked = i % 2;
    part.head.value_bytes = op == Op::update ? keys[i] * 12 : 0;
    std::strcpy(part.head.name, i % 2 ? "urls" : "users");
    call.tables.push_back(part);
  }
  std::string bytes(bytes_of(call), '\0');
  std::vector<PartPlaces> places;
  write_heads(call, reinterpret_cast<std::byte*>(bytes.data()), places);
  for (size_t i = 0; i < keys.size(); ++i) std::iota(places[i].keys, places[i].keys + keys[i], int64_t(1));
  return bytes;
}

RankSegment parsed(const std::string& bytes) {
  return parse({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, 1);
}

const std::map<std::string, std::string>& samples() {
  static const std::map<std::string, std::string> all{
      {"serve", bytes_of_call(Op::serve, {})},
      {"lookup", bytes_of_call(Op::lookup, {3, 5})},
      {"update", bytes_of_call(Op::update, {4, 1, 2})},
  };
  return all;
}

TEST(EmbeddingMessage, ACallReadsAsItWasWritten) {
  const RankSegment call = parsed(samples().at("update"));
  EXPECT_EQ(call.head.op, Op::update);
  ASSERT_EQ(call.tables.size(), 3u);
  EXPECT_EQ(std::vector<int64_t>(call.tables[0].keys.begin(), call.tables[0].keys.end()),
            (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_FALSE(call.tables[0].checks);
  EXPECT_TRUE(call.tables[1].checks);
  EXPECT_STREQ(call.tables[1].head.name, "urls");
}

TEST(EmbeddingMessage, BytesThatAreCutAreRefused) {
  const std::string& bytes = samples().at("lookup");
  const size_t used = sizeof(CallHeader) + 2 * sizeof(TableHeader) + 3 * 8 + 5 * 8 + 24;
  EXPECT_NO_THROW(parsed(bytes.substr(0, used)));
  for (size_t n = 0; n < used; ++n) EXPECT_THROW(parsed(bytes.substr(0, n)), Error) << n;
}

TEST(EmbeddingMessage, TheFuzzersCorpusHoldsEverySample) {
  lightcc::test::expect_corpus("embedding_message_fuzz", samples());
}

}  // namespace
}  // namespace lightcc::embedding

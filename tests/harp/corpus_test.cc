// What the fuzzers of HARP start from (corpus.h).
#include <gtest/gtest.h>

#include <map>

#include "corpus.h"
#include "harp_plugin/core/packet.h"
#include "labels.h"

LABEL(alone);

namespace harp::test {
namespace {

using lightcc::test::expect_corpus;
using Files = std::map<std::string, std::string>;

// What harp_packet_fuzz reads: which of its cases, then the bytes.
template <class Write> std::string input(char which, const Write& write) {
  uint8_t bytes[kMostControlBytes];
  const size_t size = write(bytes);
  return std::string(1, which).append(reinterpret_cast<const char*>(bytes), size);
}

TEST(HarpCorpus, OfPacketsHoldsEveryKind) {
  Files files;
  for (int type = 0; type <= int(Type::open_ack); ++type)
    files["header_" + std::to_string(type)] = input(0, [&](uint8_t* to) {
      write_header({.type = Type(type), .flags = kTagged, .conn = 77, .number = 5, .message = 6, .offset = 90,
                    .total = 1440 * 3, .path = 1}, to);
      return kHeaderBytes;
    });
  AckBody one{.delay_ns = 50'000, .count = 1, .ranges = {Range{3, 9}}}, many{.delay_ns = 0, .count = 16, .ranges = {}};
  for (uint64_t i = 0; i < 16; ++i) many.ranges[i] = {1000 - 10 * i, 1004 - 10 * i};
  files["ack_one_range"] = input(1, [&](uint8_t* to) { return write_ack(one, to); });
  files["ack_sixteen_ranges"] = input(1, [&](uint8_t* to) { return write_ack(many, to); });
  GrantBody grant{.first = 65'535, .count = kMostGrants, .capacity = {}};
  grant.capacity.fill(1 << 20);
  files["grant"] = input(2, [&](uint8_t* to) { return write_grant(grant, to); });
  files["credit"] = input(3, [](uint8_t* to) { return write_credit({300}, to); });
  OpenBody open{.nonce = {1, 2, 3}, .conn = 9, .first_number = 4, .payload = 1440, .receive_packets = 100,
                .eager_bytes = 8192, .eager_messages = 16, .stream_frames = 256, .mode = Mode::stream, .paths = 2};
  files["open"] = input(4, [&](uint8_t* to) { return write_open(open, to); });
  files["close"] = input(5, [](uint8_t* to) { return write_close({CloseReason::failed}, to); });
  for (const auto& [name, bytes] : files) EXPECT_GT(bytes.size(), 1u) << name;
  expect_corpus("harp_packet_fuzz", files);
}

// Scripts of harp_connection_fuzz: flags (1 authentication, 2 stream, 4 numbers near 2^32, 8 two paths, 16 records are
// copied, 32 opening is part of the script), then steps:
// 0 n, 8 n send; 1 n, 9 n post; 2 a round with a fate a packet (0 lost, 1 twice, 2 changed, else passes); 3 n time
// passes; 4 all passes; 5 inject; 6 n, 10 n consume; 11 n replay; 12 n close. The first of two is for a or from a to b.
std::string script(std::initializer_list<int> bytes) { return {bytes.begin(), bytes.end()}; }

TEST(HarpCorpus, OfConnectionsHoldsEveryStep) {
  const std::map<std::string, std::string> kinds = {
      {"all_pass", script({4, 3, 4, 4, 6, 7, 10, 7, 4, 7})},
      {"some_lost", script({2, 3, 0, 3, 0, 3, 3, 3, 20, 2, 0, 3, 3, 3, 6, 3, 4})},
      {"all_lost", script({2, 0, 0, 0, 0, 0, 0, 0, 0, 3, 60, 2, 0, 0, 0, 3, 100, 2, 0, 0, 3, 230, 4})},
      {"changed", script({2, 2, 1, 0, 6, 9, 0, 20, 3, 1, 1, 1, 2, 3, 0, 8, 40, 0, 0, 0, 0, 0, 3, 20, 4})},
      {"injected", script({2, 3, 3, 3, 5, 1, 1, 0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 9, 9, 9, 4})},
      {"stranger", script({2, 3, 3, 3, 5, 16 | 32 | 64 | 3, 0, 9, 9, 9, 9, 0, 0, 0, 0, 1, 0, 0, 4})},
      {"replayed", script({2, 0, 3, 3, 3, 3, 3, 3, 11, 0, 11, 1, 11, 2, 4, 11, 3, 11, 5, 3, 100, 11, 7, 4})},
      {"closed_by_a", script({2, 3, 3, 3, 12, 1, 8, 90, 1, 90, 2, 3, 0, 3, 3, 30, 2, 3, 3, 3, 11, 2, 4})},
      {"closed_by_b", script({2, 3, 0, 3, 12, 0, 0, 90, 9, 90, 2, 0, 0, 3, 3, 30, 12, 1, 2, 3, 3, 3, 4})},
  };
  Files files;
  for (const int flags : {0, 1, 2, 3, 13, 14, 18, 32, 35, 41}) {
    std::string start = script({flags});
    if (flags & 32) start += script({2, 3, 2, 3, 0, 2, 3, 11, 0, 3, 50, 2, 3, 3, 2, 3, 3});
    start += script({0, 100, 0, 1, 1, 100, 1, 1, 0, 0, 1, 0, 0, 200, 1, 200, 8, 150, 9, 150, 8, 20, 9, 10});
    for (const auto& [name, steps] : kinds) files[name + "_" + std::to_string(flags)] = start + steps;
  }
  expect_corpus("harp_connection_fuzz", files);
}

}  // namespace
}  // namespace harp::test

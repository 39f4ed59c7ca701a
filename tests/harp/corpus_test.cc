// The fuzzers start from these files. LIGHTCC_WRITE_CORPUS=1 writes them anew after the format has changed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "harp_plugin/core/packet.h"

namespace harp::test {
namespace {

namespace fs = std::filesystem;
using Files = std::map<std::string, std::string>;

void expect_corpus(const char* target, const Files& files) {
  const fs::path folder = fs::path(__FILE__).parent_path() / "../fuzz/corpus" / target;
  for (const auto& [name, bytes] : files) {
    if (std::getenv("LIGHTCC_WRITE_CORPUS")) {
      fs::create_directories(folder);
      std::ofstream(folder / name, std::ios::binary) << bytes;
    }
    std::ifstream file(folder / name, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes)
        << folder / name << " is old: run this test with LIGHTCC_WRITE_CORPUS=1";
  }
}

// What harp_packet_fuzz reads: which of its cases, then the bytes.
template <class Write> std::string input(char which, const Write& write) {
  uint8_t bytes[kMostControlBytes];
  const size_t size = write(bytes);
  return which + std::string(reinterpret_cast<const char*>(bytes), size);
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

// Scripts of harp_connection_fuzz: flags (1 authentication, 2 stream, 4 numbers near 2^32, 8 two paths), then steps:
// 0 n send, 1 n post, 2 exchange with a fate a packet (0 lost, 1 twice, 2 changed, else passes), 3 n time passes, 4 all
// passes, 5 inject, 6 n consume.
TEST(HarpCorpus, OfConnectionsHoldsEveryStep) {
  Files files;
  const std::string send_and_post = {0, 100, 0, 1, 1, 100, 1, 1, 0, 0, 1, 0, 0, (char)200, 1, (char)200};
  for (char flags = 0; flags < 16; ++flags) {
    const std::string start = flags + send_and_post;
    const std::string number = std::to_string(int(flags));
    files["all_pass_" + number] = start + std::string{4, 3, 1, 4, 6, 7, 4};
    files["some_lost_" + number] = start + std::string{2, 3, 0, 3, 0, 3, 3, 3, 100, 2, 0, 3, 3, 3, 6, 3, 4};
    files["changed_" + number] = start + std::string{2, 2, 1, 0, 6, 9, 0, 20, 3, 1, 1, 1, 2, 3, 0, 8, 40, 3, 20, 4};
    files["injected_" + number] = start + std::string{2, 3, 5, 0x13, 0, 0, 0, 0, 0, 1, 7, 0, 0, 0, 12, 5, 0x12, 8, 4};
  }
  expect_corpus("harp_connection_fuzz", files);
}

}  // namespace
}  // namespace harp::test

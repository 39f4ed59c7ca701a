// HARP's packets: whatever the bytes, they are refused or read, and what was read is written as the same bytes.
// Input: a byte that chooses what is read, then its bytes.
#include <cstdlib>
#include <vector>

#include "harp_plugin/core/packet.h"

namespace {

using namespace harp;
using Bytes = std::span<const uint8_t>;

void expect_same(Bytes read, const uint8_t* written, size_t bytes) {
  if (read.size() != bytes || std::memcmp(read.data(), written, bytes) != 0) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Bytes body(data + 1, size - 1);
  uint8_t again[kMostControlBytes];
  size_t used = 0;
  switch (data[0] % 6) {
    case 0:
      if (const auto header = read_header(body)) {
        write_header(*header, again);
        expect_same(body.first(kHeaderBytes), again, kHeaderBytes);
      }
      break;
    case 1:
      for (const uint64_t expected : {uint64_t(0), uint64_t(1) << 32, (uint64_t(1) << 32) - 10}) {
        const auto ack = read_ack(body, expected);
        if (!ack) continue;
        for (uint32_t i = 0; i < ack->count; ++i) {
          const Range range = ack->ranges[i];
          if (range.first > range.last || (i > 0 && range.last + 1 >= ack->ranges[i - 1].first)) std::abort();
        }
        expect_same(body, again, write_ack(*ack, again));
      }
      break;
    case 2:
      if (const auto grant = read_grant(body, &used)) expect_same(body.first(used), again, write_grant(*grant, again));
      break;
    case 3:
      if (const auto credit = read_credit(body, &used))
        expect_same(body.first(used), again, write_credit(*credit, again));
      break;
    case 4:
      if (const auto open = read_open(body)) expect_same(body, again, write_open(*open, again));
      break;
    case 5:
      if (const auto close = read_close(body)) expect_same(body, again, write_close(*close, again));
      break;
  }
  return 0;
}

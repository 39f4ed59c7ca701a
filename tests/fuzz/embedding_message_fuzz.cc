// Calls of embedding tables from a peer: parse() takes any bytes without harm. What it accepts lies within these bytes,
// and agreed() takes it beside itself.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "embedding/message.h"

namespace {

using namespace lightcc;
using namespace lightcc::embedding;

// Reads all that a call says is there, so that AddressSanitizer sees a length that is not.
uint64_t read_all(const RankSegment& call) {
  uint64_t sum = 0;
  for (const TablePart& part : call.tables) {
    for (int64_t key : part.keys) sum += uint64_t(key);
    for (int64_t i = 0; part.checks && i < part.head.keys; ++i) sum += part.checks[i];
    for (int64_t i = 0; i < part.head.value_bytes; ++i) sum += uint64_t(part.values[i]);
  }
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // As messages lie: from an address that is a multiple of 8 on, and not a byte longer.
  const auto memory = std::make_unique<std::byte[]>(size);
  std::memcpy(memory.get(), data, size);
  try {
    const RankSegment call = parse({memory.get(), size}, 0);
    static volatile uint64_t seen;
    seen = read_all(call);
    agreed({call, call});
  } catch (const Error&) {
    // Refused, as most inputs should be.
  }
  return 0;
}

// Strings to 128 bits: two lanes that each mix eight bytes at a time, with different constants, and then each other.
#include "embedding/hash.h"

#include <cstring>

namespace lightcc::embedding {
namespace {

uint64_t eight(const char* at, uint64_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

uint64_t folded(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const auto product = static_cast<Wide>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

}  // namespace

StringHash hash_of(const char* text, uint64_t bytes) {
  uint64_t a = mix(bytes), b = mix(~bytes);
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t part = eight(text + i, bytes - i < 8 ? bytes - i : 8);
    a = mix(a ^ part);
    b = mix(folded(b ^ 0xa0761d6478bd642fu, part ^ 0xe7037ed1a0b428dbu) + b + i);
  }
  return {mix(a ^ (b << 1)), uint32_t(mix(b + 0x8ebc6af09c88c6e3u) >> 32)};
}

}  // namespace lightcc::embedding

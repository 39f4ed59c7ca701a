// The body of a top-k message from a peer: any bytes, any alignment, a plain reader beside. What the one refuses the
// other refuses, what both accept they add to the same elements. An input is: flags, count of elements in 3 bytes,
// body.
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "base/error.h"
#include "device/topk_message.h"

namespace {

using namespace lightcc;

constexpr uint8_t kFloat16 = 1;

uint32_t number(const std::vector<uint8_t>& bytes, size_t at, size_t size) {
  uint32_t value = 0;
  for (size_t i = 0; i < size; ++i) value |= uint32_t(bytes.at(at + i)) << 8 * i;
  return value;
}

// Empty: malformed.
std::optional<std::vector<float>> read_plainly(const std::vector<uint8_t>& body, size_t count, bool half) {
  const size_t blocks = (count + 65535) / 65536, width = half ? 2 : 4;
  if (body.size() < 4 * blocks) return {};
  uint64_t k = 0;
  for (size_t b = 0; b < blocks; ++b) k += number(body, 4 * b, 4);
  if (body.size() != 4 * blocks + k * (2 + width)) return {};
  std::vector<float> out(count, 0);
  size_t entry = 0;
  for (size_t b = 0; b < blocks; ++b) {
    int64_t last = -1;
    for (uint32_t n = number(body, 4 * b, 4); n > 0; --n, ++entry) {
      const uint32_t index = number(body, 4 * blocks + 2 * entry, 2);
      const uint32_t bits = number(body, 4 * blocks + 2 * k + width * entry, width);
      if (index <= last || b * 65536 + index >= count) return {};
      last = index;
      out[b * 65536 + index] += half ? float_of_float16(uint16_t(bits)) : std::bit_cast<float>(bits);
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const bool half = data[0] & kFloat16;
  const size_t count = (data[1] | data[2] << 8 | data[3] << 16) % (3 * 65536 + 1000);
  const std::vector<uint8_t> body(data + 4, data + size);
  const auto expected = read_plainly(body, count, half);
  std::vector<float> out(count, 0);
  bool accepted = true;
  try {
    const TopKMessage message({reinterpret_cast<const std::byte*>(data + 4), size - 4}, count,
                              half ? DType::float16 : DType::float32);
    for (size_t b = 0; b < message.blocks(); ++b) message.add_to(out.data(), b);
  } catch (const Error&) {
    accepted = false;
  }
  if (accepted != expected.has_value()) std::abort();
  if (accepted && count > 0 && std::memcmp(out.data(), expected->data(), count * sizeof(float)) != 0) std::abort();
  return 0;
}

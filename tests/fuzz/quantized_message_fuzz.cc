// The body of an int8 or int4 message from a peer: any bytes, any alignment, a plain reader beside. Accepted is what
// has the right length, and nothing else; it adds the same numbers. An input is: flags, count of elements in 3 bytes,
// body.
// If a flag says so the body is repeated up to the right length, so that short inputs fill whole blocks.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "device/quantization.h"

namespace {

using namespace lightcc;

constexpr uint8_t kIsa = 3, kRepeated = 4, kLonger = 8, kUnaligned = 16, kInt4 = 32;

// Where the values of a message begin, and how long it is.
size_t values_at(bool is_int4, size_t count) { return is_int4 ? (count + 63) / 64 * 4 : (count + 255) / 256 * 4; }
size_t right_length(bool is_int4, size_t count) {
  return values_at(is_int4, count) + (is_int4 ? (count + 1) / 2 : count);
}

std::vector<float> read_plainly(const std::byte* body, size_t count, bool is_int4) {
  const std::byte* values = body + values_at(is_int4, count);
  std::vector<float> out(count, 1);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 4; ++k) bits |= uint32_t(body[i / (is_int4 ? 64 : 256) * 4 + k]) << 8 * k;
    const int half = int(values[i / 2]) >> (i % 2 ? 4 : 0) & 15;
    const int value = is_int4 ? (half ^ 8) - 8 : (int(values[i]) ^ 128) - 128;
    out[i] += static_cast<float>(value) * std::bit_cast<float>(bits);
  }
  return out;
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

template <class Format> void add_to(float* out, ConstSpan body, size_t count, Isa isa) {
  const QuantizedMessage<Format> message(body, count, isa);
  for (size_t b = 0; b < message.blocks(); ++b) message.add_to(out, b);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const uint8_t flags = data[0];
  const size_t count = (data[1] | data[2] << 8 | data[3] << 16) % (2 * 65536 + 1000);
  const bool is_int4 = flags & kInt4;
  const size_t right = right_length(is_int4, count), given = size - 4;
  const size_t length = (flags & kRepeated) && given > 0 ? right + bool(flags & kLonger) : given;
  const size_t shift = flags & kUnaligned ? 1 : 0;
  std::vector<std::byte> memory(shift + length);  // no byte more, so that reading beyond it shows
  for (size_t i = 0; i < length; ++i) memory[shift + i] = std::byte(data[4 + i % given]);
  const auto asked = static_cast<Isa>((flags & kIsa) % 3);
  const Isa isa = has(asked) ? asked : Isa::plain;
  std::vector<float> out(count, 1);
  bool accepted = true;
  try {
    (is_int4 ? add_to<Int4> : add_to<Int8>)(out.data(), ConstSpan(memory).subspan(shift), count, isa);
  } catch (const Error&) {
    accepted = false;
  }
  if (accepted != (length == right)) std::abort();
  if (!accepted) return 0;
  const std::vector<float> expected = read_plainly(memory.data() + shift, count, is_int4);
  for (size_t i = 0; i < count; ++i) {
    if (!same(expected[i], out[i])) std::abort();
  }
  return 0;
}

// The body of an int8 message from a peer: any bytes, any alignment, a plain reader beside. Accepted is what has the
// right length, and nothing else; it adds the same numbers. An input is: flags, count of elements in 3 bytes, body.
// If a flag says so the body is repeated up to the right length, so that short inputs fill whole blocks.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "device/int8.h"

namespace {

using namespace lightcc;

constexpr uint8_t kIsa = 3, kRepeated = 4, kLonger = 8, kUnaligned = 16;

std::vector<float> read_plainly(const std::byte* body, size_t count) {
  const size_t groups = (count + 255) / 256;
  std::vector<float> out(count, 1);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 4; ++k) bits |= uint32_t(body[i / 256 * 4 + k]) << 8 * k;
    const int value = int(body[4 * groups + i]);
    out[i] += static_cast<float>(value < 128 ? value : value - 256) * std::bit_cast<float>(bits);
  }
  return out;
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const uint8_t flags = data[0];
  const size_t count = (data[1] | data[2] << 8 | data[3] << 16) % (2 * 65536 + 1000);
  const size_t right = (count + 255) / 256 * 4 + count, given = size - 4;
  const size_t length = (flags & kRepeated) && given > 0 ? right + bool(flags & kLonger) : given;
  const size_t shift = flags & kUnaligned ? 1 : 0;
  std::vector<std::byte> memory(shift + length);  // no byte more, so that reading beyond it shows
  for (size_t i = 0; i < length; ++i) memory[shift + i] = std::byte(data[4 + i % given]);
  const auto isa = static_cast<Isa>((flags & kIsa) % 3);
  std::vector<float> out(count, 1);
  bool accepted = true;
  try {
    const Int8Message message(ConstSpan(memory).subspan(shift), count, has(isa) ? isa : Isa::plain);
    for (size_t b = 0; b < message.blocks(); ++b) message.add_to(out.data(), b);
  } catch (const Error&) {
    accepted = false;
  }
  if (accepted != (length == right)) std::abort();
  if (!accepted) return 0;
  const std::vector<float> expected = read_plainly(memory.data() + shift, count);
  for (size_t i = 0; i < count; ++i) {
    if (!same(expected[i], out[i])) std::abort();
  }
  return 0;
}

// The bodies of top-k messages from all nodes, decoded by the kernels of a GPU (device/cuda/topk_decode.h), which run
// here as plain C++: any bytes, any alignment, the CPU's decoder beside. What the one refuses the other refuses, and
// what both accept has the same sums. An input is: flags, count of elements in 3 bytes, the bodies, all of one length.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "device/topk_message.h"
#include "unit/device/cuda/host_grid.h"

namespace {

using namespace lightcc;

constexpr uint8_t kHalf = 1, kTwoNodes = 2, kUnaligned = 4, kSeed = 0xf0;

// The sums of all bodies; false: one is malformed.
bool decoded_by_cpu(const std::byte* bodies, uint32_t nodes, size_t length, bool half, std::vector<float>& out) {
  try {
    for (uint32_t node = 0; node < nodes; ++node) {
      const TopKMessage message({bodies + node * length, length}, out.size(), half ? DType::float16 : DType::float32);
      for (size_t b = 0; b < message.blocks(); ++b) message.add_to(out.data(), b);
    }
  } catch (const Error&) {
    return false;
  }
  return true;
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const bool half = data[0] & kHalf;
  const uint32_t nodes = data[0] & kTwoNodes ? 2 : 1;
  const size_t count = 1 + (data[1] | data[2] << 8 | data[3] << 16) % (kCodecBlock + gpu::kDecodeTile + 100);
  const size_t counts = blocks_of(count) * sizeof(uint32_t), entry = sizeof(uint16_t) + (half ? 2 : 4);
  if ((size - 4) / nodes < counts) return 0;
  const size_t k = ((size - 4) / nodes - counts) / entry, length = counts + k * entry;
  const size_t shift = data[0] & kUnaligned ? 1 : 0;
  std::vector<std::byte> memory(shift + nodes * length);  // no byte more, so that reading beyond it shows
  std::memcpy(memory.data() + shift, data + 4, nodes * length);

  std::vector<float> expected(count, 0), out(count, 1);
  uint64_t error = 0;
  gpu::DecodePiece piece{};
  piece.bodies = reinterpret_cast<const uint8_t*>(memory.data() + shift);
  piece.stride = length;
  piece.out = out.data();
  piece.count = count;
  piece.k = k;
  piece.nodes = nodes;
  piece.type = gpu::kFloat32;
  piece.half = half;
  std::vector<gpu::DecodePiece> pieces{piece};
  gpu::DecodeBatch batch{};
  batch.error = &error;
  test::run_on_host(pieces, data[0] & kSeed, batch);

  if (decoded_by_cpu(memory.data() + shift, nodes, length, half, expected) != (error == 0)) std::abort();
  for (size_t i = 0; error == 0 && i < count; ++i)
    if (!same(expected[i], out[i])) std::abort();
  return 0;
}

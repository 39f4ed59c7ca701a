// The codecs that PieceEncoderContract holds for, a row each.
#include "contracts/piece_encoder_contract.h"

#include <algorithm>

#include "device/quantization.h"

namespace lightcc {
namespace {

// What is not sent is at most the largest of what is not among the k largest; float16 rounds off 2^-11 of what is sent.
std::vector<float> top_k_leaves(const std::vector<float>& sums, const Codec& codec) {
  std::vector<float> magnitudes;
  for (const float sum : sums) magnitudes.push_back(std::fabs(sum));
  std::sort(magnitudes.rbegin(), magnitudes.rend());
  const size_t sent = piece_elements(codec, sums.size());
  const float unsent = sent < sums.size() ? magnitudes[sent] : 0;
  const float rounded = codec.width == DType::float16 ? std::max(magnitudes[0] * 0x1p-11f, 0x1p-25f) : 0;
  return std::vector<float>(sums.size(), std::max(unsent, rounded));
}

// Half of a group's scale, and what rounding adds to that (device/quantization.h).
template <class Format> std::vector<float> quantized_leaves(const std::vector<float>& sums, const Codec&) {
  std::vector<float> bounds(sums.size());
  for (size_t begin = 0; begin < sums.size(); begin += Format::kGroup) {
    const size_t end = std::min(begin + Format::kGroup, sums.size());
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(sums[i]));
    const float bound = largest / (2 * Format::kLargest) * (1 + 0x1p-13f);
    std::fill(bounds.begin() + ptrdiff_t(begin), bounds.begin() + ptrdiff_t(end), bound);
  }
  return bounds;
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, PieceEncoderContract,
    testing::Values(CodecCase{"top_1_percent", {CodecKind::topk, DType::float32, 0.01, 0}, top_k_leaves},
                    CodecCase{"top_half_as_float16", {CodecKind::topk, DType::float16, 0.5, 0}, top_k_leaves},
                    CodecCase{"top_all", {CodecKind::topk, DType::float32, 1, 0}, top_k_leaves},
                    CodecCase{"top_tenth_with_momentum", {CodecKind::topk, DType::float32, 0.1, 0.9}, top_k_leaves},
                    CodecCase{"int8", {CodecKind::int8, DType::int8, 1, 0}, quantized_leaves<Int8>},
                    CodecCase{"int4", {CodecKind::int4, DType::int8, 1, 0}, quantized_leaves<Int4>}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lightcc

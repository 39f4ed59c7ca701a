// How parts of compressed all-reduces lie for NCCL: whatever tensors, members' shares hold each element once.
#include "engine/run/nccl_codec_layout.h"

#include <gtest/gtest.h>

#include <random>

#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

// counts: by tensor and member.
CompressedLayout one_part(const std::vector<std::vector<int64_t>>& counts, size_t message_bytes) {
  CompressedLayout layout;
  for (const auto& of_members : counts) {
    layout.tensors.push_back({});
    layout.tensors.back().counts = of_members;
  }
  layout.parts.push_back({0, counts.size(), {message_bytes}});
  return layout;
}

TEST(NcclCodecLayout, OneTensorOfEqualSharesStaysWhereItIs) {
  const NcclPart part = lay_out_for_nccl(one_part({{10, 10}}, 100), 0, DType::float16);
  EXPECT_TRUE(part.is_even);
  EXPECT_EQ(part.share_bytes, 20u);
  EXPECT_EQ(part.messages_at(false, 2), 0u);
  EXPECT_EQ(part.message_bytes, 128u);
  EXPECT_EQ(part.memory_bytes(false, 2, 3), 3 * 128u);
  EXPECT_EQ(part.messages_at(true, 2), 64u) << "what lies on another GPU is copied";
  EXPECT_EQ(part.memory_bytes(true, 2, 3), 64u + 3 * 128u);
}

TEST(NcclCodecLayout, OtherTensorsAreCopiedIntoSharesOfWholeLines) {
  for (const auto& counts : {std::vector<std::vector<int64_t>>{{16, 10}}, {{16, 16}, {1, 0}}, {{0, 0}, {16, 16}}}) {
    const NcclPart part = lay_out_for_nccl(one_part(counts, 0), 0, DType::float32);
    EXPECT_FALSE(part.is_even);
    EXPECT_EQ(part.share_bytes, counts[0][0] == 16 && counts.size() == 2 ? 128u : 64u);
  }
}

TEST(NcclCodecLayout, NothingIsShared) {
  const NcclPart part = lay_out_for_nccl(one_part({{0, 0}, {0, 0}}, 0), 0, DType::float32);
  EXPECT_EQ(part.share_bytes, 0u);
  EXPECT_EQ(part.memory_bytes(true, 2, 2), 0u);
}

TEST(NcclCodecLayout, SharesHoldEachElementOnce) {
  std::mt19937_64 random(test::run_seed());
  for (int again = 0; again < 200; ++again) {
    const size_t members = 1 + random() % 4, tensors = 1 + random() % 5;
    std::vector<std::vector<int64_t>> counts(tensors);
    for (auto& of_members : counts)
      for (size_t m = 0; m < members; ++m) of_members.push_back(random() % 3 ? int64_t(random() % 100) : 0);
    const DType dtype = random() % 2 ? DType::float32 : DType::bfloat16;
    const NcclPart part = lay_out_for_nccl(one_part(counts, random() % 1000), 0, dtype);
    ASSERT_EQ(part.shards.size(), tensors);
    for (size_t m = 0; m < members; ++m) {
      size_t end = 0;
      for (size_t t = 0; t < tensors; ++t) {
        const NcclShard& shard = part.shards[t][m];
        EXPECT_EQ(shard.bytes, size_t(counts[t][m]) * size_of(dtype));
        if (shard.bytes == 0) continue;
        EXPECT_GE(shard.in_share, end);
        EXPECT_EQ(shard.in_share % kLine, 0u);
        end = shard.in_share + shard.bytes;
        const size_t next = m + 1 < members ? part.shards[t][m + 1].in_tensor : shard.in_tensor + shard.bytes;
        EXPECT_EQ(next, shard.in_tensor + shard.bytes);
      }
      EXPECT_LE(end, part.share_bytes);
    }
    EXPECT_EQ(part.message_bytes % kLine, 0u);
  }
}

}  // namespace
}  // namespace lightcc

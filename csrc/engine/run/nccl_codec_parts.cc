#include "engine/run/nccl_codec_parts.h"

#include <algorithm>
#include <utility>

namespace lightcc {

NcclCodecParts::NcclCodecParts(DType dtype, const CompressedLayout& layout, const std::vector<GpuTensor>& tensors,
                               const NodeLinks& links, NcclStream& stream)
    : layout_(layout), tensors_(tensors), links_(links), stream_(stream) {
  for (size_t p = 0; p < layout_.parts.size(); ++p) {
    NcclPart part = lay_out_for_nccl(layout_, p, dtype);
    const bool copies = !part.is_even || !is_here(begin(p));
    parts_.push_back({std::move(part), copies});
  }
}

std::byte* NcclCodecParts::take_memory(size_t more) {
  size_t bytes[2] = {};  // of even and odd parts
  for (size_t p = 0; p < size(); ++p) {
    const size_t its = parts_[p].memory_bytes(parts_[p].copies, members(), size_t(links_.nodes()));
    bytes[p % 2] = std::max(bytes[p % 2], round_up(its));
  }
  std::byte* const memory = stream_.buffer(bytes[0] + bytes[1] + more);
  for (size_t p = 0; p < size(); ++p) parts_[p].memory = memory + (p % 2) * bytes[0];
  return memory + bytes[0] + bytes[1];
}

const std::byte* NcclCodecParts::inputs(size_t p) const {
  return parts_[p].copies ? parts_[p].memory : static_cast<const std::byte*>(tensors_[begin(p)].input);
}

std::byte* NcclCodecParts::outputs(size_t p) const {
  return parts_[p].copies ? parts_[p].memory : static_cast<std::byte*>(tensors_[begin(p)].output);
}

std::byte* NcclCodecParts::own_share(size_t p) const {
  return outputs(p) + parts_[p].share_bytes * size_t(links_.place());
}

std::byte* NcclCodecParts::own_shard(size_t p, size_t tensor) const {
  return own_share(p) + parts_[p].shards[tensor - begin(p)][size_t(links_.place())].in_share;
}

std::byte* NcclCodecParts::messages(size_t p) const {
  return parts_[p].memory + parts_[p].messages_at(parts_[p].copies, members());
}

std::byte* NcclCodecParts::own_message(size_t p) const {
  return messages(p) + parts_[p].message_bytes * size_t(links_.node());
}

void NcclCodecParts::copy(size_t p, bool in) {
  if (!parts_[p].copies) return;
  std::vector<CudaCopy> here;
  for (size_t t = begin(p); t < end(p); ++t)
    for (size_t member = 0; member < members(); ++member) {
      const NcclShard& shard = parts_[p].shards[t - begin(p)][member];
      if (shard.bytes == 0) continue;
      std::byte* const share = parts_[p].memory + parts_[p].share_bytes * member + shard.in_share;
      const CudaCopy one =
          in ? CudaCopy{share, static_cast<const std::byte*>(tensors_[t].input) + shard.in_tensor, shard.bytes}
             : CudaCopy{static_cast<std::byte*>(tensors_[t].output) + shard.in_tensor, share, shard.bytes};
      if (is_here(t))
        here.push_back(one);
      else
        stream_.copy(one);
    }
  stream_.copy_all(here);
}

}  // namespace lightcc

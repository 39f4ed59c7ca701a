#include "engine/run/nccl_codec_layout.h"

#include <algorithm>

namespace lightcc {

// Shards and messages begin on lines: NCCL's widest access needs 16 bytes.
NcclPart lay_out_for_nccl(const CompressedLayout& layout, size_t part, DType dtype) {
  const CompressedPart& whole = layout.parts[part];
  NcclPart out;
  out.message_bytes = round_up(whole.message_bytes[0]);
  std::vector<size_t> ends(layout.tensors[whole.begin].counts.size());  // of the members' shares
  for (size_t t = whole.begin; t < whole.end; ++t) {
    size_t in_tensor = 0;
    auto& shards = out.shards.emplace_back();
    for (size_t member = 0; member < ends.size(); ++member) {
      const size_t bytes = size_t(layout.tensors[t].counts[member]) * size_of(dtype), begin = round_up(ends[member]);
      shards.push_back({in_tensor, begin, bytes});
      in_tensor += bytes;
      if (bytes > 0) ends[member] = begin + bytes;
    }
  }
  const auto [least, most] = std::ranges::minmax(ends);
  out.is_even = whole.end - whole.begin == 1 && least == most;
  out.share_bytes = out.is_even ? most : round_up(most);
  return out;
}

}  // namespace lightcc

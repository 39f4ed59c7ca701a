#include "engine/negotiate/control/fusion.h"

#include <algorithm>

namespace lightcc {
namespace {

// Both in shared memory, or both in private memory: those in shared memory may lie side by side and run without a copy,
// the others would have to be copied.
bool is_cheap_together(const ReadyRequest& a, const ReadyRequest& b) {
  return a.address != 0 || a.device == DeviceKind::cuda || (a.bytes <= kMostCopiedBytes && b.bytes <= kMostCopiedBytes);
}

CollectiveLayout lay_out_dtype(DType dtype, std::span<const BatchTensor> tensors,
                               const std::function<bool(const void*, size_t)>& may_be_used, size_t* buffer_bytes) {
  CollectiveLayout layout{dtype, {}, 0, std::nullopt};
  const std::byte* begin = nullptr;
  bool in_place = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const BatchTensor& tensor = tensors[i];
    if (tensor.dtype != dtype || tensor.bytes == 0) continue;
    if (layout.places.empty()) begin = static_cast<const std::byte*>(tensor.input);
    const size_t offset = round_up(layout.bytes);
    in_place = in_place && tensor.input == tensor.output && tensor.input == begin + offset;
    layout.places.push_back({i, offset});
    layout.bytes = offset + tensor.bytes;
  }
  if (layout.places.size() <= 1 || (in_place && may_be_used(begin, layout.bytes))) return layout;
  layout.buffer_offset = round_up(*buffer_bytes);
  *buffer_bytes = *layout.buffer_offset + layout.bytes;
  return layout;
}

}  // namespace

bool may_fuse(const ReadyRequest& a, const ReadyRequest& b) {
  return a.kind == Kind::allreduce && b.kind == Kind::allreduce && a.op == b.op && a.pre == b.pre && a.post == b.post &&
         a.codec == b.codec && a.device == b.device && a.dtype && b.dtype && *a.dtype == *b.dtype &&
         std::ranges::equal(a.absent, b.absent) && (a.address != 0) == (b.address != 0) && is_cheap_together(a, b);
}

std::vector<Bucket> fuse(std::span<const ReadyRequest> ready, FusionLimits limits) {
  std::vector<Bucket> buckets;
  std::vector<int64_t> bucket_bytes;
  for (size_t i = 0; i < ready.size(); ++i) {
    const auto takes = [&](size_t bucket) {
      const ReadyRequest& first = ready[buckets[bucket][0]];
      return may_fuse(first, ready[i]) &&
             bucket_bytes[bucket] + ready[i].bytes <= limits.bucket_bytes;
    };
    size_t bucket = limits.enabled ? 0 : buckets.size();
    while (bucket < buckets.size() && !takes(bucket)) ++bucket;
    if (bucket == buckets.size()) {
      buckets.emplace_back();
      bucket_bytes.push_back(0);
    }
    buckets[bucket].push_back(i);
    bucket_bytes[bucket] += ready[i].bytes;
  }
  for (Bucket& bucket : buckets)
    std::ranges::stable_sort(bucket, {}, [&](size_t i) { return ready[i].address; });
  return buckets;
}

BatchLayout lay_out(std::span<const BatchTensor> tensors,
                    const std::function<bool(const void*, size_t)>& may_be_used) {
  BatchLayout layout{{}, 0};
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    CollectiveLayout collective = lay_out_dtype(DType(dtype), tensors, may_be_used, &layout.buffer_bytes);
    if (!collective.places.empty()) layout.collectives.push_back(std::move(collective));
  }
  return layout;
}

}  // namespace lightcc

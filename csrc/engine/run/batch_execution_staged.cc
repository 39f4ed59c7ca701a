// How tensors of GPUs that go through the host become collectives in slots of pinned memory: slices, of which one is
// exchanged while others are copied. All ranks cut alike, by what all of them know.
#include <algorithm>
#include <numeric>

#include "engine/run/batch_execution.h"

namespace lightcc {
namespace {

std::byte* byte_at(const void* memory, size_t bytes) {
  return static_cast<std::byte*>(const_cast<void*>(memory)) + bytes;
}

// The blocks of a collective's input or output, by member, one behind the other. of: those of the whole; cut: the parts
// of these that begin at `begin`. visit(where it begins in the whole, where in the slice, how many elements).
template <class Visit>
void for_blocks(const std::vector<int64_t>& of, const std::vector<int64_t>& cut, int64_t begin, Visit visit) {
  for (size_t member = 0, in_whole = 0, in_slice = 0; member < of.size(); ++member) {
    if (cut[member] > 0) visit(int(member), in_whole + size_t(begin), in_slice, size_t(cut[member]));
    in_whole += size_t(of[member]);
    in_slice += size_t(cut[member]);
  }
}

size_t sum(const std::vector<int64_t>& counts) {
  return size_t(std::accumulate(counts.begin(), counts.end(), int64_t(0)));
}

size_t sum_before(const std::vector<int64_t>& counts, int member) {
  return size_t(std::accumulate(counts.begin(), counts.begin() + member, int64_t(0)));
}

// How many blocks of input and output a slot holds a part of. An all-gather's input lies in its output.
size_t blocks_in_slot(const Collective& c) {
  const size_t members = size_t(c.size);
  return c.kind == Kind::allgather ? members : c.kind == Kind::alltoall ? 2 * members : members + 1;
}

// Elements of a block that a slice takes: whole lines.
int64_t most_of_block(const Collective& c) {
  const size_t bytes = std::max(kStagedSlotBytes / blocks_in_slot(c) / kLine * kLine, kLine);
  return int64_t(bytes / size_of(c.dtype));
}

}  // namespace

// One collective for each slice. The data of a rank that has joined lie in host memory, as they are laid out here.
void BatchExecution::plan_slices(const CollectiveLayout& layout, const std::vector<BatchTensor>& tensors,
                                 const FusedCollective& whole) {
  const Collective& c = whole.collective;
  const bool is_whole = is_adasum(c) || c.codec.kind != CodecKind::none;
  const size_t most = is_whole ? layout.bytes : kStagedSliceBytes;
  const BatchTensor& first = tensors[layout.places[0].tensor];
  for (size_t begin = 0; begin < layout.bytes; begin += most) {
    const size_t bytes = std::min(most, layout.bytes - begin);
    FusedCollective slice{whole};
    slice.collective.count = int64_t(bytes / size_of(c.dtype));
    slice.before.clear();
    slice.after.clear();
    if (items_[0].placeholder) {
      slice.collective.input = static_cast<const std::byte*>(first.input) + begin;
      slice.collective.output = static_cast<std::byte*>(first.output) + begin;
      collectives_.push_back(std::move(slice));
      continue;
    }
    slice.staged_bytes = bytes;
    for (auto [tensor, offset] : layout.places) {
      const size_t from = std::max(offset, begin), to = std::min(offset + tensors[tensor].bytes, begin + bytes);
      if (from >= to) continue;
      const auto part = [&](const void* whole) { return byte_at(whole, from - offset); };
      const bool is_root = c.kind == Kind::broadcast && c.root == c.index;
      if (c.kind != Kind::broadcast || is_root)
        slice.fetch.push_back({owners_[tensor], part(tensors[tensor].input), from - begin, to - from});
      if (!is_root || tensors[tensor].input != tensors[tensor].output)
        slice.deliver.push_back({owners_[tensor], part(tensors[tensor].output), from - begin, to - from});
    }
    collectives_.push_back(std::move(slice));
  }
}

// All-gather, all-to-all and reduce-scatter travel whole if they fit a slot, where the output then stays until the
// caller takes it. Otherwise each slice takes a part of each block, and the output is in the GPU's memory.
void BatchExecution::plan_staged(BatchItem& item, size_t tensor, FusedCollective fused) {
  Request& request = *item.request;
  Collective& c = fused.collective;
  const Shape& shape = request.what.tensors[tensor].shape;
  int64_t largest = *std::ranges::max_element(c.counts);
  if (c.kind == Kind::alltoall)
    largest = *std::ranges::max_element(item.rows[tensor]) * count_of(Shape(shape.begin() + 1, shape.end()));
  const int64_t most = most_of_block(c);
  if (largest <= most) return plan_staged_whole(item, tensor, std::move(fused));
  const size_t element = size_of(c.dtype), own = size_t(c.index);
  Output& output = request.results[tensor];
  const size_t output_bytes = size_t(count_of(output.shape)) * element;
  if (!item.placeholder && output_bytes > 0) {
    output.gpu = staging_->output(request.place.device, output_bytes, &output.data);
    c.output = output.data;
  }
  // This rank's own block stays on its GPU.
  if (!item.placeholder && c.kind != Kind::reducescatter) {
    const size_t from = c.kind == Kind::alltoall ? sum_before(c.send, c.index) : 0;
    const size_t to = sum_before(c.counts, c.index);
    staging_->keep(request, byte_at(c.output, to * element), byte_at(c.input, from * element),
                   size_t(c.counts[own]) * element);
  }
  for (int64_t begin = 0; begin < largest; begin += most) plan_staged_slice(item, tensor, fused, begin, most);
}

void BatchExecution::plan_staged_whole(BatchItem& item, size_t tensor, FusedCollective fused) {
  if (!item.placeholder) {
    Request& request = *item.request;
    const Collective& c = fused.collective;
    const TensorSpec& spec = request.what.tensors[tensor];
    const size_t input_bytes = size_t(count_of(spec.shape)) * size_of(spec.dtype);
    const bool is_in_output = c.kind == Kind::allgather;
    fused.input_offset = is_in_output ? sum_before(c.counts, c.index) * size_of(spec.dtype) : 0;
    fused.output_offset = is_in_output ? 0 : round_up(input_bytes);
    fused.staged_bytes = fused.output_offset + size_t(count_of(request.results[tensor].shape)) * size_of(spec.dtype);
    if (input_bytes > 0)
      fused.fetch = {{&request, const_cast<void*>(request.inputs[tensor]), fused.input_offset, input_bytes}};
    fused.result = &request.results[tensor];
  }
  collectives_.push_back(std::move(fused));
}

void BatchExecution::plan_staged_slice(BatchItem& item, size_t tensor, const FusedCollective& whole, int64_t begin,
                                       int64_t most) {
  const Request& request = *item.request;
  const Collective& all = whole.collective;
  const size_t element = size_of(all.dtype);
  FusedCollective slice{whole};
  Collective& c = slice.collective;
  const auto cut = [&](int64_t count) { return std::clamp<int64_t>(count - begin, 0, most); };
  std::ranges::transform(all.counts, c.counts.begin(), cut);
  std::ranges::transform(all.send, c.send.begin(), cut);
  if (c.kind == Kind::alltoall) c.send[size_t(c.index)] = c.counts[size_t(c.index)] = 0;
  if (item.placeholder) return collectives_.push_back(std::move(slice));  // whatever it sends is the same everywhere
  const auto fetch = [&](size_t from, size_t to, size_t count) {
    slice.fetch.push_back({&request, byte_at(request.inputs[tensor], from * element), to * element, count * element});
  };
  const auto deliver = [&](size_t to, size_t from, size_t count) {
    slice.deliver.push_back({&request, byte_at(all.output, to * element), slice.output_offset + from * element,
                             count * element});
  };
  const int64_t own = c.counts[size_t(c.index)];
  const bool scatters = c.kind == Kind::reducescatter, gathers = c.kind == Kind::allgather;
  if (gathers) {
    slice.input_offset = sum_before(c.counts, c.index) * element;
    if (own > 0) fetch(size_t(begin), sum_before(c.counts, c.index), size_t(own));
  } else {
    const auto& blocks = scatters ? all.counts : all.send;
    const auto& parts = scatters ? c.counts : c.send;
    for_blocks(blocks, parts, begin, [&](int, size_t from, size_t to, size_t count) { fetch(from, to, count); });
    slice.output_offset = round_up(sum(parts) * element);
  }
  if (scatters) {
    if (own > 0) deliver(size_t(begin), 0, size_t(own));
  } else {
    for_blocks(all.counts, c.counts, begin, [&](int member, size_t to, size_t from, size_t count) {
      if (member != c.index) deliver(to, from, count);
    });
  }
  // A rank may have nothing in a slice of the others: one byte, so that it has a slot as they do.
  slice.staged_bytes = std::max(slice.output_offset + (scatters ? size_t(own) : sum(c.counts)) * element, size_t(1));
  collectives_.push_back(std::move(slice));
}

}  // namespace lightcc

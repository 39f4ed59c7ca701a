#include "engine/run/shared_fast_path.h"

#include "device/device.h"

namespace lightcc {
namespace {

static_assert(sizeof(ArenaOffsets) <= FastPathSlot::kInlineBytes);
static_assert(SharedBackend::kFlatBytes == FastPathSlot::kEagerBytes);
constexpr uint64_t kRefusal = 1;  // the lowest bit of a slot's word; the turn stands above it

std::byte* data_of(FastPathSlot& slot, size_t bytes) {
  return bytes <= FastPathSlot::kInlineBytes ? slot.inline_data : slot.eager;
}

}  // namespace

SharedFastPath::SharedFastPath(LocalRanks& local_ranks, const Group& group, SharedBackend& shared)
    : FastPath(group, FastPathSlot::kEagerBytes), local_ranks_(local_ranks), shared_(shared) {
  for (int member = 0; member < group.size(); ++member)
    for (int slot : {0, 1}) slots_.push_back(&local_ranks.fast_path_slot(group.id(), group.local_index(member), slot));
}

bool SharedFastPath::has_written(int member, uint64_t turn) const {
  return at(member, turn).word.load(std::memory_order_acquire) >> 1 == turn;
}

FastPath::Slot SharedFastPath::slot(int member, uint64_t turn, size_t bytes) const {
  FastPathSlot& slot = at(member, turn);
  return {(slot.word.load(std::memory_order_relaxed) & kRefusal) != 0, slot.hash, data_of(slot, bytes)};
}

void SharedFastPath::write(uint64_t turn, uint64_t hash, const Collective* call, bool eager) {
  FastPathSlot& own = at(group_.index(), turn);
  if (call) {
    own.hash = hash;
    const size_t bytes = size_t(call->count) * size_of(call->dtype);
    if (eager) stage(data_of(own, bytes), call->input, bytes);
    else new (own.inline_data) ArenaOffsets(shared_.offsets_of(*call));
  }
  own.word.store(turn << 1 | (call ? 0 : kRefusal), std::memory_order_release);
  for (int rank : group_.local_indices())
    if (rank != local_ranks_.rank()) local_ranks_.mark(rank);
}

std::unique_ptr<Work> SharedFastPath::start(const Collective& call, uint64_t turn) {
  std::vector<ArenaOffsets> offsets;
  for (int i = 0; i < group_.size(); ++i)
    offsets.push_back(*reinterpret_cast<ArenaOffsets*>(at(i, turn).inline_data));
  return shared_.start(call, std::move(offsets));
}

}  // namespace lightcc

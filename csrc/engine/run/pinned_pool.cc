#include "engine/run/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "engine/negotiate/control/fusion.h"

namespace lightcc {
namespace {

constexpr size_t kLeastBytes = 64 << 10;

std::byte* pinned(const CudaFunctions& cuda, Arena& arena, int device, size_t bytes) {
  std::byte* data = arena.allocate(bytes);
  arena.populate(data, bytes);
  arena.keep_in_place(data);
  try {
    check_cuda(cuda.pin(device, data, bytes), ("pinning " + std::to_string(bytes) + " bytes").c_str(), device);
  } catch (...) {
    arena.release(data);
    throw;
  }
  return data;
}

// Few sizes, so that slots which are kept serve each other's users.
size_t rounded(size_t bytes) {
  return bytes > kStagedSlotBytes ? round_up(bytes, kLeastBytes) : std::bit_ceil(std::max(bytes, kLeastBytes));
}

bool is_free(const std::shared_ptr<StagingSlot>& slot) { return slot.use_count() == 1 && slot->idle(); }

// Takes slots that somebody may still use, of a pool that is gone, and lets those go that nobody does.
void leave(std::vector<std::shared_ptr<StagingSlot>> slots) {
  static std::mutex& mutex = *new std::mutex;  // at the end of the process copies may still be under way
  static auto& leaving = *new std::vector<std::shared_ptr<StagingSlot>>;
  std::lock_guard lock(mutex);
  std::ranges::move(slots, std::back_inserter(leaving));
  std::erase_if(leaving, [](const auto& slot) {
    try {
      return is_free(slot);
    } catch (const Error&) {  // the device has failed, and copies no more
      return slot.use_count() == 1;
    }
  });
}

}  // namespace

StagingSlot::StagingSlot(const CudaFunctions& cuda, std::shared_ptr<Arena> arena, int device, size_t bytes)
    : cuda_(cuda),
      arena_(std::move(arena)),
      device_(device),
      bytes_(bytes),
      data_(pinned(cuda_, *arena_, device, bytes_)) {}

StagingSlot::~StagingSlot() {
  cuda_.unpin(device_, data_);
  arena_->release(data_);
}

void StagingSlot::copy_to(const DevicePlace& place, void* tensor, const void* from, size_t bytes) {
  if (const char* why = cuda_.refuse_stream(place.device, place.stream)) throw Error(Code::invalid_argument, why);
  auto end = std::make_shared<CudaEvent>(cuda_, place.device);
  check_cuda(cuda_.copy(place.device, place.stream, tensor, from, bytes), "copying an output", place.device);
  end->record(place.stream);
  expect(std::move(end));
}

void StagingSlot::expect(std::shared_ptr<CudaEvent> end_of_copies) {
  std::lock_guard lock(mutex_);
  copies_.push_back(std::move(end_of_copies));
}

bool StagingSlot::idle() {
  std::lock_guard lock(mutex_);
  while (!copies_.empty() && copies_.back()->reached()) copies_.pop_back();
  return copies_.empty();
}

// Copies may be under way, and behind whatever a program has given its stream: nobody waits for them here.
PinnedPool::~PinnedPool() { leave(std::move(slots_)); }

// The smallest that is large enough; but none that was made for far more, which may be needed for that again.
std::shared_ptr<StagingSlot> PinnedPool::take(const CudaFunctions& cuda, int device, size_t bytes) {
  bytes = rounded(bytes);
  if (is_over()) trim();
  const size_t most = std::max(2 * bytes, kStagedSlotBytes);
  auto best = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    const size_t its = (*slot)->bytes();
    if (its >= bytes && its <= most && (best == slots_.end() || its < (*best)->bytes()) && is_free(*slot)) best = slot;
  }
  if (best != slots_.end()) {
    std::rotate(best, best + 1, slots_.end());
  } else {
    shrink_to(most_bytes_ > bytes ? most_bytes_ - bytes : 0);
    slots_.push_back(std::make_shared<StagingSlot>(cuda, arena_, device, bytes));
    bytes_ += bytes;
  }
  ++slots_.back()->turn_;
  return slots_.back();
}

// Those go first that were not used for longest.
void PinnedPool::shrink_to(size_t bytes) {
  for (auto slot = slots_.begin(); slot != slots_.end() && bytes_ > bytes;) {
    if (!is_free(*slot)) {
      ++slot;
      continue;
    }
    bytes_ -= (*slot)->bytes();
    slot = slots_.erase(slot);
  }
}

}  // namespace lightcc

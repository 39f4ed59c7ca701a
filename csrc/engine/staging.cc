#include "engine/staging.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "engine/fusion.h"

namespace lightcc {
namespace {

constexpr size_t kLeastBytes = 64 << 10;
constexpr size_t kSlots = 4;      // of a group engine: one is filled and one exchanged while others are emptied
constexpr uint64_t kLeaveNs = 1'000'000'000;  // how long the memory of copies that do not end is waited for

std::byte* pinned(const CudaFunctions& cuda, Arena& arena, int device, size_t bytes) {
  std::byte* data = arena.allocate(bytes);
  arena.populate(data, bytes);
  try {
    check_cuda(cuda.pin(device, data, bytes), ("pinning " + std::to_string(bytes) + " bytes").c_str(), device);
  } catch (...) {
    arena.release(data);
    throw;
  }
  return data;
}

}  // namespace

StagingSlot::StagingSlot(const CudaFunctions& cuda, std::shared_ptr<Arena> arena, int device, size_t bytes)
    : cuda_(cuda),
      arena_(std::move(arena)),
      device_(device),
      bytes_(bytes),
      data_(pinned(cuda_, *arena_, device, bytes)) {}

StagingSlot::~StagingSlot() {
  const auto done = [&] {
    try {
      return idle();
    } catch (const Error&) {  // the device has failed: it copies no more
      return true;
    }
  };
  for (const uint64_t until = now_ns() + kLeaveNs; !done();) {
    if (now_ns() > until) {
      new std::shared_ptr<Arena>(arena_);  // leaked, with the slot in it
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  cuda_.unpin(device_, data_);
  arena_->release(data_);
}

void StagingSlot::copy_to(const DevicePlace& place, void* tensor, const void* from, size_t bytes) {
  check_cuda(cuda_.copy(place.device, place.stream, tensor, from, bytes), "copying an output", place.device);
  auto end = std::make_unique<CudaEvent>(cuda_, place.device);
  end->record(place.stream);
  expect(std::move(end));
}

void StagingSlot::expect(std::unique_ptr<CudaEvent> end_of_copies) {
  std::lock_guard lock(mutex_);
  copies_.push_back(std::move(end_of_copies));
}

bool StagingSlot::idle() {
  std::lock_guard lock(mutex_);
  std::erase_if(copies_, [](const auto& end) { return end->reached(); });
  return copies_.empty();
}

Staging::Staging(const CudaFunctions& cuda, std::shared_ptr<Arena> arena, std::function<void()> ring)
    : cuda_(cuda), arena_(std::move(arena)) {
  bell_->ring = std::move(ring);
}

Staging::~Staging() {
  std::lock_guard lock(bell_->mutex);
  bell_->ring = nullptr;
}

void* Staging::stream(int device, bool in) {
  Streams& both = streams_.try_emplace(device, cuda_, device).first->second;
  return (in ? both.in : both.out).get();
}

std::shared_ptr<StagingSlot> Staging::take(int device, size_t bytes) {
  return take(slots_, kSlots, device, bytes);
}

std::shared_ptr<StagingSlot> Staging::take_for_results(int device, size_t bytes) {
  return take(results_, SIZE_MAX, device, bytes);
}

// Pinning costs more than copying, so slots are kept, but for those that were made for something larger than a slice.
std::shared_ptr<StagingSlot> Staging::take(Slots& slots, size_t most, int device, size_t bytes) {
  bytes = std::bit_ceil(std::max(bytes, kLeastBytes));
  const auto is_free = [](const auto& slot) { return slot.use_count() == 1 && slot->idle(); };
  std::erase_if(slots, [&](const auto& slot) { return slot->bytes() > kStagedSliceBytes && is_free(slot); });
  const auto fits = [&](const auto& slot) { return slot->bytes() == bytes && is_free(slot); };
  if (const auto slot = std::ranges::find_if(slots, fits); slot != slots.end()) return *slot;
  if (slots.size() >= most) std::erase_if(slots, is_free);  // of other sizes
  if (slots.size() >= most) return nullptr;
  return slots.emplace_back(std::make_shared<StagingSlot>(cuda_, arena_, device, bytes));
}

void Staging::fetch(StagingSlot& slot, const std::vector<StagedPiece>& pieces) { copy(slot, pieces, true); }
void Staging::deliver(StagingSlot& slot, const std::vector<StagedPiece>& pieces) { copy(slot, pieces, false); }

void Staging::copy(StagingSlot& slot, const std::vector<StagedPiece>& pieces, bool in) {
  const Request* ordered = nullptr;
  std::vector<int> devices;
  for (const StagedPiece& piece : pieces) {
    const int device = piece.request->place.device;
    void* stream = this->stream(device, in);
    if (std::exchange(ordered, piece.request) != piece.request) piece.request->ready->order(stream);
    std::byte* staged = slot.data() + piece.offset;
    check_cuda(cuda_.copy(device, stream, in ? staged : piece.tensor, in ? piece.tensor : staged, piece.bytes),
               ("copying " + piece.request->title()).c_str(), device);
    if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
  }
  for (const int device : devices) {
    void* stream = this->stream(device, in);
    auto end = std::make_unique<CudaEvent>(cuda_, device);
    end->record(stream);
    slot.expect(std::move(end));
    auto* bell = new std::shared_ptr<Bell>(bell_);
    const auto ring = [](void* context) {
      const std::unique_ptr<std::shared_ptr<Bell>> bell(static_cast<std::shared_ptr<Bell>*>(context));
      std::lock_guard lock((*bell)->mutex);
      if ((*bell)->ring) (*bell)->ring();
    };
    check_cuda(cuda_.call(device, stream, ring, bell), "asking for a callback", device);
  }
}

void Staging::finish(Request& request, bool failed) {
  const auto streams = streams_.find(request.place.device);
  if (streams == streams_.end()) return;  // nothing was copied
  const auto order_behind = [&](const CudaStream& stream) {
    auto end = std::make_shared<CudaEvent>(cuda_, request.place.device);
    end->record(stream.get());
    end->order(request.place.stream);
    return end;
  };
  request.delivered = order_behind(streams->second.out);
  if (failed) order_behind(streams->second.in);
}

}  // namespace lightcc

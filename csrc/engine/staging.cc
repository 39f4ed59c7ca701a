#include "engine/staging.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "engine/fusion.h"

namespace lightcc {
namespace {

constexpr size_t kLeastBytes = 64 << 10;
constexpr size_t kSlots = 4;      // of a group engine: one is filled and one exchanged while others are emptied

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
  return bytes > kStagedSliceBytes ? round_up(bytes, kLeastBytes) : std::bit_ceil(std::max(bytes, kLeastBytes));
}

bool is_free(const std::shared_ptr<StagingSlot>& slot) { return slot.use_count() == 1 && slot->idle(); }

// Takes slots that somebody may still use, of a group engine that is gone, and lets those go that nobody does.
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
      bytes_(rounded(bytes)),
      data_(pinned(cuda_, *arena_, device, bytes_)) {}

StagingSlot::~StagingSlot() {
  cuda_.unpin(device_, data_);
  arena_->release(data_);
}

void StagingSlot::copy_to(const DevicePlace& place, void* tensor, const void* from, size_t bytes) {
  if (const char* why = cuda_.refuse_stream(place.device, place.stream)) throw Error(Code::invalid_argument, why);
  auto end = std::make_unique<CudaEvent>(cuda_, place.device);
  check_cuda(cuda_.copy(place.device, place.stream, tensor, from, bytes), "copying an output", place.device);
  end->record(place.stream);
  expect(std::move(end));
}

void StagingSlot::expect(std::unique_ptr<CudaEvent> end_of_copies) {
  std::lock_guard lock(mutex_);
  copies_.push_back(std::move(end_of_copies));
}

bool StagingSlot::idle() {
  std::lock_guard lock(mutex_);
  while (!copies_.empty() && copies_.back()->reached()) copies_.pop_back();
  return copies_.empty();
}

Staging::Staging(const CudaFunctions& cuda, std::shared_ptr<Arena> arena, std::function<void()> ring)
    : cuda_(cuda), arena_(std::move(arena)) {
  bell_->ring = std::move(ring);
}

// Copies may be under way, and behind whatever a program has given its stream: nobody waits for them here.
Staging::~Staging() {
  {
    std::lock_guard lock(bell_->mutex);
    bell_->ring = nullptr;
  }
  leave(std::move(slots_));
  leave(std::move(results_));
}

std::shared_ptr<StagingSlot> Staging::take(int device, size_t bytes) {
  auto slot = find(slots_, bytes);
  if (slot || slots_.size() >= kSlots) return slot;
  return slots_.emplace_back(std::make_shared<StagingSlot>(cuda_, arena_, device, bytes));
}

std::shared_ptr<StagingSlot> Staging::take_for_results(int device, size_t bytes) {
  if (auto slot = find(results_, bytes)) return slot;
  return results_.emplace_back(std::make_shared<StagingSlot>(cuda_, arena_, device, bytes));
}

// The smallest free one that is large enough. Pinning costs more than copying, so slots are kept; but not those that
// were made for something larger than a slice, nor, where there are many, those that are too small.
std::shared_ptr<StagingSlot> Staging::find(Slots& slots, size_t bytes) {
  std::shared_ptr<StagingSlot> best;
  for (auto& slot : slots)
    if (slot->bytes() >= bytes && (!best || slot->bytes() < best->bytes()) && is_free(slot)) best = slot;
  std::erase_if(slots, [&](const auto& slot) { return slot->bytes() > kStagedSliceBytes && is_free(slot); });
  if (best) return best;
  if (slots.size() >= kSlots) std::erase_if(slots, is_free);
  return nullptr;
}

void Staging::fetch(StagingSlot& slot, const std::vector<StagedPiece>& pieces) { copy(slot, pieces, true); }
void Staging::deliver(StagingSlot& slot, const std::vector<StagedPiece>& pieces) { copy(slot, pieces, false); }

void Staging::copy(StagingSlot& slot, const std::vector<StagedPiece>& pieces, bool in) {
  const auto stream_of = [&](int device) { return (in ? streams(device).in : streams(device).out).get(); };
  std::map<int, std::unique_ptr<CudaEvent>> ends;  // by device
  const auto expect_ends = [&] {
    for (auto& [device, end] : ends) {
      end->record(stream_of(device));
      slot.expect(std::move(end));
    }
  };
  const Request* ordered = nullptr;
  try {
    for (const StagedPiece& piece : pieces) {
      const int device = piece.request->place.device;
      auto& end = ends[device];
      if (!end) {
        end = std::make_unique<CudaEvent>(cuda_, device);
        if (!in) streams(device).delivered = nullptr;
      }
      const bool is_another = std::exchange(ordered, piece.request) != piece.request;
      if (is_another) piece.request->ready->order(device, stream_of(device));
      std::byte* staged = slot.data() + piece.offset;
      check_cuda(cuda_.copy(device, stream_of(device), in ? staged : piece.tensor, in ? piece.tensor : staged,
                            piece.bytes),
                 ("copying " + piece.request->title()).c_str(), device);
    }
  } catch (...) {
    std::erase_if(ends, [](auto& entry) { return !entry.second; });
    expect_ends();  // of those that have been queued
    throw;
  }
  expect_ends();
  for (auto& [device, end] : ends) ring_behind(device, stream_of(device));
}

void Staging::ring_behind(int device, void* stream) {
  auto bell = std::make_unique<std::shared_ptr<Bell>>(bell_);
  const auto ring = [](void* context) {
    const std::unique_ptr<std::shared_ptr<Bell>> own(static_cast<std::shared_ptr<Bell>*>(context));
    std::lock_guard lock((*own)->mutex);
    if ((*own)->ring) (*own)->ring();
  };
  check_cuda(cuda_.call(device, stream, ring, bell.get()), "asking for a callback", device);
  bell.release();
}

void Staging::finish(Request& request, bool failed) {
  const auto [kind, device, stream] = request.place;
  const auto found = streams_.find(device);
  if (found == streams_.end()) return;  // nothing was copied
  Streams& streams = found->second;
  if (!streams.delivered) {
    streams.delivered = std::make_shared<CudaEvent>(cuda_, device);
    streams.delivered->record(streams.out.get());
    streams.behind.clear();
  }
  request.delivered = streams.delivered;
  if (std::ranges::find(streams.behind, stream) == streams.behind.end()) {
    streams.delivered->order(device, stream);
    streams.behind.push_back(stream);
  }
  if (!failed) return;
  CudaEvent fetched(cuda_, device);
  fetched.record(streams.in.get());
  fetched.order(device, stream);
}

}  // namespace lightcc

#include "engine/run/staging.h"

#include <algorithm>
#include <utility>

namespace lightcc {
namespace {

constexpr size_t kSlots = 4;  // of a group engine at a time: one is filled and one exchanged while others are emptied

}  // namespace

Staging::Staging(const CudaFunctions& cuda, std::shared_ptr<PinnedPool> pool, std::function<void()> ring)
    : cuda_(cuda), pool_(std::move(pool)) {
  bell_->ring = std::move(ring);
}

Staging::~Staging() {
  std::lock_guard lock(bell_->mutex);
  bell_->ring = nullptr;
}

// is_emptied: nobody holds it, but it is being copied from.
bool Staging::is_in_use(const Taken& taken, bool* is_emptied) const {
  const auto slot = taken.slot.lock();
  if (!slot || slot->turn() != taken.turn) return false;
  const bool is_held = slot.use_count() > 2;  // by others than the pool and this function
  if (!is_held && slot->idle()) return false;
  *is_emptied = *is_emptied || !is_held;
  return true;
}

std::shared_ptr<StagingSlot> Staging::take(int device, size_t bytes) {
  bool is_emptied = false;  // one of them
  std::erase_if(taken_, [&](const Taken& one) { return !is_in_use(one, &is_emptied); });
  if (taken_.size() < kSlots) {
    auto slot = pool_->take(cuda_, device, bytes);
    taken_.push_back({slot, slot->turn()});
    return slot;
  }
  if (is_emptied && bell_->asked == 0)
    for (auto& [each, streams] : streams_) ring_behind(each, streams.out->stream(), true);
  return nullptr;
}

std::shared_ptr<StagingSlot> Staging::take_for_results(int device, size_t bytes) {
  return pool_->take(cuda_, device, bytes);
}

std::shared_ptr<GpuOutput> Staging::output(int device, size_t bytes, void** memory) {
  Streams& own = streams(device);
  own.out->release();
  own.delivered = nullptr;  // what is delivered next comes after it
  return gpu_output(cuda_, own.out, bytes, memory);
}

Staging::CodecStreams Staging::codec_streams(int device) {
  Streams& own = streams(device);
  own.out->release();
  own.delivered = nullptr;
  return {own.in.get(), own.out};
}

void Staging::keep(const Request& request, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const int device = request.place.device;
  Streams& own = streams(device);
  own.delivered = nullptr;
  request.ready->order(device, own.out->stream());
  check_cuda(cuda_.copy(device, own.out->stream(), to, from, bytes), ("copying " + request.title()).c_str(), device);
}

void Staging::fetch(StagingSlot& slot, const std::vector<StagedPiece>& pieces) { copy(slot, pieces, true, true); }
void Staging::deliver(StagingSlot& slot, const std::vector<StagedPiece>& pieces, bool rings) {
  copy(slot, pieces, false, rings || pool_->is_over());
}

void Staging::copy(StagingSlot& slot, const std::vector<StagedPiece>& pieces, bool in, bool rings) {
  const auto stream_of = [&](int device) { return in ? streams(device).in.get() : streams(device).out->stream(); };
  std::map<int, std::shared_ptr<CudaEvent>> ends;  // by device
  const auto expect_ends = [&] {
    for (auto& [device, end] : ends) {
      end->record(stream_of(device));
      if (!in) streams(device).delivered = end;
      slot.expect(end);
    }
  };
  const Request* ordered = nullptr;
  try {
    for (const StagedPiece& piece : pieces) {
      const int device = piece.request->place.device;
      auto& end = ends[device];
      if (!end) {
        end = std::make_shared<CudaEvent>(cuda_, device);
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
  if (!rings) return;
  for (auto& [device, end] : ends) ring_behind(device, stream_of(device), !in);
}

// for_slot: take() has nobody rung again before.
void Staging::ring_behind(int device, void* stream, bool for_slot) {
  struct Context {
    std::shared_ptr<Bell> bell;
    bool for_slot;
  };
  auto context = std::make_unique<Context>(Context{bell_, for_slot});
  const auto ring = [](void* given) {
    const std::unique_ptr<Context> own(static_cast<Context*>(given));
    if (own->for_slot) --own->bell->asked;
    std::lock_guard lock(own->bell->mutex);
    if (own->bell->ring) own->bell->ring();
  };
  if (for_slot) ++bell_->asked;
  const char* failure = cuda_.call(device, stream, ring, context.get());
  if (failure && for_slot) --bell_->asked;
  check_cuda(failure, "asking for a callback", device);
  context.release();
}

void Staging::finish(Request& request, bool failed) {
  const int device = request.place.device;
  const auto found = streams_.find(device);
  if (found == streams_.end()) return;  // nothing was copied
  Streams& streams = found->second;
  if (!streams.delivered) {
    streams.delivered = std::make_shared<CudaEvent>(cuda_, device);
    streams.delivered->record(streams.out->stream());
  }
  request.delivered = streams.delivered;
  if (!failed) return;
  CudaEvent fetched(cuda_, device);
  fetched.record(streams.in.get());
  fetched.order(device, request.place.stream);
}

}  // namespace lightcc

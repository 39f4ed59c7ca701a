#include "engine/run/gpu_residual.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine/negotiate/control/fusion.h"

namespace lightcc {
namespace {

constexpr size_t kUploadSlots = 2;  // one is filled while the other is copied from

// Pinned by itself, since whoever reads may have no engine.
class PinnedPart {
 public:
  PinnedPart(const CudaFunctions& cuda, int device, size_t bytes)
      : cuda_(cuda), device_(device), data_(std::aligned_alloc(kLine, round_up(bytes))) {
    const char* failure = data_ ? cuda_.pin(device_, data_, round_up(bytes)) : "there is no memory";
    if (!failure) return;
    std::free(data_);
    check_cuda(failure, "pinning memory to read what compression has left behind", device_);
  }
  ~PinnedPart() {
    cuda_.unpin(device_, data_);
    std::free(data_);
  }
  PinnedPart(const PinnedPart&) = delete;
  PinnedPart& operator=(const PinnedPart&) = delete;
  void* data() const { return data_; }

 private:
  const CudaFunctions& cuda_;
  const int device_;
  void* const data_;
};

// First the word that says which buffers hold, then those, part by part.
class CopyFromGpu : public ResidualCopy {
 public:
  CopyFromGpu(const CudaFunctions& cuda, const GpuResidual& from, std::shared_ptr<GpuMemory> memory)
      : cuda_(cuda),
        memory_(std::move(memory)),
        stream_(cuda, from.device()),
        part_(std::make_unique<PinnedPart>(cuda, from.device(), std::min(bytes_of(from) + kLine, kStagedSliceBytes))),
        state_(from.state()),
        buffers_{{from.values(0), from.values(1)}, {from.velocity(0), from.velocity(1)}} {
    from.order(stream_.get());
    values.resize(size_t(from.count()));
    if (from.velocity(0)) velocity.resize(values.size());
    queue(state_, sizeof(uint32_t));
  }
  // Nothing may be copied into memory that is gone: where a GPU has not come to it, the memory is given up.
  ~CopyFromGpu() override {
    try {
      if (copied_ && !copied_->reached()) static_cast<void>(part_.release());
    } catch (const Error&) {
      // The GPU has failed, and copies no more.
    }
  }

  bool step() override {
    if (!copied_) return false;  // all is there
    if (!copied_->reached()) return true;
    if (which_ < 0) {
      uint32_t word = 0;
      std::memcpy(&word, part_->data(), sizeof word);
      which_ = word != 0;
    } else {
      std::memcpy(reinterpret_cast<std::byte*>(to().data()) + done_, part_->data(), queued_);
      done_ += queued_;
    }
    copied_ = nullptr;
    while (stretch_ < 2 && done_ == to().size() * sizeof(float)) ++stretch_, done_ = 0;
    if (stretch_ == 2) return false;
    queue(reinterpret_cast<const std::byte*>(buffers_[stretch_][which_]) + done_,
          std::min(to().size() * sizeof(float) - done_, kStagedSliceBytes));
    return true;
  }

 private:
  static size_t bytes_of(const GpuResidual& from) { return size_t(from.count()) * sizeof(float); }
  std::vector<float>& to() { return stretch_ == 0 ? values : velocity; }
  void queue(const void* from, size_t bytes) {
    check_cuda(cuda_.copy(memory_->device(), stream_.get(), part_->data(), from, bytes),
               "copying what compression has left behind", memory_->device());
    queued_ = bytes;
    auto end = std::make_unique<CudaEvent>(cuda_, memory_->device());
    end->record(stream_.get());
    copied_ = std::move(end);
  }

  const CudaFunctions& cuda_;
  const std::shared_ptr<GpuMemory> memory_;  // whose device it is
  const CudaStream stream_;
  std::unique_ptr<PinnedPart> part_;
  const void* const state_;
  const float* const buffers_[2][2];         // of the values, and the velocity
  std::unique_ptr<CudaEvent> copied_;        // what was queued last
  size_t queued_ = 0;                        // so many bytes of it
  int which_ = -1;                           // of each pair holds; not known
  size_t stretch_ = 0, done_ = 0;            // the values or the velocity, and so many bytes of them
};

}  // namespace

GpuResidual::GpuResidual(const CudaFunctions& cuda, std::shared_ptr<GpuMemory> memory, size_t count, bool velocity)
    : cuda_(cuda), memory_(std::move(memory)), count_(count), has_velocity_(velocity) {
  data_ = static_cast<std::byte*>(memory_->allocate(device_residual_bytes(count, velocity)));
}

GpuResidual::~GpuResidual() { memory_->give_back(data_, std::move(used_)); }

std::unique_ptr<ResidualCopy> GpuResidual::copy() const { return std::make_unique<CopyFromGpu>(cuda_, *this, memory_); }

std::vector<ResidualUpload::Stretch> ResidualUpload::stretches() const {
  const size_t bytes = size_t(to_.count()) * sizeof(float);
  std::vector<Stretch> all{{to_.state(), nullptr, kCodecStateBytes}, {to_.values(0), from_.values.data(), bytes}};
  if (to_.velocity(0)) all.push_back({to_.velocity(0), from_.velocity.data(), bytes});
  return all;
}

StagingSlot* ResidualUpload::free_slot() {
  if (slots_.size() < kUploadSlots) {
    slots_.push_back(pool_.take(cuda_, to_.device(), std::min(device_residual_bytes(size_t(to_.count()), false),
                                                              kStagedSliceBytes)));
    return slots_.back().get();
  }
  StagingSlot* const slot = slots_[turn_ % kUploadSlots].get();
  if (!slot->idle()) return nullptr;
  ++turn_;
  return slot;
}

bool ResidualUpload::step() {
  const std::vector<Stretch> all = stretches();
  while (stretch_ < all.size() && done_ == all[stretch_].bytes) ++stretch_, done_ = 0;
  if (stretch_ == all.size()) return false;
  StagingSlot* const slot = free_slot();
  if (!slot) return true;
  const Stretch& now = all[stretch_];
  const size_t bytes = std::min({now.bytes - done_, slot->bytes(), kStagedSliceBytes});
  if (now.from)
    std::memcpy(slot->data(), reinterpret_cast<const std::byte*>(now.from) + done_, bytes);
  else
    std::memset(slot->data(), 0, bytes);
  check_cuda(cuda_.copy(to_.device(), stream_, static_cast<std::byte*>(now.to) + done_, slot->data(), bytes),
             "copying what compression has left behind", to_.device());
  auto copied = std::make_shared<CudaEvent>(cuda_, to_.device());
  copied->record(stream_);
  slot->expect(copied);
  to_.used(std::move(copied));
  done_ += bytes;
  return true;
}

}  // namespace lightcc

#include "engine/nccl_launches.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

constexpr uint64_t kPatienceNs = 5'000'000'000;  // of a group that is gone, for what it has queued

}  // namespace

bool NcclLaunches::has_turn(int group) const { return std::ranges::count(turns_, group) > 0; }

void NcclLaunches::end_turn(int group) {
  if (!is_next(group)) throw Error(Code::internal, "a batch of a GPU ran before its turn");
  turns_.pop_front();
  asked_.erase(group);
}

NcclStream& NcclLaunches::stream(const CudaFunctions& cuda, int device, bool batches_copies) {
  auto& stream = streams_[device];
  if (!stream) stream = std::make_unique<NcclStream>(cuda, device, batches_copies);
  return *stream;
}

void NcclLaunches::forget(int group, std::unique_ptr<NcclCommunicators> communicators) {
  std::erase(turns_, group);
  asked_.erase(group);
  if (communicators) leaving_.push_back({std::move(communicators), now_ns() + kPatienceNs});
}

void NcclLaunches::step() {
  std::erase_if(leaving_, [](const Leaving& one) {
    return one.communicators->try_finish() || now_ns() > one.deadline_ns;
  });
}

void NcclLaunches::finish(uint64_t deadline_ns) {
  turns_.clear();
  asked_.clear();
  if (deadline_ns > 0)
    for (const Leaving& one : leaving_) one.communicators->finish(std::min(deadline_ns, one.deadline_ns));
  leaving_.clear();
}

}  // namespace lightcc

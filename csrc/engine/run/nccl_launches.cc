#include "engine/run/nccl_launches.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {

using namespace std::chrono_literals;

bool NcclLaunches::has_turn(int group) const { return std::ranges::count(turns_, group) > 0; }

void NcclLaunches::end_turn(int group) {
  if (!is_next(group)) throw Error(Code::internal, "a batch of a GPU ran before its turn");
  turns_.pop_front();
  asked_.erase(group);
}

NcclStream& NcclLaunches::stream(const CudaFunctions& cuda, int device, size_t number, bool batches_copies) {
  auto& stream = streams_[{device, number}];
  if (!stream) stream = std::make_unique<NcclStream>(cuda, device, batches_copies);
  return *stream;
}

void NcclLaunches::forget(int group) {
  std::erase(turns_, group);
  asked_.erase(group);
}

void NcclLaunches::add_ending(std::future<void> communicators) {
  const auto has_ended = [](const std::future<void>& one) { return one.wait_for(0s) == std::future_status::ready; };
  std::erase_if(endings_, has_ended);
  endings_.push_back(std::move(communicators));
}

void NcclLaunches::finish(uint64_t deadline_ns) {
  turns_.clear();
  asked_.clear();
  for (const auto& one : endings_) {
    const uint64_t now = now_ns();
    one.wait_for(std::chrono::nanoseconds(deadline_ns > now ? deadline_ns - now : 0));
  }
  endings_.clear();
}

}  // namespace lightcc

#include "cuda_double_clocks.h"

#include <algorithm>

namespace lightcc::test {
namespace {

uintptr_t begin_of(const Access& access) { return reinterpret_cast<uintptr_t>(access.begin); }
uintptr_t end_of(const Access& access) { return begin_of(access) + access.bytes; }

size_t common_bytes(const Access& a, const Access& b) {
  const uintptr_t begin = std::max(begin_of(a), begin_of(b)), end = std::min(end_of(a), end_of(b));
  return begin < end ? end - begin : 0;
}
bool covers(const Access& all, const Access& part) {
  return begin_of(all) <= begin_of(part) && end_of(part) <= end_of(all);
}

}  // namespace

void VectorClock::advance(size_t stream) {
  if (counts_.size() <= stream) counts_.resize(stream + 1);
  ++counts_[stream];
}

void VectorClock::join(const VectorClock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
}

std::vector<std::string> AccessHistory::conflicts(const Actor& actor, const VectorClock& clock, const Access& access,
                                                  const std::string& verb) const {
  std::vector<std::string> found;
  for (const Past& past : past_) {
    const size_t bytes = common_bytes(past.access, access);
    if (bytes == 0 || !(past.access.writes || access.writes) || before(past, clock)) continue;
    const auto of_device = [](const Actor& one) { return " of device " + std::to_string(one.device); };
    found.push_back(actor.what + (actor.device < 0 ? "" : of_device(actor)) + " " + verb + " " +
                    std::to_string(bytes) + " bytes that " + past.actor.what +
                    (past.actor.device == actor.device ? "" : of_device(past.actor)) +
                    (past.access.writes ? " writes" : " reads") + " without order");
  }
  return found;
}

// An earlier access is dropped if whatever is in conflict with it would be so with the new one too: the history does
// not grow while the same memory is used again and again.
void AccessHistory::add(const Actor& actor, const VectorClock& clock, const Access& access) {
  std::erase_if(past_, [&](const Past& past) {
    return covers(access, past.access) && before(past, clock) && (access.writes || !past.access.writes);
  });
  past_.push_back({actor, clock.of(actor.stream), access});
}

void AccessHistory::host_knows(const VectorClock& done) {
  std::erase_if(past_, [&](const Past& past) { return before(past, done); });
}

void AccessHistory::forget(const void* begin, size_t bytes) {
  const Access gone{begin, bytes, true};
  std::erase_if(past_, [&](const Past& past) { return common_bytes(past.access, gone) > 0; });
}

}  // namespace lightcc::test

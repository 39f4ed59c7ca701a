#include "harp_plugin/engine/channel.h"

#include "harp_plugin/engine/engine.h"
#include "harp_plugin/engine/fork.h"

namespace harp {

Channel::Channel(Engine& e, Mode m, uint32_t stream_frames)
    : engine(e), mode(m), forks(harp::forks()), requests_(std::make_unique<Request[]>(kRequests)),
      submissions_(kRequests) {
  if (mode == Mode::stream) records_ = std::make_unique<SpscRing<LentRecord>>(stream_frames);
  for (uint32_t i = kRequests; i-- > 0;) {
    Request& request = requests_[i];
    request.channel = this;
    request.sends = i < kRequests / 2;
    retire(request);
  }
}

Request* Channel::submit(bool sends, uint8_t* data, uint32_t bytes) {
  Request* request = free_[sends];
  if (!request) return nullptr;
  free_[sends] = request->next_free;
  request->state.store(Request::posted, std::memory_order_relaxed);
  // There are as many places as requests, so it fits.
  submissions_.producer().push({data, bytes, static_cast<uint16_t>(request - requests_.get()), sends});
  engine.notice(*this);
  return request;
}

void Channel::retire(Request& request) {
  request.state.store(Request::idle, std::memory_order_relaxed);
  request.next_free = free_[request.sends];
  free_[request.sends] = &request;
}

std::optional<LentRecord> Channel::next_record() {
  LentRecord record;
  if (!records_ || !records_->consumer().pop(record)) return {};
  ++taken_;
  return record;
}

bool Channel::consume(uint64_t records) {
  if (records > lent()) return false;
  consumed_.store(consumed_.load(std::memory_order_relaxed) + records, std::memory_order_release);
  engine.notice(*this);
  return true;
}

}  // namespace harp

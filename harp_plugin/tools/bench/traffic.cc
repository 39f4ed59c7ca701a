#include "harp_plugin/tools/bench/traffic.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"

namespace harp::bench {
namespace {

using lightcc::now_ns;

constexpr size_t kCacheLine = 64;
constexpr double kGraceS = 60;

// Buffers of one size in one block, used in turn.
class Buffers {
 public:
  Buffers(BenchChannel& channel, size_t bytes, size_t footprint, size_t least)
      : stride_((bytes + kCacheLine - 1) / kCacheLine * kCacheLine), count_(std::max(least, footprint / stride_)),
        block_(channel.memory(stride_ * count_)) {
    std::memset(block_.get(), 0x5a, stride_ * count_);
  }
  uint8_t* operator[](uint64_t turn) const { return block_.get() + turn % count_ * stride_; }

 private:
  const size_t stride_, count_;
  std::shared_ptr<uint8_t> block_;
};

// Which phase a message belongs to that is made now.
class Schedule {
 public:
  explicit Schedule(const Workload& s)
      : warm_up_ns_(uint64_t(s.warm_up_s * 1e9)), all_ns_(uint64_t(s.seconds * 1e9) + warm_up_ns_) {}
  Phase phase() {
    const uint64_t now = now_ns();
    if (began_ == 0) began_ = now;
    return now - began_ < warm_up_ns_ ? Phase::warm_up : now - began_ < all_ns_ ? Phase::measured : Phase::last;
  }

 private:
  const uint64_t warm_up_ns_, all_ns_;
  uint64_t began_ = 0;
};

// Counts the messages between the first one of the window, with whose end it begins, and the last one.
class Counter {
 public:
  explicit Counter(Window& window) : window_(window) {}
  void done(Phase phase, size_t bytes) {
    if (phase == Phase::warm_up) return;
    if (begun_) bytes_ += bytes;
    begun_ = true;
    window_.begin();
    if (phase == Phase::last) window_.end();
    last_ = phase == Phase::last;
  }
  bool last() const { return last_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Window& window_;
  bool begun_ = false, last_ = false;
  uint64_t bytes_ = 0;
};

class Sender : public Party {
 public:
  Sender(BenchChannel& channel, const Workload& s, size_t bytes, Window& window)
      : channel_(channel), bytes_(bytes), depth_(s.depth), full_(s.check == "full"), schedule_(s), counter_(window),
        buffers_(channel, bytes, s.footprint_bytes, s.depth) {}

  bool step() override {
    const bool was_done = test_oldest();
    bool posted = false;
    while (!last_posted_ && requests_.size() < depth_ && post()) posted = true;
    return was_done || posted;
  }
  bool finished() const override { return counter_.last(); }
  uint64_t counted_bytes() const override { return counter_.bytes(); }

 private:
  struct PendingSend {
    void* request;
    Phase phase;
  };

  bool test_oldest() {
    size_t sent = 0;
    if (requests_.empty() || !channel_.test(requests_.front().request, &sent)) return false;
    if (sent != bytes_) throw lightcc::Error(lightcc::Code::internal, "a send ended with another number of bytes");
    counter_.done(requests_.front().phase, bytes_);
    requests_.pop_front();
    return true;
  }

  bool post() {
    uint8_t* buffer = buffers_[number_];
    if (!stamped_) {
      phase_ = schedule_.phase();
      stamp(buffer, bytes_, {number_, phase_}, full_);
      stamped_ = true;
    }
    void* request = channel_.send(buffer, bytes_);
    if (!request) return false;
    requests_.push_back({request, phase_});
    last_posted_ = phase_ == Phase::last;
    stamped_ = false;
    ++number_;
    return true;
  }

  BenchChannel& channel_;
  const size_t bytes_, depth_;
  const bool full_;
  Schedule schedule_;
  Counter counter_;
  const Buffers buffers_;
  std::deque<PendingSend> requests_;
  uint64_t number_ = 0;
  Phase phase_ = Phase::warm_up;
  bool stamped_ = false, last_posted_ = false;
};

class Receiver : public Party {
 public:
  Receiver(BenchChannel& channel, const Workload& s, Window& window)
      : channel_(channel), bytes_(s.message_bytes), depth_(s.depth), full_(s.check == "full"), counter_(window),
        buffers_(channel, bytes_, s.footprint_bytes, s.depth) {}

  bool step() override {
    size_t came = 0;
    const bool was_done = !requests_.empty() && channel_.test(requests_.front(), &came);
    if (was_done) {
      requests_.pop_front();
      counter_.done(verify(buffers_[number_], came, number_, full_).phase, came);
      ++number_;
    }
    bool posted = false;
    while (!finished() && requests_.size() < depth_ && post()) posted = true;
    return was_done || posted;
  }
  bool finished() const override { return counter_.last(); }
  uint64_t counted_bytes() const override { return counter_.bytes(); }

 private:
  bool post() {
    void* request = channel_.receive(buffers_[number_ + requests_.size()], bytes_);
    if (request) requests_.push_back(request);
    return request != nullptr;
  }

  BenchChannel& channel_;
  const size_t bytes_, depth_;
  const bool full_;
  Counter counter_;
  const Buffers buffers_;
  std::deque<void*> requests_;
  uint64_t number_ = 0;
};

class RecordReceiver : public Party {
 public:
  RecordReceiver(Records& records, const Workload& s, Window& window)
      : records_(records), full_(s.check == "full"), counter_(window) {}

  bool step() override {
    size_t bytes = 0;
    const void* data = records_.next(&bytes);
    if (!data) return false;
    counter_.done(verify(static_cast<const uint8_t*>(data), bytes, number_++, full_).phase, bytes);
    records_.consume(1);
    return true;
  }
  bool finished() const override { return counter_.last(); }
  uint64_t counted_bytes() const override { return counter_.bytes(); }

 private:
  Records& records_;
  const bool full_;
  Counter counter_;
  uint64_t number_ = 0;
};

// One message is on its way at a time. Receives are posted ahead; a send's buffer is used again when its turn comes.
class Pinger : public Party {
 public:
  Pinger(BenchChannel& channel, const Workload& s, Window& window)
      : channel_(channel), bytes_(s.message_bytes), depth_(s.depth), full_(s.check == "full"), schedule_(s),
        counter_(window), out_(channel, bytes_, 0, depth_), in_(channel, bytes_, 0, depth_), sends_(depth_) {}

  bool step() override {
    for (size_t i = 0; posted_ < number_ + depth_ && i < depth_; ++i) post_receive();
    if (!waiting_) return ping();
    size_t came = 0;
    if (!channel_.test(receives_.front(), &came)) {
      free_send(number_);  // a send may need tests to go on
      return false;
    }
    const uint64_t round_trip = now_ns() - sent_at_ns_;
    receives_.pop_front();
    const Phase phase = verify(in_[number_], came, number_, full_).phase;
    if (phase == Phase::measured) round_trips_.push_back(uint32_t(std::min<uint64_t>(round_trip, UINT32_MAX)));
    counter_.done(phase, came);
    ++number_;
    waiting_ = false;
    return true;
  }
  bool finished() const override {
    return counter_.last() && std::all_of(sends_.begin(), sends_.end(), [](void* request) { return !request; });
  }
  uint64_t counted_bytes() const override { return counter_.bytes(); }
  const std::vector<uint32_t>& round_trips_ns() const override { return round_trips_; }

 private:
  void post_receive() {
    if (void* request = channel_.receive(in_[posted_], bytes_)) {
      receives_.push_back(request);
      ++posted_;
    }
  }
  bool free_send(uint64_t turn) {
    void*& request = sends_[turn % depth_];
    size_t sent = 0;
    if (request && channel_.test(request, &sent)) request = nullptr;
    return !request;
  }
  bool ping() {
    if (counter_.last()) {
      for (size_t i = 0; i < depth_; ++i) free_send(i);
      return false;
    }
    if (!free_send(number_) || posted_ == number_) return false;
    stamp(out_[number_], bytes_, {number_, schedule_.phase()}, full_);
    sent_at_ns_ = now_ns();
    sends_[number_ % depth_] = channel_.send(out_[number_], bytes_);
    waiting_ = sends_[number_ % depth_] != nullptr;
    return waiting_;
  }

  BenchChannel& channel_;
  const size_t bytes_, depth_;
  const bool full_;
  Schedule schedule_;
  Counter counter_;
  const Buffers out_, in_;
  std::vector<void*> sends_;
  std::deque<void*> receives_;
  uint64_t number_ = 0, posted_ = 0, sent_at_ns_ = 0;
  bool waiting_ = false;
  std::vector<uint32_t> round_trips_;
};

// Sends back what comes, from where it came to. A buffer is posted again when it has been sent.
class Ponger : public Party {
 public:
  Ponger(BenchChannel& channel, const Workload& s, Window& window)
      : channel_(channel), bytes_(s.message_bytes), depth_(s.depth), full_(s.check == "full"), counter_(window),
        buffers_(channel, bytes_, 0, depth_), sends_(depth_) {}

  bool step() override {
    while (posted_ < number_ + depth_ && free_send(posted_) && post_receive()) {}
    if (counter_.last()) return free_all();
    size_t came = 0;
    if (pending_ == 0) {
      if (receives_.empty() || !channel_.test(receives_.front(), &came)) {
        free_send(number_ + depth_ - 1);  // the last
        return false;
      }
      receives_.pop_front();
      pending_ = came;
    }
    void* request = channel_.send(buffers_[number_], pending_);
    if (!request) return false;
    sends_[number_ % depth_] = request;
    counter_.done(verify(buffers_[number_], pending_, number_, full_).phase, pending_);
    pending_ = 0;
    ++number_;
    return true;
  }
  bool finished() const override {
    return counter_.last() && std::all_of(sends_.begin(), sends_.end(), [](void* request) { return !request; });
  }
  uint64_t counted_bytes() const override { return counter_.bytes(); }

 private:
  bool post_receive() {
    void* request = channel_.receive(buffers_[posted_], bytes_);
    if (!request) return false;
    receives_.push_back(request);
    ++posted_;
    return true;
  }
  bool free_send(uint64_t turn) {
    void*& request = sends_[turn % depth_];
    size_t sent = 0;
    if (request && channel_.test(request, &sent)) request = nullptr;
    return !request;
  }
  bool free_all() {
    for (size_t i = 0; i < depth_; ++i) free_send(i);
    return false;
  }

  BenchChannel& channel_;
  const size_t bytes_, depth_;
  const bool full_;
  Counter counter_;
  const Buffers buffers_;
  std::vector<void*> sends_;
  std::deque<void*> receives_;
  uint64_t number_ = 0, posted_ = 0;
  size_t pending_ = 0;  // bytes that came and are not on their way back yet
};

}  // namespace

std::unique_ptr<Party> make_client_party(BenchChannel& channel, const Workload& s, Window& window) {
  if (s.mode == "latency") return std::make_unique<Pinger>(channel, s, window);
  size_t bytes = s.message_bytes;
  if (auto* records = s.mode == "streams" ? dynamic_cast<Records*>(&channel) : nullptr)
    bytes = std::min(bytes, records->record_bytes());
  return std::make_unique<Sender>(channel, s, bytes, window);
}

std::unique_ptr<Party> make_server_party(BenchChannel& channel, const Workload& s, Window& window) {
  if (s.mode == "latency") return std::make_unique<Ponger>(channel, s, window);
  auto* records = s.mode == "streams" ? dynamic_cast<Records*>(&channel) : nullptr;
  if (records) return std::make_unique<RecordReceiver>(*records, s, window);
  return std::make_unique<Receiver>(channel, s, window);
}

void drive(const std::vector<Party*>& parties, const Workload& s) {
  const uint64_t deadline = now_ns() + uint64_t((s.warm_up_s + s.seconds + kGraceS) * 1e9);
  uint64_t idle_turns = 0;
  for (;;) {
    bool moved = false, finished = true;
    for (Party* party : parties) {
      if (party->finished()) continue;
      moved |= party->step();
      finished &= party->finished();
    }
    if (finished) return;
    if (moved) continue;
    if (s.pause_us > 0) usleep(useconds_t(s.pause_us));
    if (++idle_turns % 1024 == 0 && now_ns() > deadline)
      throw lightcc::Error(lightcc::Code::timeout, "the traffic has come to a halt");
  }
}

}  // namespace harp::bench

// A round of an engine. What it is commanded is in commands.cc, when its thread runs in thread.cc.
#include "harp_plugin/engine/engine.h"

#include <sched.h>

#include <bit>

namespace harp {

namespace {

constexpr uint64_t kPublishEveryNs = 100 * kMillisecond;

}  // namespace

bool Engine::try_round(bool* busy) {
  if (progress_lock_.test(std::memory_order_relaxed)) return false;
  if (progress_lock_.test_and_set(std::memory_order_acquire)) return false;
  try {
    *busy = round();
  } catch (const std::exception& error) {
    // The engine goes on: what is broken is known to those who use it.
    for (const auto& [id, channel] : channels_) endpoint_.fail(id, Status::local_fault, error.what());
    carry_out_events();
    *busy = true;
  }
  if (std::exchange(news_, false) && settings_.notifier) settings_.notifier->notify();
  progress_lock_.clear(std::memory_order_release);
  return true;
}

void Engine::poll() {
  if (!settings_.runs_inline) {
    if (settings_.oversubscribed) sched_yield();
    return;
  }
  // The count only tells the engine's thread that somebody polls: two threads may count as one.
  polls_.store(polls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  bool busy;
  try_round(&busy);
}

bool Engine::round() {
  if (armed_) {
    port_->disarm();
    armed_ = false;
  }
  const size_t received = receive();
  // Read again after packets were looked at: what is sent now is not as old as what has come.
  const uint64_t now_ns = lightcc::now_ns();
  bool busy = received > 0;
  if (!mailbox_.empty()) busy |= commands();
  busy |= submissions(now_ns);
  endpoint_.advance(now_ns);
  for (ConnectionId id : std::exchange(orphans_, {})) endpoint_.close(id, now_ns);
  carry_out_events();
  release();
  busy |= transmit(now_ns);
  if (!fenced_.empty()) settle();
  if (unpublished_ && now_ns - published_ns_ >= kPublishEveryNs) publish(now_ns);
  under_way_.store(endpoint_.under_way() || kept_ != kept_end_ || !fenced_.empty(), std::memory_order_relaxed);
  return busy;
}

size_t Engine::receive() {
  const bool places = port_->caps().places_payload;
  const size_t count = port_->rx(rx_, places ? endpoint_.expected() : std::span<const Expected>());
  if (count == 0) return 0;
  const uint64_t now_ns = lightcc::now_ns();  // not before rx(): packets may have come while it ran
  size_t unneeded = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool kept = endpoint_.receive(rx_[i], now_ns);
    carry_out_events();
    if (kept) continue;
    if (unneeded != i) rx_[unneeded] = rx_[i];
    ++unneeded;
  }
  unpublished_ |= count > 0;
  if (unneeded > 0) port_->release(std::span(rx_).first(unneeded));
  return count;
}

// All together: while packets are looked at, their port must not reuse any.
void Engine::release() {
  std::vector<RxPacket>& released = endpoint_.events().released;
  if (released.empty()) return;
  port_->release(released);
  released.clear();
}

bool Engine::submissions(uint64_t now_ns) {
  if (!queued_.load(std::memory_order_relaxed)) return false;
  Channel* channel = queued_.exchange(nullptr, std::memory_order_acq_rel);
  while (channel) {
    Channel* next = channel->next_queued_;
    // From here on the application queues it anew; what it submitted before is seen below.
    channel->queued_.exchange(false, std::memory_order_acq_rel);
    drain(*channel, now_ns);
    channel = next;
  }
  return true;
}

void Engine::drain(Channel& channel, uint64_t now_ns) {
  const Status over = channel.over();
  if (channel.id_ == 0 && over == Status::ok) return;  // connect() is about to come, and drains
  RingConsumer<Submission>& ring = channel.submissions_.consumer();
  while (ring.available() > 0) {
    const Submission submission = ring.read(0);
    Request& request = channel.requests_[submission.request];
    const auto name = reinterpret_cast<uintptr_t>(&request);
    bool taken = true;
    if (channel.id_ == 0) {
      complete(request, {name, over, 0});
    } else if (submission.sends) {
      taken = endpoint_.send(channel.id_, submission.data, submission.bytes, name, now_ns);
    } else {
      taken = endpoint_.receive(channel.id_, submission.data, submission.bytes, name, now_ns);
    }
    carry_out_events();
    if (!taken) {
      notice(channel);
      break;
    }
    ring.retire(1);
  }
  const uint64_t consumed = channel.consumed_.load(std::memory_order_acquire);
  if (channel.id_ == 0 || consumed == channel.consumed_seen_) return;
  endpoint_.consume(channel.id_, static_cast<uint32_t>(consumed - channel.consumed_seen_), now_ns);
  channel.consumed_seen_ = consumed;
}

bool Engine::transmit(uint64_t now_ns) {
  if (kept_ != kept_end_) offer_kept();
  for (int batch = 0; batch < kBatchesARound && kept_ == kept_end_; ++batch) {
    const size_t count = endpoint_.transmit(tx_, now_ns);
    if (count == 0) return false;
    unpublished_ = true;
    const size_t taken = port_->tx(std::span(tx_).first(count));
    taken_ += taken;
    if (taken < count) keep(taken, count);
  }
  return kept_ == kept_end_;  // else the port is full, and sleep() looks again soon
}

void Engine::offer_kept() {
  const size_t taken = port_->tx(std::span(tx_).subspan(kept_, kept_end_ - kept_));
  taken_ += taken;
  kept_ += taken;
}

// The endpoint may forget a connection before the port takes its packets: their addresses are copied.
void Engine::keep(size_t from, size_t count) {
  kept_ = from;
  kept_end_ = count;
  for (size_t i = from; i < count; ++i) {
    kept_to_[i] = *tx_[i].to;
    tx_[i].to = &kept_to_[i];
  }
}

void Engine::carry_out_events() {
  while (const Event* event = endpoint_.events().next())
    std::visit([this](const auto& one) { carry_out(one); }, *event);
}

void Engine::carry_out(const event::Completed& completed) {
  const Completion& completion = completed.completion;
  auto* request = reinterpret_cast<Request*>(static_cast<uintptr_t>(completion.request));
  const bool ended_well = completion.status == Status::ok || completion.status == Status::too_long;
  const bool kept = request->sends && kept_ != kept_end_;
  if (ended_well && !kept) return complete(*request, completion);
  // Failures come before Failed tells why, so they wait for the end of the round in any case.
  fenced_.push_back({taken_ + (kept_end_ - kept_), !ended_well, request, completion, nullptr});
}

void Engine::complete(Request& request, const Completion& completion) {
  request.complete(completion);
  news_ = true;
}

void Engine::settle() {
  const uint64_t let_go = port_->tx_done();
  while (!fenced_.empty()) {
    const Fenced& first = fenced_.front();
    if ((first.let_go ? let_go : taken_) < first.packets) return;
    if (first.request) complete(*first.request, first.completion);
    if (first.acknowledgement) first.acknowledgement->give();
    fenced_.pop_front();
  }
}

void Engine::carry_out(const event::Opened& opened) {
  const ConnectionId id = opened.id;
  news_ = true;
  if (!opened.listener) {
    if (const auto own = channels_.find(id); own != channels_.end())
      own->second->record_bytes_.store(endpoint_.record_bytes(id), std::memory_order_release);
    return;
  }
  const auto queue = listeners_.find(*opened.listener);
  if (queue == listeners_.end()) return orphans_.push_back(id);
  auto channel = std::make_unique<Channel>(*this, endpoint_.mode(id), options_.stream_frames);
  channel->id_ = id;
  channel->peer = settings_.name_of_peer(opened.peer);
  channel->record_bytes_.store(endpoint_.record_bytes(id), std::memory_order_release);
  channels_[id] = channel.get();
  load_.fetch_add(1, std::memory_order_relaxed);
  queue->second->with([&](auto& waiting) { waiting.push_back(std::move(channel)); });
}

void Engine::carry_out(const event::Received& received) {
  const auto own = channels_.find(received.id);
  if (own == channels_.end() || !own->second->records_) return;
  news_ = true;
  // The peer has credit for as many records as the ring holds.
  if (!own->second->records_->producer().push({received.record.data, received.record.bytes}))
    give_up(*own->second, Status::local_fault, "more records than the credit that was given");
}

void Engine::carry_out(const event::Failed& failed) {
  if (const auto own = channels_.find(failed.id); own != channels_.end())
    give_up(*own->second, failed.status, std::string(failed.why));
}

void Engine::give_up(Channel& channel, Status status, const std::string& why) {
  if (channel.over() != Status::ok) return;
  channel.why_ = "peer " + channel.peer + " (port " + caps().name + "): " + why;
  channel.over_.store(static_cast<int>(status), std::memory_order_release);
  news_ = true;
}

Counters Engine::counters(const Channel& channel) const {
  const Counters* counters = channel.id_ ? endpoint_.counters(channel.id_) : nullptr;
  return counters ? *counters : Counters{};
}

void Engine::publish(uint64_t now_ns) {
  published_ns_ = now_ns;
  unpublished_ = false;
  for (const auto& [id, channel] : channels_) {
    std::atomic<uint64_t>* to = channel->published.load(std::memory_order_acquire);
    if (!to) continue;
    for (uint64_t number : std::bit_cast<std::array<uint64_t, sizeof(Counters) / 8>>(counters(*channel)))
      (to++)->store(number, std::memory_order_relaxed);
  }
}

}  // namespace harp

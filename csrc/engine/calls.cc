// Calls on which a framework blocks: the engine's part of the express.
#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/engine.h"

namespace lightcc {
namespace {

constexpr uint64_t kNamed = UINT64_MAX;  // in place of an automatic number

// Of all that must agree between ranks; different calls have the same hash once in 2^64.
uint64_t hash_of(const Call& call, uint64_t number) {
  uint64_t hash = mix(uint64_t(call.dtype) << 16 | uint64_t(call.op) << 8 | call.shape.size(), number);
  for (int64_t dimension : call.shape) hash = mix(hash, uint64_t(dimension));
  hash = mix(mix(hash, std::bit_cast<uint64_t>(call.pre)), std::bit_cast<uint64_t>(call.post));
  if (!call.name) return hash;
  for (size_t at = 0, n = std::strlen(call.name); at < n; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, call.name + at, std::min(n - at, sizeof word));
    hash = mix(hash, word);
  }
  return hash;
}

RequestPtr request_of(const Call& call, uint64_t number) {
  auto request = std::make_shared<Request>();
  request->group = call.group;
  request->automatic = !call.name;
  request->key = key_of(Kind::allreduce, call.name ? call.name : automatic_name(number));
  Announcement& what = request->what;
  what.kind = Kind::allreduce, what.op = call.op, what.pre = call.pre, what.post = call.post;
  what.tensors = {{call.dtype, Shape(call.shape.begin(), call.shape.end())}};
  request->inputs = {call.input}, request->outputs = {call.output};
  request->callbacks = call.callbacks;
  request->submitted_ns = request->warned_ns = now_ns();
  return request;
}

}  // namespace

Channel* Engine::begin_express(const Call& call, uint64_t* number) {
  auto it = channels_.find(call.group);
  if (it == channels_.end() || outstanding_ > 0 || over_ || stopping_) return nullptr;
  Channel& channel = *it->second;
  Collective c{};
  c.kind = Kind::allreduce, c.index = channel.members().index, c.size = channel.members().size();
  c.dtype = call.dtype, c.pre = call.pre, c.input = call.input, c.output = call.output, c.count = 1;
  for (int64_t dimension : call.shape) c.count *= dimension;
  set_average(c, call.op, call.post);
  if (!channel.may_express(c)) return nullptr;
  *number = kNamed;
  if (!call.name) {
    std::lock_guard lock(mutex_);
    *number = automatic_[{call.group, Kind::allreduce}]++;
  }
  channel.express().begin(c, hash_of(call, *number));
  return &channel;
}

bool Engine::express(const Call& call, RequestPtr* begun) {
  if (outstanding_.load(std::memory_order_relaxed) > 0) return false;
  if (timeline_->running()) return false;  // it shows negotiation
  if (baton_.exchange(true, std::memory_order_seq_cst)) return false;
  visits_.fetch_add(1, std::memory_order_relaxed);
  uint64_t number;
  Channel* channel = begin_express(call, &number);
  auto state = channel ? step_express(channel->express()) : Express::State::idle;
  if (state == Express::State::done) {
    counters_.add(Counters::requests), counters_.add(Counters::express);
  } else if (channel) {
    *begun = request_of(call, number);
    outstanding_.fetch_add(1);
    {
      std::lock_guard lock(mutex_);
      in_flight_.insert(flight_name(**begun));
    }
    if (over_)
      finish(*begun, failure_->first, (*begun)->title() + ": " + failure_->second);
    else
      state == Express::State::refused ? channel->submit(*begun) : channel->adopt(*begun);
    peers_->ring_marked();
  }
  baton_.store(false, std::memory_order_seq_cst);
  if (inbox_full_.load(std::memory_order_seq_cst)) drive();
  return state == Express::State::done;
}

// As long as patience lasts and nothing else is urgent.
Express::State Engine::step_express(Express& express) {
  Patience patience(spin_habit_);
  auto state = Express::State::waiting;
  try {
    const auto& alarm = peers_->own().alarm;
    for (bool waits = true; waits && !alarm.load(std::memory_order_relaxed);) {
      bool moved = false;
      state = express.step(&moved);
      peers_->ring_marked();
      if (moved || !express.active()) patience.reset();
      if (!express.active()) break;
      waits = moved || patience.wait_a_little();
    }
  } catch (const Error& error) {
    end_epoch(error.code(), error.what());
  } catch (const std::exception& error) {
    end_epoch(Code::internal, error.what());
  }
  return state;
}

}  // namespace lightcc

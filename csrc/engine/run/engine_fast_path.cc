// The engine's part of the fast path: calls on which a framework blocks.
#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/engine_impl.h"

namespace lightcc {
namespace {

constexpr uint64_t kNamed = UINT64_MAX;  // in place of an automatic number

uint64_t hash_of_name(int group, std::string_view name) {
  uint64_t hash = uint64_t(group) + 1;
  for (size_t at = 0; at < name.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, name.data() + at, std::min(name.size() - at, sizeof word));
    hash = mix(hash, word);
  }
  return hash;
}

// A hash of all that must agree between ranks; two different calls have the same one once in 2^64.
uint64_t hash_of(const Call& call, uint64_t number, uint64_t name) {
  uint64_t hash = mix(name ^ (uint64_t(call.dtype) << 16 | uint64_t(call.op) << 8 | call.shape.size()), number);
  for (int64_t dimension : call.shape) hash = mix(hash, uint64_t(dimension));
  return mix(mix(hash, std::bit_cast<uint64_t>(call.pre)), std::bit_cast<uint64_t>(call.post));
}

RequestPtr request_of(const Call& call, uint64_t number) {
  auto request = std::make_shared<Request>();
  request->group = call.group;
  request->automatic = !call.name;
  request->key = key_of(Kind::allreduce, call.name ? call.name : automatic_name(number));
  Announcement& what = request->what;
  what.kind = Kind::allreduce;
  what.op = call.op;
  what.pre = call.pre;
  what.post = call.post;
  what.tensors = {{call.dtype, Shape(call.shape.begin(), call.shape.end())}};
  request->inputs = {call.input};
  request->outputs = {call.output};
  request->callbacks = call.callbacks;
  request->submitted_ns = request->warned_ns = now_ns();
  return request;
}

}  // namespace

GroupEngine* Engine::Impl::begin_fast_path(const Call& call, uint64_t* number) {
  progress_lock_.assert_held();
  auto it = group_engines_.find(call.group);
  if (it == group_engines_.end() || inbox_.in_flight() > 0 || epoch_.over() || stopping_) return nullptr;
  GroupEngine& group_engine = *it->second;
  FastPath* fast_path = group_engine.idle_fast_path();
  if (!fast_path) return nullptr;
  Collective& c = fast_path->call();
  c.dtype = call.dtype;
  c.pre = call.pre;
  c.input = call.input;
  c.output = call.output;
  c.count = 1;
  for (int64_t dimension : call.shape) c.count *= dimension;
  set_average(c, call.op, call.post);
  if (!group_engine.can_take_fast_path(c)) return nullptr;
  if (call.name && (inbox_.is_held(call.group, Kind::allreduce, call.name) ||
                    group_engine.is_withdrawn(Kind::allreduce, call.name)))
    return nullptr;  // submit() will refuse it
  *number = call.name ? kNamed : inbox_.draw_number(call.group, Kind::allreduce);
  const uint64_t name = call.name ? hash_of_name(call.group, call.name) : 0;
  fast_path_name_.store(name, std::memory_order_relaxed);
  fast_path->begin(hash_of(call, *number, name));
  return &group_engine;
}

bool Engine::Impl::is_on_fast_path(const Request& request) const {
  const uint64_t name = fast_path_name_.load(std::memory_order_relaxed);
  return name != 0 && request.what.kind == Kind::allreduce && !request.automatic &&
         name == hash_of_name(request.group, request.name());
}

bool Engine::Impl::try_fast_path(const Call& call, RequestPtr* begun) {
  if (inbox_.in_flight() > 0) return false;
  if (timeline_->running()) return false;  // it shows negotiation
  if (!progress_lock_.try_lock()) return false;
  note_visit();
  uint64_t number;
  GroupEngine* group_engine = begin_fast_path(call, &number);
  auto state = group_engine ? step_fast_path(*group_engine) : FastPath::State::idle;
  if (state == FastPath::State::done) {
    counters_.count(Counters::requests);
    counters_.count(Counters::fast_path);
  } else if (group_engine) {
    *begun = request_of(call, number);
    inbox_.adopt(**begun);
    if (epoch_.over())
      finish(*begun, epoch_.cause.code, (*begun)->title() + ": " + epoch_.cause.text);
    else
      state == FastPath::State::refused ? submit_to(*group_engine, *begun) : group_engine->adopt(*begun);
    carry_out_effects();
    peers_->flush_and_wake();
  }
  fast_path_name_.store(0, std::memory_order_relaxed);
  progress_lock_.unlock();
  if (inbox_.full()) drive();
  return state == FastPath::State::done;
}

// As long as patience lasts and nothing else is urgent.
FastPath::State Engine::Impl::step_fast_path(GroupEngine& group_engine) {
  progress_lock_.assert_held();
  FastPath& fast_path = group_engine.fast_path();
  SpinPolicy patience(wait_habit_);
  auto state = FastPath::State::waiting;
  const auto& alarm = peers_->own().alarm;
  end_epoch_on_error([&] {
    for (bool waits = true; waits && !alarm.load(std::memory_order_relaxed);) {
      bool moved = false;
      state = fast_path.step(&moved);
      peers_->flush_and_wake();
      if (moved || !fast_path.active()) patience.reset();
      if (!fast_path.active()) break;
      moved |= group_engine.receive_slots();
      carry_out_effects();
      waits = moved || patience.wait_a_little();
    }
  });
  return state;
}

}  // namespace lightcc

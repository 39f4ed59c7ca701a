#include "engine/negotiate/fast_path_calls.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/clock.h"

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

}  // namespace

GroupEngine* FastPathCalls::begin(const Call& call, FastPathFacts facts, uint64_t* number) {
  GroupEngine* group_engine = sets_.find(call.group);
  facts.op = call.op;
  facts.pre = call.pre;
  facts.in_flight = inbox_.in_flight();
  facts.has_fast_path = group_engine != nullptr;
  if (group_engine) group_engine->note_facts(&facts);
  if (!may_take_fast_path(facts)) return nullptr;
  FastPath& fast_path = *group_engine->fast_path().path();
  Collective& c = fast_path.call();
  c.dtype = call.dtype;
  c.pre = call.pre;
  c.input = call.input;
  c.output = call.output;
  c.count = 1;
  for (int64_t dimension : call.shape) c.count *= dimension;
  set_average(c, call.op, call.post);
  facts.prefers_shared = facts.is_between_hosts || group_engine->fast_path().prefers_shared(c);
  facts.has_name_free = !call.name || !(inbox_.is_held(call.group, Kind::allreduce, call.name) ||
                                        group_engine->negotiator().is_withdrawn(Kind::allreduce, call.name));
  if (!may_take_fast_path(facts)) return nullptr;  // submit() will refuse what has no name
  *number = call.name ? kNamed : inbox_.draw_number(call.group, Kind::allreduce);
  const uint64_t name = call.name ? hash_of_name(call.group, call.name) : 0;
  name_.store(name, std::memory_order_relaxed);
  fast_path.begin(hash_of(call, *number, name));
  return group_engine;
}

bool FastPathCalls::has_name_of(const Request& request) const {
  const uint64_t name = name_.load(std::memory_order_relaxed);
  return name != 0 && request.what.kind == Kind::allreduce && !request.automatic &&
         name == hash_of_name(request.group, request.name());
}

RequestPtr FastPathCalls::request_of(const Call& call, uint64_t number) {
  RequestForm form(Kind::allreduce, call.name, call.group);
  if (!call.name) form.key = key_of(Kind::allreduce, automatic_name(number));
  form.what.op = call.op;
  form.what.pre = call.pre;
  form.what.post = call.post;
  form.add_tensor({call.dtype, Shape(call.shape.begin(), call.shape.end())}, call.input, call.output);
  form.callbacks = call.callbacks;
  auto request = std::make_shared<Request>(std::move(form));
  request->submitted(now_ns());
  return request;
}

}  // namespace lightcc

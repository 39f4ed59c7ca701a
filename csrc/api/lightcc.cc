// The C door: checks what C cannot express, turns exceptions into statuses, owns the one static engine.
#include "api/lightcc.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "device/device.h"
#include "engine/engine.h"

namespace lightcc {
namespace {

struct State {
  std::mutex mutex;                                   // guards all of this, never held across a wait
  std::shared_ptr<Engine> engine;
  int epoch = 0;
  int64_t next_handle = 1;
  std::unordered_map<int64_t, RequestPtr> handles;    // of the present epoch and, until released, of earlier ones
  std::unordered_map<int64_t, RequestPtr> prepared;
  std::map<void*, std::shared_ptr<Arena>> memory;     // what lightcc_alloc gave out
  uint64_t copied_before = 0;
  bool forked = false;
};
State& state() {
  static State* state = new State;  // never destroyed: threads of the framework may outlive main()
  return *state;
}

thread_local std::string last_error;

int fail(const Error& error) {
  last_error = error.what();
  return int(error.code());
}

// Every door's body: nothing throws across the C border.
template <class Body> auto guard(Body body, int sign = 1) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    return sign * fail(error);
  } catch (const std::exception& error) {
    return sign * fail(Error(Code::internal, error.what()));
  }
}

std::shared_ptr<Engine> engine() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.forked) throw Error(Code::shut_down, "this process was forked from a rank and is none itself: call init() in it "
                                             "with a world of its own, or use lightcc in the parent only");
  if (!s.engine) throw Error(Code::shut_down, "lightcc is not initialised: call init() first");
  return s.engine;
}

RequestPtr request_of(int64_t handle) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  auto it = s.handles.find(handle);
  if (it == s.handles.end()) throw Error(Code::invalid_argument, "unknown handle " + std::to_string(handle));
  return it->second;
}

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

struct Arguments {
  int kind; const char* name; int group, count;
  const void* const* inputs; void* const* outputs;
  const int32_t *dtypes, *ndims; const int64_t* shapes;
  int op, root; double pre, post; const int32_t* splits;
};

RequestPtr make_request(Engine& engine, const Arguments& a) {
  if (a.kind < 0 || a.kind > LIGHTCC_BARRIER) refuse("unknown kind of collective " + std::to_string(a.kind));
  if (a.op < 0 || a.op > LIGHTCC_PRODUCT) refuse("unknown reduce op " + std::to_string(a.op));
  auto request = std::make_shared<Request>();
  Announcement& what = request->what;
  what.kind = Kind(a.kind), what.op = ReduceOp(a.op), what.root = a.root, what.pre = a.pre, what.post = a.post;
  request->group = a.group;
  if (a.name) request->key = std::string(name_of(what.kind)) + "." + a.name;
  else engine.name_automatically(*request);
  const int64_t* shape = a.shapes;
  for (int i = 0; i < a.count; ++i) {
    if (a.dtypes[i] < 0 || a.dtypes[i] >= kDTypes) refuse(request->title() + ": unknown dtype " + std::to_string(a.dtypes[i]));
    what.tensors.push_back({DType(a.dtypes[i]), Shape(shape, shape + a.ndims[i])});
    shape += a.ndims[i];
    for (int64_t d : what.tensors.back().shape)
      if (d < 0) refuse(request->title() + ": a dimension is negative");
    bool writes = what.kind == Kind::allreduce || what.kind == Kind::broadcast;
    request->inputs.push_back(a.inputs ? a.inputs[i] : nullptr);
    request->outputs.push_back(a.outputs ? a.outputs[i] : nullptr);
    if (count_of(what.tensors.back().shape) > 0 && writes && !request->outputs.back())
      refuse(request->title() + " needs output memory");
  }
  if (what.kind == Kind::alltoall && a.splits) {
    size_t n = engine.group_ranks(a.group).size() * size_t(a.count);
    what.splits.assign(a.splits, a.splits + n);
  }
  return request;
}

int64_t keep(const RequestPtr& request) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.handles.emplace(s.next_handle, request);
  return s.next_handle++;
}

int64_t launch(Engine& engine, const RequestPtr& request, int flags) {
  bool block = flags & LIGHTCC_BLOCK;
  engine.submit(request, block);
  if (block && engine.wait(*request, now_ns() + 100'000'000)) {
    if (request->code != Code::ok) throw Error(request->code, request->text);
    bool outputs_left = std::any_of(request->results.begin(), request->results.end(), [](auto& r) { return bool(r.own); });
    if (!outputs_left) return 0;
  }
  return keep(request);
}

int status_of(const Request& request) {
  if (!request.finished.load(std::memory_order_acquire)) return LIGHTCC_PENDING;
  if (request.code != Code::ok) last_error = request.text;
  return int(request.code);
}

void in_forked_child() {
  // Only this thread exists here. The engine's memory is left as it is; its threads are not.
  State& s = state();
  new (&s.mutex) std::mutex;
  if (!s.engine) return;
  s.engine->close_in_child();
  new std::shared_ptr<Engine>(std::move(s.engine));  // leaked: its destructor would join threads that do not exist
  s.engine = nullptr;
  s.handles.clear();
  s.forked = true;
}

int world_number(int (*get)(const World&)) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.engine ? get(s.engine->world()) : -1;
}

RequestPtr groups_request(Kind kind, const Shape& numbers) {
  auto request = std::make_shared<Request>();
  request->what.kind = kind;
  request->what.tensors = {{DType::uint8, numbers}};
  request->inputs = {nullptr}, request->outputs = {nullptr};
  return request;
}

RequestPtr run_to_end(Engine& engine, RequestPtr request) {
  engine.name_automatically(*request);
  engine.submit(request, true);
  while (!engine.wait(*request, now_ns() + 1'000'000'000)) {}
  if (request->code != Code::ok) throw Error(request->code, request->text);
  return request;
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

const char* lightcc_version(void) { return LIGHTCC_VERSION; }
const char* lightcc_error(void) { return last_error.c_str(); }

int lightcc_init(void) {
  return guard([] {
    State& s = state();
    {
      std::lock_guard lock(s.mutex);
      if (s.engine) return 0;
    }
    std::string notes;
    auto environment = [](const char* name) -> const char* { return std::getenv(name); };
    Config config = read_config(environment, &notes);
    World world = find_world(environment);
    set_log(config.log_level, config.log_hide_time, world.rank, world.host);
    if (world.rank == 0 && !notes.empty()) log(Level::warning, notes);
    uint64_t deadline = now_ns() + uint64_t(config.start_timeout_s * 1e9);
    auto host = Host::join(world, s.epoch, deadline);
    auto engine = std::make_shared<Engine>(std::move(host), world, config);
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, in_forked_child); });
    std::lock_guard lock(s.mutex);
    s.engine = std::move(engine), s.forked = false, ++s.epoch;
    s.copied_before = copied_bytes();
    return 0;
  });
}

int lightcc_shutdown(void) {
  return guard([] {
    State& s = state();
    std::shared_ptr<Engine> engine;
    {
      std::lock_guard lock(s.mutex);
      engine.swap(s.engine);
      s.prepared.clear();
    }
    if (engine) engine->shutdown();
    return 0;
  });
}

int lightcc_initialized(void) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.engine != nullptr;
}

int lightcc_abort(const char* cause) {
  return guard([&] { return engine()->abort(cause), 0; });
}

int lightcc_rank(void) { return world_number([](const World& w) { return w.rank; }); }
int lightcc_size(void) { return world_number([](const World& w) { return w.size; }); }
int lightcc_local_rank(void) { return world_number([](const World& w) { return w.local_rank; }); }
int lightcc_local_size(void) { return world_number([](const World& w) { return w.local_size; }); }
int lightcc_cross_rank(void) { return world_number([](const World& w) { return w.cross_rank; }); }
int lightcc_cross_size(void) { return world_number([](const World& w) { return w.cross_size; }); }

int lightcc_add_group(const int32_t* ranks, int count) {
  return guard([&] {
    auto e = engine();
    Shape members(ranks, ranks + std::max(count, 0));
    std::sort(members.begin(), members.end());
    if (members.empty() || members.front() < 0 || members.back() >= e->world().size ||
        std::adjacent_find(members.begin(), members.end()) != members.end())
      refuse("a process set needs different ranks of the world (0 to " + std::to_string(e->world().size - 1) + "), not " + text_of(members));
    if (e->group_ids().size() >= size_t(Host::kGroups)) refuse("there are already " + std::to_string(Host::kGroups) + " process sets");
    return run_to_end(*e, groups_request(Kind::add_group, members))->new_group;
  }, -1);
}

int lightcc_remove_group(int group) {
  return guard([&] {
    auto e = engine();
    if (group <= 0 || e->group_ranks(group).empty()) refuse("process set " + std::to_string(group) + " cannot be removed");
    run_to_end(*e, groups_request(Kind::remove_group, {group}));
    return 0;
  });
}

int lightcc_group_size(int group) {
  return guard([&] {
    size_t n = engine()->group_ranks(group).size();
    return n ? int(n) : -1;
  }, -1);
}

int lightcc_group_rank(int group) {
  return guard([&] {
    auto e = engine();
    auto ranks = e->group_ranks(group);
    auto it = std::find(ranks.begin(), ranks.end(), e->world().rank);
    return it == ranks.end() ? -1 : int(it - ranks.begin());
  }, -1);
}

int lightcc_group_ranks(int group, int32_t* ranks) {
  return guard([&] {
    auto all = engine()->group_ranks(group);
    if (all.empty()) refuse("process set " + std::to_string(group) + " does not exist");
    std::copy(all.begin(), all.end(), ranks);
    return 0;
  });
}

int lightcc_group_ids(int32_t* ids, int capacity) {
  return guard([&] {
    auto all = engine()->group_ids();
    std::copy_n(all.begin(), std::min(all.size(), size_t(std::max(capacity, 0))), ids);
    return int(all.size());
  }, -1);
}

int64_t lightcc_submit(int kind, const char* name, int group, const void* input, void* output, int dtype, int ndim,
                       const int64_t* shape, int op, int root, double prescale, double postscale,
                       const int32_t* splits, int flags) {
  return guard([&]() -> int64_t {
    auto e = engine();
    int tensors = kind == LIGHTCC_BARRIER ? 0 : 1;
    auto request = make_request(*e, {kind, name, group, tensors, &input, &output, &dtype, &ndim, shape, op, root,
                                     prescale, postscale, splits});
    return launch(*e, request, flags);
  }, -1);
}

int64_t lightcc_submit_group(int kind, const char* name, int group, int count, const void* const* inputs,
                             void* const* outputs, const int32_t* dtypes, const int32_t* ndims, const int64_t* shapes,
                             int op, int root, double prescale, double postscale, const int32_t* splits, int flags,
                             const lightcc_callbacks* callbacks) {
  return guard([&]() -> int64_t {
    auto e = engine();
    auto request = make_request(*e, {kind, name, group, count, inputs, outputs, dtypes, ndims, shapes, op, root,
                                     prescale, postscale, splits});
    if (callbacks) request->callbacks = {callbacks->done, callbacks->allocate, callbacks->context};
    return launch(*e, request, flags);
  }, -1);
}

int64_t lightcc_prepare(int kind, const char* name, int group, const void* input, void* output, int dtype, int ndim,
                        const int64_t* shape, int op, int root, double prescale, double postscale,
                        const int32_t* splits, int) {
  return guard([&]() -> int64_t {
    if (!name) refuse("a prepared request needs a name");
    auto e = engine();
    auto request = make_request(*e, {kind, name, group, 1, &input, &output, &dtype, &ndim, shape, op, root, prescale,
                                     postscale, splits});
    State& s = state();
    std::lock_guard lock(s.mutex);
    s.prepared.emplace(s.next_handle, request);
    return s.next_handle++;
  }, -1);
}

int64_t lightcc_start(int64_t prepared) {
  return guard([&]() -> int64_t {
    auto e = engine();
    auto request = std::make_shared<Request>();
    {
      State& s = state();
      std::lock_guard lock(s.mutex);
      auto it = s.prepared.find(prepared);
      if (it == s.prepared.end()) refuse("unknown prepared request " + std::to_string(prepared) + ": prepare it again after init()");
      const Request& form = *it->second;
      request->group = form.group, request->key = form.key, request->what = form.what;
      request->inputs = form.inputs, request->outputs = form.outputs;
    }
    return launch(*e, request, 0);
  }, -1);
}

int lightcc_discard(int64_t prepared) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.prepared.erase(prepared) ? LIGHTCC_OK : LIGHTCC_INVALID_ARGUMENT;
}

int lightcc_wait(int64_t handle, int timeout_ms) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire)) engine()->wait(*request, now_ns() + uint64_t(timeout_ms) * 1'000'000);
    return status_of(*request);
  });
}

int lightcc_poll(int64_t handle) {
  return guard([&] {
    auto request = request_of(handle);
    return request->finished.load(std::memory_order_acquire) ? 1 : int(engine()->poll(*request));
  }, -1);
}

int lightcc_release(int64_t handle) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.handles.erase(handle) ? LIGHTCC_OK : LIGHTCC_INVALID_ARGUMENT;
}

int lightcc_output(int64_t handle, int index, void** data, int64_t* shape, int* ndim) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire)) refuse(request->title() + " is not finished");
    if (index < 0 || size_t(index) >= request->results.size()) refuse(request->title() + " has no output " + std::to_string(index));
    Output& output = request->results[index];
    if (!output.own) refuse(request->title() + ": output " + std::to_string(index) + " is not lightcc's to give, or given already");
    if (*ndim < int(output.shape.size())) refuse("room for " + std::to_string(*ndim) + " dimensions, need " + std::to_string(output.shape.size()));
    std::copy(output.shape.begin(), output.shape.end(), shape);
    *ndim = int(output.shape.size());
    *data = output.own.release();
    return 0;
  });
}

int lightcc_received_splits(int64_t handle, int index, int32_t* splits) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire) || index < 0 || size_t(index) >= request->results.size())
      refuse(request->title() + " has no received splits");
    auto& from = request->results[index].rows_from;
    std::copy(from.begin(), from.end(), splits);
    return 0;
  });
}

void* lightcc_alloc(int64_t bytes) {
  void* data = nullptr;
  guard([&] {
    auto arena = engine()->arena();
    data = arena->allocate(size_t(std::max<int64_t>(bytes, 1)));
    State& s = state();
    std::lock_guard lock(s.mutex);
    s.memory.emplace(data, std::move(arena));
    return 0;
  });
  return data;
}

void lightcc_free(void* data) {
  if (!data) return;
  std::shared_ptr<Arena> arena;
  {
    State& s = state();
    std::lock_guard lock(s.mutex);
    auto it = s.memory.find(data);
    if (it != s.memory.end()) arena = std::move(it->second), s.memory.erase(it);
  }
  arena ? arena->release(static_cast<std::byte*>(data)) : std::free(data);
}

int lightcc_counters(int64_t* values, int capacity) {
  return guard([&] {
    auto e = engine();
    for (int i = 0; i < std::min(capacity, int(Counters::kCount)); ++i) {
      values[i] = int64_t(e->counters().values[i].load(std::memory_order_relaxed));
      if (i == Counters::copied_bytes) values[i] = int64_t(copied_bytes() - state().copied_before);
    }
    return int(Counters::kCount);
  }, -1);
}

const char* lightcc_counter_name(int index) {
  return index >= 0 && index < Counters::kCount ? Counters::kNames[size_t(index)] : nullptr;
}

const char* lightcc_describe(const char* what) {
  thread_local std::string text;
  guard([&] {
    std::string topic = what ? what : "";
    auto e = engine();
    const World& w = e->world();
    if (topic == "selector") text = e->describe_selector();
    else if (topic == "knobs") text = knobs_text(e->config());
    else if (topic == "world") text = "rank " + std::to_string(w.rank) + " of " + std::to_string(w.size) + " on host " + w.host + ", started by " + w.launcher;
    else refuse("nothing to describe under '" + topic + "': selector, knobs, world");
    return 0;
  });
  return text.c_str();
}

}  // extern "C"

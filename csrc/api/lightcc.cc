// The C door but for requests (requests.cc): life, topology, groups, memory, what there is to know.
#include "api/lightcc.h"

#include <algorithm>
#include <chrono>

#include "api/door.h"
#include "base/log.h"
#include "device/device.h"

namespace lightcc {
namespace {
thread_local std::string last_error;
}  // namespace

State& state() {
  static State* state = new State;  // never destroyed: threads of the framework may outlive main()
  return *state;
}

void set_last_error(const std::string& text) { last_error = text; }

std::shared_ptr<Engine> engine() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.forked)
    throw Error(Code::shut_down,
                "this process was forked from a rank and is none itself: call init() in it with a "
                "world of its own, or use lightcc in the parent only");
  if (!s.engine) throw Error(Code::shut_down, "lightcc is not initialised: call init() first");
  return s.engine;
}

// Does nothing on a rank that is not to write. asked: by whom, for the error.
void start_timeline(Timeline& timeline, const World& world, const std::string& pattern, bool mark_cycles,
                    const std::string& asked) {
  const std::string path = timeline_path(pattern, world.rank);
  if (path.empty() && world.rank != 0) return;
  using namespace std::chrono;
  const std::string writer =
      "rank " + std::to_string(world.rank) + " of " + std::to_string(world.size) + " on host " + world.host;
  const auto wall = duration_cast<microseconds>(system_clock::now().time_since_epoch());
  try {
    timeline.start({path, writer, mark_cycles, now_ns(), wall.count()});
  } catch (const Error& error) {
    throw Error(error.code(), asked + " on rank " + std::to_string(world.rank) + ", host " + world.host + ": " +
                                  error.what() + "; give a file in a folder that exists and may be written to");
  }
}

namespace {

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
  request->automatic = true;
  engine.submit(request, true);
  while (!engine.wait(*request, now_ns() + 1'000'000'000)) {
  }
  if (request->code != Code::ok) throw Error(request->code, request->text);
  return request;
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

const char* lightcc_version(void) { return LIGHTCC_VERSION; }
const char* lightcc_error(void) { return last_error.c_str(); }

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

int lightcc_rank(void) {
  return world_number([](const World& w) { return w.rank; });
}
int lightcc_size(void) {
  return world_number([](const World& w) { return w.size; });
}
int lightcc_local_rank(void) {
  return world_number([](const World& w) { return w.local_rank; });
}
int lightcc_local_size(void) {
  return world_number([](const World& w) { return w.local_size; });
}
int lightcc_cross_rank(void) {
  return world_number([](const World& w) { return w.cross_rank; });
}
int lightcc_cross_size(void) {
  return world_number([](const World& w) { return w.cross_size; });
}

int lightcc_is_homogeneous(void) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.engine ? s.engine->topology().is_homogeneous() : -1;
}

int lightcc_add_group(const int32_t* ranks, int count) {
  return guard(
      [&] {
        auto e = engine();
        Shape members(ranks, ranks + std::max(count, 0));
        std::sort(members.begin(), members.end());
        if (members.empty() || members.front() < 0 || members.back() >= e->world().size ||
            std::adjacent_find(members.begin(), members.end()) != members.end())
          refuse("a process set needs different ranks of the world (0 to " + std::to_string(e->world().size - 1) +
                 "), not " + text_of(members));
        if (e->group_ids().size() >= size_t(Host::kGroups))
          refuse("there are already " + std::to_string(Host::kGroups) + " process sets");
        return run_to_end(*e, groups_request(Kind::add_group, members))->new_group;
      },
      -1);
}

int lightcc_remove_group(int group) {
  return guard([&] {
    auto e = engine();
    if (group <= 0 || e->group_ranks(group).empty())
      refuse("process set " + std::to_string(group) + " cannot be removed");
    run_to_end(*e, groups_request(Kind::remove_group, {group}));
    return 0;
  });
}

int lightcc_group_size(int group) {
  return guard(
      [&] {
        size_t n = engine()->group_ranks(group).size();
        return n ? int(n) : -1;
      },
      -1);
}

int lightcc_group_rank(int group) {
  return guard(
      [&] {
        auto e = engine();
        auto ranks = e->group_ranks(group);
        auto it = std::find(ranks.begin(), ranks.end(), e->world().rank);
        return it == ranks.end() ? -1 : int(it - ranks.begin());
      },
      -1);
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
  return guard(
      [&] {
        auto all = engine()->group_ids();
        std::copy_n(all.begin(), std::min(all.size(), size_t(std::max(capacity, 0))), ids);
        return int(all.size());
      },
      -1);
}

void* lightcc_alloc(int64_t bytes) {
  void* data = nullptr;
  guard([&] {
    auto arena = engine()->arena();
    data = arena->allocate(size_t(std::max<int64_t>(bytes, 1)));
    arena->populate(static_cast<std::byte*>(data), size_t(std::max<int64_t>(bytes, 0)));
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

int lightcc_timeline_start(const char* path, int mark_cycles) {
  return guard([&] {
    auto e = engine();
    if (e->config().timeline.empty())
      refuse("start_timeline: this job was started without HOROVOD_TIMELINE; set it to DYNAMIC, or to the file of a "
             "first timeline, when you start the ranks");
    start_timeline(e->timeline(), e->world(), path ? path : "", mark_cycles, "start_timeline");
    return 0;
  });
}

int lightcc_timeline_stop(void) {
  return guard([] {
    auto e = engine();
    if (!e->timeline().stop(now_ns()) && e->world().rank == 0)
      log(Level::warning, "stop_timeline: no timeline is being written");
    return 0;
  });
}

int lightcc_counters(int64_t* values, int capacity) {
  return guard(
      [&] {
        auto e = engine();
        for (int i = 0; i < std::min(capacity, int(Counters::kCount)); ++i) {
          values[i] = int64_t(e->counters().values[i].load(std::memory_order_relaxed));
          if (i == Counters::copied_bytes) values[i] = int64_t(copied_bytes() - state().copied_before);
        }
        return int(Counters::kCount);
      },
      -1);
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
    if (topic == "selector")
      text = e->describe_selector();
    else if (topic == "knobs")
      text = knobs_text(e->config());
    else if (topic == "world")
      text = "rank " + std::to_string(w.rank) + " of " + std::to_string(w.size) + " on host " + w.host +
             ", started by " + w.launcher + "; met by " + state().how + "; " + e->topology().text();
    else
      refuse("nothing to describe under '" + topic + "': selector, knobs, world");
    return 0;
  });
  return text.c_str();
}

}  // extern "C"

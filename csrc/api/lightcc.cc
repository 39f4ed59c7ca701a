// The C API but for requests (requests.cc): life, topology, groups, memory, what there is to know.
#include "api/lightcc.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "api/global_state.h"
#include "base/log.h"
#include "device/cuda/support.h"
#include "device/device.h"
#include "engine/request/output_pool.h"
#include "engine/request/request.h"
#include "engine/timeline/counters.h"
#include "engine/timeline/trace.h"
#include "net/bootstrap/world.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {
namespace {

thread_local std::string last_error;

// The same moment by this process's clock and in microseconds since 1970: of several readings that in which the least
// came between the two, as this thread may lose its core there.
std::pair<uint64_t, int64_t> both_clocks() {
  using namespace std::chrono;
  std::pair<uint64_t, int64_t> best;
  for (uint64_t i = 0, least_ns = UINT64_MAX; i < 8; ++i) {
    const uint64_t before = now_ns();
    const auto wall = system_clock::now().time_since_epoch();
    const uint64_t took_ns = now_ns() - before;
    if (took_ns >= least_ns) continue;
    least_ns = took_ns;
    best = {before + took_ns / 2, duration_cast<microseconds>(wall).count()};
  }
  return best;
}

}  // namespace

GlobalState* (*global_state_of_thread)() = nullptr;

GlobalState& global_state() {
  static GlobalState* state = new GlobalState;  // never destroyed: threads of the framework may outlive main()
  if (GlobalState* own = global_state_of_thread ? global_state_of_thread() : nullptr) return *own;
  return *state;
}

void set_last_error(const std::string& text) { last_error = text; }

void keep_owner(void* data, std::function<void()> free) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  s.memory.emplace(data, std::move(free));
}

std::shared_ptr<Engine> engine() {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  if (s.forked_from)
    throw Error(Code::shut_down,
                "this process was forked from a rank and is none itself: call " + s.init_call +
                    " in it with a world of its own, or use lightcc in the parent only");
  if (!s.engine)  // programs look for Horovod's sentence
    throw Error(Code::shut_down, "Horovod has not been initialized; use hvd.init(). lightcc is not initialised: call " +
                                     s.init_call + " first");
  return s.engine;
}

// Does nothing on a rank that is not to write. asked: by whom, for the error.
void start_timeline(Timeline& timeline, const World& world, const std::string& pattern, bool mark_cycles,
                    bool by_bucket, const std::string& asked) {
  const std::string path = timeline_path(pattern, world.rank);
  if (path.empty() && world.rank != 0) return;
  const std::string writer =
      "rank " + std::to_string(world.rank) + " of " + std::to_string(world.size) + " on host " + world.host;
  const auto [now, wall_us] = both_clocks();
  try {
    timeline.start({path, writer, mark_cycles, now, wall_us, by_bucket});
  } catch (const Error& error) {
    throw Error(error.code(), asked + " on rank " + std::to_string(world.rank) + ", host " + world.host + ": " +
                                  error.what() + "; give a file in a folder that exists and may be written to");
  }
}

namespace {

constexpr size_t kMostReportBytes = 8192;

std::string gpu_text() {
  std::string text;
  for (const GpuSupport& one : gpu_support()) text += (one.is_there ? "+" : "-") + one.text + "\n";
  return text;
}

int world_number(int (*get)(const World&)) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  if (s.engine) return get(s.engine->world());
  return s.forked_from ? get(*s.forked_from) : -1;
}

RequestPtr change_groups(Engine& engine, Kind kind, const Shape& numbers) {
  RequestForm form(kind, nullptr);
  form.add_tensor({DType::uint8, numbers}, nullptr, nullptr);
  auto request = std::make_shared<Request>(std::move(form));
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

int lightcc_shutdown(void) { return lightcc_shutdown_because("it shut down"); }

int lightcc_shutdown_because(const char* reason) {
  return guard([&] {
    GlobalState& s = global_state();
    std::shared_ptr<Engine> engine;
    {
      std::lock_guard lock(s.mutex);
      engine.swap(s.engine);
      s.prepared.clear();
    }
    if (engine) engine->shutdown(reason);
    forget_residuals([](int group) { return group != 0; });
    return 0;
  });
}

int lightcc_initialized(void) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  return s.engine != nullptr;
}

void lightcc_name_init(const char* call) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  s.init_call = call;
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
  GlobalState& s = global_state();
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
        if (e->group_ids().size() >= size_t(LocalRanks::kGroups))
          refuse("there are already " + std::to_string(LocalRanks::kGroups) + " process sets");
        return change_groups(*e, Kind::add_group, members)->changed_group;
      },
      -1);
}

int lightcc_remove_group(int group) {
  return guard([&] {
    auto e = engine();
    if (group <= 0 || !e->group(group))
      refuse("process set " + std::to_string(group) + " cannot be removed");
    change_groups(*e, Kind::remove_group, {group});
    forget_residuals([&](int ended) { return ended == group; });
    return 0;
  });
}

int lightcc_group_size(int group) {
  return guard(
      [&] {
        const auto found = engine()->group(group);
        return found ? found->size() : -1;
      },
      -1);
}

int lightcc_group_rank(int group) {
  return guard(
      [&] {
        const auto found = engine()->group(group);
        return found ? found->index() : -1;
      },
      -1);
}

int lightcc_group_ranks(int group, int32_t* ranks) {
  return guard([&] {
    const auto found = engine()->group(group);
    if (!found) refuse("process set " + std::to_string(group) + " does not exist");
    std::copy(found->ranks().begin(), found->ranks().end(), ranks);
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
    auto e = engine();
    auto arena = e->arena();
    try {
      data = arena->allocate(size_t(std::max<int64_t>(bytes, 1)));
    } catch (const Error& error) {  // of an epoch that has ended: the cause says more
      const std::string cause = e->failure();
      throw Error(error.code(), "memory of " + std::to_string(bytes) + " bytes for tensors: " +
                                    (cause.empty() ? error.what() : cause));
    }
    arena->populate(static_cast<std::byte*>(data), size_t(std::max<int64_t>(bytes, 0)));
    keep_owner(data, [arena, data] { arena->release(static_cast<std::byte*>(data)); });
    return 0;
  });
  return data;
}

void* lightcc_alloc_output(int64_t bytes) {
  void* data = nullptr;
  guard([&] {
    auto outputs = engine()->outputs();
    if (!outputs->serves(size_t(std::max<int64_t>(bytes, 0)))) return 0;
    data = outputs->allocate(size_t(bytes));
    if (data) keep_owner(data, [outputs, data] { outputs->give_back(data); });
    return 0;
  });
  return data;
}

int lightcc_output_pool(int64_t* bytes, double* idle_s) {
  return guard([&] {
    auto e = engine();
    *bytes = e->config().output_pool_bytes, *idle_s = e->config().output_idle_s;
    return 0;
  });
}

void lightcc_free(void* data) {
  if (!data) return;
  std::function<void()> free;
  {
    GlobalState& s = global_state();
    std::lock_guard lock(s.mutex);
    auto it = s.memory.find(data);
    if (it != s.memory.end()) {
      free = std::move(it->second);
      s.memory.erase(it);
    }
  }
  free ? free() : std::free(data);
}

int lightcc_timeline_start(const char* path, int mark_cycles) {
  return guard([&] {
    auto e = engine();
    if (e->config().timeline.empty())
      refuse("start_timeline: this job was started without HOROVOD_TIMELINE; set it to DYNAMIC, or to the file of a "
             "first timeline, when you start the ranks");
    start_timeline(e->timeline(), e->world(), path ? path : "", mark_cycles, e->config().timeline_by_bucket,
                   "start_timeline");
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
        const NetworkFaults faults = capacity > 0 ? e->network_faults() : NetworkFaults{};
        for (int i = 0; i < std::min(capacity, int(Counters::kCount)); ++i) {
          values[i] = int64_t(e->counters().values[i].load(std::memory_order_relaxed));
          if (i == Counters::copied_bytes) values[i] = int64_t(copied_bytes() - global_state().copied_before);
          if (i == Counters::harp_bytes) values[i] = int64_t(e->sent_bytes("harp"));
          if (i == Counters::net_plugin_bytes) values[i] = int64_t(e->sent_bytes("plugin"));
          if (i == Counters::tcp_bytes) values[i] = int64_t(e->sent_bytes("tcp"));
          if (i == Counters::retransmits) values[i] = int64_t(faults.retransmits);
          if (i == Counters::reconnects) values[i] = int64_t(faults.reconnects);
          if (i == Counters::staged_bytes) values[i] = int64_t(staged_bytes() - global_state().staged_before);
        }
        return int(Counters::kCount);
      },
      -1);
}

const char* lightcc_counter_name(int index) {
  return index >= 0 && index < Counters::kCount ? Counters::kNames[size_t(index)] : nullptr;
}

int lightcc_waited(int64_t* values, int capacity) {
  return guard(
      [&] {
        const std::vector<uint64_t> waited = engine()->waited_ns();
        std::copy_n(waited.begin(), std::min(waited.size(), size_t(std::max(capacity, 0))), values);
        return int(waited.size());
      },
      -1);
}

int lightcc_report(const char* text) {
  return guard([&] {
    const std::string said = text ? text : "";
    if (said.size() > kMostReportBytes)
      refuse("a report of " + std::to_string(said.size()) + " bytes: at most " + std::to_string(kMostReportBytes));
    engine()->report(said);
    return 0;
  });
}

const char* lightcc_reported(int rank) {
  thread_local std::string text;
  return guard([&] { return text = engine()->reported(rank), 0; }) == 0 ? text.c_str() : nullptr;
}

void lightcc_log(int level, const char* text) { log(Level(std::clamp(level, 0, 5)), text ? text : ""); }

const char* lightcc_describe(const char* what) {
  thread_local std::string text;
  guard([&] {
    std::string topic = what ? what : "";
    if (topic == "gpus") return text = gpu_text(), 0;
    auto e = engine();
    const World& w = e->world();
    if (topic == "selector")
      text = e->selector_text();
    else if (topic == "network")
      text = e->network_text();
    else if (topic == "knobs")
      text = knobs_text(e->config());
    else if (topic == "world")
      text = "rank " + std::to_string(w.rank) + " of " + std::to_string(w.size) + " on host " + w.host +
             ", started by " + w.launcher + "; met by " + global_state().how + "; " + e->topology().text();
    else if (topic == "fusion_plan")
      text = e->plans_text();
    else
      refuse("nothing to describe under '" + topic + "': selector, network, knobs, world, fusion_plan, gpus");
    return 0;
  });
  return text.c_str();
}

}  // extern "C"

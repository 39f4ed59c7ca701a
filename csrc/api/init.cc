// init in its three forms, and what fork() does to an engine. Cancelling one: cancellable_init.h.
#include <pthread.h>

#include <cstdlib>
#include <functional>
#include <numeric>
#include <utility>

#include "api/global_state.h"
#include "api/launcher_channel.h"
#include "api/lightcc.h"
#include "base/known_variables.h"
#include "base/log.h"
#include "device/cuda.h"
#include "device/device.h"
#include "engine/lifecycle/calibration.h"
#include "engine/request/compressor.h"
#include "engine/request/output_pool.h"
#include "engine/request/request.h"
#include "engine/timeline/trace.h"
#include "net/bootstrap/bootstrap.h"

namespace lightcc {
namespace {

bool paused_for_fork = false;
std::mutex initialising;  // held for as long as one init lasts: a second one finds what the first has made

void before_fork() {
  GlobalState& s = global_state();
  s.mutex.lock();
  paused_for_fork = s.engine && s.engine->pause();
  OutputPool::before_fork();
}
void after_fork() {
  GlobalState& s = global_state();
  OutputPool::after_fork();
  if (paused_for_fork) s.engine->resume();
  s.mutex.unlock();
}

void in_forked_child() {
  // Only this thread exists here. The engine's memory is left as it is; its threads are not.
  GlobalState& s = global_state();
  new (&s.mutex) std::mutex;
  new (&initialising) std::mutex;
  s.init_under_way = nullptr;  // its thread is not here
  OutputPool::in_child();
  for (auto& [id, codec] : s.codecs)  // leaked: another thread may have held its locks
    codec = (*new std::shared_ptr<Compressor>(codec))->without_residuals();
  if (!s.engine) return;
  s.forked_from = s.engine->world();
  s.engine->close_in_child(paused_for_fork);
  new std::shared_ptr<Engine>(std::move(s.engine));  // leaked: its destructor would join threads that do not exist
  s.engine = nullptr;
  // Requests of GPUs have events and pinned memory, which only the parent may give back.
  new auto(std::move(s.handles));
  new auto(std::move(s.prepared));
  s.handles.clear();
  s.prepared.clear();
}

const char* environment(const char* name) { return std::getenv(name); }

// The slot of an elastic job's worker; -1 in any other process.
int own_slot() {
  const char *elastic = environment("HOROVOD_ELASTIC"), *slot = environment("HOROVOD_LOCAL_RANK");
  return elastic && elastic == std::string("1") && slot ? std::atoi(slot) : -1;
}

World nobody() {  // a world of one on this host
  return find_world([](const char*) -> const char* { return nullptr; });
}

// Said once in a process, to those who have chosen HARP.
void warn_of_harp(const Engine& engine, const std::string& net) {
  static bool warned = false;  // under `initialising`
  if (net == "tcp" || engine.world().rank != 0 || engine.topology().hosts.size() == 1 || std::exchange(warned, true))
    return;
  log(Level::warning, "LIGHTCC_NET=" + net + ": large tensors may take twice as long as over TCP where the " +
                          "network loses nothing; docs/harp.md says when HARP is the faster one");
}

// bootstrap_ranks(world, config, epoch, deadline, failure) finds the others. failure: why this rank cannot go on.
using Bootstrap = std::function<Bootstrapped(const World&, const Config&, const Epoch&, const Deadline&,
                                             const std::optional<Error>& failure)>;
int init(const std::function<World()>& find, const Bootstrap& bootstrap_ranks) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before_fork, after_fork, in_forked_child); });
  std::lock_guard only(initialising);
  GlobalState& s = global_state();
  {
    std::lock_guard lock(s.mutex);
    if (s.engine) return 0;
  }
  std::string notes;
  std::optional<Error> failure;  // of this rank by itself: it tells the others, once it knows where they meet
  const Config config = read_config(environment, &notes, &failure);
  if (const std::string unknown = unknown_variables(environ, config.net != "tcp"); !unknown.empty())
    notes += (notes.empty() ? "" : "\n") + unknown;
  const World world = find();
  CancellableInit under_way(world.job);
  set_log(config.log_level, config.log_hide_time, world.rank, world.host);
  set_kernel_cache(config.cache_dir.empty() ? "" : config.cache_dir + "/kernels");
  bool told;
  {
    std::lock_guard lock(s.mutex);
    told = std::exchange(s.notes, notes) == notes;
  }
  if (world.rank == 0 && !told && !notes.empty()) log(Level::warning, notes);
  static bool remarked = false;  // under `initialising`
  if (const std::string nested = nesting_remark(environment); world.rank == 0 && !nested.empty())
    if (!std::exchange(remarked, true)) log(Level::warning, nested);
  LauncherChannel launcher(world, environment, under_way.cancellation);
  auto timeline = std::make_unique<Timeline>();  // before the others are met: it may fail
  try {
    if (!failure && !config.timeline.empty() && config.timeline != kTimelineLater)
      start_timeline(*timeline, world, config.timeline, config.timeline_mark_cycles,
                     config.timeline_by_bucket, "HOROVOD_TIMELINE");
  } catch (const Error& error) {
    failure = error;
  }
  const Deadline deadline(now_ns() + uint64_t(config.start_timeout_s * 1e9), &under_way.cancellation);
  Epoch epoch;
  {
    std::lock_guard lock(s.mutex);
    epoch = s.epochs[world.job];
  }
  std::shared_ptr<Engine> engine;
  try {
    Bootstrapped bootstrapped = bootstrap_ranks(world, config, epoch, deadline, failure);
    const std::string net = bootstrapped.config.net_plugin.empty() ? bootstrapped.config.net : "tcp";
    engine = std::make_shared<Engine>(std::move(bootstrapped.peers), bootstrapped.world, bootstrapped.config,
                                      std::move(timeline));
    warn_of_harp(*engine, net);
    calibrate(*engine, deadline.cancellation);
    std::lock_guard lock(s.mutex);
    if (deadline.cancelled()) throw deadline.cancellation->why();
    s.engine = std::move(engine);
    s.forked_from.reset();
    s.epochs[world.job] = {epoch.number + 1, bootstrapped.next_socket_name};
    s.copied_before = copied_bytes();
    s.staged_before = staged_bytes();
    s.how = bootstrapped.how;
    launcher.formed();
    return 0;
  } catch (const Error&) {
    if (!deadline.cancelled()) throw;
    const Error why = deadline.cancellation->why();  // where all are cancelled, another may have failed first
    if (engine) {
      engine->abort(why.what());
      engine->shutdown(why.what(), deadline.cancellation);
    }
    throw why;
  }
}

Bootstrapped bootstrap_as_launched(const World& world, const Config& config, const Epoch& epoch,
                                   const Deadline& deadline, const std::optional<Error>& failure) {
  return bootstrap(world, config, environment, epoch, deadline, failure);
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

int lightcc_init(void) {
  return guard([] { return init([] { return find_world(environment); }, bootstrap_as_launched); });
}

int lightcc_init_ranks(const int32_t* ranks, int count) {
  return guard([&] {
    if (count < 0 || (count > 0 && !ranks)) refuse("init: no list of ranks was given");
    const std::vector<int> members(ranks, ranks + count);
    const auto find = [&] {
      World world = find_world(environment);
      std::vector<int> all(size_t(world.size));
      std::iota(all.begin(), all.end(), 0);
      return members == all ? world : subset(world, members);
    };
    return init(find, bootstrap_as_launched);
  });
}

int lightcc_open_meeting(char* where, int capacity) {
  return guard([&] {
    Rendezvous rendezvous = open_rendezvous(read_config(environment), nobody());
    const std::string text = text_of(rendezvous.endpoints);
    if (int(text.size()) >= capacity) refuse("the buffer is too small for " + text);
    text.copy(where, text.size());
    where[text.size()] = 0;
    GlobalState& s = global_state();
    std::lock_guard lock(s.mutex);
    s.rendezvous = std::move(rendezvous);
    return 0;
  });
}

int lightcc_init_at(int rank, int size, const char* job, const char* secret, const char* where) {
  return guard([&] {
    if (size < 1 || rank < 0 || rank >= size || !job || !secret || !where)
      refuse("init: give a rank of a size, a job, a secret and a place, not rank " + std::to_string(rank) + " of " +
             std::to_string(size));
    GlobalState& s = global_state();
    Rendezvous rendezvous;
    if (std::lock_guard lock(s.mutex); rank == 0 && s.rendezvous)
      rendezvous = std::move(*s.rendezvous), s.rendezvous.reset();
    rendezvous.how = "a communicator";
    rendezvous.job = job;
    rendezvous.secret = secret;
    rendezvous.endpoints = parse_endpoints("init", where);
    const auto find = [&] {
      World world = nobody();
      world.rank = rank;
      world.size = size;
      world.local_size = 0;
      world.slot = own_slot();
      world.job = job;
      world.launcher = "a communicator";
      return world;
    };
    const auto meet = [&](const World& world, const Config& config, const Epoch& epoch, const Deadline& deadline,
                          const std::optional<Error>& failure) {
      return bootstrap_at(world, config, std::move(rendezvous), epoch.number, deadline, failure);
    };
    return init(find, meet);
  });
}

}  // extern "C"

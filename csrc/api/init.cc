// init in its three forms, and what fork() does to an engine.
#include <pthread.h>

#include <cstdlib>
#include <functional>
#include <numeric>
#include <utility>

#include "api/door.h"
#include "api/lightcc.h"
#include "base/log.h"
#include "device/device.h"

namespace lightcc {
namespace {

bool paused_for_fork = false;

void before_fork() {
  State& s = state();
  s.mutex.lock();
  paused_for_fork = s.engine && s.engine->pause();
}
void after_fork() {
  State& s = state();
  if (paused_for_fork) s.engine->resume();
  s.mutex.unlock();
}

void in_forked_child() {
  // Only this thread exists here. The engine's memory is left as it is; its threads are not.
  State& s = state();
  new (&s.mutex) std::mutex;
  if (!s.engine) return;
  s.engine->close_in_child(paused_for_fork);
  new std::shared_ptr<Engine>(std::move(s.engine));  // leaked: its destructor would join threads that do not exist
  s.engine = nullptr;
  s.handles.clear();
  s.forked = true;
}

const char* environment(const char* name) { return std::getenv(name); }

World nobody() {  // a world of one on this host
  return find_world([](const char*) -> const char* { return nullptr; });
}

// meet(world, config, epoch, deadline) finds the others.
using Meet = std::function<Joined(const World&, const Config&, int, uint64_t)>;
int init(const std::function<World()>& find, const Meet& meet) {
  State& s = state();
  {
    std::lock_guard lock(s.mutex);
    if (s.engine) return 0;
  }
  std::string notes;
  const Config config = read_config(environment, &notes);
  const World world = find();
  set_log(config.log_level, config.log_hide_time, world.rank, world.host);
  bool told;
  {
    std::lock_guard lock(s.mutex);
    told = std::exchange(s.notes, notes) == notes;
  }
  if (world.rank == 0 && !told && !notes.empty()) log(Level::warning, notes);
  auto timeline = std::make_unique<Timeline>();  // before the others are met: it may fail
  if (!config.timeline.empty() && config.timeline != kTimelineLater)
    start_timeline(*timeline, world, config.timeline, config.timeline_mark_cycles, "HOROVOD_TIMELINE");
  const uint64_t deadline = now_ns() + uint64_t(config.start_timeout_s * 1e9);
  int epoch;
  {
    std::lock_guard lock(s.mutex);
    epoch = s.epochs[world.job];
  }
  Joined joined = meet(world, config, epoch, deadline);
  auto engine = std::make_shared<Engine>(std::move(joined.peers), joined.world, joined.config, std::move(timeline));
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before_fork, after_fork, in_forked_child); });
  std::lock_guard lock(s.mutex);
  s.engine = std::move(engine), s.forked = false, ++s.epochs[world.job];
  s.copied_before = copied_bytes();
  s.how = joined.how;
  return 0;
}

Joined meet_as_launched(const World& world, const Config& config, int epoch, uint64_t deadline) {
  return join(world, config, environment, epoch, deadline);
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

int lightcc_init(void) {
  return guard([] { return init([] { return find_world(environment); }, meet_as_launched); });
}

int lightcc_init_ranks(const int32_t* ranks, int count) {
  return guard([&] {
    const std::vector<int> members(ranks, ranks + std::max(count, 0));
    const auto find = [&] {
      World world = find_world(environment);
      std::vector<int> all(size_t(world.size));
      std::iota(all.begin(), all.end(), 0);
      return members == all ? world : subset(world, members);
    };
    return init(find, meet_as_launched);
  });
}

int lightcc_open_meeting(char* where, int capacity) {
  return guard([&] {
    Meeting meeting = open_meeting(read_config(environment), nobody());
    const std::string text = text_of(meeting.places);
    if (int(text.size()) >= capacity) refuse("the buffer is too small for " + text);
    text.copy(where, text.size());
    where[text.size()] = 0;
    State& s = state();
    std::lock_guard lock(s.mutex);
    s.meeting = std::move(meeting);
    return 0;
  });
}

int lightcc_init_at(int rank, int size, const char* job, const char* secret, const char* where) {
  return guard([&] {
    State& s = state();
    Meeting meeting;
    if (std::lock_guard lock(s.mutex); rank == 0 && s.meeting) meeting = std::move(*s.meeting), s.meeting.reset();
    meeting.how = "a communicator", meeting.job = job, meeting.secret = secret;
    meeting.places = parse_endpoints("init", where);
    const auto find = [&] {
      World world = nobody();
      world.rank = rank, world.size = size, world.local_size = 0, world.job = job, world.launcher = "a communicator";
      return world;
    };
    return init(find, [&](const World& world, const Config& config, int epoch, uint64_t deadline) {
      return join_at(world, config, std::move(meeting), epoch, deadline);
    });
  });
}

}  // extern "C"

#include "engine/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "engine/check.h"

namespace lightcc {
namespace {

constexpr uint64_t kNoTimeout = UINT64_MAX, kTickNs = 100'000'000;
constexpr uint64_t kBlockedNs = 500'000'000;  // waits longer than this are looked at for a dispute
constexpr uint64_t kNapNs = 50'000;
constexpr uint64_t kGatherNs = 50'000;
constexpr int64_t kGatherBytes = 64 << 10;
constexpr int kNaps = 20;  // after its last work the engine thread looks again for a millisecond, so that a burst of
                           // submissions wakes it once

// A waiting thread may spin only if every rank has a core to itself; else whoever spins keeps from working whom it
// waits for.
uint64_t most_spin_ns(const Config& config, const Host& host) {
  if (config.spin_us >= 0) return uint64_t(config.spin_us) * 1000;
  return host.size() > host.cores() ? 0 : 20'000;
}

}  // namespace

Engine::Engine(std::unique_ptr<Peers> peers, World world, Config config, std::unique_ptr<Timeline> timeline)
    : peers_(std::move(peers)),
      world_(std::move(world)),
      config_(std::move(config)),
      timeline_(timeline ? std::move(timeline) : std::make_unique<Timeline>()),
      spin_habit_(most_spin_ns(config_, peers_->host())),
      disputes_(peers_->rank()),
      judge_([this](int rank, int group) {
        const std::vector<int> ranks = group_ranks(group);
        return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      }),
      left_(peers_->size()),
      ended_(peers_->size()) {
  std::vector<int> all(peers_->size());
  for (int i = 0; i < peers_->size(); ++i) all[i] = i;
  groups_[0] = all;
  channels_[0] = std::make_unique<Channel>(*peers_, 0, all, config_, counters_, tracing_, *this);
  if (peers_->size() > 1) watch_ = watch();
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() { shutdown(); }

// ---- requests

void Engine::name_automatically(Request& request) {
  uint64_t number = automatic_[{request.group, request.what.kind}]++;
  request.key = key_of(request.what.kind, automatic_name(number));
}

// The other members settled this number without us: ours starts behind it, so that we meet again.
void Engine::skip_name(int group, const std::string& key) {
  size_t dot = key.find('.');
  std::string name = key.substr(dot + 1);
  if (!is_automatic(key)) return;
  std::lock_guard lock(mutex_);
  for (int kind = 0; kind < kKinds; ++kind)
    if (key.compare(0, dot, name_of(Kind(kind))) == 0) {
      uint64_t& next = automatic_[{group, Kind(kind)}];
      next = std::max(next, automatic_number(name) + 1);
    }
}

void Engine::submit(const RequestPtr& request, bool will_wait) {
  check(*request, group_ranks(request->group), world_.rank);
  request->submitted_ns = request->warned_ns = now_ns();
  {
    std::lock_guard lock(mutex_);
    if (failure_) throw Error(failure_->first, request->title() + ": " + failure_->second);
    if (stopping_) throw Error(Code::shut_down, request->title() + ": lightcc has been shut down");
    if (joining_)
      throw Error(Code::invalid_argument, request->title() + ": rank " + std::to_string(world_.rank) + " has called " +
                                              "join() and takes part in nothing new until it returns");
    if (request->automatic) name_automatically(*request);  // only now: a refused request must not use up a number
    if (!in_flight_.insert(flight_name(*request)).second)
      throw Error(Code::invalid_argument, request->title() + ": a tensor of this name is still in flight on rank " +
                                              std::to_string(world_.rank) + "; wait for it or use another name");
    joining_ = request->what.kind == Kind::join;
    inbox_.push_back(request);
    counters_.raise(Counters::most_in_flight, uint64_t(outstanding_.fetch_add(1)) + 1);
  }
  inbox_full_.store(true, std::memory_order_seq_cst);
  visits_.fetch_add(1, std::memory_order_relaxed);
  // In a burst of small requests each step takes along what has gathered since the last; whoever waits drives at once.
  const uint64_t driven_ns = driven_ns_.load(std::memory_order_relaxed);
  if (will_wait || request->submitted_ns - driven_ns >= kGatherNs || bytes_of(request->what) >= kGatherBytes) {
    driven_ns_.store(request->submitted_ns, std::memory_order_relaxed);
    drive();
  }
  if (!will_wait && !request->finished.load(std::memory_order_acquire)) wake_engine_thread();
}

void Engine::finish(const RequestPtr& request, Code code, const std::string& text) {
  if (request->what.kind == Kind::join && join_goes_on(request, code, text)) return;
  {
    std::lock_guard lock(mutex_);
    in_flight_.erase(flight_name(*request));
  }
  finish_dispute(*request, code, text);
  disputes_.go_on();
  tracing_.finished(*request, code, text);
  request->code = code, request->text = text;
  counters_.add(Counters::requests);
  Callbacks callbacks = request->callbacks;  // once finished, the request may be gone
  if (callbacks.received && request->what.kind == Kind::alltoall && code == Code::ok)
    for (size_t i = 0; i < request->results.size(); ++i) {
      const auto& rows = request->results[i].rows_from;
      callbacks.received(callbacks.context, int(i), rows.data(), int(rows.size()));
    }
  request->finished.store(true, std::memory_order_seq_cst);
  outstanding_.fetch_sub(1);
  if (callbacks.done) callbacks.done(callbacks.context, int(code), text.c_str());
  peers_->ring_own_driver();  // other threads of this rank may wait for it
}

bool Engine::wait(Request& request, uint64_t deadline_ns) {
  if (request.finished.load(std::memory_order_acquire)) return true;
  uint64_t begin = now_ns();
  visits_.fetch_add(1, std::memory_order_relaxed);
  waiters_.fetch_add(1);
  if (begin - request.submitted_ns > kBlockedNs && waiters_ == 1) look_for_dispute(request);
  Patience patience(spin_habit_);
  while (!request.finished.load(std::memory_order_acquire)) {
    if (drive()) {
      patience.reset();
    } else if (!patience.wait_a_little()) {
      uint64_t now = now_ns();
      if (now >= deadline_ns) break;
      sleep(std::min(deadline_ns - now, kTickNs), request.finished);
      patience.reset();
    }
  }
  counters_.add(Counters::wait_ns, now_ns() - begin);
  const int others = waiters_.fetch_sub(1) - 1;
  if (others > 0) peers_->ring_own_driver();  // one of them watches the network from now on
  else if (outstanding_.load() > 0 || network_busy()) wake_engine_thread();
  return request.finished.load(std::memory_order_acquire);
}

bool Engine::poll(Request& request) {
  bool finished = request.finished.load(std::memory_order_acquire);
  if (!finished) drive();
  return finished;
}

// ---- the baton

bool Engine::drive() {
  bool moved = false;
  do {
    if (baton_.exchange(true, std::memory_order_seq_cst)) return moved;
    moved |= step();
    baton_.store(false, std::memory_order_seq_cst);
  } while (inbox_full_.load(std::memory_order_seq_cst));  // submitted while we held the baton
  return moved;
}

bool Engine::step() {
  bool moved = false;
  try {
    if (peers_->own().alarm.load(std::memory_order_relaxed)) look_at_peers();
    moved = peers_->step();
    moved |= take_inbox();
    if (over_) return moved;
    bool holds = false;
    for (auto it = channels_.begin(); it != channels_.end(); ++it) {
      moved |= it->second->step();
      holds |= it->second->courier().holds();
    }
    holds_.store(holds, std::memory_order_relaxed);
    if (disputes_.pending() || judge_.pending()) moved |= go_on_with_disputes();
    if (ending_) end_when_quiet(moved);
    if (uint64_t now;
        !moved && outstanding_.load(std::memory_order_relaxed) > 0 && (now = now_ns()) - inspected_ns_ > kTickNs) {
      inspected_ns_ = now;
      peers_->own().awake_ns.store(now, std::memory_order_relaxed);
      for (auto& [id, channel] : channels_) {
        channel->remind();
        if (config_.stall_check) channel->inspect(now);
      }
    }
    peers_->ring_marked();
  } catch (const Error& error) {
    end_epoch(error.code(), error.what());
  } catch (const std::exception& error) {
    end_epoch(Code::internal, error.what());
  }
  return moved;
}

bool Engine::take_inbox() {
  if (!inbox_full_.load(std::memory_order_relaxed)) return false;
  std::vector<RequestPtr> requests;
  std::optional<Failure> failure;
  {
    std::lock_guard lock(mutex_);
    requests.swap(inbox_);
    inbox_full_.store(false, std::memory_order_seq_cst);
    failure = failure_;
  }
  disputes_.go_on();  // this rank goes on
  for (auto& request : requests) {
    auto channel = channels_.find(request->group);
    if (failure)
      finish(request, failure->first, request->title() + ": " + failure->second);
    else if (channel == channels_.end())
      finish(request, Code::invalid_argument, request->title() + ": its process set was removed");
    else if (request->what.kind == Kind::join)
      join(request);
    else
      channel->second->submit(request);
  }
  return true;
}

void Engine::sleep(uint64_t timeout_ns, const std::atomic<bool>& finished) {
  peers_->sleep(own_driver(), timeout_ns, [&] {
    if (finished) return true;
    // Only a step that ran after we said that we sleep proves that there is nothing to do.
    if (baton_.exchange(true, std::memory_order_seq_cst)) return true;
    bool moved = step();
    baton_.store(false, std::memory_order_seq_cst);
    return moved || inbox_full_.load(std::memory_order_seq_cst);
  });
}

// ---- the engine thread

void Engine::run() {
  prctl(PR_SET_NAME, "lightcc-engine");
  while (!stopping_) {
    if (!needed()) {
      nap_or_park();
    } else if (!drive()) {
      sleep(kTickNs, stopping_);
    }
  }
}

// There is work, no caller waits, and none has come by since the last look: a framework that calls often makes the
// steps itself, and its core is better left to it.
bool Engine::needed() {
  uint32_t visits = visits_.load(std::memory_order_relaxed);
  return std::exchange(visits_seen_, visits) == visits && outstanding_ > 0 && waiters_ == 0;
}

void Engine::nap_or_park() {
  auto alarmed = [&] { return peers_->own().alarm != 0; };  // rung while this thread was not asleep
  auto wanted = [&] { return stopping_ || alarmed() || (outstanding_ > 0 && waiters_ == 0); };
  for (int i = 0; i < kNaps; ++i) {
    if (stopping_ || needed()) return;
    if (alarmed()) break;
    if (network_busy()) drive();
    timespec nap{0, kNapNs};
    nanosleep(&nap, nullptr);
  }
  peers_->sleep(own_engine(), waiters_ > 0 || holds_ ? kTickNs : kNoTimeout, wanted);
  drive();  // a peer may have rung: a question, a goodbye
}

void Engine::wake_engine_thread() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  peers_->ring_own_engine();
}

// ---- groups

std::vector<int> Engine::group_ranks(int group) const {
  std::lock_guard lock(mutex_);
  auto it = groups_.find(group);
  return it == groups_.end() ? std::vector<int>() : it->second;
}

std::vector<int> Engine::group_ids() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ids;
  for (auto& [id, ranks] : groups_) ids.push_back(id);
  return ids;
}

// The members, or the id of the group to remove, came as the request's shape: so that ranks agree on them.
void Engine::change_groups(Request& request) {
  const Shape& numbers = request.what.tensors[0].shape;
  if (request.what.kind == Kind::remove_group) {
    int group = int(numbers[0]);
    if (auto it = channels_.find(group); it != channels_.end())
      it->second->fail_all(Code::invalid_argument, "its process set was removed");
    channels_.erase(group);
    peers_->reset_group(group);
    free_groups_.push_back(group);
    std::lock_guard lock(mutex_);
    groups_.erase(group);
    for (auto it = automatic_.begin(); it != automatic_.end();)
      it = it->first.first == group ? automatic_.erase(it) : std::next(it);
    return;
  }
  std::vector<int> ranks(numbers.begin(), numbers.end());
  int group;
  {
    std::lock_guard lock(mutex_);
    group = free_groups_.empty() ? int(groups_.size()) : free_groups_.front();
    if (!free_groups_.empty()) free_groups_.pop_front();
    groups_[group] = ranks;
  }
  request.new_group = group;
  if (std::find(ranks.begin(), ranks.end(), peers_->rank()) == ranks.end()) return;
  auto& channel = channels_[group];
  channel = std::make_unique<Channel>(*peers_, group, ranks, config_, counters_, tracing_, *this);
  if (join_) ++join_parts_, channel->submit(join_);
}

}  // namespace lightcc

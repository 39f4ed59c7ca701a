#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/overloaded.h"
#include "engine/lifecycle/calibrated.h"
#include "engine/lifecycle/lifecycle.h"
#include "engine/loop/loop.h"
#include "engine/negotiate/deadlock_watch.h"
#include "engine/negotiate/fast_path_calls.h"
#include "engine/negotiate/process_sets.h"
#include "engine/request/gpu_streams.h"
#include "engine/request/inbox.h"
#include "engine/request/validate.h"
#include "engine/timeline/observer.h"
#include "engine/timeline/trace.h"
#include "net/bootstrap/world.h"

namespace lightcc {
namespace {

constexpr uint64_t kInspectNs = 100'000'000;  // so often what takes long is looked at
constexpr uint64_t kBlockedNs = 500'000'000;  // waits longer than this may be a deadlock
constexpr uint64_t kPauseNs = 100'000'000;

// Why a second request of a name is refused.
std::string still_in_flight(int rank, bool in_another_thread) {
  return "one of this name is still in flight on rank " + std::to_string(rank) +
         (in_another_thread ? ", in another thread, so ranks may pair different calls: give each thread names of its "
                              "own. All ranks refuse this name until the next barrier() of its process set "
                              "(docs/errors.md)"
                            : "; synchronize it first, or use another name");
}

// To start a collective on a GPU takes the host long, and the caller has more work to give that GPU meanwhile.
bool is_left_to_engine_thread(const Request& request) { return request.place.kind == DeviceKind::cuda; }

}  // namespace

// What a rank's engine consists of; it joins what its parts do. Its private state is that of whoever holds the progress
// lock (loop.lock()), unless it says otherwise.
struct Engine::Impl {
  Impl(std::unique_ptr<Peers>, World, Config, std::unique_ptr<Timeline>);

  // ---- submission: any thread
  int take_in(const RequestPtr&, uint64_t now_ns, bool will_wait, GpuStreams::Mark* last = nullptr);
  void report_refusal(const Request&, const std::string& why, bool contended = false);
  template <class Body> void end_by_device(Body body);

  // ---- steps
  bool step(Loop::Sleeper);
  void step_groups(bool* moved);
  void inspect(uint64_t now_ns);
  bool take_inbox();
  void submit_to(GroupEngine&, const RequestPtr&);
  void observe(const Request&);
  FastPath::State step_fast_path(GroupEngine&);
  // What `body` throws ends the epoch: links and transports throw when a peer is lost. Its effects are carried out.
  template <class Body> void end_epoch_on_error(Body body);
  template <class Body> void attempt(Body body);
  void carry_out_effects();
  void finish(const RequestPtr&, Code, const std::string& text);
  bool join_goes_on(const RequestPtr&, Code, const std::string& text);

  const std::unique_ptr<Peers> peers;
  const World world;
  const Config config;
  const std::unique_ptr<Timeline> timeline;
  std::string selector_text;
  Calibrated calibrated{};
  Counters counters;
  Observer observer{counters, world.size};
  std::atomic<bool> awaits_planned{false};     // a caller waits for a request that came to a fusion plan
  uint64_t inspected_ns = 0;

  Inbox inbox;
  Loop loop;
  Tracing tracing;
  NcclLaunches launches;
  Effects effects;
  Surroundings surroundings;
  const GroupResources shared;
  ProcessSets sets;
  DeadlockWatch deadlocks;
  Lifecycle lifecycle;
  FastPathCalls fast_calls;
  GpuStreams gpu_streams;
};

Engine::Impl::Impl(std::unique_ptr<Peers> with_peers, World in_world, Config by_config, std::unique_ptr<Timeline> shown)
    : peers(std::move(with_peers)),
      world(std::move(in_world)),
      config(std::move(by_config)),
      timeline(shown ? std::move(shown) : std::make_unique<Timeline>()),
      inbox(peers->rank()),
      loop(*peers, config, inbox, [this](Loop::Sleeper who) { return step(who); }),
      tracing(*timeline),
      shared{{*peers, config,
              std::make_shared<OutputPool>(size_t(config.output_pool_bytes), uint64_t(config.output_idle_s * 1e9)),
              std::make_shared<PinnedPool>(peers->arena(), size_t(config.pinned_bytes)), counters, tracing, launches,
              surroundings.groups, effects},
             loop.lock(), surroundings},
      sets(shared, inbox),
      deadlocks(shared, sets, inbox),
      lifecycle(shared, sets, inbox),
      fast_calls(sets, inbox),
      gpu_streams(config.cuda_library, config.gpu_compression, world.rank) {
  selector_text = sets.world().selector().text();
  lifecycle.watch();
  loop.start();
}

// ---- steps

template <class Body> void Engine::Impl::end_epoch_on_error(Body body) {
  attempt(body);
  while (!effects.empty()) attempt([&] { carry_out_effects(); });  // one that throws ends the epoch, with more effects
}

template <class Body> void Engine::Impl::attempt(Body body) {
  try {
    body();
  } catch (const PeerSuspected& error) {
    lifecycle.suspect(error);
  } catch (const Error& error) {
    lifecycle.end(error.code(), error.what());
  } catch (const std::exception& error) {
    lifecycle.end(Code::internal, error.what());
  }
}

bool Engine::Impl::step(Loop::Sleeper who) {
  bool moved = false;
  end_epoch_on_error([&] {
    if (peers->own().alarm.load(std::memory_order_relaxed)) {
      lifecycle.look_at_peers();
      carry_out_effects();
    }
    moved = peers->step();
    moved |= take_inbox();
    if (!lifecycle.over()) step_groups(&moved);
  });
  if (moved) counters.add(who == Loop::Sleeper::engine_thread ? Counters::background_steps : Counters::caller_steps);
  return moved;
}

void Engine::Impl::step_groups(bool* moved) {
  if (lifecycle.is_suspended()) {
    sets.for_each([&](GroupEngine& group_engine) { *moved |= group_engine.negotiator().take_messages(); });
    carry_out_effects();
    lifecycle.await_verdict();
    return peers->flush_and_wake();
  }
  bool holds = false, watches = false, polls = false;
  if (awaits_planned.load(std::memory_order_relaxed) && awaits_planned.exchange(false))
    sets.for_each([](GroupEngine& group_engine) { group_engine.negotiator().leave_awaited_plans(); });
  sets.for_each([&](GroupEngine& group_engine) {
    *moved |= group_engine.step();
    carry_out_effects();
    holds |= group_engine.control_plane().holds();
    watches |= group_engine.watches_gpu();
    polls |= group_engine.polls();
  });
  loop.note_signs(holds, watches, polls);
  if (deadlocks.step()) {
    *moved = true;
    carry_out_effects();
  }
  lifecycle.stepped(*moved, inbox.in_flight() > 0 || watches);
  if (!*moved && inbox.in_flight() > 0) inspect(now_ns());
  peers->flush_and_wake();
}

void Engine::Impl::inspect(uint64_t now_ns) {
  if (now_ns - inspected_ns <= kInspectNs) return;
  inspected_ns = now_ns;
  peers->own().awake_ns.store(now_ns, std::memory_order_relaxed);
  sets.for_each([&](GroupEngine& group_engine) {
    group_engine.remind();
    group_engine.negotiator().leave_stuck_plans(now_ns);
    if (config.stall_check) group_engine.inspect(now_ns);
  });
  carry_out_effects();
}

bool Engine::Impl::take_inbox() {
  if (!inbox.full()) return false;
  const auto [requests, refusals] = inbox.take();
  deadlocks.goes_on();
  const bool failed = lifecycle.has_failed();
  auto refusal = refusals.begin();
  size_t known = 0;  // so many are finished, or the epoch knows of them
  try {
    for (size_t i = 0; i <= requests.size(); ++i) {
      for (; refusal != refusals.end() && refusal->position <= i; ++refusal)
        if (GroupEngine* group_engine = sets.find(refusal->group); group_engine && !failed)
          group_engine->negotiator().refused(*refusal);
      if (i == requests.size()) break;
      const RequestPtr& request = requests[known++];
      GroupEngine* group_engine = sets.find(request->group);
      if (failed)
        finish(request, lifecycle.cause().code, request->title() + ": " + lifecycle.cause().text);
      else if (!group_engine)
        finish(request, Code::invalid_argument, request->title() + ": its process set was removed");
      else if (request->what.kind == Kind::join)
        sets.join(request);
      else
        submit_to(*group_engine, request);
    }
  } catch (const std::exception& error) {  // ends the epoch
    for (; known < requests.size(); ++known)
      finish(requests[known], Code::internal, requests[known]->title() + ": " + error.what());
    throw;
  }
  carry_out_effects();
  return true;
}

// It comes to its process set, or is on the fast path.
void Engine::Impl::observe(const Request& request) {
  const bool is_named = request.what.kind == Kind::allreduce && !request.automatic;
  if (is_named && observer.begins_step(request.name_view(), request.set))
    tracing.step_begins(request.submitted_ns);
}

// It may have been taken in beside a call of the same name that was on its way to the fast path.
void Engine::Impl::submit_to(GroupEngine& group_engine, const RequestPtr& request) {
  observe(*request);
  if (group_engine.submit(request)) return;
  finish(request, Code::mismatch, request->title() + ": " + still_in_flight(world.rank, true));
  group_engine.negotiator().contended(request->key);
}

// One may bring about others, which come behind it.
void Engine::Impl::carry_out_effects() {
  loop.lock().assert_held();
  while (auto effect = effects.pop())
    std::visit(Overloaded{[&](const effect::Finish& end) { finish(end.request, end.code, end.text); },
                          [&](const effect::SkipName& name) { inbox.skip_name(name.group, name.key); },
                          [&](const effect::ChangeGroups& change) {
                            if (!lifecycle.over()) sets.change(*change.request);
                          },
                          [&](const effect::EndEpoch& end) { lifecycle.end(end.cause.code, end.cause.text); },
                          [&](const effect::RankLeft& left) {
                            lifecycle.apply(epoch_event::PeerLeft{left.rank, left.why});
                          },
                          [&](const effect::AwaitTurn& turn) {
                            if (!lifecycle.over()) sets.await_turn(*turn.group);
                          },
                          [&](RankReport& report) { observer.receive(report.rank, std::move(report.text)); },
                          [&](const auto& of_deadlocks) { deadlocks.receive(of_deadlocks); }},
               *effect);
}

void Engine::Impl::finish(const RequestPtr& request, Code code, const std::string& text) {
  if (request->what.kind == Kind::join && join_goes_on(request, code, text)) return;
  request->name_held = inbox.release_name(*request);
  if (code == Code::shut_down) lifecycle.apply(epoch_event::RequestShutDown{});
  deadlocks.finished(*request, code, text);
  tracing.finished(*request, code, text);
  request->code = code;
  request->text = text;
  counters.count(Counters::requests);
  Callbacks callbacks = request->callbacks;  // once finished, the request may be gone
  if (callbacks.received && request->what.kind == Kind::alltoall && code == Code::ok)
    for (size_t i = 0; i < request->results.size(); ++i) {
      const auto& rows = request->results[i].rows_from;
      callbacks.received(callbacks.context, int(i), rows.data(), int(rows.size()));
    }
  request->finished.store(true, std::memory_order_seq_cst);
  if (request->unheard && !request->unordered) try {
      order_own_stream(*request);
    } catch (const Error&) {
      // The GPU has failed, and the program's next call there finds that.
    }
  if (inbox.finished() == 0) observer.idle();
  if (callbacks.done) callbacks.done(callbacks.context, int(code), text.c_str());
  peers->wake_own_driver();  // other threads of this rank may wait for it
}

bool Engine::Impl::join_goes_on(const RequestPtr& request, Code code, const std::string& text) {
  const auto end = sets.join_ended(request, code, lifecycle.over() || loop.is_stopping());
  if (end == ProcessSets::Join::fails)
    lifecycle.apply(epoch_event::JoinFailed{{code, text.substr(request->title().size() + 2)}});
  return end != ProcessSets::Join::over;
}

// ---- submission

// Other ranks may take the same request and wait for this one: their warnings will say why.
void Engine::Impl::report_refusal(const Request& request, const std::string& why, bool contended) {
  if (request.key.empty() || is_point_to_point(request.what.kind)) return;  // of no name that others could wait for
  if (inbox.add_refusal(request, why, contended)) loop.drive();
}

// What fails in `body` has failed in the program, which nobody else can go on without.
template <class Body> void Engine::Impl::end_by_device(Body body) {
  try {
    body();
  } catch (const DeviceFailed& error) {
    loop.wait_for_lock();
    end_epoch_on_error([&] { throw error; });
    loop.lock().unlock();
    throw;
  }
}

// Returns how many are in flight with it.
int Engine::Impl::take_in(const RequestPtr& request, uint64_t now_ns, bool will_wait, GpuStreams::Mark* last) {
  try {
    validate(*request, surroundings.groups.find(request->group).get(), world.rank);
    end_by_device([&] { gpu_streams.note(*request, last); });
  } catch (const Error& error) {
    report_refusal(*request, error.what());
    throw;
  }
  request->submitted(now_ns);
  observer.submitted(now_ns);
  const bool has_handle = !request->automatic && !will_wait && !request->callbacks.done;
  const int in_flight = fast_calls.has_name_of(*request) ? Inbox::kContended : inbox.add(request, has_handle);
  if (in_flight > 0) return in_flight;
  const bool contended = in_flight == Inbox::kContended;
  const std::string why = still_in_flight(world.rank, contended && !is_point_to_point(request->what.kind));
  report_refusal(*request, why, contended);
  throw Error(Code::invalid_argument, request->title() + ": " + why);
}

// As long as patience lasts and nothing else is urgent.
FastPath::State Engine::Impl::step_fast_path(GroupEngine& group_engine) {
  FastPath& fast_path = *group_engine.fast_path().path();
  SpinPolicy patience(loop.wait_habit());
  auto state = FastPath::State::waiting;
  const auto& alarm = peers->own().alarm;
  end_epoch_on_error([&] {
    for (bool waits = true; waits && !alarm.load(std::memory_order_relaxed);) {
      bool moved = false;
      state = fast_path.step(&moved);
      peers->flush_and_wake();
      if (moved || !fast_path.active()) patience.reset();
      if (!fast_path.active()) break;
      moved |= group_engine.receive_slots();
      carry_out_effects();
      waits = moved || patience.wait_a_little();
    }
  });
  return state;
}

// ---- the engine, as others see it

Engine::Engine(std::unique_ptr<Peers> peers, World world, Config config)
    : Engine(std::move(peers), std::move(world), std::move(config), nullptr) {}
Engine::Engine(std::unique_ptr<Peers> peers, World world, Config config, std::unique_ptr<Timeline> timeline)
    : impl_(std::make_unique<Impl>(std::move(peers), std::move(world), std::move(config), std::move(timeline))) {}
Engine::~Engine() { shutdown(); }

const World& Engine::world() const { return impl_->world; }
const Config& Engine::config() const { return impl_->config; }
const Counters& Engine::counters() const {
  impl_->observer.looked_at();
  return impl_->counters;
}
uint64_t Engine::sent_bytes(const std::string& transport) const {
  return impl_->observer.sent_bytes(*impl_->peers, transport);
}
const std::string& Engine::selector_text() const { return impl_->selector_text; }
const std::string& Engine::network_text() const { return impl_->calibrated.network; }
Timeline& Engine::timeline() { return *impl_->timeline; }
const Topology& Engine::topology() const { return impl_->peers->topology(); }
const std::shared_ptr<Arena>& Engine::arena() const { return impl_->peers->arena(); }
const std::shared_ptr<OutputPool>& Engine::outputs() const { return impl_->shared.outputs; }
std::shared_ptr<const Group> Engine::group(int id) const { return impl_->surroundings.groups.find(id); }
std::vector<int> Engine::group_ids() const { return impl_->surroundings.groups.ids(); }
std::string Engine::failure() const { return impl_->inbox.failure(); }
void Engine::peer_ended(int rank) { impl_->lifecycle.peer_ended(rank); }

void Engine::submit(const RequestPtr& request, bool will_wait) {
  Impl& e = *impl_;
  const uint64_t now = now_ns();
  e.counters.raise(Counters::most_in_flight, uint64_t(e.take_in(request, now, will_wait)));
  if (!will_wait && is_left_to_engine_thread(*request)) return e.loop.wake_thread(true);
  const bool comes_back = !request->callbacks.done;
  e.loop.submitted(now, bytes_of(request->what), will_wait, comes_back);
  if (!will_wait && !request->finished.load(std::memory_order_acquire)) e.loop.wake_thread(!comes_back);
}

void Engine::submit_all(std::span<const RequestPtr> requests, size_t* begun) {
  if (requests.empty()) return;
  Impl& e = *impl_;
  const uint64_t now = now_ns();
  const auto go = [&] {
    e.counters.raise(Counters::most_in_flight, uint64_t(e.inbox.in_flight()));
    if (is_left_to_engine_thread(*requests.front())) return e.loop.wake_thread(true);
    const bool comes_back = !requests.front()->callbacks.done;
    e.loop.submitted(now, 0, true, comes_back);
    if (e.inbox.in_flight() > 0) e.loop.wake_thread(!comes_back);
  };
  try {
    GpuStreams::Mark last;
    for (*begun = 0; *begun < requests.size(); ++*begun) e.take_in(requests[*begun], now, false, &last);
  } catch (...) {
    go();
    throw;
  }
  go();
}

void Engine::fill(std::span<const Fill> fills) {
  impl_->end_by_device([&] { impl_->gpu_streams.fill(fills); });
}

bool Engine::try_fast_path(const Call& call, const FastPathFacts& known, RequestPtr* begun) {
  Impl& e = *impl_;
  FastPathFacts facts = known;
  facts.in_flight = e.inbox.in_flight();
  facts.shows_negotiation = e.timeline->running();
  if (!may_take_fast_path(facts) || !e.loop.lock().try_lock()) return false;
  e.loop.note_visit();
  facts.epoch_ends = e.lifecycle.over() || e.loop.is_stopping();
  uint64_t number;
  const bool is_timed = call.name && e.observer.times_fast_path();  // those without a name are the program's own
  const uint64_t begin_ns = is_timed ? now_ns() : 0;
  GroupEngine* group_engine = nullptr;
  e.end_epoch_on_error([&] { group_engine = e.fast_calls.begin(call, facts, &number); });
  const auto state = group_engine ? e.step_fast_path(*group_engine) : FastPath::State::idle;
  if (state == FastPath::State::done) {
    e.counters.count(Counters::requests);
    e.counters.count(Counters::fast_path);
    if (is_timed) e.observer.exposed_since(begin_ns);
    if (call.name) e.observer.begins_step(call.name, 0);
  } else if (group_engine) {
    *begun = FastPathCalls::request_of(call, number);
    e.inbox.adopt(**begun);
    e.observer.submitted((*begun)->submitted_ns);
    e.end_epoch_on_error([&] {
      if (e.lifecycle.over())
        e.finish(*begun, e.lifecycle.cause().code, (*begun)->title() + ": " + e.lifecycle.cause().text);
      else if (state == FastPath::State::refused)
        e.submit_to(*group_engine, *begun);
      else
        e.observe(**begun), group_engine->fast_path().adopt(*begun);
      e.carry_out_effects();
      e.peers->flush_and_wake();
    });
  }
  e.fast_calls.end();
  e.loop.lock().unlock();
  if (e.inbox.full()) e.loop.drive();
  return state == FastPath::State::done;
}

bool Engine::wait(Request& request, uint64_t deadline_ns) {
  if (request.finished.load(std::memory_order_acquire)) return true;
  Impl& e = *impl_;
  const uint64_t begin = now_ns();
  request.awaited.store(true);
  if (request.planned.load()) e.awaits_planned.store(true);
  const bool finished = e.loop.wait(request.finished, deadline_ns, [&](uint64_t now) {
    if (now - request.submitted_ns <= kBlockedNs || request.what.kind == Kind::join) return;
    if (!e.loop.lock().try_lock()) return;
    e.deadlocks.note_blocked(request, now);
    e.loop.lock().unlock();
  });
  e.counters.add(Counters::wait_ns, now_ns() - begin);
  return finished;
}

bool Engine::poll(Request& request) {
  const bool finished = request.finished.load(std::memory_order_acquire);
  if (!finished) impl_->loop.drive();
  return finished;
}

void Engine::give_back(Request& request) {
  if (request.finished.load(std::memory_order_acquire) && !request.name_held.exchange(false)) return;
  impl_->inbox.give_back(request);
}

void Engine::with_peers(const std::function<void(Peers&)>& body) {
  impl_->loop.wait_for_lock();
  impl_->end_epoch_on_error([&] { body(*impl_->peers); });
  impl_->loop.lock().unlock();
}

void Engine::use(Calibrated calibrated) {
  with_peers([&](Peers&) {
    Impl& e = *impl_;
    e.calibrated = std::move(calibrated);
    e.sets.world().use_rules(e.calibrated.rules, e.calibrated.costs);
    e.selector_text = "network: " + e.calibrated.network + "\n" + e.sets.world().selector().text();
  });
}

void Engine::reset_counters() {
  with_peers([&](Peers& peers) {
    for (auto& value : impl_->counters.values) value = 0;
    impl_->observer.begin(peers);
  });
}

std::string Engine::plans_text() {
  if (!impl_->loop.wait_for_lock(UINT64_MAX)) return "";
  std::string text = impl_->sets.plans_text();
  impl_->loop.lock().unlock();
  return text;
}

std::vector<uint64_t> Engine::waited_ns() {
  std::vector<uint64_t> waited(size_t(impl_->world.size));
  if (!impl_->loop.wait_for_lock(UINT64_MAX)) return waited;
  if (Coordinator* coordinator = impl_->sets.world().negotiator().coordinator()) waited = coordinator->waited_ns();
  impl_->loop.lock().unlock();
  return waited;
}

NetworkFaults Engine::network_faults() {
  NetworkFaults faults;
  if (impl_->peers->all_local() || !impl_->loop.wait_for_lock(UINT64_MAX)) return faults;
  faults = impl_->peers->network_faults();
  impl_->loop.lock().unlock();
  return faults;
}

void Engine::report(const std::string& text) {
  Impl& e = *impl_;
  if (!e.loop.wait_for_lock(UINT64_MAX)) return;
  e.end_epoch_on_error([&] {
    GroupEngine& group_engine = e.sets.world();
    if (e.lifecycle.over() || group_engine.control_plane().cut_off()) return;
    group_engine.negotiator().send_up(RankReport{e.world.rank, text});
    e.carry_out_effects();
    e.peers->flush_and_wake();
  });
  e.loop.lock().unlock();
  e.loop.drive();  // takes in what ranks of this host have reported: it woke nobody here
}

std::string Engine::reported(int rank) { return impl_->observer.reported(rank); }

void Engine::abort(const std::string& cause) {
  if (!impl_->loop.wait_for_lock(UINT64_MAX)) return;
  impl_->end_epoch_on_error([&] { impl_->lifecycle.apply(epoch_event::Interrupted{cause}); });
  impl_->loop.lock().unlock();
}

void Engine::shutdown(const std::string& reason, const Cancellation* cancellation) {
  Impl& e = *impl_;
  if (!e.inbox.close()) return;
  e.loop.stop();
  e.end_epoch_on_error([&] {
    e.take_inbox();
    e.lifecycle.settle();
  });
  const bool unfinished = e.inbox.in_flight() > 0;
  const bool in_peace = !unfinished && !e.lifecycle.over();
  if (in_peace) e.lifecycle.end_nccl();
  const std::string text = e.lifecycle.leave_text(reason);
  if (in_peace) e.end_epoch_on_error([&] { e.lifecycle.tell_other_hosts(text); });
  e.lifecycle.fail_rest(unfinished);
  e.carry_out_effects();
  e.end_epoch_on_error([&] { e.peers->flush_and_wake(); });
  e.lifecycle.leave(text, unfinished, cancellation);
  e.carry_out_effects();
  e.timeline->stop(now_ns());
}

bool Engine::pause() { return impl_->loop.wait_for_lock(kPauseNs); }
void Engine::resume() { impl_->loop.lock().unlock(); }
void Engine::close_in_child(bool paused) {
  impl_->lifecycle.close_in_child();
  impl_->peers->close_in_child(paused);
}

}  // namespace lightcc

#include "engine/negotiate/group_engine.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/overloaded.h"
#include "collective/compressed.h"
#include "engine/request/validate.h"

namespace lightcc {
namespace {

// How long a rank that waits on the fast path is not refused by one that is busy, and by an idle one on another host,
// which may come late. What is refused is negotiated, and then others know what it waits for.
constexpr uint64_t kBusyPatienceNs = 50'000, kIdlePatienceNs = 100'000'000;
constexpr uint64_t kDozeNs = 300'000'000;     // a rank with work in flight looks around three times as often
constexpr uint64_t kSilenceNs = 400'000'000;  // a coordinator that takes longer to answer is itself missing

std::vector<int32_t> to_int32(const std::vector<int>& members) { return {members.begin(), members.end()}; }

}  // namespace

GroupEngine::GroupEngine(Peers& peers, std::shared_ptr<const Group> group, const Config& config,
                         std::shared_ptr<OutputPool> outputs, std::shared_ptr<PinnedPool> pinned, Counters& counters,
                         Tracing& tracing, const ProgressLock& progress_lock, NcclLaunches& launches, Effects& effects,
                         const Surroundings& surroundings, CacheFile tuned)
    : peers_(peers),
      group_(std::move(group)),
      config_(config),
      counters_(counters),
      tracing_(tracing),
      progress_lock_(progress_lock),
      effects_(effects),
      stalls_(peers, *group_, config, counters, effects, surroundings),
      control_plane_(peers, *group_),
      plans_(group_->index(), response_cache_),
      left_(group_->size()),
      backends_(peers, *group_, config),
      queue_(peers, group_, config, backends_, std::move(outputs), std::move(pinned), counters, tracing, launches,
             surroundings.groups, effects) {
  if (group_->index() == 0)
    coordinator_ = std::make_unique<Coordinator>(
        group_->ranks(), Coordinator::Limits{{config.fusion_bytes, config.fusion}, config.cache_capacity});
  if (SharedBackend* shared = backends_.shared()) {
    fast_path_ = std::make_unique<SharedFastPath>(peers.local_ranks(), *group_, *shared);
  } else if (group_->size() == 2) {
    auto remote = std::make_unique<RemoteFastPath>(
        *group_, [this](std::string bytes) { control_plane_.send_slot(std::move(bytes)); },
        [this](const Collective& call) {
          const Row& row = selector().choose(call, autotune_choices_);
          return row.backend->start(call, row.algorithm);
        });
    remote_fast_path_ = remote.get();
    fast_path_ = std::move(remote);
  }
  if (config.autotune && is_coordinator() && group_->id() == 0 && backends_.nodes().size() > 1)
    tuning_ = std::make_unique<Tuning>(config, selector(), group_->size(), std::move(tuned));
}

void GroupEngine::use_rules(std::span<const Rule> allreduces, PlanCosts costs) {
  progress_lock_.assert_held();
  backends_.use_rules(allreduces);
  if (coordinator_) coordinator_->expect_costs(costs);
  if (tuning_) tuning_->restart();
}

bool GroupEngine::submit(const RequestPtr& request) {
  progress_lock_.assert_held();
  const auto refuse = [&](Code code, const std::string& why) {
    fail(request, code, why);
    return true;
  };
  if (left_.any()) return refuse(Code::shut_down, left_.first());
  if (!withdrawn_.empty())
    if (auto it = withdrawn_.find(request->key); it != withdrawn_.end())
      return refuse(Code::mismatch, it->second);
  if (fast_path_request_ && fast_path_request_->key == request->key) return false;
  if (!pending_.emplace(request->key, request).second) return false;
  tracing_.submitted(*request);
  if (request->compressor) {
    request->what.codec = request->compressor->codec_for(request->residuals);
    request->compressor->set_dense(why_dense(request->what.codec, request->what.tensors[0].dtype,
                                              int(backends_.nodes().size())));
    request->slot = {};  // the codec changes while it warms up, and with it what is announced
  }
  const Kind kind = request->what.kind;
  if (kind == Kind::join) send_all_up(plans_.leave_all());  // what was submitted before goes first
  MemberPlans::Messages messages =
      plans_.submit(request->key, request->what, request->set, request->submitted_ns, &request->slot);
  const bool planned = request->slot.plan != 0;
  // What a plan has taken in stays as it was when the plan was made.
  if (is_coordinator() && kind == Kind::allreduce && !planned) {
    size_t bytes = size_t(count_of(request->what.tensors[0].shape)) * size_of(request->what.tensors[0].dtype);
    bool in_place = request->inputs[0] == request->outputs[0];
    bool shared = in_place && peers_.arena()->offset_of(request->inputs[0], bytes) >= 0;
    coordinator_->set_own(request->key, shared ? reinterpret_cast<uintptr_t>(request->inputs[0]) : 0, request->set);
  }
  const bool by_itself = !messages.empty() && std::holds_alternative<Announce>(messages.back());
  counters_.add(by_itself ? Counters::announced : planned ? Counters::planned : Counters::cached);
  send_all_up(std::move(messages));
  if (!planned) return true;
  request->planned.store(true);
  if (request->awaited.load()) send_all_up(plans_.leave_with(request->key));
  return true;
}

// ---- effects

void GroupEngine::finish(const RequestPtr& request, Code code, std::string text) {
  effects_.push(effect::Finish{request, code, std::move(text)});
}

void GroupEngine::fail(const RequestPtr& request, Code code, const std::string& why) {
  finish(request, code, request->title() + ": " + why);
}

// ---- messages

void GroupEngine::send_all_up(MemberPlans::Messages messages) {
  for (UpMessage& message : messages) send_up(std::move(message));
}

void GroupEngine::send_up(UpMessage message) {
  progress_lock_.assert_held();
  control_plane_.send_up(std::move(message));
  take_own_events();
}

void GroupEngine::send_down(DownMessage message) {
  progress_lock_.assert_held();
  control_plane_.send_down(std::move(message));
  take_own_events();
}

// What the coordinator tells itself it knows at once.
void GroupEngine::take_own_events() {
  while (auto event = control_plane_.take_event()) receive(*event);
}

bool GroupEngine::step_control_plane() {
  progress_lock_.assert_held();
  bool moved = false;
  while (auto event = control_plane_.step(&moved)) receive(*event);
  return moved;
}

void GroupEngine::receive(ControlEvent& event) {
  std::visit([&](auto& one) { receive(one); }, event);
}

void GroupEngine::leave_awaited_plans() {
  progress_lock_.assert_held();
  if (!plans_.holds()) return;
  for (auto& [key, request] : pending_)
    if (request->planned.load(std::memory_order_relaxed) && request->awaited.load())
      send_all_up(plans_.leave_with(key));
}

void GroupEngine::leave_stuck_plans(uint64_t now) {
  progress_lock_.assert_held();
  if (plans_.holds()) send_all_up(plans_.leave_stuck(now));
}

void GroupEngine::receive(MemberMessage& received) {
  const int from = received.member;
  const auto ready = [&](const std::string& key) { tracing_.ready(group_->id(), key, group_->rank(from)); };
  const uint64_t now = now_ns();
  std::visit(Overloaded{[&](Announce& announce) {
                          coordinator_->announce(from, announce.key, std::move(announce.what), announce.again, now);
                          ready(announce.key);
                        },
                        [&](const CachedRequest& cached) {
                          const std::string* key = coordinator_->announce_cached(from, cached, now);
                          if (key) ready(*key);
                        },
                        [&](const BucketReady& bucket) {
                          for (const std::string& key : coordinator_->announce_bucket(from, bucket, now)) ready(key);
                        },
                        [&](const PlanLeft& left) { coordinator_->plan_left(from, left.plan); },
                        [&](const Query& query) {
                          if (query.blocked) stalls_.report_deadlock(coordinator_->blocked(query.member, query.key));
                          queries_.push_back(query);  // answered when all that came here is taken in
                        },
                        [&](const MembersAbsent& absence) { coordinator_->members_absent(absence); },
                        [&](const Refused& refused) { coordinator_->refused(from, refused.key, refused.why); },
                        [&](const Contended& contended) { coordinator_->contended(from, contended.key); },
                        [&](const NameGivenUp& given_up) { coordinator_->name_given_up(from, given_up.key); },
                        [&](const BlockedReport& report) {
                          check_world(from);
                          effects_.push(report);
                        },
                        [&](const DeadlockReply& reply) {
                          check_world(from);
                          effects_.push(reply);
                        },
                        [&](const LaunchRequest& request) {
                          check_world(from);
                          send_down(LaunchTurn{request.group, request.ranks});
                        }},
             received.message);
}

void GroupEngine::receive(DownMessage& message) {
  std::visit(Overloaded{[&](Batch& batch) { receive(batch); }, [&](const BucketBatch& batch) { receive(batch); },
                        [&](const Plan& plan) {
                          plans_.begin(plan);
                          if (tracing_.running()) tracing_.planned(plan.plan, plans_.text());
                        },
                        [&](const PlanEnded& ended) { send_all_up(plans_.end(ended)); },
                        [&](const Tuned& tuned) { autotune_choices_ = tuned.second; },
                        [&](const Failure& failure) { receive(failure); },
                        [&](const Missing& missing) { receive(missing); },
                        [&](const NameWithdrawn& withdrawn) { receive(withdrawn); },
                        [&](const DeadlockProbe& probe) {
                          check_world(0);
                          effects_.push(probe);
                        },
                        [&](const LaunchTurn& turn) {
                          check_world(0);
                          queue_.add_turn(turn);
                        }},
             message);
}

// What is between process sets is told in the world's.
void GroupEngine::check_world(int from) const {
  if (group_->id() != 0)
    throw Error(Code::internal, "rank " + std::to_string(group_->rank(from)) + " sent a message in process set " +
                                    std::to_string(group_->id()) + " that belongs in the world's");
}

bool GroupEngine::is_among(const std::vector<int32_t>& members) const {
  return std::find(members.begin(), members.end(), group_->index()) != members.end();
}

// All members have announced it.
GroupEngine::Pending::iterator GroupEngine::find_pending(const std::string& key) {
  const auto it = pending_.find(key);
  if (it == pending_.end()) throw Error(Code::internal, "told to run " + key + ", which was not announced here");
  return it;
}

void GroupEngine::receive(Batch& batch) {
  if (batch.responses.empty()) throw Error(Code::internal, "told to run nothing");
  std::vector<BatchItem> items;
  for (Response& one : batch.responses) {
    std::optional<std::string> again;
    const Response& response = response_cache_.apply(std::move(one), &again);
    if (is_among(response.absent)) {
      validate_rows(response, response.what, group_->index(), group_->size(), true);
      items.push_back(JoinedRank::placeholder(response));
      joined_residuals_.give(*items.back().request);
    } else {
      const auto it = find_pending(response.key);
      validate_rows(response, it->second->what, group_->index(), group_->size(), false);
      joined_residuals_.remember(*it->second);
      items.push_back({std::move(it->second), response.rows, int(response.absent.size())});
      pending_.erase(it);
    }
    if (!again) continue;
    if (auto other = pending_.find(*again); other != pending_.end()) {
      UpMessage anew = response_cache_.announce(*again, other->second->what);
      std::get<Announce>(anew).again = true;
      send_up(std::move(anew));
    }
  }
  agree(std::move(items));
}

void GroupEngine::receive(const BucketBatch& batch) {
  std::vector<BatchItem> items;
  for (const std::string& key : plans_.run(batch)) {
    const auto it = find_pending(key);
    joined_residuals_.remember(*it->second);
    items.push_back({std::move(it->second), {}});
    pending_.erase(it);
  }
  agree(std::move(items));
}

void GroupEngine::agree(std::vector<BatchItem> items) {
  for (BatchItem& item : items) {
    item.second = autotune_choices_;
    if (item.request->what.kind == Kind::barrier) withdrawn_.clear();  // what came before is over on all ranks
  }
  queue_.add(std::move(items));
}

void GroupEngine::receive(const Failure& failure) {
  if (!failure.only.empty() && !is_among(failure.only)) return;
  response_cache_.forget(failure.key);
  if (is_among(failure.absent)) return effects_.push(effect::SkipName{group_->id(), failure.key});
  auto it = pending_.find(failure.key);
  if (it == pending_.end()) return tracing_.refused(group_->id(), failure.key, failure.code, failure.text);
  RequestPtr request = std::move(it->second);
  pending_.erase(it);
  fail(request, failure.code, failure.text);
}

void GroupEngine::receive(const Missing& missing) {
  for (auto* members : {&missing.members, &missing.joined})
    for (int32_t member : *members)
      if (!group_->has_member(member))
        throw Error(Code::internal, "the coordinator waits for a member that is not in its group");
  if (missing.blocked) {
    std::vector<int32_t> ranks;
    for (int32_t member : missing.members) ranks.push_back(group_->rank(member));
    return effects_.push(effect::WaitsFor{group_->id(), missing.key, std::move(ranks)});
  }
  if (auto it = pending_.find(missing.key); it != pending_.end())
    stalls_.report(*it->second, waits_since(*it->second), {missing.members.begin(), missing.members.end()},
                   {missing.joined.begin(), missing.joined.end()}, missing.note, now_ns());
}

// Answers what has waited here until all that came was taken in.
void GroupEngine::answer_queries() {
  for (const auto& [key, member, blocked] : std::exchange(queries_, {})) {
    const std::vector<int> missing = coordinator_->missing(key);
    send_down(Missing{key, to_int32(missing), to_int32(coordinator_->joined()), member,
                      blocked ? "" : stalls_.note(*coordinator_, key, missing), blocked});
  }
}

bool GroupEngine::coordinate() {
  if (!coordinator_->anything_ready()) return false;
  const bool gathers = gathers_for_next_batch(queue_.size(), queue_.most_running(), coordinator_->ready_bytes());
  if (gathers && !coordinator_->anything_urgent()) return false;
  if (const auto tuned = tuning_ ? tuning_->message() : std::nullopt) send_down(*tuned);
  for (DownMessage& message : coordinator_->take_messages()) send_down(std::move(message));
  return true;
}

bool GroupEngine::run_batches() {
  if (fast_path_ && fast_path_->active()) return false;  // it began first on all ranks
  bool moved = queue_.step();
  while (const auto done = queue_.take_done()) {
    note_done(*done);
    moved = true;
  }
  return moved;
}

void GroupEngine::note_done(const BatchQueue::DoneBatch& done) {
  const BatchExecution& batch = *done.batch;
  const Kind kind = batch.items()[0].request->what.kind;
  const bool is_measured = !batch.by_nccl();  // not only queued
  if (is_coordinator() && is_measured && batch.bytes() > 0 && kind == Kind::allreduce)
    coordinator_->note_cost(batch.bytes(), done.seconds);
  if (tuning_ && is_measured) tuning_->note(batch, done.seconds);
  for (const BatchItem& item : batch.items()) {
    if (item.request->what.kind != Kind::join) continue;
    joined_residuals_.clear();
    withdrawn_.clear();
    if (group_->id() == 0 && !item.rows.empty() && !item.rows[0].empty())
      item.request->last_joined = int(item.rows[0][0]);
  }
}

bool GroupEngine::step() {
  progress_lock_.assert_held();
  bool moved = step_fast_path();
  queue_.watch();
  moved |= step_control_plane();
  answer_queries();
  if (is_coordinator()) moved |= coordinate();
  moved |= run_batches();
  // What the next batch needs is often there already.
  if (is_coordinator() && !queue_.has_unbegun()) moved |= coordinate();
  if (control_plane_.cut_off() && !moved && queue_.size() == 0 && !pending_.empty())
    fail_all(Code::shut_down, left_.first());
  return moved;
}

void GroupEngine::rank_left(int rank, const std::string& why) {
  progress_lock_.assert_held();
  if (const int member = group_->index_of(rank); member >= 0) member_left(member, why, ControlPlane::kSeen);
}

// From now on it is no fault that this rank is not there any more.
void GroupEngine::receive(const Departure& departure) {
  const int rank = group_->rank(departure.member);
  if (!peers_.is_local(rank)) {
    effects_.push(effect::RankLeft{rank, departure.why});
    peers_.mark_left(rank);
  }
  member_left(departure.member, departure.why, departure.from);
}

void GroupEngine::member_left(int member, const std::string& why, int from) {
  if (!left_.add(member, why)) return;
  if (fast_path_) fast_path_->member_left(member);
  if (member != 0) send_all_up(plans_.leave_all());  // before the coordinator, which may sleep, is rung
  while (auto event = control_plane_.receive_from_below()) receive(*event);  // what it announced before
  control_plane_.member_left(member, why, from);
  if (is_coordinator()) coordinator_->member_left(member, why);
}

void GroupEngine::fail_all(Code code, const std::string& text) {
  progress_lock_.assert_held();
  plans_.clear();
  if (fast_path_) fast_path_->drop();
  if (const RequestPtr request = std::move(fast_path_request_)) fail(request, code, text);
  queue_.fail_all(code, text);
  for (auto& [key, request] : std::exchange(pending_, {})) fail(request, code, text);
}

void GroupEngine::end_nccl(uint64_t deadline_ns) {
  progress_lock_.assert_held();
  queue_.end_nccl(deadline_ns);
}

bool GroupEngine::announced(Kind kind, bool automatic, const std::string& key) const {
  progress_lock_.assert_held();
  if (fast_path_request_ && fast_path_request_->what.kind == kind && fast_path_request_->automatic == automatic)
    return automatic || fast_path_request_->key == key;
  if (!automatic) return pending_.count(key) > 0;
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](auto& one) { return one.second->automatic && one.second->what.kind == kind; });
}

bool GroupEngine::flush() {
  progress_lock_.assert_held();
  return control_plane_.flush();
}

// ---- names that two threads of a rank use at the same time (control/coordinator_names.cc)

void GroupEngine::contended(const std::string& key) {
  progress_lock_.assert_held();
  // From now on, for the fast path; the coordinator's words follow.
  if (withdrawn_.emplace(key, why_withdrawn(group_->rank(group_->index()))).second)
    send_up(Contended{key, group_->index()});
}

void GroupEngine::receive(const NameWithdrawn& withdrawn) {
  withdrawn_[withdrawn.key] = withdrawn.text;
  receive(Failure{withdrawn.key, Code::mismatch, withdrawn.text});
  send_up(NameGivenUp{withdrawn.key, group_->index()});
}

// ---- the fast path: which calls may take it, and what this rank does while others wait on it

FastPath* GroupEngine::idle_fast_path() {
  progress_lock_.assert_held();
  return fast_path_ && idle() && !left_.any() && fast_path_->ready() ? fast_path_.get() : nullptr;
}

// Between hosts a small call has the bits that it has by negotiation, as only a factor before the sum is rounded in
// other places. Of ways that are forced or tuned each call is to be one.
bool GroupEngine::can_take_fast_path(const Collective& c) const {
  if (!remote_fast_path_) return selector().choose(c).backend == backends_.shared();
  return c.pre == 1.0 && !is_adasum(c) && config_.select.empty() && !config_.autotune;
}

bool GroupEngine::receive_slots() {
  progress_lock_.assert_held();
  return remote_fast_path_ && (peers_.step() | step_control_plane());
}

void GroupEngine::receive(ReceivedSlot& slot) {
  if (!remote_fast_path_)
    throw Error(Code::internal, "rank " + std::to_string(group_->rank(slot.member)) +
                                    " sent a call to a group that has no fast path between hosts");
  remote_fast_path_->receive(std::move(slot.bytes));
}

bool GroupEngine::step_fast_path() {
  if (!fast_path_) return false;
  if (!fast_path_->active()) {
    const bool idle_remote = remote_fast_path_ && queue_.size() == 0;
    return fast_path_->refuse_if_awaited(!pending_.empty() ? 0 : idle_remote ? kIdlePatienceNs : kBusyPatienceNs);
  }
  bool moved = false;
  FastPath::State state = fast_path_->step(&moved);
  if (fast_path_->active()) return moved;
  RequestPtr request = std::move(fast_path_request_);
  if (state != FastPath::State::done) return submit(request), true;
  counters_.count(Counters::fast_path);
  finish(request, Code::ok);
  return true;
}

// ---- requests that take too long

void GroupEngine::inspect(uint64_t now) {
  progress_lock_.assert_held();
  if (fast_path_request_) inspect_request(*fast_path_request_, true, now);
  for (auto& [key, request] : pending_) inspect_request(*request, false, now);
  if (queue_.size() > 0)
    for (const BatchItem& item : queue_.oldest()) inspect_request(*item.request, true, now);
}

// A rank in join() waits for as long as the others have work: it is no stall while that goes on.
uint64_t GroupEngine::waits_since(const Request& request) const {
  return request.what.kind == Kind::join ? std::max(request.submitted_ns, queue_.ended_ns()) : request.submitted_ns;
}

void GroupEngine::inspect_request(Request& request, bool running, uint64_t now) {
  if (request.what.kind == Kind::join && group_->id() != 0) return;  // the world's speaks for all
  const uint64_t since = waits_since(request);
  if (!stalls_.is_due(request, since, now)) return;
  if (running) return stalls_.report(request, since, silent_members(now), {}, "", now);
  if (is_coordinator()) {
    const std::vector<int> missing = coordinator_->missing(request.key);
    return stalls_.report(request, since, missing, coordinator_->joined(),
                          stalls_.note(*coordinator_, request.key, missing), now);
  }
  if (request.asked_ns <= request.warned_ns) {  // not asked since the last warning
    request.asked_ns = now;
    send_up(Query{request.key, group_->index()});
  } else if (now - request.asked_ns > kSilenceNs) {
    stalls_.report(request, since, {control_plane_.silent_since(request.asked_ns)}, {}, "", now);
  }
}

// Who holds up the batch that runs. Whom this rank waits for may itself wait for another, but a rank that does not
// even look around is stopped.
std::vector<int> GroupEngine::silent_members(uint64_t now) const {
  std::vector<int> silent;
  if (fast_path_request_) silent = fast_path_->missing();
  if (!silent.empty()) return silent;
  for (int i = 0; i < group_->size(); ++i)
    if (i != group_->index() && peers_.awake_ns_ago(group_->rank(i), now) > kDozeNs) silent.push_back(i);
  if (silent.empty()) silent.push_back(queue_.waiting_for());
  return silent;
}

bool GroupEngine::report_blocked(const std::string& key) {
  progress_lock_.assert_held();
  if (!pending_.contains(key)) return false;
  send_up(Query{key, group_->index(), true});
  return true;
}

void GroupEngine::remind() {
  progress_lock_.assert_held();
  if (!pending_.empty()) control_plane_.remind();
  if (!fast_path_request_) return;
  for (int member : fast_path_->missing()) {
    peers_.wake_urgently(group_->rank(member));
    if (remote_fast_path_) remote_fast_path_->remind();
  }
}

}  // namespace lightcc

#include "engine/group_engine.h"

#include <algorithm>

#include "base/clock.h"
#include "base/overloaded.h"
#include "collective/compressed.h"
#include "engine/validate.h"

namespace lightcc {
namespace {

std::vector<int32_t> to_int32(const std::vector<int>& members) { return {members.begin(), members.end()}; }

// Whether such a batch may run beside another. Those of a joined rank share one piece of memory; Adasum needs as much
// again while it waits; a compressed one uses the links of 2D; the other kinds are rare, and some of them end what
// others need.
bool may_overlap(const std::vector<BatchItem>& batch, int nodes) {
  const Announcement& what = batch[0].request->what;
  const auto is_compressed = [&](const TensorSpec& tensor) { return compresses(what.codec, tensor.dtype, nodes); };
  return what.kind == Kind::allreduce && what.op != ReduceOp::adasum && !batch[0].placeholder &&
         std::none_of(what.tensors.begin(), what.tensors.end(), is_compressed);
}

}  // namespace

bool GroupEngine::submit(const RequestPtr& request) {
  progress_lock_.assert_held();
  const auto refuse = [&](Code code, const std::string& why) {
    fail(request, code, why);
    return true;
  };
  if (!first_left_.empty()) return refuse(Code::shut_down, first_left_);
  if (!withdrawn_.empty())
    if (auto it = withdrawn_.find(request->key); it != withdrawn_.end())
      return refuse(Code::mismatch, it->second);
  if (fast_path_request_ && fast_path_request_->key == request->key) return false;
  if (!pending_.emplace(request->key, request).second) return false;
  tracing_.submitted(*request);
  if (request->compressor) {
    request->what.codec = request->compressor->codec_for(request->residuals);
    request->compressor->set_dense(why_dense(request->what.codec, request->what.tensors[0].dtype, nodes_));
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
  control_plane_->send_up(std::move(message));
  take_own_events();
}

void GroupEngine::send_down(const DownMessage& message) {
  progress_lock_.assert_held();
  control_plane_->send_down(message);
  take_own_events();
}

// What the coordinator tells itself it knows at once.
void GroupEngine::take_own_events() {
  while (auto event = control_plane_->take_event()) receive(*event);
}

bool GroupEngine::step_control_plane() {
  progress_lock_.assert_held();
  bool moved = false;
  while (auto event = control_plane_->step(&moved)) receive(*event);
  return moved;
}

void GroupEngine::receive(ControlEvent& event) {
  std::visit([&](auto& one) { receive(one); }, event);
}

void GroupEngine::leave_awaited_plans() {
  progress_lock_.assert_held();
  if (!plans_.holds()) return;
  for (auto& [key, request] : pending_)
    if (request->planned.load(std::memory_order_relaxed) && request->awaited.load()) send_all_up(plans_.leave_with(key));
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
                          if (query.blocked) report_deadlock(coordinator_->blocked(query.member, query.key));
                          queries_.push_back(query);  // answered when all that came is taken in
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
                          effects_.push(turn);
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
      auto it = pending_.find(response.key);
      if (it == pending_.end())
        throw Error(Code::internal, "told to run " + response.key + ", which was not announced here");
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
    auto it = pending_.find(key);
    if (it == pending_.end()) throw Error(Code::internal, "told to run " + key + ", which was not announced here");
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
  if (group_->id() == 0 && takes_turn(items)) launches_.add_turn(0);
  tracing_.agreed(items, batches_in_flight() > 0);
  batches_.push_back(std::move(items));
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
    report_stall(*it->second, {missing.members.begin(), missing.members.end()},
                 {missing.joined.begin(), missing.joined.end()}, missing.note, now_ns());
}

bool GroupEngine::coordinate() {
  if (!coordinator_->anything_ready()) return false;
  const bool gathers =
      gathers_for_next_batch(batches_in_flight(), batches_at_a_time(), coordinator_->ready_bytes());
  if (gathers && !coordinator_->anything_urgent()) return false;
  if (const auto tuned = tuning_ ? tuning_->message() : std::nullopt) send_down(*tuned);
  for (const DownMessage& message : coordinator_->take_messages()) send_down(message);
  return true;
}

bool GroupEngine::begin_batch() {
  if (batches_.empty() || running_.size() == batches_at_a_time()) return false;
  const bool has_turn = takes_turn(batches_[0]), settles = settles_nccl(batches_[0]);
  const bool is_alone = settles || runs_on_gpu(batches_[0], selector_);
  if (is_alone && is_gpu_full()) return false;
  const bool may_begin = running_.empty() || (!is_alone && !running_.back()->by_nccl() &&
                                              may_overlap(running_.back()->items(), nodes_) &&
                                              may_overlap(batches_[0], nodes_));
  if (!may_begin) return false;
  if (has_turn && !launches_.is_next(group_->id())) {
    if (!launches_.has_turn(group_->id())) effects_.push(effect::AwaitTurn{group_});
    return false;
  }
  if (settles) return settle_nccl(*batches_[0][0].request);
  const RequestPtr& front = batches_[0][0].request;
  if (changes_groups(front->what.kind) && front->changed_group < 0) {
    effects_.push(effect::ChangeGroups{front});
    return true;
  }
  if (batches_[0][0].placeholder && !joined_rank_.prepare(batches_[0])) return true;
  static_assert(kBatchesBetweenHosts == 2);
  buffer_ = running_.empty() ? 0 : 1 - buffer_;
  // It may throw: then the batch is still here, to fail.
  running_.push_back(std::make_unique<BatchExecution>(batches_[0], *group_, buffers_[buffer_], outputs_, counters_,
                                                      tracing_, selector_, ways_of(batches_[0])));
  batches_.pop_front();
  if (has_turn && !running_.back()->by_nccl()) launches_.end_turn(group_->id());
  return true;
}

bool GroupEngine::run_batches() {
  if (fast_path_ && fast_path_->active()) return false;  // it began first on all ranks
  bool moved = begin_batch(), may_start = true;
  for (auto& execution : running_) {
    moved |= execution->step(may_start);
    may_start = may_start && execution->all_started();
  }
  for (; !running_.empty() && running_[0]->done(); running_.pop_front()) {
    const uint64_t began_ns = std::max(running_[0]->began_ns(), batch_ended_ns_);
    batch_ended_ns_ = now_ns();
    const double seconds = double(batch_ended_ns_ - began_ns) * 1e-9;
    const bool is_measured = !running_[0]->by_nccl();  // not only queued
    if (is_coordinator() && is_measured && running_[0]->bytes() > 0 &&
        running_[0]->items()[0].request->what.kind == Kind::allreduce)
      coordinator_->note_cost(running_[0]->bytes(), seconds);
    if (tuning_ && is_measured) tuning_->note(*running_[0], seconds);
    for (const BatchItem& item : running_[0]->items()) {
      if (item.request->what.kind == Kind::join) all_joined(item);
      if (!item.placeholder) hand_back(item.request, Code::ok);
    }
    if (running_[0]->by_nccl()) launches_.end_turn(group_->id());
    moved = true;
  }
  return moved;
}

void GroupEngine::all_joined(const BatchItem& item) {
  joined_rank_.clear();
  joined_residuals_.clear();
  withdrawn_.clear();
  if (group_->id() == 0 && !item.rows.empty() && !item.rows[0].empty())
    item.request->last_joined = int(item.rows[0][0]);
}

bool GroupEngine::step() {
  progress_lock_.assert_held();
  bool moved = step_fast_path();
  if (gpu_is_busy_) watch_gpu();
  if (pinned_->is_over()) pinned_->trim();
  moved |= step_control_plane();
  for (const auto& [key, member, blocked] : std::exchange(queries_, {})) {
    const std::vector<int> missing = coordinator_->missing(key);
    send_down(Missing{key, to_int32(missing), to_int32(coordinator_->joined()), member,
                      blocked ? "" : note(key, missing), blocked});
  }
  if (is_coordinator()) moved |= coordinate();
  moved |= run_batches();
  // What the next batch needs is often there already.
  if (is_coordinator() && batches_.empty()) moved |= coordinate();
  if (control_plane_->cut_off() && !moved && batches_in_flight() == 0 && !pending_.empty())
    fail_all(Code::shut_down, first_left_);
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
  if (std::exchange(left_[size_t(member)], 1)) return;
  if (fast_path_) fast_path_->member_left(member);
  if (first_left_.empty()) first_left_ = why;
  if (member != 0) send_all_up(plans_.leave_all());  // before the coordinator, which may sleep, is rung
  while (auto event = control_plane_->receive_from_below()) receive(*event);  // what it announced before
  control_plane_->member_left(member, why, from);
  if (is_coordinator()) coordinator_->member_left(member, why);
}

void GroupEngine::fail_all(Code code, const std::string& text) {
  progress_lock_.assert_held();
  std::vector<BatchItem> agreed;
  const auto take = [&](const auto& items) { agreed.insert(agreed.end(), items.begin(), items.end()); };
  for (const auto& execution : running_) take(execution->items());
  for (const auto& batch : batches_) take(batch);
  running_.clear();
  batches_.clear();
  plans_.clear();
  if (fast_path_) fast_path_->drop();
  if (RequestPtr request = std::move(fast_path_request_)) fail(request, code, text);
  auto pending = std::exchange(pending_, {});
  for (const BatchItem& item : agreed)
    if (!item.placeholder) hand_back(item.request, code, item.request->title() + ": " + text);
  for (auto& [key, request] : pending) fail(request, code, text);
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
  return control_plane_->flush();
}

}  // namespace lightcc

#include "engine/negotiate/negotiator.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/overloaded.h"
#include "collective/compressed.h"
#include "engine/request/validate.h"

namespace lightcc {

Negotiator::Negotiator(const GroupResources& shared, const Group& group, const GroupBackends& backends,
                       BatchQueue& queue, GroupFastPath& fast_path, const StallReporter& stalls, CacheFile tuned)
    : shared_(shared),
      group_(group),
      nodes_(int(backends.nodes().size())),
      queue_(queue),
      fast_path_(fast_path),
      stalls_(stalls),
      control_plane_(shared.peers, group),
      plans_(group.index(), response_cache_),
      left_(group.size()) {
  if (group.index() == 0)
    coordination_ = std::make_unique<Coordination>(shared, group, backends, stalls, std::move(tuned));
}

// ---- requests

bool Negotiator::submit(const RequestPtr& request) {
  if (left_.any()) return fail(request, Code::shut_down, left_.first()), true;
  if (!withdrawn_.empty())
    if (auto it = withdrawn_.find(request->key); it != withdrawn_.end())
      return fail(request, Code::mismatch, it->second), true;
  if (fast_path_.request() && fast_path_.request()->key == request->key) return false;
  if (!pending_.emplace(request->key, request).second) return false;
  shared_.tracing.submitted(*request);
  if (request->compressor) choose_codec(*request);
  if (request->what.kind == Kind::join) send_all_up(plans_.leave_all());  // what was submitted before goes first
  MemberPlans::Messages messages =
      plans_.submit(request->key, request->what, request->set, request->submitted_ns, &request->slot);
  const bool planned = request->slot.plan != 0;
  // What a plan has taken in stays as it was when the plan was made.
  if (coordination_ && request->what.kind == Kind::allreduce && !planned) note_own(*request);
  const bool by_itself = !messages.empty() && std::holds_alternative<Announce>(messages.back());
  shared_.counters.add(by_itself ? Counters::announced : planned ? Counters::planned : Counters::cached);
  send_all_up(std::move(messages));
  if (!planned) return true;
  request->planned.store(true);
  if (request->awaited.load()) send_all_up(plans_.leave_with(request->key));
  return true;
}

// It changes while the compressor warms up, and with it what is announced.
void Negotiator::choose_codec(Request& request) {
  request.what.codec = request.compressor->codec_for(request.residuals);
  request.compressor->set_dense(why_dense(request.what.codec, request.what.tensors[0].dtype, nodes_));
  request.slot = {};
}

void Negotiator::note_own(const Request& request) {
  const TensorSpec& tensor = request.what.tensors[0];
  const size_t bytes = size_t(count_of(tensor.shape)) * size_of(tensor.dtype);
  const bool in_place = request.inputs[0] == request.outputs[0];
  const bool shared = in_place && shared_.peers.arena()->offset_of(request.inputs[0], bytes) >= 0;
  coordinator()->set_own(request.key, shared ? reinterpret_cast<uintptr_t>(request.inputs[0]) : 0, request.set);
}

void Negotiator::fail(const RequestPtr& request, Code code, const std::string& why) {
  shared_.effects.push(effect::Finish{request, code, request->title() + ": " + why});
}

void Negotiator::fail_pending(Code code, const std::string& text) {
  plans_.clear();
  for (auto& [key, request] : std::exchange(pending_, {})) fail(request, code, text);
}

void Negotiator::leave_awaited_plans() {
  if (!plans_.holds()) return;
  for (auto& [key, request] : pending_)
    if (request->planned.load(std::memory_order_relaxed) && request->awaited.load())
      send_all_up(plans_.leave_with(key));
}

void Negotiator::leave_stuck_plans(uint64_t now_ns) {
  if (plans_.holds()) send_all_up(plans_.leave_stuck(now_ns));
}

// ---- messages

void Negotiator::send_all_up(MemberPlans::Messages messages) {
  for (UpMessage& message : messages) send_up(std::move(message));
}

void Negotiator::send_up(UpMessage message) {
  control_plane_.send_up(std::move(message));
  take_own_events();
}

void Negotiator::send_down(DownMessage message) {
  control_plane_.send_down(std::move(message));
  take_own_events();
}

void Negotiator::take_own_events() {
  while (auto event = control_plane_.take_event()) receive(*event);
}

bool Negotiator::take_messages() {
  bool moved = false;
  while (auto event = control_plane_.step(&moved)) receive(*event);
  return moved;
}

void Negotiator::answer_queries() {
  if (!coordination_) return;
  for (DownMessage& answer : coordination_->take_answers()) send_down(std::move(answer));
}

bool Negotiator::coordinate() {
  if (!coordination_) return false;
  std::vector<DownMessage> messages = coordination_->decide(queue_.size(), queue_.most_running());
  for (DownMessage& message : messages) send_down(std::move(message));
  return !messages.empty();
}

void Negotiator::receive(ControlEvent& event) {
  std::visit([&](auto& one) { receive(one); }, event);
}

void Negotiator::receive(MemberMessage& message) {
  if (auto answer = coordination_->receive(message)) send_down(std::move(*answer));
}

void Negotiator::receive(DownMessage& message) {
  std::visit(Overloaded{[&](Batch& batch) { receive(batch); }, [&](const BucketBatch& batch) { receive(batch); },
                        [&](const Plan& plan) {
                          plans_.begin(plan);
                          if (shared_.tracing.running()) shared_.tracing.planned(plan.plan, plans_.text());
                        },
                        [&](const PlanEnded& ended) { send_all_up(plans_.end(ended)); },
                        [&](const Tuned& tuned) { autotune_choices_ = tuned.second; },
                        [&](const Failure& failure) { receive(failure); },
                        [&](const Missing& missing) { receive(missing); },
                        [&](const NameWithdrawn& withdrawn) { receive(withdrawn); },
                        [&](const DeadlockProbe& probe) {
                          check_is_world(group_, 0);
                          shared_.effects.push(probe);
                        },
                        [&](const LaunchTurn& turn) {
                          check_is_world(group_, 0);
                          queue_.add_turn(turn);
                        }},
             message);
}

bool Negotiator::is_among(const std::vector<int32_t>& members) const {
  return std::find(members.begin(), members.end(), group_.index()) != members.end();
}

RequestPtr Negotiator::take_pending(const std::string& key, const Response* response) {
  const auto it = pending_.find(key);
  if (it == pending_.end()) throw Error(Code::internal, "told to run " + key + ", which was not announced here");
  if (response) validate_rows(*response, it->second->what, group_.index(), group_.size(), false);
  RequestPtr request = std::move(it->second);
  pending_.erase(it);
  joined_residuals_.remember(*request);
  return request;
}

void Negotiator::receive(Batch& batch) {
  if (batch.responses.empty()) throw Error(Code::internal, "told to run nothing");
  std::vector<BatchItem> items;
  for (Response& one : batch.responses) {
    std::optional<std::string> again;
    const Response& response = response_cache_.apply(std::move(one), &again);
    if (is_among(response.absent)) {
      validate_rows(response, response.what, group_.index(), group_.size(), true);
      items.push_back(JoinedRank::placeholder(response));
      joined_residuals_.give(*items.back().request);
    } else {
      items.push_back({take_pending(response.key, &response), response.rows, int(response.absent.size())});
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

void Negotiator::receive(const BucketBatch& batch) {
  std::vector<BatchItem> items;
  for (const std::string& key : plans_.run(batch)) items.push_back({take_pending(key, nullptr), {}});
  agree(std::move(items));
}

void Negotiator::agree(std::vector<BatchItem> items) {
  for (BatchItem& item : items) {
    item.second = autotune_choices_;
    if (item.request->what.kind == Kind::barrier) withdrawn_.clear();  // what came before is over on all ranks
  }
  queue_.add(std::move(items));
}

void Negotiator::note_done(const BatchQueue::DoneBatch& done) {
  if (coordination_) coordination_->note_done(done);
  for (const BatchItem& item : done.batch->items()) {
    if (item.request->what.kind != Kind::join) continue;
    joined_residuals_.clear();
    withdrawn_.clear();
    if (group_.id() == 0 && !item.rows.empty() && !item.rows[0].empty())
      item.request->last_joined = int(item.rows[0][0]);
  }
}

void Negotiator::receive(const Failure& failure) {
  if (!failure.only.empty() && !is_among(failure.only)) return;
  response_cache_.forget(failure.key);
  if (is_among(failure.absent)) return shared_.effects.push(effect::SkipName{group_.id(), failure.key});
  auto it = pending_.find(failure.key);
  if (it == pending_.end()) return shared_.tracing.refused(group_.id(), failure.key, failure.code, failure.text);
  RequestPtr request = std::move(it->second);
  pending_.erase(it);
  fail(request, failure.code, failure.text);
}

void Negotiator::receive(const Missing& missing) {
  for (auto* members : {&missing.members, &missing.joined})
    for (int32_t member : *members)
      if (!group_.has_member(member))
        throw Error(Code::internal, "the coordinator waits for a member that is not in its group");
  if (missing.blocked) {
    std::vector<int32_t> ranks;
    for (int32_t member : missing.members) ranks.push_back(group_.rank(member));
    return shared_.effects.push(effect::WaitsFor{group_.id(), missing.key, std::move(ranks)});
  }
  if (auto it = pending_.find(missing.key); it != pending_.end())
    stalls_.report(*it->second, queue_.waits_since(*it->second), {missing.members.begin(), missing.members.end()},
                   {missing.joined.begin(), missing.joined.end()}, missing.note, now_ns());
}

// ---- members that leave

// From now on it is no fault that this rank is not there any more.
void Negotiator::receive(const Departure& departure) {
  const int rank = group_.rank(departure.member);
  if (!shared_.peers.is_local(rank)) {
    shared_.effects.push(effect::RankLeft{rank, departure.why});
    shared_.peers.mark_left(rank);
  }
  member_left(departure.member, departure.why, departure.from);
}

void Negotiator::member_left(int member, const std::string& why, int from) {
  if (!left_.add(member, why)) return;
  fast_path_.member_left(member);
  if (member != 0) send_all_up(plans_.leave_all());  // before the coordinator, which may sleep, is rung
  while (auto event = control_plane_.receive_from_below()) receive(*event);  // what it announced before
  control_plane_.member_left(member, why, from);
  if (coordination_) coordinator()->member_left(member, why);
}

// ---- names that two threads of a rank use at the same time (control/coordinator_names.cc)

void Negotiator::contended(const std::string& key) {
  // From now on, for the fast path; the coordinator's words follow.
  if (withdrawn_.emplace(key, why_withdrawn(group_.rank(group_.index()))).second)
    send_up(Contended{key, group_.index()});
}

void Negotiator::refused(const Inbox::Refusal& refusal) {
  if (refusal.contended) return contended(refusal.key);
  send_up(Refused{refusal.key, refusal.why, group_.index()});
}

void Negotiator::receive(const NameWithdrawn& withdrawn) {
  withdrawn_[withdrawn.key] = withdrawn.text;
  receive(Failure{withdrawn.key, Code::mismatch, withdrawn.text});
  send_up(NameGivenUp{withdrawn.key, group_.index()});
}

}  // namespace lightcc

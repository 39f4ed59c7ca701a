#include "engine/negotiate/group_engine.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr uint64_t kDozeNs = 300'000'000;     // a rank with work in flight looks around three times as often
constexpr uint64_t kSilenceNs = 400'000'000;  // a coordinator that takes longer to answer is itself missing

}  // namespace

GroupEngine::GroupEngine(const GroupResources& shared, std::shared_ptr<const Group> group, CacheFile tuned)
    : shared_(shared),
      group_(std::move(group)),
      stalls_(shared, *group_),
      backends_(shared.peers, *group_, shared.config),
      queue_(shared, group_, backends_),
      fast_path_(shared.peers, *group_, shared.config, backends_,
                 [this](std::string bytes) { control_plane().send_slot(std::move(bytes)); }),
      negotiator_(shared, *group_, backends_, queue_, fast_path_, stalls_, std::move(tuned)),
      point_to_point_(shared.peers, *group_, shared.effects, shared.tracing) {}

void GroupEngine::use_rules(std::span<const Rule> allreduces, PlanCosts costs) {
  shared_.progress_lock.assert_held();
  backends_.use_rules(allreduces);
  if (Coordination* coordination = negotiator_.coordination()) coordination->use_costs(costs);
}

// ---- its work

bool GroupEngine::submit(const RequestPtr& request) {
  Negotiator& own = negotiator();  // who comes without the progress lock ends here
  if (!is_point_to_point(request->what.kind)) return own.submit(request);
  const int member = request->what.root;
  if (const std::string& why = negotiator_.left().why(member); !why.empty())
    point_to_point_.member_left(member, why, now_ns());
  point_to_point_.submit(request);
  return true;
}

bool GroupEngine::step() {
  shared_.progress_lock.assert_held();
  bool moved = step_fast_path();
  queue_.watch();
  moved |= negotiator_.take_messages();
  negotiator_.answer_queries();
  moved |= negotiator_.coordinate();
  moved |= run_batches();
  // What the next batch needs is often there already.
  if (!queue_.has_unbegun()) moved |= negotiator_.coordinate();
  if (point_to_point_.active()) moved |= step_point_to_point();
  if (control_plane().cut_off() && !moved && queue_.size() == 0 && !negotiator_.pending().empty())
    fail_agreed(Code::shut_down, negotiator_.left().first());
  return moved;
}

bool GroupEngine::step_point_to_point() {
  if (const LeftMembers& left = negotiator_.left(); left.any())
    for (int member = 0; member < left.members(); ++member)
      if (!left.why(member).empty()) point_to_point_.member_left(member, left.why(member), now_ns());
  return point_to_point_.step();
}

bool GroupEngine::run_batches() {
  if (fast_path_.is_active()) return false;  // it began first on all ranks
  bool moved = queue_.step();
  while (const auto done = queue_.take_done()) {
    negotiator_.note_done(*done);
    moved = true;
  }
  return moved;
}

// ---- the fast path

void GroupEngine::note_facts(FastPathFacts* facts) const {
  shared_.progress_lock.assert_held();
  fast_path_.note_facts(facts);
  facts->is_idle = facts->is_idle && idle() && !negotiator_.left().any();
}

bool GroupEngine::receive_slots() {
  shared_.progress_lock.assert_held();
  return fast_path_.is_between_hosts() && (shared_.peers.step() | negotiator_.take_messages());
}

bool GroupEngine::step_fast_path() {
  GroupFastPath::Ended ended{};
  const bool moved = fast_path_.step(!negotiator_.pending().empty(), queue_.size() > 0, &ended);
  if (!ended.request) return moved;
  if (!ended.is_done) return negotiator_.submit(ended.request), true;
  shared_.counters.count(Counters::fast_path);
  shared_.effects.push(effect::Finish{ended.request, Code::ok, {}});
  return true;
}

// ---- ends

void GroupEngine::leave(const std::string& why) {
  shared_.progress_lock.assert_held();
  control_plane().leave(why);
  point_to_point_.leave();
}

void GroupEngine::rank_left(int rank, const std::string& why) {
  shared_.progress_lock.assert_held();
  if (const int member = group_->index_of(rank); member >= 0)
    negotiator_.member_left(member, why, ControlPlane::kSeen);
}

void GroupEngine::fail_all(Code code, const std::string& text) {
  shared_.progress_lock.assert_held();
  fail_agreed(code, text);
  point_to_point_.fail_all(code, text);
}

void GroupEngine::fail_agreed(Code code, const std::string& text) {
  if (const RequestPtr request = fast_path_.drop())
    shared_.effects.push(effect::Finish{request, code, request->title() + ": " + text});
  queue_.fail_all(code, text);
  negotiator_.fail_pending(code, text);
}

void GroupEngine::end_nccl(uint64_t deadline_ns) {
  shared_.progress_lock.assert_held();
  queue_.end_nccl(deadline_ns);
}

// ---- requests that take too long

bool GroupEngine::announced(Kind kind, bool automatic, const std::string& key) const {
  shared_.progress_lock.assert_held();
  if (const RequestPtr& request = fast_path_.request();
      request && request->what.kind == kind && request->automatic == automatic)
    return automatic || request->key == key;
  const Negotiator::Pending& pending = negotiator_.pending();
  if (!automatic) return pending.count(key) > 0;
  return std::any_of(pending.begin(), pending.end(),
                     [&](auto& one) { return one.second->automatic && one.second->what.kind == kind; });
}

void GroupEngine::inspect(uint64_t now_ns) {
  shared_.progress_lock.assert_held();
  if (fast_path_.request()) inspect_request(*fast_path_.request(), true, now_ns);
  for (auto& [key, request] : negotiator_.pending()) inspect_request(*request, false, now_ns);
  if (queue_.size() > 0)
    for (const BatchItem& item : queue_.oldest()) inspect_request(*item.request, true, now_ns);
  point_to_point_.for_each([&](Request& request, const char* what) {
    if (stalls_.is_due(request, request.submitted_ns, now_ns)) stalls_.report_peer(request, what, now_ns);
  });
}

void GroupEngine::inspect_request(Request& request, bool running, uint64_t now_ns) {
  if (request.what.kind == Kind::join && group_->id() != 0) return;  // the world's speaks for all
  const uint64_t since = queue_.waits_since(request);
  if (!stalls_.is_due(request, since, now_ns)) return;
  if (running) return stalls_.report(request, since, silent_members(now_ns), {}, "", now_ns);
  if (const Coordinator* coordinator = negotiator_.coordinator()) {
    const std::vector<int> missing = coordinator->missing(request.key);
    return stalls_.report(request, since, missing, coordinator->joined(),
                          stalls_.note(*coordinator, request.key, missing), now_ns);
  }
  if (request.asked_ns <= request.warned_ns) {  // not asked since the last warning
    request.asked_ns = now_ns;
    negotiator_.send_up(Query{request.key, group_->index()});
  } else if (now_ns - request.asked_ns > kSilenceNs) {
    stalls_.report(request, since, {control_plane().silent_since(request.asked_ns)}, {}, "", now_ns);
  }
}

// Who holds up the batch that runs. Whom this rank waits for may itself wait for another, but a rank that does not
// even look around is stopped.
std::vector<int> GroupEngine::silent_members(uint64_t now_ns) const {
  std::vector<int> silent = fast_path_.missing();
  if (!silent.empty()) return silent;
  for (int i = 0; i < group_->size(); ++i)
    if (i != group_->index() && shared_.peers.awake_ns_ago(group_->rank(i), now_ns) > kDozeNs) silent.push_back(i);
  if (silent.empty()) silent.push_back(queue_.waiting_for());
  return silent;
}

bool GroupEngine::report_blocked(const std::string& key) {
  shared_.progress_lock.assert_held();
  if (!negotiator_.pending().contains(key)) return false;
  negotiator_.send_up(Query{key, group_->index(), true});
  return true;
}

void GroupEngine::remind() {
  shared_.progress_lock.assert_held();
  if (!negotiator_.pending().empty()) control_plane().remind();
  fast_path_.remind();
}

}  // namespace lightcc

#include "engine/negotiate/coordination.h"

#include <utility>

#include "base/clock.h"
#include "base/overloaded.h"
#include "engine/negotiate/control/hold.h"

namespace lightcc {
namespace {

std::vector<int32_t> to_int32(const std::vector<int>& members) { return {members.begin(), members.end()}; }

}  // namespace

void check_is_world(const Group& group, int from) {
  if (group.id() != 0)
    throw Error(Code::internal, "rank " + std::to_string(group.rank(from)) + " sent a message in process set " +
                                    std::to_string(group.id()) + " that belongs in the world's");
}

Coordination::Coordination(const GroupResources& shared, const Group& group, const GroupBackends& backends,
                           const StallReporter& stalls, CacheFile tuned)
    : shared_(shared),
      group_(group),
      stalls_(stalls),
      decisions_(group.ranks(), {{shared.config.fusion_bytes, shared.config.fusion}, shared.config.cache_capacity}) {
  if (shared.config.autotune && group.id() == 0 && backends.nodes().size() > 1)
    tuning_ = std::make_unique<Tuning>(shared.config, backends.selector(), group.size(), std::move(tuned));
}

void Coordination::use_costs(PlanCosts costs) {
  decisions_.expect_costs(costs);
  if (tuning_) tuning_->restart();
}

std::optional<DownMessage> Coordination::receive(MemberMessage& received) {
  const int from = received.member;
  const auto ready = [&](const std::string& key) { shared_.tracing.ready(group_.id(), key, group_.rank(from)); };
  const uint64_t now = now_ns();
  std::optional<DownMessage> answer;
  std::visit(Overloaded{[&](Announce& announce) {
                          decisions_.announce(from, announce.key, std::move(announce.what), announce.again, now);
                          ready(announce.key);
                        },
                        [&](const CachedRequest& cached) {
                          const std::string* key = decisions_.announce_cached(from, cached, now);
                          if (key) ready(*key);
                        },
                        [&](const BucketReady& bucket) {
                          for (const std::string& key : decisions_.announce_bucket(from, bucket, now)) ready(key);
                        },
                        [&](const PlanLeft& left) { decisions_.plan_left(from, left.plan); },
                        [&](const Query& query) {
                          if (query.blocked) stalls_.report_deadlock(decisions_.blocked(query.member, query.key));
                          queries_.push_back(query);
                        },
                        [&](const MembersAbsent& absence) { decisions_.members_absent(absence); },
                        [&](const Refused& refused) { decisions_.refused(from, refused.key, refused.why); },
                        [&](const Contended& contended) { decisions_.contended(from, contended.key); },
                        [&](const NameGivenUp& given_up) { decisions_.name_given_up(from, given_up.key); },
                        [&](const BlockedReport& report) {
                          check_is_world(group_, from);
                          shared_.surroundings.deadlocks.receive(report);
                        },
                        [&](const DeadlockReply& reply) {
                          check_is_world(group_, from);
                          shared_.surroundings.deadlocks.receive(reply);
                        },
                        [&](const LaunchRequest& request) {
                          check_is_world(group_, from);
                          answer = LaunchTurn{request.group, request.ranks};
                        },
                        [&](RankReport& report) {
                          check_is_world(group_, from);
                          shared_.effects.push(std::move(report));
                        }},
             received.message);
  return answer;
}

std::vector<DownMessage> Coordination::take_answers() {
  std::vector<DownMessage> answers;
  for (const auto& [key, member, blocked] : std::exchange(queries_, {})) {
    const std::vector<int> missing = decisions_.missing(key);
    answers.push_back(Missing{key, to_int32(missing), to_int32(decisions_.joined()), member,
                              blocked ? "" : stalls_.note(decisions_, key, missing), blocked});
  }
  return answers;
}

std::vector<DownMessage> Coordination::decide(size_t in_flight, size_t may_run) {
  if (!decisions_.anything_ready()) return {};
  const bool holds = hold::for_next_batch(in_flight, may_run, decisions_.ready_bytes());
  if (holds && !decisions_.anything_urgent()) return {};
  std::vector<DownMessage> messages = decisions_.take_messages();
  if (const auto tuned = tuning_ ? tuning_->message() : std::nullopt) messages.insert(messages.begin(), *tuned);
  return messages;
}

void Coordination::note_done(const BatchQueue::DoneBatch& done) {
  const BatchExecution& batch = *done.batch;
  if (batch.by_nccl()) return;  // it is only queued
  if (batch.bytes() > 0 && batch.items()[0].request->what.kind == Kind::allreduce)
    decisions_.note_cost(batch.bytes(), done.seconds);
  if (tuning_) tuning_->note(batch, done.seconds);
}

}  // namespace lightcc

// The control stream of a group on three hosts: whatever messages its members send, the aggregator and the coordinator
// take them or refuse them with an Error, and a member can apply what comes of them.
//
// The input is messages one behind the other: who hears it (0 the coordinator, else the aggregator), from which child
// (7: it says it itself), the length in two bytes, and the message. Then the coordinator decides, and all are told.
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "base/overloaded.h"
#include "engine/negotiate/control/aggregator.h"
#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/control/hold.h"
#include "engine/negotiate/control/member_plans.h"
#include "engine/negotiate/control/response_cache.h"
#include "engine/request/validate.h"

namespace {

using namespace lightcc;

class FuzzedGroup {
 public:
  void receive(int who, int child, const UpFrame& frame) {
    now_ns_ += hold::kAggregatorNs / 4;
    if (who == 0) {
      coordinate(size_t(child), frame);
    } else {
      aggregate(child == 7 ? Aggregator::kSelf : child % int(leader_.children.size()), frame);
      aggregator_.pass_expired(now_ns_);
      pass_up();
    }
    for (const DownMessage& one : coordinator_.take_messages()) send_down(one);
  }

 private:
  void aggregate(int child, const UpFrame& frame) {
    std::visit(Overloaded{[&](const MemberLeft&) { aggregator_.member_left(); },
                          [&](const auto& one) { aggregator_.receive_up(child, one, now_ns_); }},
               frame);
    if (auto* left = std::get_if<MemberLeft>(&frame)) pass_up(), member_left(*left);
  }
  void pass_up() {
    const int sender = 2;
    for (const UpFrame& one : aggregator_.take_frames())
      coordinate(size_t(root_.toward(sender)), parse_up(encode(one), sender));
  }
  void coordinate(size_t child, const UpFrame& frame) {
    const bool own = child == 7;
    child %= root_.children.size();
    std::visit(
        Overloaded{[&](const UpMessage& message) { receive_up(own ? 0 : root_.children[child], message); },
                   [&](const AggregatedRequests& requests) {
                     for_each_request(requests, own ? std::vector{0} : root_.below[child],
                                      [&](int member, const Readiness& one) {
                                        std::visit([&](auto& each) { receive_request(member, each); }, one);
                                      });
                   },
                   [&](const MemberLeft& left) { member_left(left); }},
        frame);
  }
  void receive_up(int from, const UpMessage& message) {
    std::visit(Overloaded{[&](const Announce& announce) { receive_request(from, announce); },
                          [&](const CachedRequest& cached) { receive_request(from, cached); },
                          [&](const BucketReady& bucket) { receive_request(from, bucket); },
                          [&](const PlanLeft& left) { coordinator_.plan_left(from, left.plan); },
                          [&](const MembersAbsent& absence) { coordinator_.members_absent(absence); },
                          [&](const Query& query) { answer(from, query); },
                          [&](const Refused& refused) { coordinator_.refused(from, refused.key, refused.why); },
                          [&](const Contended& contended) { coordinator_.contended(from, contended.key); },
                          [&](const NameGivenUp& given_up) { coordinator_.name_given_up(from, given_up.key); },
                          [](const BlockedReport&) {}, [](const DeadlockReply&) {},
                          [](const LaunchRequest&) {}, [](const RankReport&) {}},
               message);
  }
  void answer(int from, const Query& query) {
    send_down(Missing{query.key, {}, {}, query.member, coordinator_.refusal(from, query.key)});
    coordinator_.missing(query.key);
    coordinator_.waits_for(from);
  }
  void member_left(const MemberLeft& left) {
    if (left.member >= 0 && left.member < int(ranks_.size())) coordinator_.member_left(left.member, left.why);
  }
  void receive_request(int member, const Announce& one) {
    coordinator_.set_own(one.key, 0, int(one.key.size() % 4));  // sets
    coordinator_.announce(member, one.key, one.what, one.again, now_ns_);
  }
  void receive_request(int member, const CachedRequest& one) { coordinator_.announce_cached(member, one, now_ns_); }
  void receive_request(int member, const BucketReady& one) { coordinator_.announce_bucket(member, one, now_ns_); }

  void send_down(const DownMessage& decided) {
    const auto message = std::get<DownMessage>(parse_down(encode(decided), 0));
    aggregator_.receive_down(message);
    pass_up();
    if (auto* batch = std::get_if<Batch>(&message))
      for (const Response& one : batch->responses) {
        std::optional<std::string> again;
        const Response& response = cache_.apply(one, &again);
        if (!response.absent.empty()) validate_rows(response, response.what, response.absent[0], 6, true);
        if (again) cache_.announce(*again, {});
      }
    else if (auto* plan = std::get_if<Plan>(&message))
      plans_.begin(*plan);
    else if (auto* ended = std::get_if<PlanEnded>(&message))
      plans_.end(*ended);
    else if (auto* failure = std::get_if<Failure>(&message))
      cache_.forget(failure->key);
    else if (auto* withdrawn = std::get_if<NameWithdrawn>(&message))
      cache_.forget(withdrawn->key);
  }

  const std::vector<int> ranks_ = {0, 1, 2, 3, 4, 5};
  const Topology topology_ = Topology::by_leader({0, 0, 2, 2, 2, 5});
  const Tree root_{Group(0, ranks_, 0, topology_)}, leader_{Group(0, ranks_, 2, topology_)};
  Coordinator coordinator_{ranks_, {{1 << 20, true}, 2}};
  Aggregator aggregator_{leader_};
  ResponseCache cache_;
  MemberPlans plans_{1, cache_};
  uint64_t now_ns_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    FuzzedGroup group;
    for (size_t at = 0; at + 4 <= size;) {
      const size_t length = size_t(data[at + 2]) | size_t(data[at + 3]) << 8;
      if (length > size - at - 4) return 0;
      const std::string_view bytes(reinterpret_cast<const char*>(data) + at + 4, length);
      group.receive(data[at] % 2, data[at + 1] % 8, parse_up(bytes, 0));
      at += 4 + length;
    }
  } catch (const Error&) {
    // Refused: it ends the epoch, and nobody crashes.
  }
  return 0;
}

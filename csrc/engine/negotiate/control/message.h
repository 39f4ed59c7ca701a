// What the ranks of a group tell each other before a collective runs. Every request is announced to the
// group's coordinator (member 0); when all members have announced it, the coordinator tells everyone to run it,
// in one order for all, fused with others in a batch. A request seen before travels as a number. All of this goes up
// and down the group's tree (tree.h), on which an aggregator gathers what the members below it send (aggregator.h).
// An UpMessage is what a member says to the coordinator, a DownMessage what the coordinator says to members. A frame is
// what one link of the tree carries in that direction: a message, or what concerns the tree itself.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/types.h"

namespace lightcc {

struct TensorSpec {
  DType dtype = DType::uint8;
  Shape shape;
  bool operator==(const TensorSpec&) const = default;
};

// The name of a request that was given none: this and a number.
inline constexpr std::string_view kAutomatic = "noname.";
inline bool is_automatic(std::string_view key) {
  std::string_view name = key.substr(key.find('.') + 1);
  return name.starts_with(kAutomatic) && name.size() > kAutomatic.size() && name.size() < kAutomatic.size() + 20 &&
         name.find_first_not_of("0123456789", kAutomatic.size()) == name.npos;
}

inline const std::string kJoinKey = std::string(name_of(Kind::join)) + ".";  // of every join()

// What must agree between ranks (but for the first dimension of allgather and alltoall).
struct Announcement {
  Kind kind = Kind::barrier;
  ReduceOp op = ReduceOp::sum;
  int32_t root = 0;  // world rank
  double pre = 1, post = 1;
  Codec codec;
  std::vector<TensorSpec> tensors;
  std::vector<int64_t> splits;  // alltoall: rows to each member, tensor after tensor
  DeviceKind device = DeviceKind::cpu;  // where all of its tensors are
  bool operator==(const Announcement&) const = default;
};

int64_t bytes_of(const Announcement&);  // of all its tensors

inline constexpr uint32_t kNoId = UINT32_MAX;

// member -> coordinator. An announcement of kind join says that this member has no more data: until all members
// have joined, the others' requests run without it.
struct Announce {
  std::string key;
  Announcement what;
  bool again = false;                              // it was announced by a number that had gone to another request
  bool operator==(const Announce&) const = default;
};
struct CachedRequest {                             // "the same as last time"
  uint32_t id, generation;
  bool operator==(const CachedRequest&) const = default;
};
struct BucketReady {                               // "each request of this bucket, the same as last time"
  uint32_t plan, bucket;
  bool operator==(const BucketReady&) const = default;
};
struct PlanLeft {                                  // answers PlanEnded: this member says nothing more by that plan
  uint32_t plan;
  int32_t member = 0;
};
struct Query {                                     // "who is missing?", and who asks
  std::string key;
  int32_t member = 0;
  bool blocked = false;                            // it waits for this, for long, and announces nothing meanwhile
};
struct MembersAbsent {                             // "these members will not come: they gave it to another group"
  std::string key, text;
  std::vector<int32_t> absent;
};
struct Refused {                                   // "I did not take it, when it was submitted here, and why"
  std::string key, why;
  int32_t member = 0;
};
struct Contended {                                 // "two threads of mine had this name at the same time"
  std::string key;
  int32_t member = 0;
};
struct NameGivenUp {                               // answers NameWithdrawn: what was announced by it came before
  std::string key;
  int32_t member = 0;
};
struct BlockedReport {                             // in group 0: this rank waits for nothing but this, for long
  int32_t rank = 0;
  uint32_t state = 0;                              // of this rank: grows whenever it goes on
  int32_t group = -1;                              // -1: it has gone on
  Kind kind = Kind::barrier;
  std::string key = {};
  std::vector<int32_t> missing = {};               // ranks that have not announced it, as its group's coordinator says
  uint32_t answers = 0;                            // after so many probes about nobody, of this state
};
struct DeadlockReply {                             // answers DeadlockProbe
  int32_t rank;
  uint32_t state;
  int32_t other, group;
  bool deadlocked;                                 // yes: it belongs there and has announced nothing like it
};
struct LaunchRequest {                             // in group 0: `group` has a batch for NCCL (nccl_launches.h)
  int32_t rank = 0, group = 0;
  std::vector<int32_t> ranks = {};                 // of that group
};
struct RankReport {                                // in group 0: what this rank tells of itself, for rank 0 to show
  int32_t rank = 0;
  std::string text = {};
};

using UpMessage = std::variant<Announce, CachedRequest, BucketReady, PlanLeft, Query, MembersAbsent, Refused,
                               Contended, NameGivenUp, BlockedReport, DeadlockReply, LaunchRequest, RankReport>;
// Those of them that say that a member is ready.
using Readiness = std::variant<Announce, CachedRequest, BucketReady>;

// aggregator -> coordinator, gathered from the members below it.
struct AggregatedRequest {
  std::vector<int32_t> positions;                  // first, last, first, last ... in the sender's Tree::subtree
  Readiness request;                               // by each of them
};
struct AggregatedRequests { std::vector<AggregatedRequest> requests; };

// coordinator -> members
struct Response {                                  // one request to run
  uint32_t id = kNoId, generation = 0;             // under which to remember it
  bool fresh = false;                              // the rest follows; otherwise it is as remembered
  std::string key;
  std::vector<std::vector<int64_t>> rows;          // by tensor: first dimension by member (allgather); rows
                                                   // from member i to member j at i * size + j (alltoall);
                                                   // join: the world rank that joined last
  std::vector<int32_t> absent = {};                // members that have joined: they take part without data ...
  Announcement what = {};                          // ... in this; only if there are any
};
struct Batch { std::vector<Response> responses; };  // to run as one
// The learned fusion plan (plan.h): from now on each of these requests, given by their numbers, is held until
// all of its bucket are there, and those are announced by BucketReady. It says the same as a CachedRequest for each of
// them.
struct Plan {
  uint32_t plan;                                   // no number comes twice
  std::vector<std::vector<uint32_t>> buckets;      // each in the order in which it runs
};
struct PlanEnded { uint32_t plan; };               // each request by itself again
struct BucketBatch { uint32_t plan, bucket; };     // a bucket to run as one batch
struct Tuned { uint64_t second; };                 // all-reduces of later batches choose by these AutotuneChoices
struct Failure {
  std::string key;
  Code code;
  std::string text;
  std::vector<int32_t> only = {};                  // members that it is for; empty: all
  std::vector<int32_t> absent = {};                // members that had not announced it and will not
};
struct Missing {                                   // to the member that asked, `to`
  std::string key;
  std::vector<int32_t> members, joined = {};       // who has not announced it; who has joined and need not
  int32_t to = 0;
  std::string note = {};                           // in words: what is known of why
  bool blocked = false;                            // as in the query
};
// Nobody knows any more which calls of this name belong together: what was announced by it fails, and each member
// refuses it until the next barrier of the group, or until all have joined.
struct NameWithdrawn { std::string key, text; };
// In group 0, to one rank: another is blocked in `group` on what this one is blocked on elsewhere. Does this one belong
// to it too, and has announced nothing like it there? other = -1, about nobody: for whom does this one still wait?
struct DeadlockProbe {
  int32_t rank = 0;
  uint32_t state = 0;                              // of this rank, as it said
  int32_t other = 0, group = 0;
  std::string key = {};                            // under which the other knows it; automatic names differ
  bool confirmed = false;                          // both have said yes: no question any more
};
struct LaunchTurn {                                // answers LaunchRequest, to those ranks: that batch is the next
  int32_t group = 0;
  std::vector<int32_t> ranks = {};
};

using DownMessage =
    std::variant<Batch, Plan, PlanEnded, BucketBatch, Tuned, Failure, Missing, NameWithdrawn, DeadlockProbe,
                 LaunchTurn>;

// Between neighbours on different hosts, either way: this member has left, and all that it had to send came before.
struct MemberLeft { int32_t member; std::string why; };

// The member that the message itself says it is from (of group 0, where members are ranks): aggregators pass such
// messages on as they are.
std::optional<int> named_sender(const UpMessage&);

using UpFrame = std::variant<UpMessage, AggregatedRequests, MemberLeft>;  // to the parent
using DownFrame = std::variant<DownMessage, MemberLeft>;                  // to a child

std::string encode(const UpFrame&);
std::string encode(const DownFrame&);
// sender: its rank, for the error. Both throw Error{internal} on anything that encode does not write for this
// direction.
UpFrame parse_up(std::string_view, int sender);
DownFrame parse_down(std::string_view, int sender);

}  // namespace lightcc

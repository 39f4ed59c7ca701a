#include "engine/negotiate/control/message.h"

#include "base/overloaded.h"
#include "base/wire.h"

namespace lightcc {
namespace {

// The first byte of a frame.
enum class Tag : uint8_t {
  announce, cached_request, query, members_absent, batch, failure, missing, aggregated_requests, member_left,
  blocked_report, deadlock_probe, deadlock_reply, refused, bucket_ready, plan_left, plan, plan_ended, bucket_batch,
  tuned, launch_request, launch_turn, contended, name_given_up, name_withdrawn, rank_report
};
constexpr int kTags = int(Tag::rank_report) + 1;

Tag tag_of(const Announce&) { return Tag::announce; }
Tag tag_of(const CachedRequest&) { return Tag::cached_request; }
Tag tag_of(const Query&) { return Tag::query; }
Tag tag_of(const MembersAbsent&) { return Tag::members_absent; }
Tag tag_of(const Batch&) { return Tag::batch; }
Tag tag_of(const Failure&) { return Tag::failure; }
Tag tag_of(const Missing&) { return Tag::missing; }
Tag tag_of(const AggregatedRequests&) { return Tag::aggregated_requests; }
Tag tag_of(const MemberLeft&) { return Tag::member_left; }
Tag tag_of(const BlockedReport&) { return Tag::blocked_report; }
Tag tag_of(const DeadlockProbe&) { return Tag::deadlock_probe; }
Tag tag_of(const DeadlockReply&) { return Tag::deadlock_reply; }
Tag tag_of(const Refused&) { return Tag::refused; }
Tag tag_of(const BucketReady&) { return Tag::bucket_ready; }
Tag tag_of(const PlanLeft&) { return Tag::plan_left; }
Tag tag_of(const Plan&) { return Tag::plan; }
Tag tag_of(const PlanEnded&) { return Tag::plan_ended; }
Tag tag_of(const BucketBatch&) { return Tag::bucket_batch; }
Tag tag_of(const Tuned&) { return Tag::tuned; }
Tag tag_of(const LaunchRequest&) { return Tag::launch_request; }
Tag tag_of(const LaunchTurn&) { return Tag::launch_turn; }
Tag tag_of(const Contended&) { return Tag::contended; }
Tag tag_of(const NameGivenUp&) { return Tag::name_given_up; }
Tag tag_of(const NameWithdrawn&) { return Tag::name_withdrawn; }
Tag tag_of(const RankReport&) { return Tag::rank_report; }

// ---- encoding

void put(WireWriter& out, const Announcement& a) {
  out.put(a.kind).put(a.op).put(a.root).put(a.pre).put(a.post);
  out.put(a.codec.kind);
  if (a.codec.kind != CodecKind::none) out.put(a.codec.width).put(a.codec.ratio).put(a.codec.momentum);
  out.put(a.device).put(uint32_t(a.tensors.size()));
  for (const TensorSpec& tensor : a.tensors) out.put(tensor.dtype).put(tensor.shape);
  out.put(a.splits);
}

void put(WireWriter& out, const Response& response) {
  out.put(response.id).put(response.generation).put(uint8_t(response.fresh));
  if (!response.fresh) return;
  out.put(response.key).put(uint32_t(response.rows.size()));
  for (auto& rows : response.rows) out.put(rows);
  out.put(response.absent);
  if (!response.absent.empty()) put(out, response.what);
}

void put(WireWriter& out, const Announce& m) {
  out.put(m.key).put(uint8_t(m.again));
  put(out, m.what);
}
void put(WireWriter& out, const CachedRequest& m) { out.put(m.id).put(m.generation); }
void put(WireWriter& out, const BucketReady& m) { out.put(m.plan).put(m.bucket); }
void put(WireWriter& out, const PlanLeft& m) { out.put(m.plan).put(m.member); }
void put(WireWriter& out, const Plan& m) {
  out.put(m.plan).put(uint32_t(m.buckets.size()));
  for (auto& bucket : m.buckets) out.put(bucket);
}
void put(WireWriter& out, const PlanEnded& m) { out.put(m.plan); }
void put(WireWriter& out, const BucketBatch& m) { out.put(m.plan).put(m.bucket); }
void put(WireWriter& out, const Tuned& m) { out.put(m.second); }
void put(WireWriter& out, const LaunchRequest& m) { out.put(m.rank).put(m.group).put(m.ranks); }
void put(WireWriter& out, const RankReport& m) { out.put(m.rank).put(m.text); }
void put(WireWriter& out, const LaunchTurn& m) { out.put(m.group).put(m.ranks); }
void put(WireWriter& out, const Query& m) { out.put(m.key).put(m.member).put(uint8_t(m.blocked)); }
void put(WireWriter& out, const MembersAbsent& m) { out.put(m.key).put(m.text).put(m.absent); }
void put(WireWriter& out, const Batch& m) {
  out.put(uint32_t(m.responses.size()));
  for (const Response& response : m.responses) put(out, response);
}
void put(WireWriter& out, const Failure& m) { out.put(m.key).put(m.code).put(m.text).put(m.only).put(m.absent); }
void put(WireWriter& out, const Missing& m) {
  out.put(m.key).put(m.members).put(m.joined).put(m.to).put(m.note).put(uint8_t(m.blocked));
}
void put(WireWriter& out, const AggregatedRequests& m) {
  out.put(uint32_t(m.requests.size()));
  for (const AggregatedRequest& request : m.requests) {
    out.put(request.positions).put(uint8_t(request.request.index()));
    std::visit([&](auto& one) { put(out, one); }, request.request);
  }
}
void put(WireWriter& out, const MemberLeft& m) { out.put(m.member).put(m.why); }
void put(WireWriter& out, const BlockedReport& m) {
  out.put(m.rank).put(m.state).put(m.group).put(m.kind).put(m.key).put(m.missing).put(m.answers);
}
void put(WireWriter& out, const DeadlockProbe& m) {
  out.put(m.rank).put(m.state).put(m.other).put(m.group).put(m.key).put(uint8_t(m.confirmed));
}
void put(WireWriter& out, const DeadlockReply& m) {
  out.put(m.rank).put(m.state).put(m.other).put(m.group).put(uint8_t(m.deadlocked));
}
void put(WireWriter& out, const Refused& m) { out.put(m.key).put(m.why).put(m.member); }
void put(WireWriter& out, const Contended& m) { out.put(m.key).put(m.member); }
void put(WireWriter& out, const NameGivenUp& m) { out.put(m.key).put(m.member); }
void put(WireWriter& out, const NameWithdrawn& m) { out.put(m.key).put(m.text); }

template <class Frame, class Message>
std::string encode_frame(const Frame& frame) {
  WireWriter out;
  const auto put_one = [&](const auto& one) {
    out.put(tag_of(one));
    put(out, one);
  };
  std::visit(Overloaded{[&](const Message& message) { std::visit(put_one, message); }, put_one}, frame);
  return out.take();
}

// ---- parsing

bool flag(WireReader& in) {
  auto byte = in.get<uint8_t>();
  if (byte > 1) WireReader::fail();
  return byte != 0;
}

// Of what is negotiated.
Kind negotiated_kind(WireReader& in) {
  const auto kind = in.get_enum<Kind>(kKinds);
  if (is_point_to_point(kind)) WireReader::fail();
  return kind;
}

Announcement announcement(WireReader& in) {
  Announcement a;
  a.kind = negotiated_kind(in);
  a.op = in.get_enum<ReduceOp>(int(ReduceOp::product) + 1);
  a.root = in.get<int32_t>();
  a.pre = in.get<double>();
  a.post = in.get<double>();
  a.codec.kind = in.get_enum<CodecKind>(kCodecKinds);
  if (a.codec.kind != CodecKind::none) {
    a.codec.width = in.get_enum<DType>(kDTypes);
    a.codec.ratio = in.get<double>();
    a.codec.momentum = in.get<double>();
    if (fault_of(a.codec)) WireReader::fail();
  }
  a.device = in.get_enum<DeviceKind>(kDeviceKinds);
  a.tensors.resize(in.length(sizeof(int32_t) * 2));
  for (TensorSpec& tensor : a.tensors) {
    tensor.dtype = in.get_enum<DType>(kDTypes);
    tensor.shape = in.values<int64_t>();
    if (!is_countable(tensor.shape)) WireReader::fail();
  }
  a.splits = in.values<int64_t>();
  return a;
}

Response response(WireReader& in) {
  Response response;
  response.id = in.get<uint32_t>();
  response.generation = in.get<uint32_t>();
  response.fresh = flag(in);
  if (!response.fresh) return response;
  response.key = in.text();
  response.rows.resize(in.length(sizeof(uint32_t)));
  for (auto& rows : response.rows) rows = in.values<int64_t>();
  response.absent = in.values<int32_t>();
  if (!response.absent.empty()) response.what = announcement(in);
  return response;
}

Announce announce(WireReader& in) {
  Announce announce;
  announce.key = in.text();
  announce.again = flag(in);
  announce.what = announcement(in);
  return announce;
}

CachedRequest cached_request(WireReader& in) {
  auto id = in.get<uint32_t>();
  return {id, in.get<uint32_t>()};
}

BucketReady bucket_ready(WireReader& in) {
  const auto plan = in.get<uint32_t>();
  return {plan, in.get<uint32_t>()};
}

PlanLeft plan_left(WireReader& in) {
  const auto plan = in.get<uint32_t>();
  return {plan, in.get<int32_t>()};
}

Plan plan(WireReader& in) {
  Plan plan{in.get<uint32_t>(), {}};
  plan.buckets.resize(in.length(sizeof(uint32_t)));
  for (auto& bucket : plan.buckets) {
    bucket = in.values<uint32_t>();
    if (bucket.empty()) WireReader::fail();
  }
  if (plan.buckets.empty()) WireReader::fail();
  return plan;
}

BucketBatch bucket_batch(WireReader& in) {
  const auto plan = in.get<uint32_t>();
  return {plan, in.get<uint32_t>()};
}

AggregatedRequest aggregated_request(WireReader& in) {
  AggregatedRequest request;
  request.positions = in.values<int32_t>();
  // Ranges ascend and do not touch each other; how far they may go is the reader's to know.
  if (request.positions.empty() || request.positions.size() % 2 || request.positions[0] < 0) WireReader::fail();
  for (size_t i = 1; i < request.positions.size(); ++i) {
    const int64_t before = request.positions[i - 1], least = i % 2 ? before : before + 2;
    if (request.positions[i] < least) WireReader::fail();
  }
  switch (in.get<uint8_t>()) {  // its place in Readiness
    case 0: request.request = announce(in); break;
    case 1: request.request = cached_request(in); break;
    case 2: request.request = bucket_ready(in); break;
    default: WireReader::fail();
  }
  return request;
}

Query query(WireReader& in) {
  Query query;
  query.key = in.text();
  query.member = in.get<int32_t>();
  query.blocked = flag(in);
  return query;
}

MembersAbsent members_absent(WireReader& in) {
  MembersAbsent absence;
  absence.key = in.text();
  absence.text = in.text();
  absence.absent = in.values<int32_t>();
  return absence;
}

Batch batch(WireReader& in) {
  Batch batch;
  batch.responses.resize(in.length(9));
  for (Response& one : batch.responses) one = response(in);
  return batch;
}

Failure failure(WireReader& in) {
  Failure failure;
  failure.key = in.text();
  failure.code = in.get_enum<Code>(int(Code::internal) + 1);
  failure.text = in.text();
  failure.only = in.values<int32_t>();
  failure.absent = in.values<int32_t>();
  return failure;
}

Missing missing(WireReader& in) {
  Missing missing;
  missing.key = in.text();
  missing.members = in.values<int32_t>();
  missing.joined = in.values<int32_t>();
  missing.to = in.get<int32_t>();
  missing.note = in.text();
  missing.blocked = flag(in);
  return missing;
}

AggregatedRequests aggregated_requests(WireReader& in) {
  AggregatedRequests aggregated;
  aggregated.requests.resize(in.length(17));
  for (AggregatedRequest& one : aggregated.requests) one = aggregated_request(in);
  return aggregated;
}

MemberLeft member_left(WireReader& in) {
  const auto member = in.get<int32_t>();
  MemberLeft left{member, in.text()};
  if (left.why.empty()) WireReader::fail();  // it would mean that the member has not left
  return left;
}

BlockedReport blocked_report(WireReader& in) {
  BlockedReport report;
  report.rank = in.get<int32_t>();
  report.state = in.get<uint32_t>();
  report.group = in.get<int32_t>();
  report.kind = negotiated_kind(in);
  report.key = in.text();
  report.missing = in.values<int32_t>();
  report.answers = in.get<uint32_t>();
  return report;
}

DeadlockProbe deadlock_probe(WireReader& in) {
  DeadlockProbe probe;
  probe.rank = in.get<int32_t>();
  probe.state = in.get<uint32_t>();
  probe.other = in.get<int32_t>();
  probe.group = in.get<int32_t>();
  probe.key = in.text();
  probe.confirmed = flag(in);
  return probe;
}

DeadlockReply deadlock_reply(WireReader& in) {
  DeadlockReply reply{};
  reply.rank = in.get<int32_t>();
  reply.state = in.get<uint32_t>();
  reply.other = in.get<int32_t>();
  reply.group = in.get<int32_t>();
  reply.deadlocked = flag(in);
  return reply;
}

Refused refused(WireReader& in) {
  Refused refused;
  refused.key = in.text();
  refused.why = in.text();
  refused.member = in.get<int32_t>();
  return refused;
}

template <class Message>  // of a key and the member that sends it
Message of_name(WireReader& in) {
  Message message;
  message.key = in.text();
  message.member = in.get<int32_t>();
  return message;
}

NameWithdrawn name_withdrawn(WireReader& in) {
  NameWithdrawn withdrawn;
  withdrawn.key = in.text();
  withdrawn.text = in.text();
  return withdrawn;
}

LaunchRequest launch_request(WireReader& in) {
  LaunchRequest request;
  request.rank = in.get<int32_t>();
  request.group = in.get<int32_t>();
  request.ranks = in.values<int32_t>();
  return request;
}

RankReport rank_report(WireReader& in) {
  const auto rank = in.get<int32_t>();
  return {rank, in.text()};
}

LaunchTurn launch_turn(WireReader& in) {
  LaunchTurn turn;
  turn.group = in.get<int32_t>();
  turn.ranks = in.values<int32_t>();
  return turn;
}

Tag tag(WireReader& in) {
  const auto byte = in.get<uint8_t>();
  if (byte >= kTags) WireReader::fail();
  return Tag(byte);
}

[[noreturn]] void refuse(int sender, const char* senders) {
  throw Error(Code::internal, "rank " + std::to_string(sender) + " sent a message that only " + senders + " send");
}

UpFrame read_up(WireReader& in, int sender) {
  switch (tag(in)) {
    case Tag::announce: return announce(in);
    case Tag::cached_request: return cached_request(in);
    case Tag::bucket_ready: return bucket_ready(in);
    case Tag::plan_left: return plan_left(in);
    case Tag::query: return query(in);
    case Tag::members_absent: return members_absent(in);
    case Tag::refused: return refused(in);
    case Tag::contended: return of_name<Contended>(in);
    case Tag::name_given_up: return of_name<NameGivenUp>(in);
    case Tag::blocked_report: return blocked_report(in);
    case Tag::deadlock_reply: return deadlock_reply(in);
    case Tag::launch_request: return launch_request(in);
    case Tag::rank_report: return rank_report(in);
    case Tag::aggregated_requests: return aggregated_requests(in);
    case Tag::member_left: return member_left(in);
    default: refuse(sender, "coordinators");
  }
}

DownFrame read_down(WireReader& in, int sender) {
  switch (tag(in)) {
    case Tag::batch: return batch(in);
    case Tag::plan: return plan(in);
    case Tag::plan_ended: return PlanEnded{in.get<uint32_t>()};
    case Tag::bucket_batch: return bucket_batch(in);
    case Tag::tuned: return Tuned{in.get<uint64_t>()};
    case Tag::failure: return failure(in);
    case Tag::missing: return missing(in);
    case Tag::name_withdrawn: return name_withdrawn(in);
    case Tag::deadlock_probe: return deadlock_probe(in);
    case Tag::launch_turn: return launch_turn(in);
    case Tag::member_left: return member_left(in);
    default: refuse(sender, "members");
  }
}

}  // namespace

int64_t bytes_of(const Announcement& a) {
  int64_t bytes = 0;
  for (auto& tensor : a.tensors) bytes += count_of(tensor.shape) * int64_t(size_of(tensor.dtype));
  return bytes;
}

std::optional<int> named_sender(const UpMessage& message) {
  using Sender = std::optional<int>;
  return std::visit(Overloaded{[](const Query& query) -> Sender { return query.member; },
                               [](const Refused& refused) -> Sender { return refused.member; },
                               [](const Contended& contended) -> Sender { return contended.member; },
                               [](const NameGivenUp& given_up) -> Sender { return given_up.member; },
                               [](const BlockedReport& report) -> Sender { return report.rank; },
                               [](const DeadlockReply& reply) -> Sender { return reply.rank; },
                               [](const PlanLeft& left) -> Sender { return left.member; },
                               [](const LaunchRequest& asked) -> Sender { return asked.rank; },
                               [](const RankReport& report) -> Sender { return report.rank; },
                               [](const Announce&) -> Sender { return std::nullopt; },
                               [](const CachedRequest&) -> Sender { return std::nullopt; },
                               [](const BucketReady&) -> Sender { return std::nullopt; },
                               [](const MembersAbsent&) -> Sender { return std::nullopt; }},
                    message);
}

std::string encode(const UpFrame& frame) { return encode_frame<UpFrame, UpMessage>(frame); }
std::string encode(const DownFrame& frame) { return encode_frame<DownFrame, DownMessage>(frame); }

UpFrame parse_up(std::string_view bytes, int sender) {
  WireReader in(bytes);
  UpFrame frame = read_up(in, sender);
  if (!in.empty()) WireReader::fail();
  return frame;
}

DownFrame parse_down(std::string_view bytes, int sender) {
  WireReader in(bytes);
  DownFrame frame = read_down(in, sender);
  if (!in.empty()) WireReader::fail();
  return frame;
}

}  // namespace lightcc

#include "engine/control/message.h"

#include "base/wire.h"

namespace lightcc {
namespace {

template <class... Cases> struct Match : Cases... { using Cases::operator()...; };
template <class... Cases> Match(Cases...) -> Match<Cases...>;

void put(WireWriter& out, const Announcement& a) {
  out.put(a.kind).put(a.op).put(a.root).put(a.pre).put(a.post).put(uint32_t(a.tensors.size()));
  for (const TensorSpec& tensor : a.tensors) out.put(tensor.dtype).put(tensor.shape);
  out.put(a.splits);
}

Announcement announcement(WireReader& in) {
  Announcement a;
  a.kind = in.get_enum<Kind>(kKinds);
  a.op = in.get_enum<ReduceOp>(int(ReduceOp::product) + 1);
  a.root = in.get<int32_t>();
  a.pre = in.get<double>(), a.post = in.get<double>();
  a.tensors.resize(in.length(sizeof(int32_t) * 2));
  for (TensorSpec& tensor : a.tensors) {
    tensor.dtype = in.get_enum<DType>(kDTypes);
    tensor.shape = in.values<int64_t>();
    if (!is_countable(tensor.shape)) WireReader::fail();
  }
  a.splits = in.values<int64_t>();
  return a;
}

void put(WireWriter& out, const Response& response) {
  out.put(response.id).put(response.generation).put(uint8_t(response.fresh));
  if (!response.fresh) return;
  out.put(response.key).put(uint32_t(response.rows.size()));
  for (auto& rows : response.rows) out.put(rows);
  out.put(response.absent);
  if (!response.absent.empty()) put(out, response.what);
}

bool flag(WireReader& in) {
  auto byte = in.get<uint8_t>();
  if (byte > 1) WireReader::fail();
  return byte != 0;
}

Response response(WireReader& in) {
  Response response;
  response.id = in.get<uint32_t>(), response.generation = in.get<uint32_t>();
  response.fresh = flag(in);
  if (!response.fresh) return response;
  response.key = in.text();
  response.rows.resize(in.length(sizeof(uint32_t)));
  for (auto& rows : response.rows) rows = in.values<int64_t>();
  response.absent = in.values<int32_t>();
  if (!response.absent.empty()) response.what = announcement(in);
  return response;
}

void put(WireWriter& out, const Announce& m) { out.put(m.key).put(uint8_t(m.again)), put(out, m.what); }
void put(WireWriter& out, const CachedRequest& m) { out.put(m.id).put(m.generation); }

Announce announce(WireReader& in) {
  Announce announce;
  announce.key = in.text(), announce.again = flag(in), announce.what = announcement(in);
  return announce;
}

CachedRequest cached_request(WireReader& in) {
  auto id = in.get<uint32_t>();
  return {id, in.get<uint32_t>()};
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
  if (flag(in))
    request.request = cached_request(in);
  else
    request.request = announce(in);
  return request;
}

}  // namespace

int64_t bytes_of(const Announcement& a) {
  int64_t bytes = 0;
  for (auto& tensor : a.tensors) bytes += count_of(tensor.shape) * int64_t(size_of(tensor.dtype));
  return bytes;
}

std::string encode(const Message& message) {
  WireWriter out;
  out.put(uint8_t(message.index()));
  std::visit(Match{[&](const Announce& m) { put(out, m); },
                   [&](const CachedRequest& m) { put(out, m); },
                   [&](const Query& m) { out.put(m.key).put(m.member); },
                   [&](const MembersAbsent& m) { out.put(m.key).put(m.text).put(m.absent); },
                   [&](const Batch& m) {
                     out.put(uint32_t(m.responses.size()));
                     for (const Response& response : m.responses) put(out, response);
                   },
                   [&](const Failure& m) { out.put(m.key).put(m.code).put(m.text).put(m.only).put(m.absent); },
                   [&](const Missing& m) { out.put(m.key).put(m.members).put(m.joined).put(m.to).put(m.note); },
                   [&](const AggregatedRequests& m) {
                     out.put(uint32_t(m.requests.size()));
                     for (const AggregatedRequest& request : m.requests) {
                       out.put(request.positions).put(uint8_t(request.request.index()));
                       std::visit([&](auto& one) { put(out, one); }, request.request);
                     }
                   },
                   [&](const MemberLeft& m) { out.put(m.member).put(m.why); },
                   [&](const BlockedReport& m) { out.put(m.rank).put(m.state).put(m.group).put(m.kind).put(m.key); },
                   [&](const DeadlockProbe& m) {
                     out.put(m.rank).put(m.state).put(m.other).put(m.group).put(m.key).put(uint8_t(m.confirmed));
                   },
                   [&](const DeadlockReply& m) {
                     out.put(m.rank).put(m.state).put(m.other).put(m.group).put(uint8_t(m.deadlocked));
                   },
                   [&](const Refused& m) { out.put(m.key).put(m.why).put(m.member); }},
             message);
  return out.take();
}

Message parse(std::string_view bytes) {
  WireReader in(bytes);
  Message message;
  switch (in.get<uint8_t>()) {
    case 0: message = announce(in); break;
    case 1: message = cached_request(in); break;
    case 2: {
      Query query{in.text()};
      query.member = in.get<int32_t>();
      message = std::move(query);
      break;
    }
    case 3: {
      MembersAbsent absence;
      absence.key = in.text(), absence.text = in.text();
      absence.absent = in.values<int32_t>();
      message = std::move(absence);
      break;
    }
    case 4: {
      Batch batch;
      batch.responses.resize(in.length(9));
      for (Response& one : batch.responses) one = response(in);
      message = std::move(batch);
      break;
    }
    case 5: {
      Failure failure;
      failure.key = in.text();
      failure.code = in.get_enum<Code>(int(Code::internal) + 1);
      failure.text = in.text();
      failure.only = in.values<int32_t>(), failure.absent = in.values<int32_t>();
      message = std::move(failure);
      break;
    }
    case 6: {
      Missing missing;
      missing.key = in.text();
      missing.members = in.values<int32_t>(), missing.joined = in.values<int32_t>();
      missing.to = in.get<int32_t>(), missing.note = in.text();
      message = std::move(missing);
      break;
    }
    case 7: {
      AggregatedRequests aggregated;
      aggregated.requests.resize(in.length(17));
      for (AggregatedRequest& one : aggregated.requests) one = aggregated_request(in);
      message = std::move(aggregated);
      break;
    }
    case 8: {
      auto member = in.get<int32_t>();
      message = MemberLeft{member, in.text()};
      break;
    }
    case 9: {
      BlockedReport report;
      report.rank = in.get<int32_t>(), report.state = in.get<uint32_t>(), report.group = in.get<int32_t>();
      report.kind = in.get_enum<Kind>(kKinds), report.key = in.text();
      message = std::move(report);
      break;
    }
    case 10: {
      DeadlockProbe probe;
      probe.rank = in.get<int32_t>(), probe.state = in.get<uint32_t>(), probe.other = in.get<int32_t>();
      probe.group = in.get<int32_t>(), probe.key = in.text(), probe.confirmed = flag(in);
      message = std::move(probe);
      break;
    }
    case 11: {
      DeadlockReply reply{};
      reply.rank = in.get<int32_t>(), reply.state = in.get<uint32_t>(), reply.other = in.get<int32_t>();
      reply.group = in.get<int32_t>(), reply.deadlocked = flag(in);
      message = reply;
      break;
    }
    case 12: {
      Refused refused;
      refused.key = in.text(), refused.why = in.text(), refused.member = in.get<int32_t>();
      message = std::move(refused);
      break;
    }
    default: WireReader::fail();
  }
  if (!in.empty()) WireReader::fail();
  return message;
}

}  // namespace lightcc

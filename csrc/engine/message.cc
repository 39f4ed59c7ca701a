#include "engine/message.h"

#include "base/wire.h"

namespace lightcc {
namespace {

constexpr size_t kMaxDims = 64;
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
    if (tensor.shape.size() > kMaxDims) WireReader::fail();
    // The element count must be a number that later arithmetic on it cannot overflow.
    int64_t count = 1;
    for (int64_t d : tensor.shape)
      if (d < 0 || __builtin_mul_overflow(count, d == 0 ? 1 : d, &count) || count > INT64_MAX / 64) WireReader::fail();
  }
  a.splits = in.values<int64_t>();
  return a;
}

void put(WireWriter& out, const Item& item) {
  out.put(item.id).put(item.generation).put(uint8_t(item.fresh));
  if (!item.fresh) return;
  out.put(item.key).put(uint32_t(item.rows.size()));
  for (auto& rows : item.rows) out.put(rows);
  out.put(item.absent);
  if (!item.absent.empty()) put(out, item.what);
}

bool flag(WireReader& in) {
  auto byte = in.get<uint8_t>();
  if (byte > 1) WireReader::fail();
  return byte != 0;
}

Item item(WireReader& in) {
  Item item;
  item.id = in.get<uint32_t>(), item.generation = in.get<uint32_t>();
  item.fresh = flag(in);
  if (!item.fresh) return item;
  item.key = in.text();
  item.rows.resize(in.length(sizeof(uint32_t)));
  for (auto& rows : item.rows) rows = in.values<int64_t>();
  item.absent = in.values<int32_t>();
  if (!item.absent.empty()) item.what = announcement(in);
  return item;
}

void put(WireWriter& out, const Announce& m) { out.put(m.key).put(uint8_t(m.again)), put(out, m.what); }
void put(WireWriter& out, const Recall& m) { out.put(m.id).put(m.generation); }

Announce announce(WireReader& in) {
  Announce announce;
  announce.key = in.text(), announce.again = flag(in), announce.what = announcement(in);
  return announce;
}

Recall recall(WireReader& in) {
  auto id = in.get<uint32_t>();
  return {id, in.get<uint32_t>()};
}

Part part(WireReader& in) {
  Part part;
  part.places = in.values<int32_t>();
  // Ranges ascend and do not touch each other; how far they may go is the reader's to know.
  if (part.places.empty() || part.places.size() % 2 || part.places[0] < 0) WireReader::fail();
  for (size_t i = 1; i < part.places.size(); ++i) {
    const int64_t before = part.places[i - 1], least = i % 2 ? before : before + 2;
    if (part.places[i] < least) WireReader::fail();
  }
  if (flag(in))
    part.said = recall(in);
  else
    part.said = announce(in);
  return part;
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
                   [&](const Recall& m) { put(out, m); },
                   [&](const Query& m) { out.put(m.key).put(m.member); },
                   [&](const Contest& m) { out.put(m.key).put(m.text).put(m.absent); },
                   [&](const Batch& m) {
                     out.put(uint32_t(m.items.size()));
                     for (const Item& item : m.items) put(out, item);
                   },
                   [&](const Failure& m) { out.put(m.key).put(m.code).put(m.text).put(m.only).put(m.absent); },
                   [&](const Missing& m) { out.put(m.key).put(m.members).put(m.joined).put(m.to); },
                   [&](const Said& m) {
                     out.put(uint32_t(m.parts.size()));
                     for (const Part& part : m.parts) {
                       out.put(part.places).put(uint8_t(part.said.index()));
                       std::visit([&](auto& said) { put(out, said); }, part.said);
                     }
                   },
                   [&](const Gone& m) { out.put(m.member).put(m.why); },
                   [&](const Stuck& m) { out.put(m.rank).put(m.state).put(m.group).put(m.kind).put(m.key); },
                   [&](const Accuse& m) {
                     out.put(m.rank).put(m.state).put(m.other).put(m.group).put(m.key).put(uint8_t(m.proven));
                   },
                   [&](const Plea& m) {
                     out.put(m.rank).put(m.state).put(m.other).put(m.group).put(uint8_t(m.guilty));
                   }},
             message);
  return out.take();
}

Message parse(std::string_view bytes) {
  WireReader in(bytes);
  Message message;
  switch (in.get<uint8_t>()) {
    case 0: message = announce(in); break;
    case 1: message = recall(in); break;
    case 2: {
      Query query{in.text()};
      query.member = in.get<int32_t>();
      message = std::move(query);
      break;
    }
    case 3: {
      Contest contest;
      contest.key = in.text(), contest.text = in.text();
      contest.absent = in.values<int32_t>();
      message = std::move(contest);
      break;
    }
    case 4: {
      Batch batch;
      batch.items.resize(in.length(9));
      for (Item& one : batch.items) one = item(in);
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
      missing.to = in.get<int32_t>();
      message = std::move(missing);
      break;
    }
    case 7: {
      Said said;
      said.parts.resize(in.length(17));
      for (Part& one : said.parts) one = part(in);
      message = std::move(said);
      break;
    }
    case 8: {
      auto member = in.get<int32_t>();
      message = Gone{member, in.text()};
      break;
    }
    case 9: {
      Stuck stuck;
      stuck.rank = in.get<int32_t>(), stuck.state = in.get<uint32_t>(), stuck.group = in.get<int32_t>();
      stuck.kind = in.get_enum<Kind>(kKinds), stuck.key = in.text();
      message = std::move(stuck);
      break;
    }
    case 10: {
      Accuse accuse;
      accuse.rank = in.get<int32_t>(), accuse.state = in.get<uint32_t>(), accuse.other = in.get<int32_t>();
      accuse.group = in.get<int32_t>(), accuse.key = in.text(), accuse.proven = flag(in);
      message = std::move(accuse);
      break;
    }
    case 11: {
      Plea plea{};
      plea.rank = in.get<int32_t>(), plea.state = in.get<uint32_t>(), plea.other = in.get<int32_t>();
      plea.group = in.get<int32_t>(), plea.guilty = flag(in);
      message = plea;
      break;
    }
    default: WireReader::fail();
  }
  if (!in.empty()) WireReader::fail();
  return message;
}

}  // namespace lightcc

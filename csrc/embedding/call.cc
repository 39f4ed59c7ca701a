// How calls move: from one message to the next, the same for all kinds.
#include <algorithm>
#include <climits>
#include <utility>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

lightcc_embedding_call::~lightcc_embedding_call() {
  first.reset();
  message.reset();  // it waits until nobody reads what is outgoing
  if (outgoing) group.transport->give_back(outgoing);
  constexpr size_t kSpare = 64;
  for (size_t i = 0; op == Op::lookup && i < wanted.size() && group.spare.size() < kSpare; ++i) {
    wanted[i].clear();
    group.spare.push_back(std::move(wanted[i]));
  }
}

void Wanted::clear() {
  table = nullptr;
  checks.clear();
  found.clear();
  partition.counts.clear();
  partition.order.clear();
}

namespace lightcc::embedding {
namespace {

constexpr int kNames = 8;  // calls that may be under way at once

void give_back_outgoing(Call& call) {
  if (call.outgoing) call.group.transport->give_back(std::exchange(call.outgoing, nullptr));
}

void defer(Call& call) {
  call.deferred = true;
  call.stage = Call::Stage::second_message;
}

// Prefetched lookups may be read now: before the next update changes what they would see.
void release_deferred(Group& group) {
  for (auto& waiting : group.background) {
    if (!waiting->deferred) continue;
    waiting->deferred = false;
    answer_lookup(*waiting);
  }
}

void drive_background(Group& group) {
  for (auto it = group.background.begin(); it != group.background.end();) {
    const bool ended = !(*it)->deferred && advance(**it, 0);
    it = ended ? group.background.erase(it) : std::next(it);
  }
}

// What a rank that serves learns from the others: it goes on as they do, with no keys.
void follow(Call& call, const RankSegment& other) {
  static constexpr int kServed[] = {LIGHTCC_EMBEDDING_SERVED_END, LIGHTCC_EMBEDDING_SERVED_LOOKUP,
                                    LIGHTCC_EMBEDDING_SERVED_UPDATE, LIGHTCC_EMBEDDING_SERVED_APPLY,
                                    LIGHTCC_EMBEDDING_SERVED_LOOKUP};
  call.op = other.head.op;
  call.flags = other.head.flags & ~uint32_t(LIGHTCC_EMBEDDING_SKIP);
  call.served = kServed[size_t(other.head.op)];
  const bool trains = call.op == Op::lookup && (call.flags & LIGHTCC_EMBEDDING_TRAINING);
  if (trains) call.served = LIGHTCC_EMBEDDING_SERVED_TRAINING;
  call.head = other.head;
  for (const TablePart& part : other.tables) {
    Wanted wanted;
    wanted.table = call.group.find(part.head.id);
    if (!wanted.table)
      throw Error(Code::mismatch, "another rank uses a table '" + std::string(part.head.name) + "' that is not here");
    if (wanted.table->header().fingerprint != part.head.fingerprint)
      throw Error(Code::mismatch, wanted.table->about("it is another one on the rank that asks"));
    wanted.partition.counts.assign(size_t(call.group.size()), 0);
    call.wanted.push_back(std::move(wanted));
  }
}

void hear(Call& call) {
  for (int rank = 0; rank < call.group.size(); ++rank) call.calls.push_back(parse(call.message->from(rank), rank));
  call.first = std::move(call.message);
  give_back_outgoing(call);
  const int active = agreed(call.calls);
  if (call.op != Op::serve || active < 0) return;
  try {
    follow(call, call.calls[size_t(active)]);
  } catch (const Error& error) {  // the others wait for an answer
    call.wanted.clear();
    call.head.refuse(int(error.code()), error.what());
  }
}

// The first message has come. A prefetched lookup that is served waits in the background, and the call is done.
void go_on(Call& call, bool serves) {
  Group& group = call.group;
  switch (call.op) {
    case Op::serve: call.stage = Call::Stage::done; return;  // all serve
    case Op::read: release_deferred(group); call.stage = Call::Stage::done; return;
    case Op::apply:
      apply_held(group, call.head.scale);
      release_deferred(group);
      call.stage = Call::Stage::done;
      return;
    case Op::update: return collect_update(call);
    case Op::lookup: break;
    default: throw Error(Code::internal, "no call begins so");
  }
  if (!serves || !(call.flags & LIGHTCC_EMBEDDING_PREFETCH)) return answer_lookup(call);
  auto waiting = std::make_unique<Call>(group, call.op, call.flags);
  waiting->number = call.number;
  waiting->calls = std::move(call.calls);
  waiting->first = std::move(call.first);
  waiting->wanted = std::move(call.wanted);
  defer(*waiting);
  group.background.push_back(std::move(waiting));
  call.stage = Call::Stage::done;
}

// A prefetched lookup that no update has followed: the ranks that serve must be told to read.
bool must_announce(const Call& call) {
  return call.op == Op::lookup && (call.flags & LIGHTCC_EMBEDDING_PREFETCH) && !call.announced &&
         call.updates_before == call.group.updates;
}

bool step(Call& call, int timeout_ms) {
  if (call.group.size() == 1) {  // a prefetched lookup
    answer_lookup(call);
    return true;
  }
  if (call.stage == Call::Stage::first_message && must_announce(call)) {
    if (!call.announcement) {
      call.announcement = std::make_unique<Call>(call.group, Op::read, 0);
      begin_simple(*call.announcement);
    }
    if (!advance(*call.announcement, timeout_ms)) return false;
    if (call.announcement->error) throw Error(Code(call.announcement->error), call.announcement->error_text);
    call.announced = true;
  }
  if (!call.message->finish(timeout_ms)) return false;
  if (call.stage == Call::Stage::first_message) {
    const bool serves = call.op == Op::serve;
    hear(call);
    go_on(call, serves);
  } else {
    call.op == Op::lookup ? take_rows(call) : end_update(call);
    give_back_outgoing(call);
    call.stage = Call::Stage::done;
    if (call.op == Op::update && call.group.held.empty()) release_deferred(call.group);
  }
  return true;
}

}  // namespace

void send(Call& call, const std::string& kind, std::vector<RankSegment>& to_ranks,
          const std::function<void(int rank, std::vector<PartPlaces>&)>& fill) {
  give_back_outgoing(call);
  OutgoingSegments out;
  size_t all = 0;
  for (const RankSegment& segment : to_ranks) {
    const size_t bytes = bytes_of(segment);
    if (bytes > INT_MAX) throw Error(Code::invalid_argument, "more than 2 GiB for one rank: use smaller batches");
    out.bytes.push_back(int32_t(bytes));
    all += bytes;
  }
  out.data = call.outgoing = call.group.transport->outgoing(all);
  std::byte* at = out.data;
  std::vector<PartPlaces> places;
  for (size_t rank = 0; rank < to_ranks.size(); at += out.bytes[rank++]) {
    write_heads(to_ranks[rank], at, places);
    fill(int(rank), places);
  }
  call.message = call.group.transport->alltoall("embedding." + kind + "." + std::to_string(call.number % kNames), out);
}

void begin_simple(Call& call) {
  call.number = call.group.calls++;
  call.head.op = call.op;
  call.head.flags = call.flags;
  RankSegment segment;
  segment.head = call.head;
  std::vector<RankSegment> to_ranks(size_t(call.group.size()), segment);
  send(call, "call", to_ranks, [](int, auto&) {});
}

bool advance(Call& call, int timeout_ms) {
  try {
    while (call.stage != Call::Stage::done && call.stage != Call::Stage::failed)
      if (!step(call, timeout_ms)) return false;
  } catch (const Error& error) {
    call.error = int(error.code());
    call.error_text = error.what();
    call.stage = Call::Stage::failed;
  } catch (const std::bad_alloc&) {
    call.error = int(Code::internal);
    call.error_text = "memory does not suffice for a message of embedding tables";
    call.stage = Call::Stage::failed;
  }
  return true;
}

}  // namespace lightcc::embedding

namespace {

void begin(lightcc_embedding_group& group, Op op, uint32_t flags, lightcc_embedding_call** call,
           const std::function<void(Call&)>& start) {
  auto begun = std::make_unique<Call>(group, op, flags);
  begun->updates_before = group.updates;
  start(*begun);
  *call = begun.release();
}

}  // namespace

extern "C" {

int lightcc_embedding_lookup(lightcc_embedding_group* group, const lightcc_embedding_wanted* wanted, int count,
                             uint32_t flags, lightcc_embedding_call** call) {
  return guard([&] {
    begin(*group, Op::lookup, flags, call, [&](Call& c) { begin_lookup(c, {wanted, size_t(count)}); });
    return 0;
  });
}

int lightcc_embedding_update(lightcc_embedding_group* group, const lightcc_embedding_step* steps, int count,
                             uint32_t flags, lightcc_embedding_call** call) {
  return guard([&] {
    if (!group->held.empty()) throw Error(Code::invalid_argument, "an update is held: apply or discard it first");
    begin(*group, Op::update, flags, call, [&](Call& c) { begin_update(c, {steps, size_t(count)}); });
    return 0;
  });
}

int lightcc_embedding_serve(lightcc_embedding_group* group, lightcc_embedding_call** call) {
  return guard([&] {
    begin(*group, Op::serve, 0, call, [&](Call& c) {
      if (group->size() == 1) c.stage = Call::Stage::done;
      else begin_simple(c);
    });
    return 0;
  });
}

int lightcc_embedding_finish(lightcc_embedding_call* call, int timeout_ms) {
  return guard([&] {
    drive_background(call->group);
    if (!advance(*call, timeout_ms)) return int(LIGHTCC_PENDING);
    drive_background(call->group);
    if (call->error) throw Error(Code(call->error), call->error_text);
    return 0;
  });
}

int lightcc_embedding_release(lightcc_embedding_call* call) {
  return guard([&] {
    std::unique_ptr<Call> own(call);
    const bool ended = call->stage == Call::Stage::done || call->stage == Call::Stage::failed;
    if (!ended && call->group.size() > 1) call->group.background.push_back(std::move(own));
    return 0;
  });
}

int lightcc_embedding_get_found(lightcc_embedding_call* call, int index, lightcc_embedding_found* found) {
  return guard([&] {
    if (index < 0 || size_t(index) >= call->wanted.size())
      throw Error(Code::invalid_argument, "no such table of a lookup");
    Wanted& w = call->wanted[size_t(index)];
    found->count = int64_t(w.inverse.size());
    found->unique = int64_t(w.keys.size());
    found->padded = w.padded;
    found->keys = w.keys.data();
    found->inverse = w.inverse.data();
    found->rows = w.rows.data();
    return 0;
  });
}

int lightcc_embedding_get_sums(lightcc_embedding_call* call, double* sums, int* skipped) {
  if (sums) std::copy(call->sums.begin(), call->sums.end(), sums);
  if (skipped) *skipped = call->skipped;
  return 0;
}

int lightcc_embedding_apply(lightcc_embedding_call* call, double scale, int discard) {
  return guard([&] {
    const bool held = call->op == Op::update && call->stage == Call::Stage::done && !call->skipped;
    if (!held || !(call->flags & LIGHTCC_EMBEDDING_HOLD))
      throw Error(Code::invalid_argument, "apply: there is no held update");
    call->op = Op::apply;
    call->head = {};
    call->head.scale = discard ? -1 : scale;
    call->calls.clear();
    if (call->group.size() == 1) {
      apply_held(call->group, call->head.scale);
    } else {
      call->stage = Call::Stage::first_message;
      begin_simple(*call);
    }
    return 0;
  });
}

int lightcc_embedding_get_served(lightcc_embedding_call* call, int* served) {
  *served = call->served;
  return 0;
}
}

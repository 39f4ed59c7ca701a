// How calls move: from one message to the next, the same for all kinds.
#include <algorithm>
#include <climits>
#include <utility>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

lightcc_embedding_call::~lightcc_embedding_call() {
  std::erase(group.updates, this);
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
  counts.clear();
  call = -1;
}

namespace lightcc::embedding {
namespace {

constexpr int kNames = 8;  // calls that may be under way at once
constexpr const char* kNoMemory = "memory does not suffice for a message of embedding tables";

void give_back_outgoing(Call& call) {
  if (call.outgoing) call.group.transport->give_back(std::exchange(call.outgoing, nullptr));
}

// A prefetched lookup that is served waits in the background until the others come to read it.
void defer(Call& call) {
  auto waiting = std::make_unique<Call>(call.group, call.op, call.flags);
  waiting->number = call.number;
  waiting->calls = std::move(call.calls);
  waiting->first = std::move(call.first);
  waiting->wanted = std::move(call.wanted);
  waiting->deferred = true;
  call.group.background.push_back(std::move(waiting));
  call.stage = Call::Stage::done;
}

// What Op::read has named; it is answered as all ranks do, who may have dropped it.
void answer_deferred(const Call& read) {
  for (auto& waiting : read.group.background) {
    if (!waiting->deferred || waiting->number != read.head.lookup) continue;
    waiting->deferred = false;
    waiting->flags &= read.flags | ~uint32_t(LIGHTCC_EMBEDDING_TRAINING);
    answer_lookup(*waiting);
  }
}

// Where all ranks serve: whether none has a step to end before.
bool all_end(const Call& call) {
  return std::none_of(call.calls.begin(), call.calls.end(),
                      [](const RankSegment& s) { return s.head.flags & LIGHTCC_EMBEDDING_PREFETCH; });
}

bool is_served(const Call& call) {
  return std::any_of(call.calls.begin(), call.calls.end(), [](const RankSegment& s) { return s.head.op == Op::serve; });
}

// Before a prefetched lookup is answered: the ranks that serve hear that it is time.
void announce(Call& call) {
  if (call.released) throw Error(Code::invalid_argument, "a prefetched lookup was neither finished nor dropped");
  call.announcement = std::make_unique<Call>(call.group, Op::read, call.flags);
  call.announcement->head.lookup = call.number;
  begin_simple(*call.announcement);
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
  if (call.op == Op::update) call.group.updates.push_back(&call);
  call.served = kServed[size_t(other.head.op)];
  const bool now = call.op == Op::read || !(call.flags & LIGHTCC_EMBEDDING_PREFETCH);
  const bool trains = call.op == Op::lookup || call.op == Op::read;
  if (now && trains && call.flags & LIGHTCC_EMBEDDING_TRAINING) call.served = LIGHTCC_EMBEDDING_SERVED_TRAINING;
  call.head = other.head;
  for (const TablePart& part : other.tables) {
    Wanted wanted;
    wanted.table = call.group.find(part.head.id);
    if (!wanted.table)
      throw Error(Code::mismatch, "another rank uses a table '" + std::string(part.head.name) + "' that is not here");
    if (wanted.table->header().fingerprint != part.head.fingerprint)
      throw Error(Code::mismatch, wanted.table->about("it is another one on the rank that asks"));
    wanted.counts.assign(size_t(call.group.size()), 0);
    call.wanted.push_back(std::move(wanted));
  }
}

void hear(Call& call) {
  for (int rank = 0; rank < call.group.size(); ++rank) {
    call.calls.push_back(parse(call.message->from(rank), rank));
    if (call.calls.back().head.op > Op::read)
      throw Error(Code::internal, "a call of embedding tables began with another message on rank " +
                                      std::to_string(rank));
  }
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

// The first message has come.
void go_on(Call& call, bool serves) {
  Group& group = call.group;
  const bool later = call.op == Op::lookup && call.flags & LIGHTCC_EMBEDDING_PREFETCH;
  switch (call.op) {
    case Op::serve: call.served = all_end(call) ? LIGHTCC_EMBEDDING_SERVED_END : LIGHTCC_EMBEDDING_SERVED_LOOKUP; break;
    case Op::read: answer_deferred(call); break;
    case Op::apply: apply_held(group, call.head.scale); break;
    case Op::update: return collect_update(call);
    case Op::lookup:
      if (later && serves) return defer(call);
      return later && is_served(call) ? announce(call) : answer_lookup(call);
    default: throw Error(Code::internal, "no call begins so");
  }
  call.stage = Call::Stage::done;
}

// An update that is to end before this one; nullptr: there is none.
Call* earlier_update(Call& call) {
  const std::vector<Call*>& updates = call.group.updates;
  const bool is_update = std::ranges::find(updates, &call) != updates.end();
  return is_update && updates.front() != &call ? updates.front() : nullptr;
}

bool step(Call& call, int timeout_ms) {
  if (call.group.size() == 1) {  // a prefetched lookup
    answer_lookup(call);
    return true;
  }
  if (call.announcement) {
    if (!advance(*call.announcement, timeout_ms)) return false;
    const std::unique_ptr<Call> heard = std::move(call.announcement);
    if (heard->error) throw Error(Code(heard->error), heard->error_text);
    answer_lookup(call);
    return true;
  }
  while (const auto earlier = earlier_update(call))
    if (!advance(*earlier, timeout_ms)) return false;
  if (!call.message->finish(timeout_ms)) return false;
  if (call.stage == Call::Stage::first_message) {
    const bool serves = call.op == Op::serve;
    hear(call);
    go_on(call, serves);
  } else {
    call.op == Op::lookup ? take_rows(call) : end_update(call);
    give_back_outgoing(call);
    call.stage = Call::Stage::done;
  }
  return true;
}

// The segments for all ranks, in the call's outgoing memory.
OutgoingSegments written(Call& call, const std::vector<RankSegment>& to_ranks, const Fill& fill) {
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
  return out;
}

// In place of what cannot be sent: all ranks, this one too, hear why, as they wait for a message.
OutgoingSegments refusal(Call& call, std::vector<RankSegment>& to_ranks, Code code, const std::string& why) {
  for (RankSegment& segment : to_ranks) {
    segment.head.refuse(int(code), why);
    segment.tables.clear();
  }
  return written(call, to_ranks, [](int, auto&) {});
}

void fail(Call& call, Code code, const std::string& why) {
  call.error = int(code);
  call.error_text = why;
  call.stage = Call::Stage::failed;
  if (call.op == Op::apply) call.group.held.clear();  // all ranks fail alike: what was held is forgotten
}

}  // namespace

void send(Call& call, const std::string& kind, std::vector<RankSegment>& to_ranks, const Fill& fill) {
  OutgoingSegments out;
  try {
    out = written(call, to_ranks, fill);
  } catch (const Error& error) {
    out = refusal(call, to_ranks, error.code(), error.what());
  } catch (const std::bad_alloc&) {
    out = refusal(call, to_ranks, Code::internal, kNoMemory);
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
    fail(call, error.code(), error.what());
  } catch (const std::bad_alloc&) {
    fail(call, Code::internal, kNoMemory);
  }
  std::erase(call.group.updates, &call);
  return true;
}

}  // namespace lightcc::embedding

namespace {

void begin(lightcc_embedding_group& group, Op op, uint32_t flags, lightcc_embedding_call** call,
           const std::function<void(Call&)>& start) {
  auto begun = std::make_unique<Call>(group, op, flags);
  start(*begun);
  *call = begun.release();
  ++group.handed_out;
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
    if (!group->held.empty()) throw Error(Code::invalid_argument, kHeld);
    begin(*group, Op::update, flags, call, [&](Call& c) { begin_update(c, {steps, size_t(count)}); });
    return 0;
  });
}

int lightcc_embedding_serve(lightcc_embedding_group* group, uint32_t flags, lightcc_embedding_call** call) {
  return guard([&] {
    begin(*group, Op::serve, flags, call, [&](Call& c) {
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

int lightcc_embedding_drop(lightcc_embedding_call* call) {
  return guard([&] {
    call->flags &= ~uint32_t(LIGHTCC_EMBEDDING_TRAINING);
    return 0;
  });
}

int lightcc_embedding_release(lightcc_embedding_call* call) {
  return guard([&] {
    std::unique_ptr<Call> own(call);
    Group& group = call->group;
    const bool ended = call->stage == Call::Stage::done || call->stage == Call::Stage::failed;
    call->released = true;
    if (!ended && group.size() > 1 && !group.closed) {
      for (OwnGradients& stayed : call->own) stayed.keep();  // the caller's memory may go now
      group.background.push_back(std::move(own));
    }
    own.reset();
    --group.handed_out;
    delete_if_over(group);
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
    found->plain = w.plain;
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

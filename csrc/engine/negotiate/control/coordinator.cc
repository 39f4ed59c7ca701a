#include "engine/negotiate/control/coordinator.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/limits.h"
#include "engine/negotiate/control/disagreement.h"

namespace lightcc {
namespace {

std::optional<DType> common_dtype(const std::vector<TensorSpec>& tensors) {
  const auto differs = [&](const TensorSpec& tensor) { return tensor.dtype != tensors[0].dtype; };
  if (tensors.empty() || std::any_of(tensors.begin(), tensors.end(), differs)) return std::nullopt;
  return tensors[0].dtype;
}

// What a member that has joined takes part with: as the others do, but it sends and receives no rows.
Announcement without_rows(Announcement a, size_t members) {
  if (a.kind != Kind::allgather && a.kind != Kind::alltoall) return a;
  for (TensorSpec& tensor : a.tensors) tensor.shape.at(0) = 0;
  if (a.kind == Kind::alltoall) a.splits.assign(members * a.tensors.size(), 0);
  return a;
}

// What a member's own check (validate.h) lets through; of other members only a damaged message is anything else.
bool is_possible(const Announcement& a, size_t members) {
  const bool rows = a.kind == Kind::allgather || a.kind == Kind::alltoall || a.kind == Kind::reducescatter;
  if (a.kind == Kind::alltoall && a.splits.size() != members * a.tensors.size()) return false;
  int64_t bytes = 0;
  for (size_t t = 0; t < a.tensors.size(); ++t) {
    const TensorSpec& tensor = a.tensors[t];
    if (rows && tensor.shape.empty()) return false;
    const int64_t count = count_of(tensor.shape);
    bytes += count * int64_t(size_of(tensor.dtype));
    if (count > kMostRequestBytes || bytes > kMostRequestBytes) return false;
    int64_t left = rows ? tensor.shape[0] : 0;
    for (size_t i = t * members; a.kind == Kind::alltoall && i < (t + 1) * members; ++i) {
      if (a.splits[i] < 0 || a.splits[i] > left) return false;
      left -= a.splits[i];
    }
  }
  return true;
}

}  // namespace

Coordinator::Entry& Coordinator::entry(const std::string& key) {
  Entry& entry = entries_[key];
  if (entry.what.empty()) {
    entry.key = key;
    entry.what.resize(rank_of_.size());
    entry.announced.resize(rank_of_.size());
  }
  return entry;
}

void Coordinator::announce(int member, const std::string& key, Announcement what, bool again, uint64_t now_ns) {
  if (!is_possible(what, rank_of_.size()))
    throw Error(Code::internal, "rank " + std::to_string(rank_of_[size_t(member)]) + " announced " + key +
                                    " with shapes that no request can have");
  Entry& e = entry(key);
  lateness_.set_now(now_ns);
  end_plan_of(e);
  e.what[member] = std::move(what);
  e.fresh = true;
  if (again && stale_[member] > 0) --stale_[member];
  arrived(e, member);
  learn(e);
  if (!again) return;
  if (auto join = entries_.find(kJoinKey); join != entries_.end()) join_if_due(join->second, member);
}

const std::string* Coordinator::announce_cached(int member, const CachedRequest& request, uint64_t now_ns) {
  // A number that was given away meanwhile: the member learns of it from the batch that gave it away, and
  // announces the request again in full.
  if (request.id >= by_id_.size() || by_id_[request.id].generation != request.generation) {
    ++stale_[member];
    return nullptr;
  }
  Entry& e = *by_id_[request.id].entry;
  lateness_.set_now(now_ns);
  end_plan_of(e);
  arrived(e, member);
  learn(e);
  return &e.key;
}

void Coordinator::reset(Entry& e) {
  e.count = 0;
  e.ready = false;
  std::fill(e.announced.begin(), e.announced.end(), 0);
}

void Coordinator::arrived(Entry& e, int member) {
  if (!unheard_.empty() && is_withdrawn(e, member)) return;  // there it has failed already
  if (std::exchange(e.announced[member], 1)) throw Error(Code::internal, "a member announced " + e.key + " twice");
  e.last_used = ++clock_;
  if (!cycles_.blocked_on.empty()) cycles_.blocked_on.erase(member);
  if (!refused_.empty())
    if (auto it = refused_.find(e.key); it != refused_.end()) it->second[size_t(member)].count = 0;
  if (!e.owed.empty() && !e.owed[member].empty()) {
    e.announced[member] = 0;
    failures_.push_back({e.key, Code::mismatch, std::exchange(e.owed[member], ""), {member}});
    return;
  }
  if (++e.count == int(rank_of_.size())) lateness_.note_last(member, e.arrived_ns);
  e.arrived_ns = lateness_.now_ns();
  if (!first_left_.empty() && !complete(e)) {
    failures_.push_back({e.key, Code::shut_down, first_left_});
    reset(e);
  } else if (e.what[member].kind == Kind::join) {
    join_if_due(e, member);
  } else if (complete(e)) {
    make_ready(e);
  }
}

// All have announced it but members that have joined.
bool Coordinator::complete(const Entry& e) const {
  if (e.count == int(rank_of_.size())) return true;
  if (e.count == 0 || joined_.count == 0) return false;
  for (size_t i = 0; i < e.announced.size(); ++i)
    if (!e.announced[i] && !joined_.is[i]) return false;
  return true;
}

void Coordinator::make_ready(Entry& e) {
  e.absent.clear();
  for (size_t i = 0; e.count < int(rank_of_.size()) && i < e.announced.size(); ++i)
    if (!e.announced[i]) e.absent.push_back(int32_t(i));
  e.first_member = int(std::find(e.announced.begin(), e.announced.end(), 1) - e.announced.begin());
  e.ready = true;
  ready_.push_back(&e);
  ready_bytes_ += bytes_of(e.announcement());
}

// The member has announced that it joins. A cached request whose number had been given away was made before, so that
// comes first. From now on nothing waits for the member; when all have joined, nothing is left to wait for.
void Coordinator::join_if_due(Entry& join, int member) {
  if (!join.announced[member] || join.ready || joined_.is[member] || stale_[member] > 0) return;
  end_plans();  // buckets wait for all members
  joined_.add(member);
  std::vector<Entry*> now;
  for (auto& [key, e] : entries_)
    if (&e != &join && !e.ready && complete(e)) now.push_back(&e);
  std::sort(now.begin(), now.end(), [](Entry* a, Entry* b) { return a->last_used < b->last_used; });
  for (Entry* e : now) make_ready(*e);
  if (joined_.count < int(rank_of_.size())) return;
  join.fresh = true;  // who was last is news each time
  make_ready(join);
  joined_.clear();
  for (auto& [key, e] : entries_) e.owed.clear();  // all have gone past it
}

void Coordinator::set_own(const std::string& key, uintptr_t address, int set) {
  Entry& e = entry(key);
  if (e.set != set) end_plan_of(e);
  e.address = address;
  e.set = set;
}

void Coordinator::member_left(int member, const std::string& why) {
  end_plans();
  if (first_left_.empty()) first_left_ = why;
  for (auto& [key, e] : entries_) {
    if (e.count == 0 || e.announced[member] || e.ready) continue;
    failures_.push_back({key, Code::shut_down, why});
    reset(e);
  }
}

void Coordinator::members_absent(const MembersAbsent& absence) {
  auto it = entries_.find(absence.key);
  if (it == entries_.end()) return;
  end_plan_of(it->second);
  bool known = false;  // that they will not come: the request has failed before, and failed waits for them
  for (int32_t i : absence.absent) {
    if (i < 0 || i >= int32_t(it->second.owed.size()) || it->second.owed[size_t(i)].empty()) continue;
    it->second.owed[size_t(i)].clear();
    known = true;
    failures_.push_back({absence.key, Code::mismatch, absence.text, {i}, {i}});
  }
  if (known || it->second.count == 0 || it->second.ready) return;  // decided already
  Entry& e = it->second;
  e.owed.resize(e.announced.size());
  Failure failure{e.key, Code::mismatch, absence.text, {}, absence.absent};
  for (int i = 0; i < int(e.announced.size()); ++i) {
    if (e.announced[i])
      failure.only.push_back(i);
    else if (std::find(absence.absent.begin(), absence.absent.end(), i) == absence.absent.end())
      e.owed[i] = absence.text;
    else
      failure.only.push_back(i);
  }
  failures_.push_back(std::move(failure));
  reset(e);
}

// "" or why it cannot go on without the members that have joined.
std::string Coordinator::needs_the_absent(const Entry& e) const {
  std::vector<int> ranks;
  for (int member : e.absent) ranks.push_back(rank_of_[member]);
  std::string joined = ranks.size() > 1 ? " have joined and take" : " has joined and takes";
  joined += " part in nothing new until all ranks have called join()";
  switch (e.announcement().kind) {
    case Kind::broadcast:
      if (std::find(ranks.begin(), ranks.end(), e.announcement().root) == ranks.end()) return "";
      return "root rank " + std::to_string(e.announcement().root) +
             " has joined and has no more data: broadcast from a rank " + "that has some, or after join()";
    case Kind::add_group:
    case Kind::remove_group:
      return "all ranks of the job must call it, but rank" + std::string(ranks.size() > 1 ? "s " : " ") +
             text_of(ranks) + joined;
    default: return "";
  }
}

void Coordinator::number(Entry& e) {
  // An automatic name never comes again.
  if (e.id != kNoId || limits_.cache_capacity == 0 || is_automatic(e.key)) return;
  if (int(by_id_.size()) < limits_.cache_capacity) {
    e.id = uint32_t(by_id_.size());
    by_id_.push_back({&e});
    return;
  }
  Entry* oldest = nullptr;
  for (const auto& [old, generation] : by_id_)
    if (old->count == 0 && old->plans == 0 && (!oldest || old->last_used < oldest->last_used)) oldest = old;
  if (!oldest) return end_oldest_plan();  // all are in flight or planned: this one goes unnumbered
  e.id = oldest->id;
  by_id_[e.id].entry = &e;
  entries_.erase(oldest->key);
}

Response Coordinator::response(Entry& e) {
  Response response;
  number(e);
  response.id = e.id;
  response.fresh = std::exchange(e.fresh, false) || e.id == kNoId;
  if (response.fresh && e.id != kNoId) ++by_id_[e.id].generation;
  response.generation = e.id == kNoId ? 0 : by_id_[e.id].generation;
  if (!response.fresh) return response;
  e.known = e.id != kNoId;
  response.key = e.key;
  response.absent = e.told_absent = e.absent;
  size_t n = rank_of_.size();
  Announcement without = e.absent.empty() ? Announcement() : without_rows(e.announcement(), n);
  Kind kind = e.announcement().kind;
  if (kind == Kind::join) response.rows = {{rank_of_[joined_.last]}};
  if (kind == Kind::allgather || kind == Kind::alltoall)
    for (size_t t = 0; t < e.announcement().tensors.size(); ++t) {
      auto& rows = response.rows.emplace_back();
      for (size_t i = 0; i < n; ++i) {
        const Announcement& what = e.announced[i] ? e.what[i] : without;
        if (kind == Kind::allgather)
          rows.push_back(what.tensors[t].shape[0]);
        else
          rows.insert(rows.end(), what.splits.begin() + t * n, what.splits.begin() + (t + 1) * n);
      }
    }
  if (!e.absent.empty()) response.what = std::move(without);
  return response;
}

ReadyRequest Coordinator::ready_request(const Entry& e) const {
  const Announcement& what = e.announcement();
  return {what.kind, what.op, what.pre, what.post, what.codec, common_dtype(what.tensors), bytes_of(what), e.address,
          e.absent, what.device};
}

// ---- what runs

std::vector<DownMessage> Coordinator::take_messages() {
  std::vector<DownMessage> out;
  for (const BucketBatch& batch : ready_buckets_) {
    PlannedBucket& bucket = plans_[batch.plan].buckets[batch.bucket];
    std::fill(bucket.announced.begin(), bucket.announced.end(), 0);
    bucket.count = 0;
    bucket.ready = false;
    out.push_back(batch);
  }
  ready_buckets_.clear();
  std::ranges::move(plan_messages_, std::back_inserter(out));
  plan_messages_.clear();
  const auto forget = [&](const std::string& key) {  // as members do
    if (auto it = entries_.find(key); it != entries_.end()) it->second.known = false;
  };
  for (Failure& failure : failures_) {
    forget(failure.key);
    out.emplace_back(std::move(failure));
  }
  failures_.clear();
  for (NameWithdrawn& withdrawn : withdrawals_) {
    forget(withdrawn.key);
    out.emplace_back(std::move(withdrawn));
  }
  withdrawals_.clear();

  std::vector<Entry*> entries;  // of those that run
  std::vector<ReadyRequest> ready;
  for (Entry* e : ready_) {
    e->fresh = e->fresh || e->absent != e->told_absent;
    std::string why = e->fresh ? disagreement(e->what, e->announced, rank_of_) : "";
    if (why.empty() && e->fresh && !e->absent.empty()) why = needs_the_absent(*e);
    if (!why.empty()) {
      Failure& failure = std::get<Failure>(out.emplace_back(Failure{e->key, Code::mismatch, why}));
      for (size_t i = 0; !e->absent.empty() && i < e->announced.size(); ++i)
        if (e->announced[i]) failure.only.push_back(int32_t(i));
      reset(*e);
      forget(e->key);
      continue;
    }
    entries.push_back(e);
    ready.push_back(ready_request(*e));
  }
  ready_.clear();
  ready_bytes_ = 0;

  for (const Bucket& bucket : fuse(ready, limits_.fusion)) {
    Batch batch;
    for (size_t i : bucket) {
      Entry& e = *entries[i];
      batch.responses.push_back(response(e));
      reset(e);
      if (e.id == kNoId) entries_.erase(e.key);
    }
    out.push_back(std::move(batch));
  }
  return out;
}

}  // namespace lightcc

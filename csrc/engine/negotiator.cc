#include "engine/negotiator.h"

#include <algorithm>
#include <map>
#include <utility>

namespace lightcc {
namespace {

// Private tensors above this run alone: copying them together would cost more than a collective.
constexpr int64_t kFuseBytes = 256 << 10;

const std::string kJoinKey = std::string(name_of(Kind::join)) + ".";

bool one_dtype(const Announcement& a) {
  return std::all_of(a.tensors.begin(), a.tensors.end(),
                     [&](auto& tensor) { return tensor.dtype == a.tensors[0].dtype; });
}

// What a member that has joined takes part with: as the others do, but it sends and receives no rows.
Announcement without_rows(Announcement a, size_t members) {
  if (a.kind != Kind::allgather && a.kind != Kind::alltoall) return a;
  for (TensorSpec& tensor : a.tensors) tensor.shape.at(0) = 0;
  if (a.kind == Kind::alltoall) a.splits.assign(members * a.tensors.size(), 0);
  return a;
}

// What a member's own check (check.h) lets through; of other members only a damaged message is anything else.
bool is_possible(const Announcement& a, size_t members) {
  constexpr int64_t kMostBytes = int64_t(1) << 46;  // sums of these stay far from overflow
  const bool rows = a.kind == Kind::allgather || a.kind == Kind::alltoall || a.kind == Kind::reducescatter;
  if (a.kind == Kind::alltoall && a.splits.size() != members * a.tensors.size()) return false;
  int64_t bytes = 0;
  for (size_t t = 0; t < a.tensors.size(); ++t) {
    const TensorSpec& tensor = a.tensors[t];
    if (rows && tensor.shape.empty()) return false;
    const int64_t count = count_of(tensor.shape);
    if (count > kMostBytes || (bytes += count * int64_t(size_of(tensor.dtype))) > kMostBytes) return false;
    int64_t left = rows ? tensor.shape[0] : 0;
    for (size_t i = t * members; a.kind == Kind::alltoall && i < (t + 1) * members; ++i) {
      if (a.splits[i] < 0 || a.splits[i] > left) return false;
      left -= a.splits[i];
    }
  }
  return true;
}

std::string factor_text(double value) {
  char text[32];
  snprintf(text, sizeof text, "%g", value);
  return text;
}

// The dimensions that must agree: allgather and alltoall may differ in the first.
std::string shape_text(const Announcement& a, size_t t) {
  const Shape& shape = a.tensors[t].shape;
  bool free_rows = a.kind == Kind::allgather || a.kind == Kind::alltoall;
  if (!free_rows || shape.empty()) return text_of(shape);
  std::string rest = text_of(Shape(shape.begin() + 1, shape.end()));
  return shape.size() == 1 ? "[any]" : "[any, " + rest.substr(1);
}

}  // namespace

Message Ledger::announce(const std::string& key, const Announcement& what) {
  auto it = known_.find(key);
  if (it != known_.end() && it->second.what == what && it->second.item.id != kNoId) {
    it->second.recalled = true;
    return Recall{it->second.item.id, it->second.item.generation};
  }
  Known& known = known_[key];  // kept until it is settled
  if (known.item.id != kNoId) by_id_.erase(known.item.id);
  known = Known{{}, what, false};
  return Announce{key, what};
}

const Item& Ledger::settle(Item item, std::optional<std::string>* again) {
  if (!item.fresh) {
    auto key = by_id_.find(item.id);
    if (key == by_id_.end()) throw Error(Code::internal, "the coordinator recalled a request that was never numbered");
    Known& known = known_[key->second];
    known.recalled = false;
    return known.item;
  }
  if (item.id == kNoId) {
    known_.erase(item.key);
    unnumbered_ = std::move(item);
    return unnumbered_;
  }
  if (auto old = by_id_.find(item.id); old != by_id_.end() && old->second != item.key) {
    if (known_[old->second].recalled) *again = old->second;
    known_.erase(old->second);
  }
  by_id_[item.id] = item.key;
  Known& known = known_[item.key];
  known.item = std::move(item), known.recalled = false;
  return known.item;
}

void Ledger::forget(const std::string& key) {
  auto it = known_.find(key);
  if (it == known_.end()) return;
  if (it->second.item.id != kNoId) by_id_.erase(it->second.item.id);
  known_.erase(it);
}

Coordinator::Entry& Coordinator::entry(const std::string& key) {
  Entry& entry = entries_[key];
  if (entry.what.empty()) entry.key = key, entry.what.resize(rank_of_.size()), entry.here.resize(rank_of_.size());
  return entry;
}

void Coordinator::announce(int member, const std::string& key, Announcement what, bool again) {
  if (!is_possible(what, rank_of_.size()))
    throw Error(Code::internal, "rank " + std::to_string(rank_of_[size_t(member)]) + " announced " + key +
                                    " with shapes that no request can have");
  Entry& e = entry(key);
  e.what[member] = std::move(what), e.fresh = true;
  if (again && lost_[member] > 0) --lost_[member];
  arrived(e, member);
  if (!again) return;
  if (auto join = entries_.find(kJoinKey); join != entries_.end()) join_if_due(join->second, member);
}

const std::string* Coordinator::recall(int member, const Recall& recall) {
  // A number that was given away meanwhile: the member learns of it from the batch that gave it away, and
  // announces the request again in full.
  if (recall.id >= by_id_.size() || !by_id_[recall.id] || generations_[recall.id] != recall.generation) {
    ++lost_[member];
    return nullptr;
  }
  arrived(*by_id_[recall.id], member);
  return &by_id_[recall.id]->key;
}

void Coordinator::reset(Entry& e) { e.count = 0, e.ready = false, std::fill(e.here.begin(), e.here.end(), 0); }

void Coordinator::arrived(Entry& e, int member) {
  if (std::exchange(e.here[member], 1)) throw Error(Code::internal, "a member announced " + e.key + " twice");
  e.last_used = ++clock_;
  if (!e.owed.empty() && !e.owed[member].empty()) {
    e.here[member] = 0;
    failures_.push_back({e.key, Code::mismatch, std::exchange(e.owed[member], ""), {member}});
    return;
  }
  ++e.count;
  if (!gone_.empty() && !complete(e)) {
    failures_.push_back({e.key, Code::shut_down, gone_});
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
  if (e.count == 0 || joined_count_ == 0) return false;
  for (size_t i = 0; i < e.here.size(); ++i)
    if (!e.here[i] && !joined_[i]) return false;
  return true;
}

void Coordinator::make_ready(Entry& e) {
  e.absent.clear();
  for (size_t i = 0; e.count < int(rank_of_.size()) && i < e.here.size(); ++i)
    if (!e.here[i]) e.absent.push_back(int32_t(i));
  e.speaker = int(std::find(e.here.begin(), e.here.end(), 1) - e.here.begin());
  e.ready = true;
  ready_.push_back(&e);
  ready_bytes_ += bytes_of(e.said());
}

// The member has announced that it joins. A recall that came too late stands for a request that it made before, so
// that comes first. From now on nothing waits for the member; when all have joined, nothing is left to wait for.
void Coordinator::join_if_due(Entry& join, int member) {
  if (!join.here[member] || join.ready || joined_[member] || lost_[member] > 0) return;
  joined_[member] = 1, ++joined_count_, last_joined_ = member;
  std::vector<Entry*> now;
  for (auto& [key, e] : entries_)
    if (&e != &join && !e.ready && complete(e)) now.push_back(&e);
  std::sort(now.begin(), now.end(), [](Entry* a, Entry* b) { return a->last_used < b->last_used; });
  for (Entry* e : now) make_ready(*e);
  if (joined_count_ < int(rank_of_.size())) return;
  join.fresh = true;  // who was last is news each time
  make_ready(join);
  std::fill(joined_.begin(), joined_.end(), 0), joined_count_ = 0;
  for (auto& [key, e] : entries_) e.owed.clear();  // all have gone past it
}

void Coordinator::place(const std::string& key, uintptr_t address) { entry(key).place = address; }

void Coordinator::gone(int member, const std::string& why) {
  if (gone_.empty()) gone_ = why;
  for (auto& [key, e] : entries_) {
    if (e.count == 0 || e.here[member] || e.ready) continue;
    failures_.push_back({key, Code::shut_down, why});
    reset(e);
  }
}

void Coordinator::contest(const Contest& contest) {
  auto it = entries_.find(contest.key);
  if (it == entries_.end()) return;
  bool known = false;  // that they will not come: the request has failed before, and failed waits for them
  for (int32_t i : contest.absent) {
    if (i < 0 || i >= int32_t(it->second.owed.size()) || it->second.owed[size_t(i)].empty()) continue;
    it->second.owed[size_t(i)].clear(), known = true;
    failures_.push_back({contest.key, Code::mismatch, contest.text, {i}, {i}});
  }
  if (known || it->second.count == 0 || it->second.ready) return;  // settled already
  Entry& e = it->second;
  e.owed.resize(e.here.size());
  Failure failure{e.key, Code::mismatch, contest.text, {}, contest.absent};
  for (int i = 0; i < int(e.here.size()); ++i) {
    if (e.here[i])
      failure.only.push_back(i);
    else if (std::find(contest.absent.begin(), contest.absent.end(), i) == contest.absent.end())
      e.owed[i] = contest.text;
    else
      failure.only.push_back(i);
  }
  failures_.push_back(std::move(failure));
  reset(e);
}

std::vector<int> Coordinator::missing(const std::string& key) const {
  std::vector<int> members;
  auto it = entries_.find(key);
  for (int i = 0; i < int(rank_of_.size()); ++i)
    if (!joined_[i] && (it == entries_.end() || it->second.here.empty() || !it->second.here[i])) members.push_back(i);
  return members;
}

std::vector<int> Coordinator::joined() const {
  std::vector<int> members;
  for (int i = 0; i < int(rank_of_.size()); ++i)
    if (joined_[i]) members.push_back(i);
  return members;
}

// "" or what differs and who has what: "shape: ranks 0, 2 have [2, 3], rank 1 has [3, 2]".
std::string Coordinator::disagreement(const Entry& e) const {
  auto differ = [&](const char* what, auto text) -> std::string {
    std::map<std::string, std::vector<int>> groups;
    for (size_t i = 0; i < e.what.size(); ++i)
      if (e.here[i]) groups[text(e.what[i])].push_back(rank_of_[i]);
    if (groups.size() < 2) return "";
    std::vector<std::pair<std::vector<int>, std::string>> sides;
    for (auto& [value, ranks] : groups) sides.push_back({ranks, value});
    std::sort(sides.begin(), sides.end());
    std::string line;
    for (auto& [ranks, value] : sides)
      line += (line.empty() ? "" : ", ") + std::string(ranks.size() > 1 ? "ranks " : "rank ") + text_of(ranks) +
              (ranks.size() > 1 ? " have " : " has ") + value;
    return std::string("ranks disagree on ") + what + ": " + line;
  };
  const Announcement& first = e.said();
  std::string found = differ("operation", [](auto& a) { return name_of(a.kind); });
  if (found.empty()) found = differ("number of tensors", [](auto& a) { return std::to_string(a.tensors.size()); });
  for (size_t t = 0; found.empty() && t < first.tensors.size(); ++t) {
    std::string which = first.tensors.size() == 1
                            ? ""
                            : " of tensor " + std::to_string(t + 1) + "of" + std::to_string(first.tensors.size());
    found = differ(("dtype" + which).c_str(), [&](auto& a) { return name_of(a.tensors[t].dtype); });
    if (found.empty()) found = differ(("shape" + which).c_str(), [&](auto& a) { return shape_text(a, t); });
  }
  if (found.empty()) found = differ("reduce op", [](auto& a) { return name_of(a.op); });
  if (found.empty()) found = differ("root rank", [](auto& a) { return std::to_string(a.root); });
  if (found.empty()) found = differ("prescale factor", [](auto& a) { return factor_text(a.pre); });
  if (found.empty()) found = differ("postscale factor", [](auto& a) { return factor_text(a.post); });
  return found;
}

// "" or why it cannot go on without the members that have joined.
std::string Coordinator::needs_the_absent(const Entry& e) const {
  std::vector<int> ranks;
  for (int member : e.absent) ranks.push_back(rank_of_[member]);
  std::string joined = ranks.size() > 1 ? " have joined and take" : " has joined and takes";
  joined += " part in nothing new until all ranks have called join()";
  switch (e.said().kind) {
    case Kind::broadcast:
      if (std::find(ranks.begin(), ranks.end(), e.said().root) == ranks.end()) return "";
      return "root rank " + std::to_string(e.said().root) + " has joined and has no more data: broadcast from a rank " +
             "that has some, or after join()";
    case Kind::add_group:
    case Kind::remove_group:
      return "all ranks of the job must call it, but rank" + std::string(ranks.size() > 1 ? "s " : " ") +
             text_of(ranks) + joined;
    default: return "";
  }
}

void Coordinator::number(Entry& e) {
  // An automatic name never comes again.
  if (e.id != kNoId || limits_.capacity == 0 || is_automatic(e.key)) return;
  if (int(by_id_.size()) < limits_.capacity) {
    e.id = uint32_t(by_id_.size());
    by_id_.push_back(&e), generations_.push_back(0);
    return;
  }
  Entry* oldest = nullptr;
  for (Entry* old : by_id_)
    if (old->count == 0 && (!oldest || old->last_used < oldest->last_used)) oldest = old;
  if (!oldest) return;  // all are in flight: this one goes unnumbered
  e.id = oldest->id;
  by_id_[e.id] = &e;
  entries_.erase(oldest->key);
}

Item Coordinator::item(Entry& e) {
  Item item;
  number(e);
  item.id = e.id;
  item.fresh = std::exchange(e.fresh, false) || e.id == kNoId;
  if (item.fresh && e.id != kNoId) ++generations_[e.id];
  item.generation = e.id == kNoId ? 0 : generations_[e.id];
  if (!item.fresh) return item;
  item.key = e.key;
  item.absent = e.told_absent = e.absent;
  size_t n = rank_of_.size();
  Announcement without = e.absent.empty() ? Announcement() : without_rows(e.said(), n);
  Kind kind = e.said().kind;
  if (kind == Kind::join) item.rows = {{rank_of_[last_joined_]}};
  if (kind == Kind::allgather || kind == Kind::alltoall)
    for (size_t t = 0; t < e.said().tensors.size(); ++t) {
      auto& rows = item.rows.emplace_back();
      for (size_t i = 0; i < n; ++i) {
        const Announcement& what = e.here[i] ? e.what[i] : without;
        if (kind == Kind::allgather)
          rows.push_back(what.tensors[t].shape[0]);
        else
          rows.insert(rows.end(), what.splits.begin() + t * n, what.splits.begin() + (t + 1) * n);
      }
    }
  if (!e.absent.empty()) item.what = std::move(without);
  return item;
}

std::vector<Message> Coordinator::take() {
  std::vector<Message> out;
  for (Failure& failure : failures_) out.push_back(std::move(failure));
  failures_.clear();

  struct Open {
    std::vector<Entry*> entries;
    int64_t bytes = 0;
  };
  std::vector<Open> batches;
  auto fits = [&](const Open& open, const Entry& e, int64_t bytes) {
    const Announcement &a = open.entries[0]->said(), &b = e.said();
    return limits_.fusion && a.kind == Kind::allreduce && b.kind == Kind::allreduce && a.op == b.op && a.pre == b.pre &&
           a.post == b.post && one_dtype(a) && one_dtype(b) && !a.tensors.empty() && !b.tensors.empty() &&
           a.tensors[0].dtype == b.tensors[0].dtype && open.bytes + bytes <= limits_.batch_bytes &&
           (open.entries[0]->place != 0) == (e.place != 0) && open.entries[0]->absent == e.absent &&
           (e.place != 0 || (bytes <= kFuseBytes && bytes_of(a) <= kFuseBytes));
  };
  for (Entry* e : ready_) {
    e->fresh = e->fresh || e->absent != e->told_absent;
    std::string why = e->fresh ? disagreement(*e) : "";
    if (why.empty() && e->fresh && !e->absent.empty()) why = needs_the_absent(*e);
    if (!why.empty()) {
      Failure& failure = std::get<Failure>(out.emplace_back(Failure{e->key, Code::mismatch, why}));
      for (size_t i = 0; !e->absent.empty() && i < e->here.size(); ++i)
        if (e->here[i]) failure.only.push_back(int32_t(i));
      reset(*e);
      continue;
    }
    int64_t bytes = bytes_of(e->said());
    auto open = std::find_if(batches.begin(), batches.end(), [&](Open& o) { return fits(o, *e, bytes); });
    if (open == batches.end()) open = batches.insert(open, Open{});
    open->entries.push_back(e), open->bytes += bytes;
  }
  ready_.clear(), ready_bytes_ = 0;

  for (Open& open : batches) {
    std::stable_sort(open.entries.begin(), open.entries.end(), [](Entry* a, Entry* b) { return a->place < b->place; });
    Batch batch;
    for (Entry* e : open.entries) {
      batch.items.push_back(item(*e));
      reset(*e);
      if (e->id == kNoId) entries_.erase(e->key);
    }
    out.push_back(std::move(batch));
  }
  return out;
}

}  // namespace lightcc

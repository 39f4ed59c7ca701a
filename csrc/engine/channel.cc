#include "engine/channel.h"

#include <algorithm>

#include "base/clock.h"
#include "base/log.h"
#include "engine/check.h"

namespace lightcc {
namespace {
// While one batch runs, ready requests gather for the next; so much is enough to be agreed on ahead of time.
constexpr int64_t kAheadBytes = 4 << 20;
constexpr uint64_t kDozeNs = 300'000'000;       // a rank with work in flight looks around three times as often
constexpr uint64_t kSilenceNs = 400'000'000;  // a coordinator that takes longer to answer is itself missing

std::vector<int32_t> to_int32(const std::vector<int>& members) { return {members.begin(), members.end()}; }

}  // namespace

Channel::Channel(Peers& peers, int group, std::vector<int> ranks, const Config& config, Counters& counters,
                 Tracing& tracing, ChannelOwner& owner)
    : peers_(peers),
      group_(group),
      members_{std::move(ranks), 0},
      config_(config),
      counters_(counters),
      tracing_(tracing),
      owner_(owner),
      selector_(peers.all_here(members_.ranks), config.select),
      buffer_(peers.arena()),
      phantom_(peers.arena()) {
  auto& all = members_.ranks;
  members_.index = int(std::find(all.begin(), all.end(), peers.rank()) - all.begin());
  links_.resize(all.size()), left_.resize(all.size());
  courier_ = std::make_unique<Courier>(peers, peers.topology(), group, members_, *this);
  std::vector<Link*> links;
  for (int i = 0; i < members_.size(); ++i) {
    if (i != members_.index) links_[i] = peers.data_link(group, all[i]);
    links.push_back(links_[i].get());
  }
  if (is_coordinator())
    coordinator_ = std::make_unique<Coordinator>(
        all, Coordinator::Limits{config.fusion_bytes, config.fusion, config.cache_capacity});
  if (peers.all_here(all)) {
    here_ = {peers.local(all), members_.index};
    shared_ = std::make_unique<SharedBackend>(peers.host(), group, here_.ranks, links);
    express_ = std::make_unique<Express>(peers.host(), group, here_, *shared_);
  }
  by_links_ = std::make_unique<LinksBackend>(links, selector_);
  choose_ = [this](const Collective& c) -> Backend& {
    const Row& row = selector_.choose(c);
    tracing_.activity(runs_[0], row);
    return shared_ && row.backend == shared_->name() ? *shared_ : *by_links_;
  };
}

void Channel::submit(const RequestPtr& request) {
  if (!gone_.empty()) return owner_.finish(request, Code::shut_down, request->title() + ": " + gone_);
  tracing_.submitted(*request);
  pending_.emplace(request->key, request);
  Message message = ledger_.announce(request->key, request->what);
  counters_.add(std::holds_alternative<Recall>(message) ? Counters::recalled : Counters::announced);
  if (is_coordinator() && request->what.kind == Kind::allreduce) {
    size_t bytes = size_t(count_of(request->what.tensors[0].shape)) * size_of(request->what.tensors[0].dtype);
    bool in_place = request->inputs[0] == request->outputs[0];
    bool shared = in_place && peers_.arena()->offset_of(request->inputs[0], bytes) >= 0;
    coordinator_->place(request->key, shared ? reinterpret_cast<uintptr_t>(request->inputs[0]) : 0);
  }
  courier_->say(std::move(message));
}

void Channel::receive(int from, Message message) {
  if (auto* announce = std::get_if<Announce>(&message)) {
    coordinator_->announce(from, announce->key, std::move(announce->what), announce->again);
    tracing_.ready(group_, announce->key, members_.ranks[from]);
  } else if (auto* recall = std::get_if<Recall>(&message)) {
    const std::string* key = coordinator_->recall(from, *recall);
    if (key) tracing_.ready(group_, *key, members_.ranks[from]);
  } else if (auto* query = std::get_if<Query>(&message)) {
    queries_.push_back({query->member, query->key});  // answered when all that has arrived is taken in
  } else if (auto* contest = std::get_if<Contest>(&message)) {
    coordinator_->contest(*contest);
  } else if (group_ == 0 && (std::holds_alternative<Stuck>(message) || std::holds_alternative<Plea>(message))) {
    owner_.judge(message);
  } else {
    throw Error(Code::internal, "a member sent the coordinator a message that only coordinators send");
  }
}

void Channel::handle(Message message) {
  auto for_me = [&](auto& members) {
    return std::find(members.begin(), members.end(), members_.index) != members.end();
  };
  if (auto* batch = std::get_if<Batch>(&message)) {
    if (batch->items.empty()) throw Error(Code::internal, "told to run nothing");
    std::vector<Entry> entries;
    for (Item& one : batch->items) {
      std::optional<std::string> again;
      const Item& item = ledger_.settle(std::move(one), &again);
      if (for_me(item.absent)) {
        check_rows(item, item.what, members_.index, members_.size(), true);
        entries.push_back(Phantom::entry(item));
      } else {
        auto it = pending_.find(item.key);
        if (it == pending_.end())
          throw Error(Code::internal, "told to run " + item.key + ", which was not announced here");
        check_rows(item, it->second->what, members_.index, members_.size(), false);
        entries.push_back({std::move(it->second), item.rows, int(item.absent.size())});
        pending_.erase(it);
      }
      if (!again) continue;
      if (auto other = pending_.find(*again); other != pending_.end()) {
        Message anew = ledger_.announce(*again, other->second->what);
        std::get<Announce>(anew).again = true;
        courier_->say(std::move(anew));
      }
    }
    tracing_.agreed(entries, !runs_.empty());
    runs_.push_back(std::move(entries));
  } else if (auto* failure = std::get_if<Failure>(&message)) {
    if (!failure->only.empty() && !for_me(failure->only)) return;
    ledger_.forget(failure->key);
    if (for_me(failure->absent)) return owner_.skip_name(group_, failure->key);
    auto it = pending_.find(failure->key);
    if (it == pending_.end()) return tracing_.refused(group_, failure->key, failure->code, failure->text);
    RequestPtr request = std::move(it->second);
    pending_.erase(it);
    owner_.finish(request, failure->code, request->title() + ": " + failure->text);
  } else if (auto* accuse = std::get_if<Accuse>(&message); accuse && group_ == 0) {
    owner_.accused(*accuse);
  } else if (auto* missing = std::get_if<Missing>(&message)) {
    for (auto* members : {&missing->members, &missing->joined})
      for (int32_t member : *members)
        if (member < 0 || member >= members_.size())
          throw Error(Code::internal, "the coordinator waits for a member that is not in its group");
    if (auto it = pending_.find(missing->key); it != pending_.end())
      report(*it->second, {missing->members.begin(), missing->members.end()},
             {missing->joined.begin(), missing->joined.end()}, now_ns());
  } else {
    throw Error(Code::internal, "the coordinator sent a message that only members send");
  }
}

// Self-clocked: nothing in flight, send at once; something in flight, gather.
bool Channel::coordinate() {
  if (!coordinator_->anything_ready()) return false;
  bool ahead = runs_.size() == 1 && coordinator_->ready_bytes() >= kAheadBytes;
  if (!runs_.empty() && !ahead && !coordinator_->anything_failed()) return false;
  for (const Message& message : coordinator_->take()) courier_->tell(message);
  return true;
}

bool Channel::may_express(const Collective& c) {
  return express_ && idle() && gone_.empty() && selector_.choose(c).backend == shared_->name() && express_->ready();
}

bool Channel::step_express() {
  if (!express_) return false;
  if (!express_->active()) return express_->refuse_if_awaited(!pending_.empty());
  bool moved = false;
  Express::State state = express_->step(&moved);
  if (express_->active()) return moved;
  RequestPtr request = std::move(expressed_);
  if (state != Express::State::done) return submit(request), true;
  counters_.add(Counters::express);
  owner_.finish(request, Code::ok, "");
  return true;
}

bool Channel::run_front() {
  if (runs_.empty() || (express_ && express_->active())) return false;  // the express began first on all ranks
  if (!run_) {
    auto& front = *runs_[0][0].request;
    if (runs_[0][0].phantom && !phantom_.prepare(runs_[0])) return true;
    if (front.what.kind == Kind::add_group || front.what.kind == Kind::remove_group) owner_.change_groups(front);
    run_ = std::make_unique<Run>(runs_[0], members_, buffer_, counters_, tracing_, choose_);
  }
  bool moved = run_->step();
  if (run_->done()) {
    ran_ns_ = now_ns();
    for (const Entry& entry : run_->entries()) {
      if (entry.request->what.kind == Kind::join) all_joined(entry);
      if (!entry.phantom) owner_.finish(entry.request, Code::ok, "");
    }
    run_.reset();
    runs_.pop_front();
    return true;
  }
  return moved;
}

void Channel::all_joined(const Entry& entry) {
  phantom_.clear();
  if (group_ == 0 && !entry.rows.empty() && !entry.rows[0].empty())
    entry.request->last_joined = int(entry.rows[0][0]);
}

bool Channel::step() {
  bool moved = step_express();
  moved |= courier_->step();
  for (auto& [member, key] : std::exchange(queries_, {}))
    courier_->tell(Missing{key, to_int32(coordinator_->missing(key)), to_int32(coordinator_->joined()), member});
  if (is_coordinator()) moved |= coordinate();
  moved |= run_front();
  // What the next batch needs is often there already.
  if (is_coordinator() && runs_.empty()) moved |= coordinate();
  if (courier_->cut_off() && !moved && runs_.empty() && !pending_.empty()) fail_all(Code::shut_down, gone_);
  return moved;
}

void Channel::gone(int rank, const std::string& why) {
  auto it = std::find(members_.ranks.begin(), members_.ranks.end(), rank);
  if (it != members_.ranks.end()) left(int(it - members_.ranks.begin()), why, Courier::kSeen);
}

void Channel::farewell(int member, const std::string& why, int from) {
  const int rank = members_.ranks[size_t(member)];
  if (!peers_.here(rank)) owner_.has_left(rank);
  left(member, why, from);
}

void Channel::left(int member, const std::string& why, int from) {
  if (std::exchange(left_[size_t(member)], 1)) return;
  if (express_) express_->gone(member);
  if (gone_.empty()) gone_ = why;
  courier_->gone(member, why, from);
  if (is_coordinator()) coordinator_->gone(member, why);
}

void Channel::fail_all(Code code, const std::string& text) {
  run_.reset();
  if (express_) express_->drop();
  if (RequestPtr request = std::move(expressed_)) owner_.finish(request, code, request->title() + ": " + text);
  auto runs = std::exchange(runs_, {});
  auto pending = std::exchange(pending_, {});
  for (auto& entries : runs)
    for (Entry& entry : entries)
      if (!entry.phantom) owner_.finish(entry.request, code, entry.request->title() + ": " + text);
  for (auto& [key, request] : pending) owner_.finish(request, code, request->title() + ": " + text);
}

bool Channel::announced(Kind kind, bool automatic, const std::string& key) const {
  if (expressed_ && expressed_->what.kind == kind && expressed_->automatic == automatic)
    return automatic || expressed_->key == key;
  if (!automatic) return pending_.count(key) > 0;
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](auto& one) { return one.second->automatic && one.second->what.kind == kind; });
}

bool Channel::flush() { return courier_->flush(); }

void Channel::remind() {
  if (!pending_.empty()) courier_->remind();
  if (!expressed_) return;
  for (int member : express_->missing()) peers_.ring_urgently(members_.ranks[member]);
}

void Channel::inspect(uint64_t now) {
  if (expressed_) look_for(*RequestPtr(expressed_), true, now);
  for (auto& [key, request] : std::unordered_map(pending_)) look_for(*request, false, now);
  if (!runs_.empty())
    for (Entry& entry : std::vector(runs_[0])) look_for(*entry.request, true, now);
}

// A rank in join() waits for as long as the others have work: it is no stall while that goes on.
uint64_t Channel::waits_since(const Request& request) const {
  return request.what.kind == Kind::join ? std::max(request.submitted_ns, ran_ns_) : request.submitted_ns;
}

void Channel::look_for(Request& request, bool running, uint64_t now) {
  if (request.what.kind == Kind::join && group_ != 0) return;  // the world's speaks for all
  auto after = [&](uint64_t since, double seconds) { return double(now - since) * 1e-9 >= seconds; };
  const uint64_t since = waits_since(request);
  bool warn = after(since, config_.stall_warn_s) && after(request.warned_ns, config_.stall_warn_s);
  bool end = config_.stall_end_s > 0 && after(since, config_.stall_end_s);
  if (!warn && !end) return;
  if (running) return report(request, silent_members(now), {}, now);
  if (is_coordinator()) return report(request, coordinator_->missing(request.key), coordinator_->joined(), now);
  if (request.asked_ns <= request.warned_ns) {  // not asked since the last warning
    request.asked_ns = now;
    courier_->say(Query{request.key, members_.index});
  } else if (now - request.asked_ns > kSilenceNs) {
    report(request, {courier_->silent_since(request.asked_ns)}, {}, now);
  }
}

// Who holds up the batch that runs. Whom this rank waits for may itself wait for another, but a rank that does not
// even look around is stopped.
std::vector<int> Channel::silent_members(uint64_t now) const {
  std::vector<int> silent;
  if (expressed_) silent = express_->missing();
  if (!silent.empty()) return silent;
  for (int i = 0; i < members_.size(); ++i)
    if (i != members_.index && peers_.awake_ns_ago(members_.ranks[i], now) > kDozeNs) silent.push_back(i);
  if (silent.empty()) silent.push_back(run_ ? run_->waiting_for() : 0);
  return silent;
}

std::string Channel::names(const std::vector<int>& members) const {
  std::string text;
  for (int member : members) text += (text.empty() ? "" : ", ") + peers_.name(members_.ranks[member]);
  return text;
}

void Channel::report(Request& request, const std::vector<int>& missing, const std::vector<int>& joined, uint64_t now) {
  if (missing.empty()) return;  // they have all come meanwhile
  request.warned_ns = now;
  const double waited_s = double(now - waits_since(request)) * 1e-9;
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%.0f s", waited_s);
  std::string text = request.title() + " has waited " + seconds + " for " + names(missing);
  if (!joined.empty()) text += " (has joined: " + names(joined) + ")";
  if (config_.stall_end_s > 0 && waited_s >= config_.stall_end_s)
    return owner_.end_epoch(Code::timeout, "stalled: " + text + "; ended after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS");
  counters_.add(Counters::stall_warnings);
  // One voice is enough: the first member that waits for it.
  auto waits = [&](int member) {
    bool has_joined = std::find(joined.begin(), joined.end(), member) != joined.end();
    return std::find(missing.begin(), missing.end(), member) == missing.end() &&
           (!has_joined || request.what.kind == Kind::join);
  };
  int first = 0;
  while (first < members_.size() && !waits(first)) ++first;
  if (first == members_.index)
    log(Level::warning, "stall: " + text +
                            " to submit it or to go on. Are they stopped, or do they take another path "
                            "through the program?");
}

}  // namespace lightcc

// How a group engine finds that a request takes too long, and says who holds it up.
#include <algorithm>

#include "base/log.h"
#include "engine/blocked_text.h"
#include "engine/group_engine.h"

namespace lightcc {
namespace {

constexpr uint64_t kDozeNs = 300'000'000;     // a rank with work in flight looks around three times as often
constexpr size_t kMostNotes = 4;              // members of which a warning says more than their name
constexpr size_t kMostNames = 8;              // members that a deadlock's warning names on each side
constexpr uint64_t kSilenceNs = 400'000'000;  // a coordinator that takes longer to answer is itself missing

}  // namespace

void GroupEngine::inspect(uint64_t now) {
  progress_lock_.assert_held();
  if (fast_path_request_) inspect_request(*RequestPtr(fast_path_request_), true, now);
  for (auto& [key, request] : std::unordered_map(pending_)) inspect_request(*request, false, now);
  if (batches_in_flight() > 0)
    for (const BatchItem& item : std::vector(oldest_batch())) inspect_request(*item.request, true, now);
}

// A rank in join() waits for as long as the others have work: it is no stall while that goes on.
uint64_t GroupEngine::waits_since(const Request& request) const {
  return request.what.kind == Kind::join ? std::max(request.submitted_ns, batch_ended_ns_) : request.submitted_ns;
}

void GroupEngine::inspect_request(Request& request, bool running, uint64_t now) {
  if (request.what.kind == Kind::join && group_->id() != 0) return;  // the world's speaks for all
  auto after = [&](uint64_t since, double seconds) { return double(now - since) * 1e-9 >= seconds; };
  const uint64_t since = waits_since(request);
  bool warn = after(since, config_.stall_warn_s) && after(request.warned_ns, config_.stall_warn_s);
  bool end = config_.stall_end_s > 0 && after(since, config_.stall_end_s);
  if (!warn && !end) return;
  if (running) return report_stall(request, silent_members(now), {}, "", now);
  if (is_coordinator()) {
    const std::vector<int> missing = coordinator_->missing(request.key);
    return report_stall(request, missing, coordinator_->joined(), note(request.key, missing), now);
  }
  if (request.asked_ns <= request.warned_ns) {  // not asked since the last warning
    request.asked_ns = now;
    send_up(Query{request.key, group_->index()});
  } else if (now - request.asked_ns > kSilenceNs) {
    report_stall(request, {control_plane_->silent_since(request.asked_ns)}, {}, "", now);
  }
}

// Who holds up the batch that runs. Whom this rank waits for may itself wait for another, but a rank that does not
// even look around is stopped.
std::vector<int> GroupEngine::silent_members(uint64_t now) const {
  std::vector<int> silent;
  if (fast_path_request_) silent = fast_path_->missing();
  if (!silent.empty()) return silent;
  for (int i = 0; i < group_->size(); ++i)
    if (i != group_->index() && peers_.awake_ns_ago(group_->rank(i), now) > kDozeNs) silent.push_back(i);
  if (silent.empty()) silent.push_back(running_.empty() ? 0 : running_[0]->waiting_for());
  return silent;
}

std::string GroupEngine::names(const std::vector<int>& members) const {
  std::string text;
  for (int member : members) text += (text.empty() ? "" : ", ") + peers_.name(group_->rank(member));
  return text;
}

std::string GroupEngine::some_names(std::vector<int> members) const {
  const size_t more = members.size() - std::min(members.size(), kMostNames);
  members.resize(members.size() - more);
  return names(members) + (more ? " and " + std::to_string(more) + " more" : "");
}

// The coordinator's: why these members may not have come, as far as it knows.
std::string GroupEngine::note(const std::string& key, const std::vector<int>& missing) {
  std::string text;
  for (size_t i = 0; i < missing.size() && i < kMostNotes; ++i) {
    const int rank = group_->rank(missing[i]);
    std::string one = coordinator_->refusal(missing[i], key);
    if (!one.empty()) {
      one = "refused it when it was submitted there: " + one;
    } else if (one = blocked_text(surroundings_, rank); !one.empty()) {
      one = "itself waits for " + one;
    } else if (const std::string other = coordinator_->waits_for(missing[i]); !other.empty()) {
      one = "itself waits for " + title_of_key(other) + ", for which " + names(coordinator_->missing(other)) +
            " has not come";
    }
    if (!one.empty()) text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + " " + one;
  }
  return text;
}

void GroupEngine::report_stall(Request& request, const std::vector<int>& missing, const std::vector<int>& joined,
                               const std::string& note, uint64_t now) {
  if (missing.empty()) return;  // they have all come meanwhile
  request.warned_ns = now;
  const double waited_s = double(now - waits_since(request)) * 1e-9;
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%.0f s", waited_s);
  std::string text = request.title() + " has waited " + seconds + " for " + names(missing);
  if (!joined.empty()) text += " (has joined: " + names(joined) + ")";
  if (config_.stall_end_s > 0 && waited_s >= config_.stall_end_s)
    return effects_.push(effect::EndEpoch{{Code::timeout, "stalled: " + text + "; ended after "
                                           "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" + (note.empty() ? "" : "; " + note)}});
  counters_.add(Counters::stall_warnings);
  // One voice is enough: the first member that waits for it.
  auto waits = [&](int member) {
    bool has_joined = std::find(joined.begin(), joined.end(), member) != joined.end();
    return std::find(missing.begin(), missing.end(), member) == missing.end() &&
           (!has_joined || request.what.kind == Kind::join);
  };
  int first = 0;
  while (first < group_->size() && !waits(first)) ++first;
  if (first == group_->index())
    log(Level::warning, "stall: " + text +
                            " to submit it or to go on. " +
                            (note.empty() ? "Are they stopped, or do they take another path through the program?"
                                          : "Of those, " + note));
}

bool GroupEngine::report_blocked(const std::string& key) {
  progress_lock_.assert_held();
  if (!pending_.contains(key)) return false;
  send_up(Query{key, group_->index(), true});
  return true;
}

void GroupEngine::report_deadlock(const std::vector<Wait>& cycle) {
  if (cycle.empty()) return;
  counters_.add(Counters::stall_warnings);
  std::string text;
  for (const Wait& wait : cycle)
    text += (text.empty() ? "" : "; ") + some_names(wait.members) +
            (wait.members.size() > 1 ? " wait in " : " waits in ") + title_of_key(wait.key) + " for " +
            some_names(wait.missing);
  const std::string where = group_->id() == 0 ? "" : " in process set " + std::to_string(group_->id());
  log(Level::warning, deadlock_warning(where, text));
}

void GroupEngine::remind() {
  progress_lock_.assert_held();
  if (!pending_.empty()) control_plane_->remind();
  if (!fast_path_request_) return;
  for (int member : fast_path_->missing()) {
    peers_.wake_urgently(group_->rank(member));
    if (remote_fast_path_) remote_fast_path_->remind();
  }
}

}  // namespace lightcc

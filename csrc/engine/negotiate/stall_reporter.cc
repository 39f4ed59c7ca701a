#include "engine/negotiate/stall_reporter.h"

#include <algorithm>

#include "base/log.h"
#include "engine/negotiate/blocked_text.h"

namespace lightcc {
namespace {

constexpr size_t kMostNotes = 4;  // members of which a warning says more than their name
constexpr size_t kMostNames = 8;  // members that a deadlock's warning names on each side

bool has_waited(uint64_t since_ns, uint64_t now_ns, double seconds) {
  return double(now_ns - since_ns) * 1e-9 >= seconds;
}

std::string in_seconds(uint64_t ns) {
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%.0f s", double(ns) * 1e-9);
  return seconds;
}

bool contains(const std::vector<int>& members, int member) {
  return std::find(members.begin(), members.end(), member) != members.end();
}

}  // namespace

bool StallReporter::is_due(const Request& request, uint64_t since_ns, uint64_t now_ns) const {
  const bool warns = has_waited(since_ns, now_ns, shared_.config.stall_warn_s) &&
                     has_waited(request.warned_ns, now_ns, shared_.config.stall_warn_s);
  return warns || (shared_.config.stall_end_s > 0 && has_waited(since_ns, now_ns, shared_.config.stall_end_s));
}

void StallReporter::report(Request& request, uint64_t since_ns, const std::vector<int>& missing,
                           const std::vector<int>& joined, const std::string& note, uint64_t now_ns) const {
  if (missing.empty()) return;  // they have all come meanwhile
  request.warned_ns = now_ns;
  std::string text = request.title() + " has waited " + in_seconds(now_ns - since_ns) + " for " + names(missing);
  if (!joined.empty()) text += " (has joined: " + names(joined) + ")";
  if (ends_epoch(text, note, since_ns, now_ns)) return;
  // One voice is enough: the first member that waits for it.
  const auto waits = [&](int member) {
    return !contains(missing, member) && (!contains(joined, member) || request.what.kind == Kind::join);
  };
  int first = 0;
  while (first < group_.size() && !waits(first)) ++first;
  if (first == group_.index())
    log(Level::warning, "stall: " + text + " to submit it or to go on. " +
                            (note.empty() ? "Are they stopped, or do they take another path through the program?"
                                          : "Of those, " + note));
}

// Each rank that waits says so, since no other knows.
void StallReporter::report_peer(Request& request, const char* what, uint64_t now_ns) const {
  request.warned_ns = now_ns;
  const std::string text = shared_.peers.name(shared_.peers.rank()) + " has waited " +
                           in_seconds(now_ns - request.submitted_ns) + " in " + request.title() + " for " +
                           names({request.what.root}) + " " + what;
  if (ends_epoch(text, "", request.submitted_ns, now_ns)) return;
  log(Level::warning, "stall: " + text + ". Is it stopped, or does it take another path through the program?");
}

bool StallReporter::ends_epoch(const std::string& text, const std::string& note, uint64_t since_ns,
                               uint64_t now_ns) const {
  if (shared_.config.stall_end_s <= 0 || !has_waited(since_ns, now_ns, shared_.config.stall_end_s)) {
    shared_.counters.add(Counters::stall_warnings);
    return false;
  }
  shared_.effects.push(effect::EndEpoch{{Code::timeout, "stalled: " + text + "; ended after "
                                         "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" + (note.empty() ? "" : "; " + note)}});
  return true;
}

std::string StallReporter::note(const Coordinator& coordinator, const std::string& key,
                                const std::vector<int>& missing) const {
  std::string text;
  for (size_t i = 0; i < missing.size() && i < kMostNotes; ++i) {
    const int rank = group_.rank(missing[i]);
    std::string one = coordinator.refusal(missing[i], key);
    if (!one.empty()) {
      one = "refused it when it was submitted there: " + one;
    } else if (one = blocked_text(shared_.surroundings, rank); !one.empty()) {
      one = "itself waits for " + one;
    } else if (const std::string other = coordinator.waits_for(missing[i]); !other.empty()) {
      one = "itself waits for " + title_of_key(other) + ", for which " + names(coordinator.missing(other)) +
            " has not come";
    }
    if (!one.empty()) text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + " " + one;
  }
  return text;
}

void StallReporter::report_deadlock(const std::vector<Wait>& cycle) const {
  if (cycle.empty()) return;
  shared_.counters.add(Counters::stall_warnings);
  std::string text;
  for (const Wait& wait : cycle)
    text += (text.empty() ? "" : "; ") + some_names(wait.members) +
            (wait.members.size() > 1 ? " wait in " : " waits in ") + title_of_key(wait.key) + " for " +
            some_names(wait.missing);
  const std::string where = group_.id() == 0 ? "" : " in process set " + std::to_string(group_.id());
  log(Level::warning, deadlock_warning(where, text));
}

std::string StallReporter::names(const std::vector<int>& members) const {
  std::string text;
  for (int member : members) text += (text.empty() ? "" : ", ") + shared_.peers.name(group_.rank(member));
  return text;
}

std::string StallReporter::some_names(std::vector<int> members) const {
  const size_t more = members.size() - std::min(members.size(), kMostNames);
  members.resize(members.size() - more);
  return names(members) + (more ? " and " + std::to_string(more) + " more" : "");
}

}  // namespace lightcc

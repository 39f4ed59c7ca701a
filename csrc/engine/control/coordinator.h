// Who has announced what, what may run, in which order and fused with what. Messages in, messages out: no I/O,
// no clock, no threads. Members are indices in the group; the coordinator is member 0.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/control/message.h"
#include "engine/fusion.h"

namespace lightcc {

class Coordinator {
 public:
  struct Limits { FusionLimits fusion; int cache_capacity; };
  // rank_of[i]: world rank of member i, for messages to people.
  Coordinator(std::vector<int> rank_of, Limits limits)
      : rank_of_(std::move(rank_of)), limits_(limits), joined_(rank_of_.size()), stale_(rank_of_.size()) {}

  void announce(int member, const std::string& key, Announcement, bool again = false);
  // The request's key, or nullptr: its number has been given away.
  const std::string* announce_cached(int member, const CachedRequest&);
  // Where the coordinator's own tensor lies in memory that ranks share (0: not in such memory). Requests that
  // lie side by side are put side by side in a batch, so that they run without being copied together.
  void set_address(const std::string& key, uintptr_t address);
  // This member will announce nothing more: what waits for it fails, now and later.
  void member_left(int member, const std::string& why);
  // Fails a request that the absent members will never announce, on the others as each comes to it.
  void members_absent(const MembersAbsent&);
  // This member did not take the request when it was submitted there; it may come yet.
  void refused(int member, const std::string& key, const std::string& why);
  std::string refusal(int member, const std::string& key) const;  // why, or ""
  // What this member has announced first of all that still waits for others, or "".
  std::string waits_for(int member) const;
  std::vector<int> missing(const std::string& key) const;  // members that have not announced it, but should
  // Members that have joined: what the others have announced is ready without them, until all have joined. That
  // becomes ready last, and ends it.
  std::vector<int> joined() const;

  int64_t ready_bytes() const { return ready_bytes_; }
  bool anything_failed() const { return !failures_.empty(); }
  bool anything_ready() const { return !ready_.empty() || anything_failed(); }
  // Everything ready, as messages that go to every member in this order.
  std::vector<DownMessage> take_messages();

 private:
  struct Entry {
    std::string key;
    std::vector<Announcement> what;    // by member
    std::vector<char> announced;       // by member
    std::vector<std::string> owed;     // by member: the failure that waits for its announcement
    std::vector<int32_t> absent;       // once it is ready: members that joined and have not announced it
    std::vector<int32_t> told_absent;  // when it last ran
    int count = 0, first_member = 0;   // members that announced it; the first of them, once it is ready
    bool ready = false;
    bool fresh = true;               // someone announced it in full since it last ran
    uint32_t id = kNoId, generation = 0;
    uint64_t last_used = 0;
    uintptr_t address = 0;
    const Announcement& announcement() const { return what[size_t(first_member)]; }
  };
  Entry& entry(const std::string& key);
  void arrived(Entry&, int member);
  bool complete(const Entry&) const;
  void make_ready(Entry&);
  void join_if_due(Entry& join, int member);
  void reset(Entry&);
  void number(Entry&);
  std::string needs_the_absent(const Entry&) const;
  Response response(Entry&);

  std::vector<int> rank_of_;
  Limits limits_;
  std::unordered_map<std::string, Entry> entries_;   // pointers to values stay valid
  std::vector<Entry*> by_id_;
  std::vector<uint32_t> generations_;                // by id
  std::vector<Entry*> ready_;
  std::vector<Failure> failures_;
  int64_t ready_bytes_ = 0;
  uint64_t clock_ = 0;
  std::string first_left_;                           // why the first member left; empty: all are here
  std::vector<char> joined_;                         // by member
  int joined_count_ = 0, last_joined_ = 0;
  struct Refusal { int count = 0; std::string why; };
  std::map<std::string, std::vector<Refusal>> refused_;  // by key and member: since it last announced it
  std::vector<int> stale_;                           // by member: cached requests whose number had been given away;
                                                     // each is followed by an announcement that says `again`
};

}  // namespace lightcc

// Who has announced what, what may run, in which order and fused with what. Messages in, messages out: no I/O,
// no clock, no threads. Members are indices in the group; the coordinator is member 0.
#pragma once
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/message.h"

namespace lightcc {

// Every member's half: remembers requests by the number that the coordinator gave them.
class Ledger {
 public:
  // What to send to announce this request.
  Message announce(const std::string& key, const Announcement&);
  // Takes an item to run; returns the whole of it, as remembered. If its number belonged to another
  // request that was recalled by that number and has not run, `again` gets the key, to be announced anew.
  const Item& settle(Item, std::optional<std::string>* again);
  void forget(const std::string& key);

 private:
  struct Known { Item item; Announcement what; bool recalled = false; };
  std::unordered_map<std::string, Known> known_;      // by key
  std::unordered_map<uint32_t, std::string> by_id_;
  Item unnumbered_;                                    // the last one settled without a number
};

class Coordinator {
 public:
  struct Limits { int64_t batch_bytes; bool fusion; int capacity; };
  // rank_of[i]: world rank of member i, for messages to people.
  Coordinator(std::vector<int> rank_of, Limits limits)
      : rank_of_(std::move(rank_of)), limits_(limits), joined_(rank_of_.size()), lost_(rank_of_.size()) {}

  void announce(int member, const std::string& key, Announcement, bool again = false);
  // The request's key, or nullptr: its number has been given away.
  const std::string* recall(int member, const Recall&);
  // Where the coordinator's own tensor lies in memory that ranks share (0: not in such memory). Requests that
  // lie side by side are put side by side in a batch, so that they run without being copied together.
  void place(const std::string& key, uintptr_t address);
  // This member will announce nothing more: what waits for it fails, now and later.
  void gone(int member, const std::string& why);
  // Fails a request that the absent members will never announce, on the others as each comes to it.
  void contest(const Contest&);
  std::vector<int> missing(const std::string& key) const;  // members that have not announced it, but should
  // Members that have joined: what the others have announced is ready without them, until all have joined. That
  // becomes ready last, and ends it.
  std::vector<int> joined() const;

  int64_t ready_bytes() const { return ready_bytes_; }
  bool anything_failed() const { return !failures_.empty(); }
  bool anything_ready() const { return !ready_.empty() || anything_failed(); }
  // Everything ready, as messages that go to every member in this order.
  std::vector<Message> take();

 private:
  struct Entry {
    std::string key;
    std::vector<Announcement> what;  // by member
    std::vector<char> here;
    std::vector<std::string> owed;   // by member: the failure that waits for its announcement
    std::vector<int32_t> absent;     // once it is ready: members that joined and have not announced it
    std::vector<int32_t> told_absent;  // when it last ran
    int count = 0, speaker = 0;      // members that announced it; the first of them, once it is ready
    bool ready = false;
    bool fresh = true;               // someone announced it in full since it last ran
    uint32_t id = kNoId, generation = 0;
    uint64_t last_used = 0;
    uintptr_t place = 0;
    const Announcement& said() const { return what[size_t(speaker)]; }
  };
  Entry& entry(const std::string& key);
  void arrived(Entry&, int member);
  bool complete(const Entry&) const;
  void make_ready(Entry&);
  void join_if_due(Entry& join, int member);
  void reset(Entry&);
  void number(Entry&);
  std::string disagreement(const Entry&) const;
  std::string needs_the_absent(const Entry&) const;
  Item item(Entry&);

  std::vector<int> rank_of_;
  Limits limits_;
  std::unordered_map<std::string, Entry> entries_;   // pointers to values stay valid
  std::vector<Entry*> by_id_;
  std::vector<uint32_t> generations_;                // by id
  std::vector<Entry*> ready_;
  std::vector<Failure> failures_;
  int64_t ready_bytes_ = 0;
  uint64_t clock_ = 0;
  std::string gone_;                                 // why, once somebody is
  std::vector<char> joined_;                         // by member
  int joined_count_ = 0, last_joined_ = 0;
  std::vector<int> lost_;                            // by member: recalls that came too late; each is made good by an
                                                     // announcement that says so
};

}  // namespace lightcc

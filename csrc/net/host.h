// The ranks of one host as one of them sees them: everyone's arena, how to wake everyone, who has gone.
//
// An arena's fixed part: a header, then for each group a block of streams whose writer is the arena's owner:
// one to all members, and two to each member (control and data); the owner's tails of the streams it reads; and
// two signs.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/cores.h"
#include "net/arena.h"
#include "net/futex.h"
#include "net/link.h"
#include "net/stream.h"
#include "net/watch.h"

namespace lightcc {

enum class Presence : uint32_t { here, left, failed, dead };

struct Header {
  uint64_t nonce;                        // proves that a peer maps this very memory
  Bell driver;                           // whoever drives this rank's engine sleeps here
  Bell engine;                           // its engine thread sleeps here when there is nothing to drive
  alignas(kLine) std::atomic<Presence> presence{Presence::here};
  std::atomic<uint64_t> left_ns{0};      // when the owner left: the first to go is the cause of what follows
  alignas(kLine) std::atomic<uint32_t> alarm{0};  // rung urgently: look at presences and messages
  alignas(kLine) std::atomic<uint64_t> awake_ns{0};  // when the owner, with work in flight, last looked around
  alignas(kLine) std::atomic<uint64_t> beat_ns{0};   // of the host's first rank: when any of them last sent heartbeats
  alignas(kLine) int32_t cause_code = 0;  // why the owner failed; written before presence says so
  char cause[1024] = {};
};

// What a member of a group shows the others when its call may skip negotiation; see engine/express.h.
struct Sign {
  static constexpr size_t kRoom = 48, kEagerBytes = 4 << 10;
  alignas(kLine) std::atomic<uint64_t> word{0};  // whose turn, and whether it refuses; written last
  uint64_t hash = 0;                             // of the call
  std::byte room[kRoom] = {};                    // its data, if they fit, or where they lie
  alignas(kLine) std::byte eager[kEagerBytes];   // its data, if they fit here
};

struct HostRank {
  std::string name;     // "rank 1 (pid 17) on host h"
  std::string note;     // what else it had to say when it joined
  std::shared_ptr<Arena> arena;
  Fd event = Fd();      // wakes whoever of its threads sleeps in poll()
};

class Host {
 public:
  static constexpr int kGroups = 128;
  static constexpr size_t kRecordBytes = 256 << 10;  // the largest record of the data and the common stream

  // Meets the other ranks of this host at a place that is named alike by all of them and by nobody else.
  static std::unique_ptr<Host> join(const std::string& place, int rank, int size, const std::string& name,
                                    const std::string& note, uint64_t deadline_ns);
  // n ranks as threads of one process, for tests. They share one mapping, so a race is seen as a race.
  static std::vector<std::unique_ptr<Host>> threads(int n);

  int rank() const { return rank_; }  // among the ranks of this host
  int size() const { return int(ranks_.size()); }
  int cores() const { return cores_; }  // that all ranks together may keep busy
  const std::string& name(int rank) const { return ranks_[rank].name; }
  const std::string& note(int rank) const { return ranks_[rank].note; }
  Header& header(int rank) const { return *reinterpret_cast<Header*>(ranks_[rank].arena->base()); }
  std::byte* base(int rank) const { return ranks_[rank].arena->base(); }
  const std::shared_ptr<Arena>& arena() const { return ranks_[rank_].arena; }
  std::vector<Fd> take_pidfds() { return std::move(pidfds_); }
  void no_copy_in_child();

  // Group slot `group` < kGroups. Only the engine's thread of the moment uses streams and links.
  StreamWriter common_writer(int group, const std::vector<int>& readers) const;
  StreamReader common_reader(int group, int from) const;
  std::unique_ptr<Link> control_link(int group, int peer);
  std::unique_ptr<Link> data_link(int group, int peer);
  Sign& sign(int group, int rank, int slot) const;  // slot 0 or 1
  void reset_group(int group) const;  // once every member has left it: this rank's cursors and signs back to zero

  // News for a peer is rung once for a whole step: mark while writing, ring at the end.
  void mark(int peer) { marked_[peer] = 1, any_marked_ = true; }
  void ring_marked();
  void ring_urgently(int peer);       // also if it has nothing to do
  void ring_driver(int rank) { ring(rank, header(rank).driver); }  // after a seq_cst fence; any thread
  void ring_engine(int rank) { ring(rank, header(rank).engine); }
  int event() const { return ranks_[rank_].event.get(); }  // readable when a bell of this rank that is polled was rung
  void clear_event() const;

 private:
  Host(int rank, std::vector<HostRank> ranks);
  enum Stream { common, control, data };
  struct Layout;
  void ring(int rank, Bell&);
  Cursor* head(Stream, int group, int owner, int to) const;
  Cursor* tail(Stream, int group, int owner, int from) const;
  StreamWriter writer(Stream, int group, int to, const std::vector<int>& readers) const;
  StreamReader reader(Stream, int group, int from) const;

  int rank_;
  int cores_ = usable_cores();
  std::vector<HostRank> ranks_;
  std::vector<Fd> pidfds_;
  std::vector<char> marked_;
  bool any_marked_ = false;
};

}  // namespace lightcc

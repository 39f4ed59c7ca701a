// The ranks of one host as one of them sees them: the arena of each, how to wake each, and which have gone.
//
// An arena's fixed part: a header, then for each group a block of ring buffers whose writer is the arena's owner: the
// common ones, which many members read; to each member one for control and one for each lane of data; the owner's tails
// of the ring buffers it reads; and two fast path slots.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "net/link.h"
#include "net/ring_buffer.h"
#include "net/shm/arena.h"
#include "net/shm/futex.h"

namespace lightcc {

enum class Presence : uint32_t { here, left, failed, dead };

struct Header {
  uint64_t nonce;                        // proves that a peer maps this very memory
  Doorbell driver;                       // whoever drives this rank's engine sleeps here
  Doorbell engine;                       // its engine thread sleeps here when there is nothing to drive
  alignas(kLine) std::atomic<Presence> presence{Presence::here};
  std::atomic<uint64_t> left_ns{0};      // when the owner left: the first to go is the cause of what follows
  alignas(kLine) std::atomic<uint32_t> alarm{0};  // woken urgently: look at presences and messages
  alignas(kLine) std::atomic<uint64_t> awake_ns{0};  // when the owner, with work in flight, last looked around
  // Used in the header of the host's first rank: when any of its ranks last sent heartbeats, and how many were sent.
  alignas(kLine) std::atomic<uint64_t> heartbeat_ns{0};
  std::atomic<uint64_t> heartbeats_sent{0};
  alignas(kLine) int32_t cause_code = 0;  // why the owner failed or left; written before presence says so
  char cause[1024] = {};
};

// What a member of a group shows the others when its call may skip negotiation; see engine/run/fast_path.h.
struct FastPathSlot {
  static constexpr size_t kInlineBytes = 48, kEagerBytes = 4 << 10;
  alignas(kLine) std::atomic<uint64_t> word{0};  // whose turn, and whether it refuses; written last
  uint64_t hash = 0;                             // of the call
  std::byte inline_data[kInlineBytes] = {};      // its data, if they fit, or where they lie
  alignas(kLine) std::byte eager[kEagerBytes];   // its data, if they fit here
};

Fd new_event();           // an eventfd

struct LocalRank {
  std::string name;     // "rank 1 (pid 17) on host h"
  std::string note;     // what else it told when it connected
  std::shared_ptr<Arena> arena;
  Fd event = Fd();      // wakes whoever of its threads sleeps in poll()
};

class LocalRanks {
 public:
  static constexpr int kGroups = 128, kLanes = 4, kCommonLanes = 3;
  static constexpr int kPointToPointLane = 3;        // of kLanes: the only one that also leads to the rank itself
  static constexpr size_t kRecordBytes = 256 << 10;  // the largest record of the data and the common ring

  // An arena for one of n ranks, with a new Header in it.
  static std::shared_ptr<Arena> create_arena(int n);
  static std::shared_ptr<Arena> map_arena(int memfd, int n);
  // pidfds: of the others. cores: that all ranks together may keep busy.
  LocalRanks(int rank, std::vector<LocalRank> ranks, std::vector<Fd> pidfds, int cores);
  // n ranks as threads of one process, for tests. They share one mapping, so a race is seen as a race.
  static std::vector<std::unique_ptr<LocalRanks>> threads(int n);

  int rank() const { return rank_; }  // among the ranks of this host
  int size() const { return int(ranks_.size()); }
  int cores() const { return cores_; }
  const std::string& name(int rank) const { return ranks_[rank].name; }
  const std::string& note(int rank) const { return ranks_[rank].note; }
  Header& header(int rank) const { return *reinterpret_cast<Header*>(ranks_[rank].arena->base()); }
  std::byte* base(int rank) const { return ranks_[rank].arena->base(); }
  const std::shared_ptr<Arena>& arena() const { return ranks_[rank_].arena; }
  std::vector<Fd> take_pidfds() { return std::move(pidfds_); }

  // Group slot `group` < kGroups. Only the engine's thread of the moment uses ring buffers and links.
  // The readers of a common ring never change.
  RingWriter common_writer(int group, int lane, const std::vector<int>& readers) const;
  RingReader common_reader(int group, int lane, int from) const;
  std::unique_ptr<Link> control_link(int group, int peer);
  std::unique_ptr<Link> data_link(int group, int lane, int peer);
  FastPathSlot& fast_path_slot(int group, int rank, int slot) const;  // slot 0 or 1
  void reset_group(int group) const;  // once every member has left it: this rank's cursors and slots back to zero

  // A peer is woken once for a whole step: mark while writing, wake_marked() at the end.
  void mark(int peer) { marked_[peer] = 1, any_marked_ = true; }
  void wake_marked();
  void wake_urgently(int peer);       // also if it has nothing to do
  void wake_driver(int rank) { wake(rank, header(rank).driver); }  // after a seq_cst fence; any thread
  void wake_engine(int rank) { wake(rank, header(rank).engine); }
  int event() const { return ranks_[rank_].event.get(); }  // readable when a polled doorbell of this rank was rung
  void set_event(int rank) const;     // wakes whoever sleeps in poll() there, or is about to
  void set_event() const { set_event(rank_); }
  void clear_event() const;

 private:
  struct Layout;
  void wake(int rank, Doorbell&);
  // ring: which of those that Layout knows.
  Cursor* head(int ring, int group, int owner, int to) const;
  Cursor* tail(int ring, int group, int owner, int from) const;
  RingWriter writer(int ring, int group, int to, const std::vector<int>& readers) const;
  RingReader reader(int ring, int group, int from) const;
  std::unique_ptr<Link> link(int ring, int group, int peer);

  const int rank_;
  std::vector<LocalRank> ranks_;
  std::vector<Fd> pidfds_;
  const int cores_;
  std::vector<char> marked_;
  bool any_marked_ = false;
};

}  // namespace lightcc

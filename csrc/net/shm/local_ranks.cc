#include "net/shm/local_ranks.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/error.h"
#include "net/shm/shm_link.h"

namespace lightcc {
namespace {

constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes);

}  // namespace

Fd new_event() {
  Fd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw system_error("creating an eventfd");
  return fd;
}

// Where the ring buffers of one group lie in each arena of a host of n ranks: the common ones, then for each other kind
// one to each rank (a line for the head, then the ring), this rank's tails of what it reads, and last its fast path
// slots.
struct LocalRanks::Layout {
  enum Ring { common, control = kCommonLanes, data };  // common, data: of lane 0, the other lanes follow
  static constexpr int kRings = data + kLanes;
  size_t n;
  static constexpr size_t ring_bytes(int ring) { return ring == control ? 64 << 10 : 4 * kRecordBytes; }
  size_t readers(int ring) const { return ring < control ? 1 : n; }  // that have a ring of their own
  size_t head(int ring, int to) const {
    size_t at = 0;
    for (int before = common; before < ring; ++before) at += readers(before) * (kLine + ring_bytes(before));
    return ring < control ? at : at + size_t(to) * (kLine + ring_bytes(ring));
  }
  size_t tail(int ring, int from) const { return head(kRings, 0) + kLine * size_t(kRings * from + ring); }
  size_t fast_path_slot(int slot) const {
    return round_up(tail(common, int(n)), 4096) + size_t(slot) * sizeof(FastPathSlot);
  }
  size_t block_bytes() const { return round_up(fast_path_slot(2), 4096); }
  size_t block(int group) const { return kHeaderBytes + group * block_bytes(); }
  size_t bytes() const { return block(kGroups); }
};

std::shared_ptr<Arena> LocalRanks::create_arena(int n) {
  auto arena = Arena::create(Layout{size_t(n)}.bytes());
  new (arena->base()) Header{};
  return arena;
}
std::shared_ptr<Arena> LocalRanks::map_arena(int memfd, int n) { return Arena::map(memfd, Layout{size_t(n)}.bytes()); }

LocalRanks::LocalRanks(int rank, std::vector<LocalRank> ranks, std::vector<Fd> pidfds, int cores)
    : rank_(rank), ranks_(std::move(ranks)), pidfds_(std::move(pidfds)), cores_(cores), marked_(ranks_.size()) {}

std::vector<std::unique_ptr<LocalRanks>> LocalRanks::threads(int n) {
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<Fd> events;
  for (int i = 0; i < n; ++i) {
    arenas.push_back(create_arena(n));
    arenas[i]->close_memfd();
    events.push_back(new_event());
  }
  std::vector<std::unique_ptr<LocalRanks>> hosts;
  for (int rank = 0; rank < n; ++rank) {
    std::vector<LocalRank> ranks;
    for (int i = 0; i < n; ++i)
      ranks.push_back({"rank " + std::to_string(i) + " (a thread)", "", arenas[i], duplicate(events[i].get())});
    hosts.push_back(std::make_unique<LocalRanks>(rank, std::move(ranks), std::vector<Fd>(size_t(n)), usable_cores()));
  }
  return hosts;
}

Cursor* LocalRanks::head(int ring, int group, int owner, int to) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.head(ring, to));
}
Cursor* LocalRanks::tail(int ring, int group, int owner, int from) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.tail(ring, from));
}
RingWriter LocalRanks::writer(int ring, int group, int to, const std::vector<int>& readers) const {
  Cursor* own = head(ring, group, rank_, to);
  std::vector<const Cursor*> tails;
  for (int reader : readers) tails.push_back(tail(ring, group, reader, rank_));
  return {own, reinterpret_cast<std::byte*>(own + 1), Layout::ring_bytes(ring), std::move(tails)};
}
RingReader LocalRanks::reader(int ring, int group, int from) const {
  const Cursor* theirs = head(ring, group, from, rank_);
  return {theirs, reinterpret_cast<const std::byte*>(theirs + 1), Layout::ring_bytes(ring),
          tail(ring, group, rank_, from)};
}

RingWriter LocalRanks::common_writer(int group, int lane, const std::vector<int>& readers) const {
  std::vector<int> others(readers);
  std::erase(others, rank_);
  return writer(Layout::common + lane, group, 0, others);
}
RingReader LocalRanks::common_reader(int group, int lane, int from) const {
  return reader(Layout::common + lane, group, from);
}

std::unique_ptr<Link> LocalRanks::link(int ring, int group, int peer) {
  return std::make_unique<ShmLink>(writer(ring, group, peer, {peer}), reader(ring, group, peer),
                                   Layout::ring_bytes(ring) / 4, *this, peer);
}
std::unique_ptr<Link> LocalRanks::control_link(int group, int peer) { return link(Layout::control, group, peer); }
std::unique_ptr<Link> LocalRanks::data_link(int group, int lane, int peer) {
  return link(Layout::data + lane, group, peer);
}

FastPathSlot& LocalRanks::fast_path_slot(int group, int rank, int slot) const {
  Layout layout{ranks_.size()};
  return *reinterpret_cast<FastPathSlot*>(base(rank) + layout.block(group) + layout.fast_path_slot(slot));
}

void LocalRanks::reset_group(int group) const {
  for (int slot : {0, 1}) fast_path_slot(group, rank_, slot).word = 0;
  for (int peer = 0; peer < size(); ++peer)
    for (int ring = 0; ring < Layout::kRings; ++ring) {
      head(ring, group, rank_, peer)->at = 0;
      tail(ring, group, rank_, peer)->at = 0;
    }
}

void LocalRanks::wake(int rank, Doorbell& doorbell) {
  doorbell.ring();
  if (doorbell.polled.load(std::memory_order_relaxed) != 0) set_event(rank);
}

void LocalRanks::set_event(int rank) const {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(ranks_[rank].event.get(), &one, sizeof one);  // full: it is readable already
}

void LocalRanks::clear_event() const {
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(event(), &count, sizeof count);
}

void LocalRanks::wake_marked() {
  if (!any_marked_) return;
  any_marked_ = false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer)
    if (std::exchange(marked_[peer], 0)) wake_driver(peer);
}

void LocalRanks::wake_urgently(int peer) {
  header(peer).alarm = 1;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_driver(peer);
  wake_engine(peer);
}

}  // namespace lightcc

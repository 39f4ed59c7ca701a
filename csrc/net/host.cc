#include "net/host.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <set>

#include "base/wire.h"
#include "net/rendezvous.h"
#include "net/shm.h"

namespace lightcc {
namespace {

constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes);

Fd new_event() {
  Fd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw system_error("creating an eventfd");
  return fd;
}
Fd duplicate(int fd) { return Fd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

// Where the streams of one group lie in each arena of a host of n ranks: the common stream, n control and n
// data streams (a line for the head, then the ring), this rank's tails of what it reads, and last its signs.
struct Host::Layout {
  static constexpr size_t kRing[] = {4 * kRecordBytes, 64 << 10, 4 * kRecordBytes};  // by Stream
  size_t n;
  size_t head(Stream s, int to) const {
    size_t control_at = kLine + kRing[common], data_at = control_at + n * (kLine + kRing[control]);
    return s == common    ? 0
           : s == control ? control_at + to * (kLine + kRing[control])
                          : data_at + to * (kLine + kRing[data]);
  }
  size_t tail(Stream s, int from) const { return head(data, int(n)) + kLine * (3 * from + s); }
  size_t sign(int slot) const { return round_up(tail(common, int(n)), 4096) + size_t(slot) * sizeof(Sign); }
  size_t block_bytes() const { return round_up(sign(2), 4096); }
  size_t block(int group) const { return kHeaderBytes + group * block_bytes(); }
  size_t bytes() const { return block(kGroups); }
};

Host::Host(int rank, std::vector<HostRank> ranks) : rank_(rank), ranks_(std::move(ranks)), marked_(ranks_.size()) {}

std::unique_ptr<Host> Host::join(const std::string& place, int rank, int size, const std::string& name,
                                 const std::string& note, uint64_t deadline_ns) {
  const size_t fixed = Layout{size_t(size)}.bytes();
  auto mine = Arena::create(fixed);
  auto* header = new (mine->base()) Header{};
  if (getrandom(&header->nonce, sizeof header->nonce, 0) != sizeof header->nonce) throw system_error("drawing a nonce");

  Card card{WireWriter().put(header->nonce).put(name).put(note).put(bound_to()).take(), {}};
  card.fds.push_back(duplicate(mine->memfd()));
  card.fds.push_back(Watch::own_pidfd());
  card.fds.push_back(new_event());
  mine->close_memfd();
  auto cards = meet(place, rank, size, std::move(card), deadline_ns);

  std::vector<HostRank> ranks(size);
  std::vector<Fd> pidfds(size);
  std::set<int32_t> cores;
  for (int i = 0; i < size; ++i) {
    WireReader reader(cards[i].note);
    auto nonce = reader.get<uint64_t>();
    if (cards[i].fds.size() != 3) throw Error(Code::internal, "init: a rank's descriptors did not arrive");
    ranks[i].name = reader.text(), ranks[i].note = reader.text();
    for (int32_t core : reader.values<int32_t>()) cores.insert(core);
    ranks[i].arena = i == rank ? mine : Arena::map(cards[i].fds[0].get(), fixed);
    ranks[i].arena->close_memfd();
    if (reinterpret_cast<Header*>(ranks[i].arena->base())->nonce != nonce)
      throw Error(Code::internal, "init: " + ranks[i].name + " does not share memory with this rank");
    if (i != rank) pidfds[i] = std::move(cards[i].fds[1]);
    ranks[i].event = std::move(cards[i].fds[2]);
  }
  std::unique_ptr<Host> host(new Host(rank, std::move(ranks)));
  host->pidfds_ = std::move(pidfds);
  host->cores_ = within_quota(int(cores.size()));
  host->no_copy_in_child();
  return host;
}

std::vector<std::unique_ptr<Host>> Host::threads(int n) {
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<Fd> events;
  for (int i = 0; i < n; ++i) {
    arenas.push_back(Arena::create(Layout{size_t(n)}.bytes()));
    new (arenas[i]->base()) Header{};
    arenas[i]->close_memfd();
    events.push_back(new_event());
  }
  std::vector<std::unique_ptr<Host>> hosts;
  for (int rank = 0; rank < n; ++rank) {
    std::vector<HostRank> ranks;
    for (int i = 0; i < n; ++i)
      ranks.push_back({"rank " + std::to_string(i) + " (a thread)", "", arenas[i], duplicate(events[i].get())});
    hosts.emplace_back(new Host(rank, std::move(ranks)));
    hosts.back()->pidfds_.resize(n);
  }
  return hosts;
}

void Host::no_copy_in_child() {
  // A forked child keeps its parent's own memory, in which tensors may lie, and none of the peers'.
  for (int i = 0; i < size(); ++i)
    if (i != rank_) ranks_[i].arena->no_copy_in_child();
}

Cursor* Host::head(Stream s, int group, int owner, int to) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.head(s, to));
}
Cursor* Host::tail(Stream s, int group, int owner, int from) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.tail(s, from));
}
StreamWriter Host::writer(Stream s, int group, int to, const std::vector<int>& readers) const {
  Cursor* own = head(s, group, rank_, to);
  std::vector<const Cursor*> tails;
  for (int reader : readers)
    if (reader != rank_) tails.push_back(tail(s, group, reader, rank_));
  return {own, reinterpret_cast<std::byte*>(own + 1), Layout::kRing[s], std::move(tails)};
}
StreamReader Host::reader(Stream s, int group, int from) const {
  const Cursor* theirs = head(s, group, from, rank_);
  return {theirs, reinterpret_cast<const std::byte*>(theirs + 1), Layout::kRing[s], tail(s, group, rank_, from)};
}

StreamWriter Host::common_writer(int group, const std::vector<int>& readers) const {
  return writer(common, group, 0, readers);
}
StreamReader Host::common_reader(int group, int from) const { return reader(common, group, from); }
std::unique_ptr<Link> Host::control_link(int group, int peer) {
  return std::make_unique<ShmLink>(writer(control, group, peer, {peer}), reader(control, group, peer),
                                   Layout::kRing[control] / 4, *this, peer);
}
std::unique_ptr<Link> Host::data_link(int group, int peer) {
  return std::make_unique<ShmLink>(writer(data, group, peer, {peer}), reader(data, group, peer), kRecordBytes, *this,
                                   peer);
}

Sign& Host::sign(int group, int rank, int slot) const {
  Layout layout{ranks_.size()};
  return *reinterpret_cast<Sign*>(base(rank) + layout.block(group) + layout.sign(slot));
}

void Host::reset_group(int group) const {
  for (int slot : {0, 1}) sign(group, rank_, slot).word = 0;
  head(common, group, rank_, 0)->at = 0;
  for (int peer = 0; peer < size(); ++peer)
    for (Stream s : {common, control, data}) head(s, group, rank_, peer)->at = 0, tail(s, group, rank_, peer)->at = 0;
}

void Host::ring(int rank, Bell& bell) {
  bell.ring();
  if (bell.polled.load(std::memory_order_relaxed) == 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(ranks_[rank].event.get(), &one, sizeof one);  // full: it is readable already
}

void Host::clear_event() const {
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(event(), &count, sizeof count);
}

void Host::ring_marked() {
  if (!any_marked_) return;
  any_marked_ = false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer)
    if (std::exchange(marked_[peer], 0)) ring_driver(peer);
}

void Host::ring_urgently(int peer) {
  header(peer).alarm = 1;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_driver(peer);
  ring_engine(peer);
}

}  // namespace lightcc

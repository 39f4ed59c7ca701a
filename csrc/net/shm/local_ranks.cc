#include "net/shm/local_ranks.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/wire.h"
#include "net/bootstrap/local_exchange.h"
#include "net/shm/shm_link.h"

namespace lightcc {
namespace {

constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes);

Fd new_event() {
  Fd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw system_error("creating an eventfd");
  return fd;
}
Fd duplicate(int fd) {
  Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw system_error("copying a descriptor");
  return copy;
}

}  // namespace

// Where the ring buffers of one group lie in each arena of a host of n ranks: the common one, n for control and n for
// data (a line for the head, then the ring), this rank's tails of what it reads, and last its fast path slots.
struct LocalRanks::Layout {
  static constexpr size_t kRing[] = {4 * kRecordBytes, 64 << 10, 4 * kRecordBytes};  // by RingKind
  size_t n;
  size_t head(RingKind s, int to) const {
    size_t control_at = kLine + kRing[common], data_at = control_at + n * (kLine + kRing[control]);
    return s == common    ? 0
           : s == control ? control_at + to * (kLine + kRing[control])
                          : data_at + to * (kLine + kRing[data]);
  }
  size_t tail(RingKind s, int from) const { return head(data, int(n)) + kLine * (3 * from + s); }
  size_t fast_path_slot(int slot) const {
    return round_up(tail(common, int(n)), 4096) + size_t(slot) * sizeof(FastPathSlot);
  }
  size_t block_bytes() const { return round_up(fast_path_slot(2), 4096); }
  size_t block(int group) const { return kHeaderBytes + group * block_bytes(); }
  size_t bytes() const { return block(kGroups); }
};

LocalRanks::LocalRanks(int rank, std::vector<LocalRank> ranks)
    : rank_(rank), ranks_(std::move(ranks)), marked_(ranks_.size()) {}

std::unique_ptr<LocalRanks> LocalRanks::connect(const std::vector<std::string>& socket_names, int rank, int size,
                                                const std::string& name, const std::string& note,
                                                uint64_t deadline_ns) {
  const auto exchange = open_local_exchange(socket_names, rank, size);
  try {
    auto local_ranks = connect(*exchange, rank, size, name, note, deadline_ns);
    exchange->exchange({}, deadline_ns);  // all map all memory: from now on a rank that is not there is a loss
    return local_ranks;
  } catch (const Error& error) {
    exchange->fail(error);
    throw;
  }
}

std::unique_ptr<LocalRanks> LocalRanks::connect(LocalExchange& exchange, int rank, int size, const std::string& name,
                                                const std::string& note, uint64_t deadline_ns) {
  const size_t fixed = Layout{size_t(size)}.bytes();
  auto mine = Arena::create(fixed);
  auto* header = new (mine->base()) Header{};
  if (getrandom(&header->nonce, sizeof header->nonce, 0) != sizeof header->nonce) throw system_error("drawing a nonce");

  RankInfo info{WireWriter().put(header->nonce).put(name).put(note).put(bitmap_of(bound_to())).take(), {}};
  info.fds.push_back(duplicate(mine->memfd()));
  info.fds.push_back(ProcessWatch::own_pidfd());
  info.fds.push_back(new_event());
  mine->close_memfd();
  auto infos = exchange.exchange(std::move(info), deadline_ns);

  std::vector<LocalRank> ranks(size);
  std::vector<Fd> pidfds(size);
  CoreBitmap cores;
  for (int i = 0; i < size; ++i) {
    WireReader reader(infos[i].note);
    auto nonce = reader.get<uint64_t>();
    if (infos[i].fds.size() != 3) WireReader::fail();
    ranks[i].name = reader.text(), ranks[i].note = reader.text();
    cores = together(std::move(cores), reader.values<uint64_t>());
    ranks[i].arena = i == rank ? mine : Arena::map(infos[i].fds[0].get(), fixed);
    ranks[i].arena->close_memfd();
    if (reinterpret_cast<Header*>(ranks[i].arena->base())->nonce != nonce)
      throw Error(Code::internal, "init: " + ranks[i].name + " does not share memory with this rank");
    if (i != rank) pidfds[i] = std::move(infos[i].fds[1]);
    ranks[i].event = std::move(infos[i].fds[2]);
  }
  std::unique_ptr<LocalRanks> local_ranks(new LocalRanks(rank, std::move(ranks)));
  local_ranks->pidfds_ = std::move(pidfds);
  local_ranks->cores_ = within_quota(count_of(cores));
  local_ranks->no_copy_in_child();
  return local_ranks;
}

std::vector<std::unique_ptr<LocalRanks>> LocalRanks::threads(int n) {
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<Fd> events;
  for (int i = 0; i < n; ++i) {
    arenas.push_back(Arena::create(Layout{size_t(n)}.bytes()));
    new (arenas[i]->base()) Header{};
    arenas[i]->close_memfd();
    events.push_back(new_event());
  }
  std::vector<std::unique_ptr<LocalRanks>> hosts;
  for (int rank = 0; rank < n; ++rank) {
    std::vector<LocalRank> ranks;
    for (int i = 0; i < n; ++i)
      ranks.push_back({"rank " + std::to_string(i) + " (a thread)", "", arenas[i], duplicate(events[i].get())});
    hosts.emplace_back(new LocalRanks(rank, std::move(ranks)));
    hosts.back()->pidfds_.resize(n);
  }
  return hosts;
}

void LocalRanks::no_copy_in_child() {
  // A forked child keeps its parent's own memory, in which tensors may lie, and none of the peers'.
  for (int i = 0; i < size(); ++i)
    if (i != rank_) ranks_[i].arena->no_copy_in_child();
}

Cursor* LocalRanks::head(RingKind s, int group, int owner, int to) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.head(s, to));
}
Cursor* LocalRanks::tail(RingKind s, int group, int owner, int from) const {
  Layout layout{ranks_.size()};
  return reinterpret_cast<Cursor*>(base(owner) + layout.block(group) + layout.tail(s, from));
}
RingWriter LocalRanks::writer(RingKind s, int group, int to, const std::vector<int>& readers) const {
  Cursor* own = head(s, group, rank_, to);
  std::vector<const Cursor*> tails;
  for (int reader : readers)
    if (reader != rank_) tails.push_back(tail(s, group, reader, rank_));
  return {own, reinterpret_cast<std::byte*>(own + 1), Layout::kRing[s], std::move(tails)};
}
RingReader LocalRanks::reader(RingKind s, int group, int from) const {
  const Cursor* theirs = head(s, group, from, rank_);
  return {theirs, reinterpret_cast<const std::byte*>(theirs + 1), Layout::kRing[s], tail(s, group, rank_, from)};
}

RingWriter LocalRanks::common_writer(int group, const std::vector<int>& readers) const {
  return writer(common, group, 0, readers);
}
RingReader LocalRanks::common_reader(int group, int from) const { return reader(common, group, from); }
std::unique_ptr<Link> LocalRanks::control_link(int group, int peer) {
  return std::make_unique<ShmLink>(writer(control, group, peer, {peer}), reader(control, group, peer),
                                   Layout::kRing[control] / 4, *this, peer);
}
std::unique_ptr<Link> LocalRanks::data_link(int group, int peer) {
  return std::make_unique<ShmLink>(writer(data, group, peer, {peer}), reader(data, group, peer), kRecordBytes, *this,
                                   peer);
}

FastPathSlot& LocalRanks::fast_path_slot(int group, int rank, int slot) const {
  Layout layout{ranks_.size()};
  return *reinterpret_cast<FastPathSlot*>(base(rank) + layout.block(group) + layout.fast_path_slot(slot));
}

void LocalRanks::reset_group(int group) const {
  for (int slot : {0, 1}) fast_path_slot(group, rank_, slot).word = 0;
  head(common, group, rank_, 0)->at = 0;
  for (int peer = 0; peer < size(); ++peer)
    for (RingKind s : {common, control, data}) head(s, group, rank_, peer)->at = 0, tail(s, group, rank_, peer)->at = 0;
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

#include "harp_plugin/port/xsk.h"

#include <linux/if_xdp.h>
#include <net/if.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/clock.h"

namespace harp {

namespace {

using lightcc::Fd;

constexpr uint16_t kUseSegments = 1 << 4;  // XDP_USE_SG and XDP_PKT_CONTD, not in the headers of older systems
constexpr uint32_t kGoesOn = 1 << 0;
constexpr useconds_t kPauseUs = 5000;
constexpr uint32_t kFrames = kXskReceiveFrames + kXskSendFrames;

uint32_t acquire(const uint32_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
void release(uint32_t* counter, uint32_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }

uint32_t frame_at(uint64_t address) { return static_cast<uint32_t>(address / kXskFrameBytes); }

template <class Value>
void set(const Fd& socket, int option, const Value& value, const char* what) {
  if (setsockopt(socket.get(), SOL_XDP, option, &value, sizeof value) != 0)
    throw lightcc::system_error(std::string("HARP: giving an AF_XDP socket ") + what);
}

Mapping memory_of(const XskSocket& socket) {
  auto memory = Mapping::of_peer(socket.memory.get(), size_t{kFrames} * kXskFrameBytes, true);
  if (!memory) throw lightcc::system_error("HARP: mapping the memory of an AF_XDP socket");
  return std::move(*memory);
}

// Nothing: the interface refuses these flags, for this errno.
std::optional<XskSocket> bind_xsk(unsigned interface, uint32_t queue, uint16_t flags) {
  const Region region(size_t{kFrames} * kXskFrameBytes);
  XskSocket made{.socket = Fd(socket(AF_XDP, SOCK_RAW | SOCK_CLOEXEC, 0)),
                 .memory = lightcc::duplicate(region.descriptor()),
                 .zero_copy = (flags & XDP_ZEROCOPY) != 0,
                 .segments = (flags & kUseSegments) != 0};
  if (!made.socket) throw lightcc::system_error("HARP: opening an AF_XDP socket (it needs CAP_NET_RAW)");
  xdp_umem_reg memory{};
  memory.addr = reinterpret_cast<uintptr_t>(region.data());
  memory.len = region.bytes();
  memory.chunk_size = kXskFrameBytes;
  set(made.socket, XDP_UMEM_REG, memory, "its memory (is RLIMIT_MEMLOCK too small?)");
  set(made.socket, XDP_UMEM_FILL_RING, kXskReceiveFrames, "a ring");
  set(made.socket, XDP_UMEM_COMPLETION_RING, kXskSendFrames, "a ring");
  set(made.socket, XDP_RX_RING, kXskReceiveFrames, "a ring");
  set(made.socket, XDP_TX_RING, kXskSendFrames, "a ring");
  sockaddr_xdp address{};
  address.sxdp_family = AF_XDP;
  address.sxdp_flags = static_cast<uint16_t>(XDP_USE_NEED_WAKEUP | flags);
  address.sxdp_ifindex = interface;
  address.sxdp_queue_id = queue;
  if (bind(made.socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return {};
  return made;
}

}  // namespace

XskSocket open_xsk(const std::string& interface, uint32_t queue, XskCopies copies, uint64_t patience_ns) {
  const uint64_t until_ns = lightcc::now_ns() + patience_ns;
  for (;;) {
    for (const uint16_t copying : {uint16_t{XDP_ZEROCOPY}, uint16_t{XDP_COPY}}) {
      if (copies == (copying == XDP_COPY ? XskCopies::never : XskCopies::always)) continue;
      for (const uint16_t segments : {kUseSegments, uint16_t{0}}) {
        if (auto made = bind_xsk(if_nametoindex(interface.c_str()), queue, static_cast<uint16_t>(copying | segments)))
          return std::move(*made);
        if (errno == EBUSY) break;
      }
      if (errno == EBUSY) break;
    }
    const bool taken = errno == EBUSY;
    if (!taken || lightcc::now_ns() >= until_ns)
      throw lightcc::system_error("HARP: binding an AF_XDP socket to queue " + std::to_string(queue) + " of " +
                                  interface + (taken ? ", which has one already" : ""));
    usleep(kPauseUs);
  }
}

Xsk::Xsk(XskSocket socket)
    : socket_(std::move(socket)),
      not_inherited_{NotInherited(socket_.socket.get()), NotInherited(socket_.memory.get())},
      memory_(memory_of(socket_)) {
  xdp_mmap_offsets offsets{};
  socklen_t length = sizeof offsets;
  if (getsockopt(descriptor(), SOL_XDP, XDP_MMAP_OFFSETS, &offsets, &length) != 0 || length != sizeof offsets)
    throw lightcc::system_error("HARP: asking for the rings of an AF_XDP socket");
  receive_ = map_ring(XDP_PGOFF_RX_RING, &offsets.rx, kXskReceiveFrames, sizeof(xdp_desc));
  send_ = map_ring(XDP_PGOFF_TX_RING, &offsets.tx, kXskSendFrames, sizeof(xdp_desc));
  fill_ = map_ring(XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, kXskReceiveFrames, sizeof(uint64_t));
  done_ = map_ring(XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, kXskSendFrames, sizeof(uint64_t));
  lent_ = kXskReceiveFrames;
  for (uint32_t i = 0; i < kXskReceiveFrames; ++i) give_back(i);
  for (uint32_t i = kFrames; i > kXskReceiveFrames; --i) free_.push_back(i - 1);
}

Xsk::Ring Xsk::map_ring(uint64_t page, const void* offsets, uint32_t entries, size_t entry_bytes) {
  const auto& at = *static_cast<const xdp_ring_offset*>(offsets);
  mapped_.push_back(Mapping::of_ring(descriptor(), at.desc + entries * entry_bytes, page));
  uint8_t* const base = mapped_.back().data();
  return {.producer = reinterpret_cast<uint32_t*>(base + at.producer),
          .consumer = reinterpret_cast<uint32_t*>(base + at.consumer),
          .flags = reinterpret_cast<uint32_t*>(base + at.flags),
          .entries = base + at.desc,
          .mask = entries - 1};
}

size_t Xsk::receive(std::span<Frame> frames) {
  const uint32_t there = acquire(receive_.producer) - receive_.next;
  const size_t count = std::min<size_t>(there, frames.size());
  for (size_t i = 0; i < count; ++i) {
    const xdp_desc& entry = static_cast<const xdp_desc*>(receive_.entries)[receive_.next++ & receive_.mask];
    frames[i] = {memory_.data() + entry.addr, entry.len, frame_at(entry.addr),
                 (entry.options & kGoesOn) != 0};
  }
  if (count > 0) release(receive_.consumer, receive_.next);
  lent_ += static_cast<uint32_t>(count);
  return count;
}

void Xsk::give_back(uint32_t name) {
  static_cast<uint64_t*>(fill_.entries)[fill_.next++ & fill_.mask] = uint64_t{name} * kXskFrameBytes;
  release(fill_.producer, fill_.next);
  --lent_;
}

bool Xsk::received_more() const { return acquire(receive_.producer) != receive_.next; }

void Xsk::wake_receiver() {
  if (acquire(fill_.flags) & XDP_RING_NEED_WAKEUP) recvfrom(descriptor(), nullptr, 0, MSG_DONTWAIT, nullptr, nullptr);
}

void Xsk::reap() {
  const uint32_t end = acquire(done_.producer);
  if (done_.next == end) return;
  while (done_.next != end)
    free_.push_back(frame_at(static_cast<uint64_t*>(done_.entries)[done_.next++ & done_.mask]));
  release(done_.consumer, end);
}

bool Xsk::send(std::span<const std::span<const uint8_t>> pieces) {
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  const size_t frames = (bytes + kXskFrameBytes - 1) / kXskFrameBytes;
  if (free_.size() < frames) reap();
  if (free_.size() < frames) return false;
  uint8_t* to = nullptr;
  size_t room = 0;
  xdp_desc* entry = nullptr;
  for (std::span<const uint8_t> piece : pieces) {
    while (!piece.empty()) {
      if (room == 0) {
        if (entry) entry->options = kGoesOn;
        const uint64_t at = uint64_t{free_.back()} * kXskFrameBytes;
        free_.pop_back();
        entry = &static_cast<xdp_desc*>(send_.entries)[send_.next++ & send_.mask];
        *entry = {at, 0, 0};
        to = memory_.data() + at;
        room = kXskFrameBytes;
      }
      const size_t part = std::min(room, piece.size());
      std::memcpy(to, piece.data(), part);
      to += part;
      room -= part;
      entry->len += static_cast<uint32_t>(part);
      piece = piece.subspan(part);
    }
  }
  return true;
}

bool Xsk::flush() {
  release(send_.producer, send_.next);
  // The kernel takes some at each call; what it cannot put on the wire now it takes later.
  while (acquire(send_.consumer) != send_.next) {
    const uint32_t before = acquire(send_.consumer);
    if (!(acquire(send_.flags) & XDP_RING_NEED_WAKEUP)) return true;
    const ssize_t sent = sendto(descriptor(), nullptr, 0, MSG_DONTWAIT, nullptr, 0);
    if (acquire(send_.consumer) != before) continue;
    // A link that is down or gone takes none: they wait for the next packet.
    return sent < 0 && errno != EAGAIN && errno != EBUSY && errno != ENOBUFS && errno != EINTR;
  }
  return true;
}

}  // namespace harp

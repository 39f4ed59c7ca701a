#include "harp_plugin/port/shm.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "harp_plugin/port/not_inherited.h"
#include "harp_plugin/port/shm_socket.h"

namespace harp {

using lightcc::Fd;
using lightcc::system_error;

namespace {

constexpr uint32_t kPayload = 65520;  // the largest that OPEN can name; a frame of the pool is 64 KiB
constexpr uint32_t kPoolFrames = 512;
constexpr uint32_t kReceivePackets = 64;  // 4 MiB; below the half of the frames that one peer may hold
constexpr size_t kMostRegions = 4096;     // of one peer
constexpr int kLookEvery = 16;            // attend() calls between two looks at the sockets, while nobody sleeps

// One thread of control: descriptors are added where they are opened, and leave the epoll set with their owner.
class Watched {
 public:
  Watched() = default;
  Watched(int epoll, Fd fd, uint32_t events) : epoll_(epoll), fd_(std::move(fd)) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd_.get();
    watched_ = epoll_ctl(epoll_, EPOLL_CTL_ADD, fd_.get(), &event) == 0;
    if (fd_) not_inherited_.emplace(fd_.get());  // in a forked child it would hide from the peer that this one died
  }
  Watched(Watched&& other) noexcept
      : epoll_(other.epoll_), fd_(std::move(other.fd_)), not_inherited_(std::move(other.not_inherited_)),
        watched_(std::exchange(other.watched_, false)) {}
  Watched& operator=(Watched&& other) noexcept {
    std::swap(epoll_, other.epoll_);
    std::swap(fd_, other.fd_);
    std::swap(not_inherited_, other.not_inherited_);
    std::swap(watched_, other.watched_);
    return *this;
  }
  ~Watched() {
    // Closing would not do where a forked child has the descriptor too.
    if (watched_) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_.get(), nullptr);
  }
  int get() const { return fd_.get(); }
  explicit operator bool() const { return watched_; }

 private:
  int epoll_ = -1;
  Fd fd_;
  std::optional<NotInherited> not_inherited_;
  bool watched_ = false;
};

struct ShmSendLink final : SendLink {
  ShmSendLink(const Address& to, std::unique_ptr<Region> r, Watched s, Fd b)
      : SendLink(to, reinterpret_cast<PacketRing*>(r->data()), b.get()), memory(std::move(r)), socket(std::move(s)),
        doorbell(std::move(b)) {}
  std::unique_ptr<Region> memory;
  Watched socket;
  Fd doorbell;
};

struct ShmReceiveLink final : ReceiveLink {
  ShmReceiveLink(const Address& from, Mapping m, Watched s, Watched b)
      : ReceiveLink(from, reinterpret_cast<PacketRing*>(m.data())), memory(std::move(m)), socket(std::move(s)),
        doorbell(std::move(b)) {}
  Mapping memory;
  Watched socket;
  Watched doorbell;
};

class ShmRendezvous final : public Rendezvous {
 public:
  explicit ShmRendezvous(const Address& own)
      : own_(own), epoll_(epoll_create1(EPOLL_CLOEXEC)), listener_(epoll_.get(), listen_on(own), EPOLLIN) {
    if (!epoll_ || !listener_) throw system_error("watching a socket (epoll)");
  }

  // Connecting to a listening AF_UNIX socket is done at once, and what is sent waits there until it is accepted: the
  // first packet can go into the ring right away.
  std::unique_ptr<SendLink> connect(const Address& to) override {
    Watched socket(epoll_.get(), connect_to(to), EPOLLIN | EPOLLRDHUP);
    Fd bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!socket || !bell) return nullptr;
    std::unique_ptr<Region> memory;
    try {
      memory = std::make_unique<Region>(sizeof(PacketRing));
    } catch (const lightcc::Error&) {
      return nullptr;  // no descriptors or no memory left, now: the packet is lost
    }
    ShmMessage hello{.kind = ShmMessage::kHello, .bytes = memory->bytes()};
    hello.from = own_.bytes;
    hello.from_size = own_.size;
    if (!send_message(socket.get(), hello, {memory->descriptor(), bell.get()})) return nullptr;
    return std::make_unique<ShmSendLink>(to, std::move(memory), std::move(socket), std::move(bell));
  }
  bool show(SendLink& link, const SentRegion& region) override {
    const ShmMessage message{.kind = ShmMessage::kRegion, .region = region.id, .bytes = region.bytes};
    return send_message(static_cast<ShmSendLink&>(link).socket.get(), message, {region.memory->descriptor()});
  }
  void hide(SendLink& link, uint32_t region) override {
    // Where this is lost the peer keeps a mapping until the link ends.
    send_message(static_cast<ShmSendLink&>(link).socket.get(), {.kind = ShmMessage::kForget, .region = region}, {});
  }

  void attend(Links& links, bool awake) override {
    if (!awake && ++calls_ % kLookEvery != 0) return;
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == listener_.get()) {
        accept_all(links);
      } else {
        heard(links, fd);
      }
    }
  }
  int descriptor() const override { return epoll_.get(); }

 private:
  void accept_all(Links& links) {
    for (bool more = true; more;) {
      Fd accepted = accept_from(listener_.get(), &more);
      if (!accepted) continue;
      Watched socket(epoll_.get(), std::move(accepted), EPOLLIN | EPOLLRDHUP);
      if (socket && !greet(links, socket)) strangers_.push_back(std::move(socket));
    }
  }

  // true: the socket is settled, as a link or as a failure.
  bool greet(Links& links, Watched& socket) {
    ShmReceived hello;
    const Heard heard = receive_message(socket.get(), &hello);
    if (heard == Heard::nothing) return false;
    Watched done(std::move(socket));
    const ShmMessage& message = hello.message;
    if (heard == Heard::end || message.kind != ShmMessage::kHello || message.from_size != kShmAddressBytes) return true;
    auto memory = Mapping::of_peer(hello.descriptors[0].get(), sizeof(PacketRing), true);
    // Edge-triggered: it need not be read, and its owner cannot make us wait in a read.
    Watched bell(epoll_.get(), std::move(hello.descriptors[1]), EPOLLIN | EPOLLET);
    if (!memory || !bell) return true;
    Address from;
    std::copy_n(message.from.begin(), kShmAddressBytes, from.bytes.begin());
    from.size = kShmAddressBytes;
    links.add(std::make_unique<ShmReceiveLink>(from, std::move(*memory), std::move(done), std::move(bell)));
    return true;
  }

  void heard(Links& links, int fd) {
    for (auto& link : links.receivers) {
      if (link && static_cast<ShmReceiveLink&>(*link).socket.get() == fd) return listen_to(*link, fd);
    }
    for (auto& link : links.senders) {
      if (static_cast<ShmSendLink&>(*link).socket.get() != fd) continue;
      ShmReceived nothing;  // is what a receiver has to say
      if (receive_message(fd, &nothing) != Heard::nothing) link->gone = true;
      return;
    }
    for (auto stranger = strangers_.begin(); stranger != strangers_.end(); ++stranger) {
      if (stranger->get() != fd) continue;
      if (greet(links, *stranger)) strangers_.erase(stranger);
      return;
    }
  }

  // What the sender of packets announces.
  void listen_to(ReceiveLink& link, int fd) {
    ShmReceived got;
    Heard heard;
    while ((heard = receive_message(fd, &got)) == Heard::message) {
      const uint32_t id = got.message.region;
      const auto known = std::find_if(link.regions.begin(), link.regions.end(),
                                      [&](const ReceiveLink::Seen& seen) { return seen.id == id; });
      const bool is_known = known != link.regions.end() && id >= Region::kFirstId;
      if (got.message.kind == ShmMessage::kForget && is_known) {
        known->forgotten = true;
        if (known->lent == 0) *known = {};
      } else if (got.message.kind == ShmMessage::kRegion && !is_known && id >= Region::kFirstId) {
        learn(link, got);
      } else {
        link.ended = true;
      }
    }
    if (heard == Heard::end) end(link, fd);
  }

  void learn(ReceiveLink& link, const ShmReceived& got) {
    auto mapping = Mapping::of_peer(got.descriptors[0].get(), got.message.bytes, false);
    if (!mapping || link.regions.size() >= kMostRegions) {
      link.ended = true;
      return;
    }
    const auto base = reinterpret_cast<uintptr_t>(mapping->data());
    auto place = std::find_if(link.regions.begin(), link.regions.end(),
                              [](const ReceiveLink::Seen& seen) { return seen.id == 0; });
    if (place == link.regions.end()) place = link.regions.emplace(place);
    *place = {.id = got.message.region, .base = base, .bytes = got.message.bytes, .mapping = std::move(mapping)};
  }

  void end(ReceiveLink& link, int fd) {
    link.ended = true;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);  // it would be readable until what is lent comes back
  }

  Address own_;
  Fd epoll_;
  Watched listener_;
  std::vector<Watched> strangers_;  // have connected, and not said who they are
  unsigned calls_ = 0;
};

}  // namespace

std::unique_ptr<RingPort> open_shm() {
  const Address own = random_shm_address();
  const Caps caps{.name = "shm",
                  .payload = kPayload,
                  .receive_packets = kReceivePackets,
                  .holds_payload = true,
                  .places_payload = false,
                  .zero_copy = true,  // from regions
                  .locals = 1,
                  .speed_mbit = 0,
                  .address = own};
  auto pool = make_region(size_t{kPoolFrames} * RingPort::frame_bytes(kPayload));
  const SentRegion region{pool->id(), reinterpret_cast<uintptr_t>(pool->data()), pool->bytes(), pool};
  return std::make_unique<RingPort>(caps, std::make_unique<ShmRendezvous>(own), region, kPoolFrames);
}

}  // namespace harp

#include "harp_plugin/port/xdp.h"

#include <poll.h>
#include <sys/epoll.h>

#include <cstring>
#include <unordered_map>

#include "base/clock.h"
#include "harp_plugin/port/interfaces.h"
#include "harp_plugin/port/neighbors.h"
#include "harp_plugin/port/udp_frames.h"
#include "harp_plugin/port/xdp_frame.h"
#include "harp_plugin/port/xdp_lease.h"

namespace harp {

namespace {

using lightcc::Fd;

constexpr size_t kMostPeers = 16384;
constexpr uint64_t kLookAgainNs = 1'000'000'000, kLookSoonNs = 20'000'000;
constexpr uint32_t kRoundsAKernel = 64;  // between two looks at the UDP sockets
constexpr uint64_t kByKernel = uint64_t{1} << 63, kJoined = uint64_t{1} << 62;  // in RxPacket::frame
constexpr int kQueueShift = 32;
constexpr uint32_t kLongFrames = 512;

struct AddressHash {
  size_t operator()(const Address& address) const {
    uint64_t start;
    std::memcpy(&start, address.bytes.data(), sizeof start);
    return std::hash<uint64_t>()(start);  // family, port and address of a sockaddr_in
  }
};

struct Peer {
  std::optional<FrameHeaders> headers;  // nothing: the kernel knows the way
  uint64_t look_ns = 0;                 // when the kernel is asked again
};

struct Queue {
  Xsk xsk;
  // What has come so far of a packet that is longer than a frame.
  bool begun = false;
  size_t bytes = 0;
  std::optional<uint32_t> joined = {};  // a frame of UdpFrames; nothing: there was none
};

UdpOptions udp_options(const XdpOptions& options) {
  UdpOptions udp = options.udp;
  udp.keeps_port = !options.harpd.empty();
  return udp;
}

class Xdp : public XdpPort {
 public:
  explicit Xdp(const XdpOptions& options) : Xdp(options, choose_interfaces(options.udp.address).front()) {}
  Xdp(const XdpOptions& options, const Interface& interface)
      : survives_harpd_(options.survives_harpd),
        udp_(open_udp(udp_options(options))),
        neighbors_(interface.name, address_of_socket(udp_->socket(0)).sin_addr.s_addr) {
    std::vector<int> sockets;
    for (int i = 0; i < udp_->caps().locals; ++i) sockets.push_back(udp_->socket(i));
    for (const int one : sockets) own_.push_back(address_of_socket(one));
    const XdpWish wish{.interface = interface.name, .queues = options.queues, .copies = options.copies};
    lease_ = options.harpd.empty() ? own_lease(wish, own_) : lease_from_harpd(options.harpd, wish, sockets);
    bool segments = true;
    for (XskSocket& one : lease_.sockets) {
      segments = segments && one.segments;
      queues_.push_back({Xsk(std::move(one))});
    }
    caps_ = udp_->caps();
    caps_.name = "xdp";
    caps_.places_payload = false;
    caps_.sent_together = 1;
    constexpr uint32_t kAFrame = kXskFrameBytes - kXskHeadroom;
    if (!segments)
      caps_.payload = std::min<uint32_t>(caps_.payload, (kAFrame - kFrameHeaders - kHeaderBytes - kTagBytes) /
                                                            kOffsetUnit * kOffsetUnit);
    longest_ = kFrameHeaders + kHeaderBytes + caps_.payload + kTagBytes;
    const auto frames_a_packet = static_cast<uint32_t>(longest_ / kAFrame + 1);
    const uint32_t of_sockets = caps_.receive_packets;
    caps_.receive_packets = kXskReceiveFrames / 2 / frames_a_packet;
    if (survives_harpd_ || queues_.size() < queues_of(interface.name))  // the kernel may have to hold them
      caps_.receive_packets = std::min(caps_.receive_packets, of_sockets);
    if (frames_a_packet > 1) long_ = std::make_unique<UdpFrames>(kLongFrames, longest_, true);
    if (lease_.daemon) not_inherited_.emplace(lease_.daemon.get());
    watch();
  }

  const Caps& caps() const override { return caps_; }
  const XdpCounters& counters() const override { return counters_; }
  std::vector<std::pair<const char*, uint64_t>> counted() const override {
    return {{"sent", counters_.sent},
            {"received", counters_.received},
            {"sent_by_kernel", counters_.sent_by_kernel},
            {"received_by_kernel", counters_.received_by_kernel},
            {"queues", queues_.size()},
            {"zero_copy_queues", std::count_if(queues_.begin(), queues_.end(),
                                               [](const Queue& one) { return one.xsk.zero_copy(); })}};
  }

  size_t tx(std::span<const TxPacket> packets) override {
    if (harpd_lost_ && !survives_harpd_) {  // they are lost, and the next rx() says why
      says_why_ = true;
      done_ += packets.size();
      return packets.size();
    }
    const uint64_t now_ns = lightcc::now_ns();
    size_t taken = 0;
    while (taken < packets.size()) {
      const std::span rest = packets.subspan(taken);
      const FrameHeaders* const to = headers_to(*rest[0].to, now_ns);
      const size_t sent = to ? send(rest[0], *to) : send_by_kernel(rest, now_ns);
      if (sent == 0) break;
      taken += sent;
    }
    flush();
    if (taken < packets.size()) ++counters_.refused;
    done_ += taken;
    return taken;
  }
  uint64_t tx_done() override { return done_; }  // all was copied

  size_t rx(std::span<RxPacket> packets, std::span<const Expected>) override {
    if (std::exchange(says_why_, false)) throw harpd_has_ended();
    if (unflushed_) flush();
    if (++rounds_ >= kRoundsAKernel || harpd_lost_) {
      rounds_ = 0;
      if (lease_.daemon && !harpd_lost_) look_for_harpd();
      if (const size_t count = receive_by_kernel(packets)) {
        rounds_ = kRoundsAKernel;  // more may be there
        return count;
      }
    }
    for (size_t i = 0; i < queues_.size(); ++i) {
      current_ = (current_ + 1) % queues_.size();
      if (const size_t count = receive(queues_[current_], packets)) return count;
    }
    return 0;
  }

  void release(std::span<const RxPacket> packets) override {
    for (const RxPacket& packet : packets) {
      if (packet.frame & kByKernel) {
        RxPacket of_udp = packet;
        of_udp.frame &= ~kByKernel;
        udp_->release(std::span(&of_udp, 1));
      } else if (packet.frame & kJoined) {
        long_->release(static_cast<uint32_t>(packet.frame));
      } else {
        queues_[packet.frame >> kQueueShift].xsk.give_back(static_cast<uint32_t>(packet.frame));
      }
    }
  }

  int descriptor() const override { return bell_.get(); }
  bool arm() override {
    if (unflushed_) return false;
    for (Queue& queue : queues_) {
      queue.xsk.wake_receiver();
      if (queue.xsk.received_more()) return false;
    }
    return udp_->arm();
  }
  void disarm() override { rounds_ = kRoundsAKernel; }  // what woke it may be the kernel's

 private:
  void watch() {
    bell_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    const auto add = [&](int descriptor) {
      epoll_event event{.events = EPOLLIN, .data = {}};
      return epoll_ctl(bell_.get(), EPOLL_CTL_ADD, descriptor, &event) == 0;
    };
    bool watched = bell_ && add(udp_->descriptor()) && (!lease_.daemon || add(lease_.daemon.get()));
    for (const Queue& queue : queues_) watched = watched && add(queue.xsk.descriptor());
    if (!watched) throw lightcc::system_error("HARP: watching AF_XDP sockets");
  }

  // Its XDP program has ended with it: packets come by the kernel again.
  void look_for_harpd() {
    pollfd hung_up{lease_.daemon.get(), POLLIN, 0};
    if (poll(&hung_up, 1, 0) <= 0 || !hung_up.revents) return;
    harpd_lost_ = true;
    epoll_ctl(bell_.get(), EPOLL_CTL_DEL, lease_.daemon.get(), nullptr);
    if (!survives_harpd_) throw harpd_has_ended();
  }
  static lightcc::Error harpd_has_ended() {
    return lightcc::Error(lightcc::Code::internal,
                          "HARP: harpd, which gave this process its AF_XDP sockets, has ended (HARP_XDP_FALLBACK=1 "
                          "lets the kernel carry packets then)");
  }

  // ---- sending

  bool send(const TxPacket& packet, const FrameHeaders& to) {
    const std::span tag(packet.tag.data(), packet.tagged ? kTagBytes : 0);
    const auto headers =
        to.with(own_[packet.local].sin_port, packet.head_bytes + packet.payload_bytes + tag.size());
    const std::array pieces = {std::span<const uint8_t>(headers), std::span(packet.head.data(), packet.head_bytes),
                               std::span(packet.payload, packet.payload_bytes), tag};
    if (!queues_[packet.local % queues_.size()].xsk.send(pieces)) return false;
    unflushed_ = true;
    ++counters_.sent;
    return true;
  }

  // The first packet and those behind it that go the same way. How many were taken.
  size_t send_by_kernel(std::span<const TxPacket> packets, uint64_t now_ns) {
    size_t count = 1;
    while (count < packets.size() && !headers_to(*packets[count].to, now_ns)) ++count;
    const size_t sent = udp_->tx(packets.first(count));
    counters_.sent_by_kernel += sent;
    return sent;
  }

  const FrameHeaders* headers_to(const Address& address, uint64_t now_ns) {  // nullptr: the kernel knows the way
    Peer& peer = peer_of(address);
    if (now_ns >= peer.look_ns) look(peer, address, now_ns);
    return peer.headers && !harpd_lost_ ? &*peer.headers : nullptr;
  }

  Peer& peer_of(const Address& address) {
    if (last_ && last_->first == address) return last_->second;
    if (peers_.size() >= kMostPeers) peers_.clear();  // those that are in use are found again
    last_ = &*peers_.try_emplace(address).first;
    return last_->second;
  }

  void look(Peer& peer, const Address& address, uint64_t now_ns) {
    const sockaddr_in ip = ip_of(address);
    peer.headers.reset();
    if (const auto ethernet = neighbors_.find(ip))
      peer.headers.emplace(neighbors_.own(), *ethernet, own_[0].sin_addr.s_addr, ip);
    peer.look_ns = now_ns + (peer.headers ? kLookAgainNs : kLookSoonNs);
  }

  void flush() {
    unflushed_ = false;
    for (Queue& queue : queues_) unflushed_ |= !queue.xsk.flush();
  }

  // ---- receiving

  size_t receive_by_kernel(std::span<RxPacket> packets) {
    const size_t count = udp_->rx(packets, {});
    for (RxPacket& packet : packets.first(count)) packet.frame |= kByKernel;
    counters_.received_by_kernel += count;
    return count;
  }

  size_t receive(Queue& queue, std::span<RxPacket> packets) {
    std::array<Xsk::Frame, 64> frames;
    const size_t came = queue.xsk.receive(std::span(frames).first(std::min(frames.size(), packets.size())));
    if (came == 0) queue.xsk.wake_receiver();
    size_t count = 0;
    for (const Xsk::Frame& frame : std::span(frames).first(came)) {
      if (!frame.more && !queue.begun) {
        const auto index = static_cast<uint64_t>(&queue - queues_.data());
        auto packet = read_frame({frame.data, frame.bytes}, own_);
        if (!packet || frame.bytes > longest_) {
          queue.xsk.give_back(frame.name);
          ++counters_.dropped;
          continue;
        }
        packet->frame = index << kQueueShift | frame.name;
        packet->lendable = queue.xsk.plenty();
        packets[count++] = *packet;
      } else {
        const auto packet = join(queue, frame);
        queue.xsk.give_back(frame.name);
        if (packet) packets[count++] = *packet;
      }
    }
    counters_.received += count;
    return count;
  }

  // A further part of a packet; all of it with its last part, if it fitted.
  std::optional<RxPacket> join(Queue& queue, const Xsk::Frame& part) {
    if (!queue.begun && long_ && long_->free() > 0) queue.joined = long_->take();
    if (queue.joined && queue.bytes + part.bytes <= longest_)
      std::memcpy(long_->bytes(*queue.joined) + queue.bytes, part.data, part.bytes);
    queue.bytes += part.bytes;
    queue.begun = part.more;
    if (part.more) return {};
    const size_t bytes = std::exchange(queue.bytes, 0);
    const std::optional<uint32_t> joined = std::exchange(queue.joined, {});
    std::optional<RxPacket> packet;
    if (joined && bytes <= longest_) packet = read_frame({long_->bytes(*joined), bytes}, own_);
    if (packet) {
      packet->frame = kJoined | *joined;
      packet->lendable = long_->plenty();
      return packet;
    }
    if (joined) long_->release(*joined);
    ++counters_.dropped;
    return {};
  }

  const bool survives_harpd_;
  std::unique_ptr<UdpPort> udp_;
  Neighbors neighbors_;
  XdpLease lease_;
  std::optional<NotInherited> not_inherited_;  // the connection to harpd
  std::vector<Queue> queues_;
  std::unique_ptr<UdpFrames> long_;  // packets that were put together
  Caps caps_;
  XdpCounters counters_;
  Fd bell_;
  std::vector<sockaddr_in> own_;  // of each local
  std::unordered_map<Address, Peer, AddressHash> peers_;
  std::pair<const Address, Peer>* last_ = nullptr;
  size_t longest_ = 0;  // frame that may come
  size_t current_ = 0;
  uint32_t rounds_ = 0;
  bool unflushed_ = false, harpd_lost_ = false, says_why_ = false;
  uint64_t done_ = 0;
};

}  // namespace

std::unique_ptr<XdpPort> open_xdp(const XdpOptions& options) { return std::make_unique<Xdp>(options); }

}  // namespace harp

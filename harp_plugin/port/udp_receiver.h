// The receiving half of a UDP socket, in one of two modes.
//   direct:  each datagram is scattered: header into a frame, payload to where it is expected to belong. If it is the
//            expected one, no copy is left to do; if not, its payload is taken out of there before anyone looks.
//   gro:     the kernel hands over many datagrams of a flow as one (UDP_GRO), which costs far less but cannot be
//            scattered: they are handed on as they lie.
// It starts with gro, and again every second for some receptions, and stays with what the kernel does.
#pragma once
#include <sys/socket.h>

#include <vector>

#include "harp_plugin/port/udp.h"

namespace harp {

class UdpReceiver {
 public:
  UdpReceiver(int socket, uint16_t local, uint32_t payload, bool gro, UdpCounters&);

  size_t receive(std::span<RxPacket>, std::span<const Expected>, uint64_t now_ns);
  void release(const RxPacket&);
  bool holds_more() const { return aggregate_ < aggregates_.size(); }  // received, not handed out yet

 private:
  static constexpr size_t kBatch = 64;
  enum class Mode : uint8_t { gro, draining, direct };
  struct Frame {
    uint8_t* bytes;
    uint32_t references;
  };
  // A pool of frames of equal size.
  struct Pool {
    Pool(size_t frames, size_t frame_bytes);
    std::vector<uint8_t> memory;
    std::vector<Frame> frames;
    std::vector<uint32_t> free;
  };
  size_t receive_direct(std::span<RxPacket>, std::span<const Expected>);
  size_t receive_aggregates(std::span<RxPacket>);
  bool hand_out(const Expected*, uint32_t frame, uint32_t bytes, RxPacket*);
  size_t split(std::span<RxPacket>);
  void set_gro(bool on);

  const int socket_;
  const uint16_t local_;
  const uint32_t payload_;
  const bool may_gro_;
  UdpCounters& counters_;
  Mode mode_;
  Pool small_, large_;
  uint64_t next_trial_ns_ = 0;
  uint32_t trial_left_ = 0, trial_aggregates_ = 0;
  size_t batch_ = 8;

  struct Aggregate {  // a frame of which not all datagrams have been handed out
    uint32_t frame, bytes, at, segment;
    Address from;
  };
  std::vector<Aggregate> aggregates_;
  size_t aggregate_ = 0;

  std::vector<mmsghdr> messages_;
  std::vector<iovec> pieces_;
  std::vector<sockaddr_storage> names_;
  struct alignas(cmsghdr) Control : std::array<uint8_t, 64> {};
  std::vector<Control> controls_;
  std::vector<uint32_t> frames_;
};

}  // namespace harp

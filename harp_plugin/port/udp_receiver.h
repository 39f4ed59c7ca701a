// The receiving half of a UDP socket. A datagram is scattered: headers into a frame, payloads to where they are
// expected to belong. For those that are the expected ones no copy is left to do; the others are put together in the
// frame before anyone looks.
//   alone:       the kernel gives each packet as a datagram; many are received by one call.
//   aggregates:  the kernel gives many packets of a flow as one datagram (UDP_GRO), with all that was expected as its
//                scatter list; one is received by one call.
// It starts with aggregates and goes on with what the network does. After a tenth of a second it looks whether that has
// changed: so what comes after a pause, as gradients do, comes in aggregates from the start.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <memory>
#include <span>

#include "harp_plugin/port/udp.h"
#include "harp_plugin/port/udp_frames.h"

namespace harp {

// What the sockets of a port share. A frame is so long that all of a datagram fits behind the headers' slots.
struct UdpPools {
  UdpPools(uint32_t payload_and_tag, bool gro);
  UdpFrames alone, aggregates;
};

class UdpReceiver {
 public:
  UdpReceiver(int socket, uint16_t local, uint32_t payload, bool gro, UdpPools&, UdpCounters&);

  size_t receive(std::span<RxPacket>, std::span<const Expected>);
  static void release(const RxPacket&, UdpPools&);
  bool holds_more() const { return rest_.at < rest_.bytes; }  // received, not handed out yet

 private:
  static constexpr size_t kBatch = 64;
  enum class GroMode : uint8_t { aggregates, leaving, alone };
  struct Parts {  // of an aggregate that are not handed out yet: they lie in its frame
    const uint8_t* begin = nullptr;
    uint32_t frame = 0, bytes = 0, at = 0, segment = 0;
    Address from;
  };
  struct alignas(cmsghdr) Control : std::array<uint8_t, CMSG_SPACE(sizeof(int))> {};
  struct Batch {
    std::array<mmsghdr, kBatch> messages{};
    std::array<std::array<iovec, 3>, kBatch> pieces;
    std::array<Address, kBatch> names;  // where they come from: the kernel writes a sockaddr_in
    std::array<iovec, 2 * kBatch + 1> aggregate;  // the scatter list of one datagram
    Control control;
  };

  size_t receive_alone(std::span<RxPacket>, std::span<const Expected>);
  size_t receive_aggregates(std::span<RxPacket>, std::span<const Expected>);
  int receive_aggregate(std::span<RxPacket>, std::span<const Expected>, size_t* count);
  size_t hand_out_rest(std::span<RxPacket>);
  void set_gro(bool on);
  void consider(size_t packets);
  void leave();

  const int socket_;
  const uint16_t local_;
  const uint32_t payload_;
  const bool may_gro_;
  GroMode mode_;
  uint64_t next_look_ns_ = 0;
  uint32_t receptions_ = 0, packets_ = 0;  // since the mode was considered last
  uint32_t hesitations_ = 0;               // in a row, to leave the mode for aggregates
  size_t batch_size_ = 8;
  UdpPools& pools_;
  UdpCounters& counters_;
  Parts rest_;
  std::unique_ptr<Batch> batch_ = std::make_unique<Batch>();
};

}  // namespace harp

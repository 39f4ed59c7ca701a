// An AF_XDP socket: one queue of an interface, whose packets lie in memory that kernel and process share. A privileged
// process opens it (open_xsk()); any process that has its descriptors uses it (Xsk).
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "harp_plugin/port/not_inherited.h"
#include "harp_plugin/port/region.h"

namespace harp {

enum class XskCopies { if_needed, always, never };  // by the kernel, between its packets and the shared memory

// A socket that is bound, and the memory that is registered with it.
struct XskSocket {
  lightcc::Fd socket, memory;
  bool zero_copy = false;
  bool segments = false;  // packets may be longer than a frame
};

inline constexpr uint32_t kXskFrameBytes = 4096;
inline constexpr uint32_t kXskHeadroom = 256;  // the kernel's, before a received packet
inline constexpr uint32_t kXskReceiveFrames = 2048, kXskSendFrames = 1024;

// The kernel lets go of a queue a moment after its socket was closed, or later where other interfaces come and go: so
// long it is tried.
inline constexpr uint64_t kXskLetGoNs = 1'000'000'000;

// Throws Error{internal}: the queue is another socket's, the interface's driver cannot do it.
XskSocket open_xsk(const std::string& interface, uint32_t queue, XskCopies, uint64_t patience_ns = kXskLetGoNs);

// One thread.
class Xsk {
 public:
  struct Frame {
    const uint8_t* data;
    uint32_t bytes;
    uint32_t name;
    bool more;  // the packet goes on in the next frame
  };

  explicit Xsk(XskSocket);
  int descriptor() const { return socket_.socket.get(); }
  bool zero_copy() const { return socket_.zero_copy; }
  bool segments() const { return socket_.segments; }

  size_t receive(std::span<Frame>);
  void give_back(uint32_t name);
  bool plenty() const { return lent_ <= kXskReceiveFrames / 2; }
  bool received_more() const;
  void wake_receiver();  // the kernel asks for it where frames had run out

  // A packet that consists of these pieces, copied; false: no room.
  bool send(std::span<const std::span<const uint8_t>> pieces);
  // Tells the kernel of what was sent. False: it has not taken all of it, so that this must be called again.
  bool flush();

 private:
  // A ring that the kernel shares: one side moves the producer's counter, the other the consumer's.
  struct Ring {
    uint32_t* producer = nullptr;
    uint32_t* consumer = nullptr;
    uint32_t* flags = nullptr;
    void* entries = nullptr;
    uint32_t mask = 0;
    uint32_t next = 0;  // of our side
  };
  Ring map_ring(uint64_t page, const void* offsets, uint32_t entries, size_t entry_bytes);
  void reap();  // frames that have been sent

  XskSocket socket_;
  NotInherited not_inherited_[2];
  Mapping memory_;
  std::vector<Mapping> mapped_;
  Ring receive_, fill_, send_, done_;
  uint32_t lent_ = 0;
  std::vector<uint32_t> free_;  // frames to send from
};

}  // namespace harp

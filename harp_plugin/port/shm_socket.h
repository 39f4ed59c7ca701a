// What goes over the sockets between shm ports: a fixed message with up to two descriptors. Nothing here waits.
#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include "base/fd.h"
#include "harp_plugin/core/packet.h"
#include "harp_plugin/port/descriptors.h"

namespace harp {

struct ShmMessage {
  static constexpr uint32_t kMagic = 0x48415250;
  static constexpr uint32_t kVersion = 1;
  enum Kind : uint32_t {
    kHello = 1,   // from the side that sends packets, first: descriptors of the ring's memory and of the doorbell
    kRegion = 2,  // descriptor of a region
    kForget = 3   // a region is not used any more
  };
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t kind = 0;
  uint32_t region = 0;
  uint64_t bytes = 0;  // of the ring's memory or of the region
  std::array<uint8_t, 31> from{};  // the sender's own address
  uint8_t from_size = 0;
};

struct ShmReceived {
  ShmMessage message;
  std::array<lightcc::Fd, 2> descriptors;
};

inline constexpr uint8_t kShmAddressBytes = 16;  // random

Address random_shm_address();
lightcc::Fd listen_on(const Address&);
// No descriptor: nobody is there, it is somebody else's, or it is too busy.
lightcc::Fd connect_to(const Address&);
lightcc::Fd accept_from(int listener, bool* more);  // none: another user's, or (more false) nobody is waiting
bool send_message(int socket, const ShmMessage&, std::initializer_list<int> descriptors);
Heard receive_message(int socket, ShmReceived*);  // end: closed, or not what we speak

}  // namespace harp

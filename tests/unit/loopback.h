// Where ranks of a test listen, if it counts on nobody listening there once they have gone.
#pragma once
#include <unistd.h>

#include <string>

#include "net/address.h"

namespace lightcc {

// An address of this host for this process alone.
inline Address own_loopback() {
  const int pid = int(getpid());
  return Address::parse("127." + std::to_string(1 + (pid >> 16)) + "." + std::to_string(pid >> 8 & 255) + "." +
                        std::to_string(pid & 255));
}

// At 127.0.0.1, or at a port that the system picks, another process that runs side by side may listen as soon as the
// port is free again. These ports are below those that a Linux picks from.
inline Fd listen_on_own_loopback() { return listen_on(own_loopback(), {20'000, 32'000}); }

}  // namespace lightcc

// Messages over AF_UNIX sockets (SOCK_SEQPACKET) that carry descriptors. Nothing here waits: not even close(), which
// may take as long as whoever has passed a descriptor likes (a TCP socket that lingers, a file of a file system of
// theirs). What has not been received is closed with the socket that it was sent to.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"

namespace harp {

enum class Heard { message, nothing, end };  // end: closed, or not a message of this length

bool send_with_descriptors(int socket, const void* message, size_t bytes, std::span<const int> descriptors);
Heard receive_with_descriptors(int socket, void* message, size_t bytes, std::vector<lightcc::Fd>* descriptors);

}  // namespace harp

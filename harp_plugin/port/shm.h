// Ports of processes of one host and one user: the rings lie in shared memory (memfds, sealed against shrinking), and
// are handed over on a SOCK_SEQPACKET socket of the abstract AF_UNIX name space. Nothing of it has a name in a file
// system, so nothing is left after kill -9; it works across mount and PID name spaces (not across network ones).
//
// Payloads in a Region that was added are read where they are; others are copied once, into the port's pool.
// Trust: whoever has the same uid may connect, and may send what it likes; all that it writes into shared memory is
// checked on a private copy, so that it can break its own link only. The end of a peer is seen by its socket. (A child
// that it forked without exec holds the socket too: then only the protocol's time-out notices.)
#pragma once
#include <memory>

#include "harp_plugin/port/ring_port.h"

namespace harp {

std::unique_ptr<RingPort> open_shm();

}  // namespace harp

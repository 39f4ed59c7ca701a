// Ports within a process. Packets travel as descriptors: the receiver sees the payload where the sender has it.
// That memory must stay until tx_done() counts the packet. A port that is closed before delivers nothing more that lies
// outside it, but packets that a receiver has already taken are read until it releases them.
#pragma once
#include <memory>

#include "harp_plugin/port/ring_port.h"

namespace harp {

class MemNetwork;  // ports reach each other if they are opened with the same one. Any thread.

std::shared_ptr<MemNetwork> make_mem_network();
std::unique_ptr<RingPort> open_mem(std::shared_ptr<MemNetwork>, uint32_t payload = 8944);

}  // namespace harp

// The network interfaces of this host, and which of them is meant.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace harp {

struct Interface {
  std::string name, address;  // numeric IPv4
  uint32_t mtu = 0;
  uint64_t speed_mbit = 0;  // 0: not known
};

std::vector<Interface> interfaces();  // that are up and have an IPv4 address; an interface with two is there twice

// As NCCL_SOCKET_IFNAME: names' beginnings with commas between, `=` before them: whole names, `^`: all but these.
bool matches(std::string_view pattern, std::string_view name);

// Those that are meant by a pattern or have this address, at least one. Without a pattern: not the loopback nor bridges
// of virtual machines, unless there is nothing else. Throws Error{invalid_argument} with what there is.
std::vector<Interface> choose_interfaces(const std::string& pattern_or_address);

}  // namespace harp

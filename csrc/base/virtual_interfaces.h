// Network interfaces that containers and virtual machines make. Every host has the same addresses on them, so no other
// host can be reached there.
#pragma once
#include <algorithm>
#include <iterator>
#include <string_view>

namespace lightcc {

inline bool is_virtual_interface(std::string_view name) {
  constexpr std::string_view kPrefixes[] = {"docker", "podman",  "virbr", "veth", "cni",
                                            "br-",    "flannel", "cali",  "lxc",  "lxd"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](auto prefix) { return name.starts_with(prefix); });
}

}  // namespace lightcc

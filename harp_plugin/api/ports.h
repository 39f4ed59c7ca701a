// The kinds of ports, by name.
#pragma once
#include <memory>
#include <string>

#include "harp_plugin/api/config.h"
#include "harp_plugin/port/port.h"

namespace harp {

// Throws lightcc::Error where there is none of this name (it lists those there are), or it cannot be opened.
std::unique_ptr<Port> open_port(const Config&);
std::string name_of_peer(const std::string& port, const Address&);  // "10.0.0.2:45123"

}  // namespace harp

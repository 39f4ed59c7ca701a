// Whether this process is a fork of the one that made an engine: its threads do not exist here, and its sockets are
// the other's.
#pragma once
#include <cstdint>

namespace harp {

uint32_t forks();  // that lie between the first process that called and this one

}  // namespace harp

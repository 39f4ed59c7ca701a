// A core for an engine alone: engines of several processes on a host must not be pinned to the same one.
#pragma once
#include <optional>

#include "base/fd.h"
#include "harp_plugin/port/not_inherited.h"

namespace harp {

// Held as a name of the abstract AF_UNIX space, which the kernel frees however the process ends.
struct CoreClaim {
  int core;
  lightcc::Fd name;
  NotInherited not_inherited;
};
std::optional<CoreClaim> claim_core();  // one that this process is bound to; nothing: all are taken

}  // namespace harp

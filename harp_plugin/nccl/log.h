// NCCL's log: NCCL_DEBUG=WARN and INFO show these lines.
#pragma once
#include <string>

#include "nccl_abi/nccl_net.h"

namespace harp {

void log_to(nccl::Logger);  // nullptr: nowhere
void warn(const std::string&);
void inform(const std::string&);

}  // namespace harp

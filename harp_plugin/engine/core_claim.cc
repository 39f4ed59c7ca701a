#include "harp_plugin/engine/core_claim.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "base/cores.h"

namespace harp {

std::optional<CoreClaim> claim_core() {
  const auto cores = lightcc::bound_to();
  // From the end: the first cores are where systems put interrupts and unbound programs begin.
  for (size_t i = cores.size(); i-- > 0;) {
    lightcc::Fd name(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!name) return {};
    const std::string text = "harp-core-" + std::to_string(cores[i]);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());  // a name that begins with a zero is abstract
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    if (bind(name.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) continue;
    NotInherited not_inherited(name.get());
    return CoreClaim{cores[i], std::move(name), std::move(not_inherited)};
  }
  return {};
}

}  // namespace harp

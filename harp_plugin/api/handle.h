// What a listener hands out, as bytes: where it is and the nonce that opens it.
#pragma once
#include <string>

#include "harp_plugin/core/packet.h"
#include "harp_plugin/harp.h"

namespace harp {

struct Handle {
  std::string port;  // its kind, at most 8 characters
  uint16_t engine = 0;
  Nonce nonce{};
  Address address;
  bool operator==(const Handle&) const = default;
};

harp_handle write_handle(const Handle&);
// Bytes that are no handle, or one of another version or another port than `port`: throws
// lightcc::Error{invalid_argument} that says which.
Handle read_handle(const harp_handle&, const std::string& port);

}  // namespace harp

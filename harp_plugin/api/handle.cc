#include "harp_plugin/api/handle.h"

#include <cstring>

#include "base/error.h"
#include "base/text.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

constexpr char kMagic[4] = {'H', 'A', 'R', 'P'};
constexpr uint8_t kHandleVersion = 1;
constexpr size_t kPortBytes = 8;

struct Layout {
  char magic[4];
  uint8_t version;
  uint8_t address_bytes;
  uint16_t engine;
  char port[kPortBytes];
  uint8_t nonce[sizeof(Nonce)];
  uint8_t address[sizeof(Address::bytes)];
  uint8_t unused[64];
  uint8_t of_the_application;
};
static_assert(sizeof(Layout) == HARP_HANDLE_BYTES && alignof(Layout) <= 2);

}  // namespace

harp_handle write_handle(const Handle& handle) {
  Layout layout{};
  std::memcpy(layout.magic, kMagic, sizeof kMagic);
  layout.version = kHandleVersion;
  layout.address_bytes = handle.address.size;
  layout.engine = handle.engine;
  std::memcpy(layout.port, handle.port.data(), std::min(handle.port.size(), kPortBytes));
  std::memcpy(layout.nonce, handle.nonce.data(), sizeof layout.nonce);
  std::memcpy(layout.address, handle.address.bytes.data(), sizeof layout.address);
  harp_handle bytes;
  std::memcpy(bytes.bytes, &layout, sizeof layout);
  return bytes;
}

Handle read_handle(const harp_handle& bytes, const std::string& port) {
  Layout layout;
  std::memcpy(&layout, bytes.bytes, sizeof layout);
  if (std::memcmp(layout.magic, kMagic, sizeof kMagic) != 0)
    throw Error(Code::invalid_argument, "connecting: these 128 bytes are no handle of harp_listen (wrong magic)");
  if (layout.version != kHandleVersion)
    throw Error(Code::invalid_argument, "connecting: the handle is of version " + std::to_string(layout.version) +
                                            ", this library reads " + std::to_string(kHandleVersion) +
                                            "; use the same library on both sides");
  Handle handle;
  handle.port = std::string(layout.port, strnlen(layout.port, kPortBytes));
  if (handle.port != port)
    throw Error(Code::invalid_argument, "connecting: the handle is of a listener on port " +
                                            lightcc::printable(handle.port) + ", this context uses " + port +
                                            "; set HARP_PORT to the same on both sides");
  if (layout.address_bytes > sizeof layout.address)
    throw Error(Code::invalid_argument, "connecting: the handle is damaged (its address is too long)");
  handle.engine = layout.engine;
  handle.address.size = layout.address_bytes;
  std::memcpy(handle.nonce.data(), layout.nonce, sizeof layout.nonce);
  std::memcpy(handle.address.bytes.data(), layout.address, sizeof layout.address);
  return handle;
}

}  // namespace harp

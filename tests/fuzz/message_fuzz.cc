// Control messages from a peer: parse() takes any bytes without harm, and what it accepts is exactly what encode()
// writes.
#include <cstdint>
#include <cstdlib>

#include "engine/control/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (lightcc::encode(lightcc::parse(bytes)) != bytes) std::abort();
  } catch (const lightcc::Error&) {
    // Refused, as most inputs should be.
  }
  return 0;
}

// Control messages from a peer: parse_up() and parse_down() take any bytes without harm, and what each accepts is
// exactly what encode() writes for its direction.
#include <cstdint>
#include <cstdlib>

#include "engine/negotiate/control/message.h"

namespace {

using namespace lightcc;

template <class Frame>
void check(std::string_view bytes, Frame (*parse)(std::string_view, int)) {
  try {
    if (encode(parse(bytes, 0)) != bytes) std::abort();
  } catch (const Error&) {
    // Refused, as most inputs should be.
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check(bytes, parse_up);
  check(bytes, parse_down);
  return 0;
}

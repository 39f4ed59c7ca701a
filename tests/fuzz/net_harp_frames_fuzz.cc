// What peers say beside the records of a link over HARP: it is read whole or refused, and what was read is written the
// same.
#include <cstdlib>

#include "net/harp/harp_frames.h"

using namespace lightcc;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto hello = hello_in(bytes); hello && frame_of(*hello) != bytes) std::abort();
  try {
    const HarpNotice notice = notice_in(bytes);
    if (notice.why.size() <= 900 && frame_of(notice) != bytes) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

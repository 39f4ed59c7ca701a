// What a link over HARP says beside its records (harp_link.h). Both come from peers, and are read as foreign bytes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace lightcc {

// The first record of a stream: which link it is for.
struct HarpHello {
  uint64_t epoch;
  int32_t group, lane, from, to;
};
std::string frame_of(const HarpHello&);
std::optional<HarpHello> hello_in(std::string_view);  // nothing: it is none

// The last record: why nothing more follows. All that was committed has been sent (ok), or the epoch has ended there.
struct HarpNotice {
  Code code = Code::ok;
  std::string why;
};
std::string frame_of(const HarpNotice&);  // fits into the smallest packet
HarpNotice notice_in(std::string_view);   // throws Error{internal} if it is none

}  // namespace lightcc

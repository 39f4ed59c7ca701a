// Finds the one that is meant among many places: connects to all of them, the first ones first, and again, until the
// handshake succeeds at one.
#pragma once
#include <string>
#include <vector>

#include "net/store.h"

namespace lightcc {

struct Dialed {
  Fd fd;             // non-blocking
  std::string rest;  // bytes that came right behind the handshake
};

// Throws, once the deadline is over: why a place refused, if one did that is not another job's; else Error{timeout}
// beginning with `missing` and telling what became of each place.
Dialed dial(const std::vector<Endpoint>&, const Terms&, const Hello&, const std::string& missing, uint64_t deadline_ns);

}  // namespace lightcc

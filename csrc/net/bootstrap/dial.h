// Finds rank 0 among many endpoints: connects to all of them, the first ones first, and again, until the handshake
// succeeds at one.
#pragma once
#include <string>
#include <vector>

#include "net/bootstrap/exchange.h"

namespace lightcc {

struct Dialed {
  Fd fd;             // non-blocking
  std::string rest;  // bytes that came right behind the handshake
};

// Throws why it was cancelled; once the deadline is over, why an endpoint refused, if one did that is of no other job;
// else Error{timeout} beginning with `missing` and telling what became of each endpoint.
Dialed dial(const std::vector<Endpoint>&, const JobCredentials&, const Hello&, const std::string& missing,
            const Deadline&);

}  // namespace lightcc

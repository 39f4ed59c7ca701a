// One side of connections through a plugin, that a test in Python does things to.
//
//   peer listen [KEY=VALUE]...                 receives; prints "handle HEX" first
//   peer connect handle=HEX [KEY=VALUE]...     sends
//
// Keys: connections, idle (1: receives are posted, nothing is sent before "go"), most (bytes of a message). On its
// input: "go" and "stop" (the sender's: what is under way is the last). Lines that it prints: "ready"; "at N", so many
// messages are over; "error CODE TEXT", the plugin returned this and warned of that, then it ends with 3; "done N" when
// the sender has stopped, then it ends with 0; "wrong TEXT", then it ends with 4.
#pragma once
#include <string>
#include <vector>

namespace harp::plugtest {

int run_peer(const std::string& plugin, const std::vector<std::string>& words);

}  // namespace harp::plugtest

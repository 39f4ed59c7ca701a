// Runs between a client and a server: two processes, which may be on two hosts.
#pragma once
#include "harp_plugin/tools/bench/settings.h"

namespace harp::bench {

std::string run_client(const Settings&);  // what it has measured, as a line of JSON; may start a server of its own
void serve(const Settings&);              // a process for every client

}  // namespace harp::bench

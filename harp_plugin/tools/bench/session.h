// Runs between a client and a server: two processes, which may be on two hosts.
#pragma once
#include "harp_plugin/tools/bench/settings.h"

namespace harp::bench {

std::string run_client(const Workload&);  // what it has measured, as a line of JSON; may start a server of its own
void serve(const Workload&);              // a process for every client

}  // namespace harp::bench

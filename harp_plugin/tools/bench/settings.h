// What one run of harp-bench does. The client's command line is the source; the server is sent what both must know.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace harp::bench {

struct Workload {
  // Both sides.
  std::string mode = "throughput";  // latency, streams, idle
  std::string transport = "harp";   // tcp: the kernel's, in the same message pattern
  std::string port = "udp";
  uint64_t message_bytes = 1 << 20;
  uint64_t footprint_bytes = 0;  // of the buffers of one connection that are used in turn; 0: as many as `depth` takes
  uint64_t depth = 8;            // requests outstanding
  uint64_t connections = 1;
  uint64_t threads = 1;  // of the application, which share the connections
  uint64_t engines = 1;
  std::string engine_mode = "auto";  // inline, threads
  uint64_t paths = 1;
  uint64_t mtu = 0;
  uint64_t peer_timeout_ms = 0;
  std::string secret;  // not empty: authenticate
  double warm_up_s = 0.2;
  double seconds = 1;
  std::string check = "sampled";  // full: every byte
  uint64_t pause_us = 0;          // sleep after a turn in which nothing was done; 0: poll, as NCCL does
  uint64_t flows = 1;             // tcp: connections that a message is striped over
  uint64_t socket_buffer = 0;     // tcp: SO_SNDBUF and SO_RCVBUF; 0: the kernel tunes them
  std::string congestion;         // tcp: TCP_CONGESTION
  // This side.
  std::string listen;   // [ADDRESS:]PORT: serve those who connect here
  std::string connect;  // ADDRESS:PORT of a server; neither: a server of its own, in another process
  uint64_t sessions = 0;  // that a server serves before it ends; 0: for ever
  std::string interface;
  std::string cores;         // that this process is bound to, as 0,1
  std::string server_cores;  // of the server in another process
  uint64_t pairs = 0;        // mem: both sides in one thread, and so many of these
  std::string pairs_as = "threads";  // processes
};

Workload parse(const std::vector<std::string>& arguments);
std::string help();
std::string for_server(const Workload&);           // what both sides must know, one argument a line
Workload from_client(const std::string& lines, const Workload& own);
std::vector<int> core_list(const std::string& text);
void bind_to(const std::string& cores);  // this thread, and those that it starts; "" leaves it as it is

}  // namespace harp::bench

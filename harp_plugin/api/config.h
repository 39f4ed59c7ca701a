// What a context is opened with. The only reader of HARP's environment; docs have the table that knobs_table() prints.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "harp_plugin/core/options.h"
#include "harp_plugin/harp.h"
#include "harp_plugin/port/xsk.h"

namespace harp {

using Environment = std::function<const char*(const char* name)>;  // getenv, or a test's map

const char* process_environment(const char* name);

struct Config {
  std::string port = "udp";
  std::string interface;           // "": any that is up
  int engines = 1;
  int inline_mode = 0;             // 1 to 3 as in harp_options, 0: by cores
  int paths = 1;
  uint16_t first_port = 0, last_port = 0;  // 0: any
  uint32_t mtu = 0;                // 0: the interface's
  uint64_t delay_target_us = 0;    // 0: it depends on which thread polls
  uint64_t peer_timeout_ms = 4000;
  uint64_t connect_timeout_ms = 60000;
  bool authenticate = false;
  std::string secret;
  bool stats = true;
  bool gso = true, gro = true;
  XskCopies xdp_copies = XskCopies::if_needed;
  uint32_t xdp_queues = 0;     // 0: all
  std::string harpd;           // "": without
  bool xdp_fallback = false;
  int most_receives = 1;  // of NCCL's plugin: in one irecv
};

// The environment, and over it what `options` say (they may be nullptr). A value that cannot be read throws
// lightcc::Error{invalid_argument} that names it and what is expected.
Config read_config(const harp_options* options, const Environment&);

std::string knobs_table();  // Markdown: variable, default, meaning

}  // namespace harp

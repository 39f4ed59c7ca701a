// What a plugin must do, each a case of its own. A case throws what is wrong.
#pragma once
#include <string>
#include <vector>

namespace harp::plugtest {

struct PlugtestSettings {
  std::string path;
  int version = 0;
  uint64_t seed = 1;
};

struct Case {
  const char* name;
  void (*run)(const PlugtestSettings&);
};

const std::vector<Case>& message_cases();     // what is sent and received
const std::vector<Case>& connection_cases();  // opening, closing, failing, processes and threads
const std::vector<Case>& pattern_cases();     // collectives as NCCL does them

}  // namespace harp::plugtest

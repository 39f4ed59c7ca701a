// Says that a request of a group takes too long, and who holds it up: a warning in one member's voice, or the end of
// the epoch.
#pragma once
#include <string>
#include <vector>

#include "base/config.h"
#include "engine/negotiate/control/coordinator.h"
#include "engine/timeline/counters.h"
#include "engine/request/effects.h"
#include "engine/negotiate/surroundings.h"
#include "net/peers.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class StallReporter {
 public:
  // Everything outlives it.
  StallReporter(const Peers&, const Group&, const Config&, Counters&, Effects&, const Surroundings&);

  // Whether something is to be said of a request that has waited since then.
  bool is_due(const Request&, uint64_t since_ns, uint64_t now_ns) const;
  // It has waited since then, for these members. joined: those that have joined, if they matter. note: why the missing
  // ones may not have come; or "".
  void report(Request&, uint64_t since_ns, const std::vector<int>& missing, const std::vector<int>& joined,
              const std::string& note, uint64_t now_ns);
  // On the coordinator: why these members may not have come, as far as it knows.
  std::string note(const Coordinator&, const std::string& key, const std::vector<int>& missing) const;
  void report_deadlock(const std::vector<Wait>& cycle);  // nothing, if there is none

 private:
  std::string names(const std::vector<int>& members) const;
  std::string some_names(std::vector<int> members) const;  // the first of many

  const Peers& peers_;
  const Group& group_;
  const Config& config_;
  Counters& counters_;
  Effects& effects_;
  const Surroundings& surroundings_;
};

}  // namespace lightcc

// Says that a request of a group takes too long, and who holds it up: a warning in one member's voice, or the end of
// the epoch.
#pragma once
#include <string>
#include <vector>

#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/group_resources.h"
#include "net/group.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class StallReporter {
 public:
  // Everything outlives it.
  StallReporter(const GroupResources& shared, const Group& group) : shared_(shared), group_(group) {}

  // Whether something is to be said of a request that has waited since then.
  bool is_due(const Request&, uint64_t since_ns, uint64_t now_ns) const;
  // It has waited since then, for these members. joined: those that have joined, if they matter. note: why the missing
  // ones may not have come; or "".
  void report(Request&, uint64_t since_ns, const std::vector<int>& missing, const std::vector<int>& joined,
              const std::string& note, uint64_t now_ns) const;
  // A send or a receive has waited for its peer to do what is said.
  void report_peer(Request&, const char* what, uint64_t now_ns) const;
  // On the coordinator: why these members may not have come, as far as it knows.
  std::string note(const Coordinator&, const std::string& key, const std::vector<int>& missing) const;
  void report_deadlock(const std::vector<Wait>& cycle) const;  // nothing, if there is none

 private:
  // A stall, as a text; false: it does not end the epoch, and only counts.
  bool ends_epoch(const std::string& text, const std::string& note, uint64_t since_ns, uint64_t now_ns) const;
  std::string names(const std::vector<int>& members) const;
  std::string some_names(std::vector<int> members) const;  // the first of many

  const GroupResources& shared_;
  const Group& group_;
};

}  // namespace lightcc

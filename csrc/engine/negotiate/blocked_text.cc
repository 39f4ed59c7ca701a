#include "engine/negotiate/blocked_text.h"

#include "base/types.h"
#include "engine/request/request.h"

namespace lightcc {

std::string process_set_text(int id, const std::shared_ptr<const Group>& group) {
  return "process set " + std::to_string(id) + " (ranks " + (group ? text_of(group->ranks()) : "") + ")";
}

std::string blocked_text(const Surroundings& surroundings, int rank) {
  const BlockedReport* report = surroundings.deadlocks.blocked(rank);
  if (!report) return "";
  return title_of(report->kind, report->key) + " in " +
         process_set_text(report->group, surroundings.groups.find(report->group));
}

}  // namespace lightcc

// The backend that runs Schedules over Links: every data collective, any ranks, any hosts.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/schedule.h"
#include "net/link.h"

namespace lightcc {

// One a group. A link carries records without names, so collectives take turns on it in the order of their start:
// step every one in flight. To drop one that is not done breaks the rest.
class LinksBackend : public Backend {
 public:
  // links[member] leads there, nullptr at our own place; they must outlive this and all its Work.
  // lends: Work may be done while the links still send out of its memory; release() ends that.
  explicit LinksBackend(std::vector<Link*> links, bool lends = false);
  void release();

  const char* name() const override { return "links"; }
  bool accepts(const Collective&) const override;
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

  struct Turns;

 private:
  std::shared_ptr<const Schedule> schedule_of(const Collective&, const Algorithm&);

  const std::vector<Link*> links_;
  std::map<std::vector<int64_t>, std::shared_ptr<const Schedule>> schedules_;  // by all that a plan depends on
  std::shared_ptr<Turns> turns_;
};

}  // namespace lightcc

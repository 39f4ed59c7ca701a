// The backend that runs Schedules over Links: every data collective, any ranks, any hosts.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/hosts.h"
#include "collective/schedule.h"
#include "net/link.h"

namespace lightcc {

// One a group. A link carries records without names, so collectives take turns on it in the order of their start:
// step every one in flight. To drop one that is not done breaks the rest. All-reduces other than Adasum, and barriers,
// run with the members numbered by host, so that near numbers are near; other algorithms get the hosts and number the
// members themselves.
class LinksBackend : public Backend {
 public:
  // links[member] leads there, nullptr at our own place; they and this must outlive all its Work. hosts: of the
  // members; none: they count as on one.
  // keeps_lent: Work may be done while the links still send out of its memory; release_lent() ends that.
  explicit LinksBackend(std::vector<Link*> links, Hosts hosts = {}, bool keeps_lent = false);
  void lent(std::vector<uint64_t>* marks) const;  // by link, what Work has lent so far; see BulkLink
  void release_lent(const std::vector<uint64_t>& before);

  const char* name() const override { return "links"; }
  bool accepts(const Collective&) const override;
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

  struct Turns;

 private:
  std::shared_ptr<const Schedule> schedule_of(const Collective&, const Algorithm&);

  const Hosts hosts_;
  const std::vector<Link*> links_;
  const std::vector<int> by_host_;       // the members, by host
  std::vector<Link*> links_by_host_;
  std::map<std::vector<int64_t>, std::shared_ptr<const Schedule>> schedules_;  // by all that a plan depends on
  std::shared_ptr<Turns> turns_;
};

}  // namespace lightcc

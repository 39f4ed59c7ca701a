// How the members of a group make communicators of NCCL: the first member of each makes its id, all gather the ids on
// the host, and each makes its end of those that it is in, one after the other. Collectives of the host start at the
// same place in the order of batches on all members.
#pragma once
#include <memory>
#include <vector>

#include "base/config.h"
#include "collective/hosts.h"
#include "collective/nccl.h"
#include "collective/selector.h"
#include "net/group.h"

namespace lightcc {

// Begins an all-gather of `bytes` of each member, or another collective, by the way that the selector has for it.
std::unique_ptr<Work> start_gather(const Group&, const Selector&, const void* own, size_t bytes, void* all);
std::unique_ptr<Work> start_on_host(const Selector&, const Collective&);

class NcclConnections {
 public:
  // All must outlive it. device: this rank's GPU.
  NcclConnections(const Config& config, const Group& group, const Selector& selector, int device)
      : config_(config), group_(group), selector_(selector), device_(device) {}

  // One more: members of the group, this one among them, and where it goes. All members plan equally many, in one
  // order, before the first step.
  void plan(std::vector<int> members, std::unique_ptr<NcclCommunicator>* place);
  // Those of this member's node, and those that have its place on their node.
  void plan_2d(const Hosts& nodes, NcclCommunicators& to);
  bool step();  // never blocks; whether anything moved
  bool done() const { return done_; }

 private:
  struct Planned {
    std::vector<int> members;
    std::unique_ptr<NcclCommunicator>* place;
  };
  void make_ids();
  bool connect();
  bool connect_next();

  const Config& config_;
  const Group& group_;
  const Selector& selector_;
  const int device_;
  std::vector<Planned> planned_;
  std::vector<NcclUniqueId> own_ids_;  // one for each planned, made where this member is its first
  std::vector<NcclUniqueId> ids_;      // those of all members, one behind the other
  std::unique_ptr<Work> gather_;       // of these
  size_t begun_ = 0;                   // so many communicators
  bool done_ = false;
};

}  // namespace lightcc

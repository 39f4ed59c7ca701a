// The fast path of a group: which of the two kinds it has, the call of this rank that is on it, and what this rank does
// while others wait there. Only whoever holds the progress lock calls it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "engine/request/fast_path_facts.h"
#include "engine/request/request.h"
#include "engine/run/group_backends.h"
#include "engine/run/remote_fast_path.h"
#include "engine/run/shared_fast_path.h"

namespace lightcc {

class GroupFastPath {
 public:
  // Everything outlives it. It has one if all members share this host, or there are two. send: a slot to the other one.
  GroupFastPath(Peers&, const Group&, const Config&, const GroupBackends&, RemoteFastPath::Send send);

  FastPath* path() { return path_.get(); }      // nullptr: there is none
  void note_facts(FastPathFacts*) const;        // of the group, but for what is in flight in it
  bool prefers_shared(const Collective&) const;
  bool is_between_hosts() const { return remote_ != nullptr; }
  bool is_active() const { return path_ && path_->active(); }

  // A call that is already on it, and from now on nobody's but the engine's; nullptr: there is none.
  void adopt(const RequestPtr& request) { request_ = request; }
  const RequestPtr& request() const { return request_; }

  // A bounded piece of work; true if anything moved. *ended: the adopted call, if it came to its end.
  struct Ended { RequestPtr request; bool is_done; };  // or is refused, and to be negotiated
  bool step(bool has_announced, bool runs_batch, Ended* ended);
  void receive(std::string slot, int member);   // of another host
  void member_left(int member) { if (path_) path_->member_left(member); }
  RequestPtr drop();                            // the epoch ends
  void remind();                                // those whom the adopted call waits for
  std::vector<int> missing() const { return path_ && request_ ? path_->missing() : std::vector<int>(); }

 private:
  Peers& peers_;
  const Group& group_;
  const GroupBackends& backends_;
  const bool fixes_ways_;
  std::unique_ptr<FastPath> path_;
  RemoteFastPath* remote_ = nullptr;            // the same, if it is between two hosts
  RequestPtr request_;
};

}  // namespace lightcc

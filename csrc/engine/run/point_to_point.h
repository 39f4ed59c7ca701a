// The sends and receives of a group: a channel to each member with which this rank has any, made at the first. A step
// looks only at those with something in flight. Only whoever holds the progress lock calls it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/run/peer_channel.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

class PointToPoint {
 public:
  // The arguments outlive it.
  PointToPoint(Peers&, const Group&, Effects&, Tracing&);

  void submit(const RequestPtr&);
  bool active() const { return !active_.empty(); }      // something is in flight
  bool step();                                          // a bounded piece of work; true if anything moved
  // A member has left in peace. What it had sent before still arrives; all else with it fails.
  void member_left(int member, const std::string& why, uint64_t now_ns);
  void leave();                                         // this rank does; nothing is in flight
  void fail_all(Code, const std::string& text);
  template <class Visit> void for_each(Visit visit) const {  // as PeerChannel's
    for (const int member : active_) channels_[size_t(member)].channel->for_each(visit);
  }

 private:
  struct Channel {
    std::unique_ptr<PeerChannel> channel;               // nullptr: not used yet
    bool active = false;
    std::string left;                                   // why the member has left; "": it has not
    uint64_t moved_ns = 0;                              // if it has: when anything last came, or it left
  };
  bool step(Channel&, int member);
  PeerChannel& channel(int member);

  Peers& peers_;
  const Group& group_;
  Effects& effects_;
  Tracing& tracing_;
  std::vector<Channel> channels_;                       // by member
  std::vector<int> active_;                             // members
};

}  // namespace lightcc

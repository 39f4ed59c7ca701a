// How the members of a group come to run collectives by NCCL: each says what it has, and all decide alike whether that
// is enough; then the first member of each communicator makes its id, and each member its end of each. What they say to
// each other travels in collectives of the host, which all start at the same place in the order of their batches.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "collective/nccl.h"
#include "collective/selector.h"
#include "net/group.h"

namespace lightcc {

class NcclSetup {
 public:
  // What each member has. Its text travels as it is here.
  struct Offer {
    int32_t version = 0;              // of NCCL; 0: it has none that can be used
    int32_t hierarchical = 0;         // whether it is to use 2D
    std::array<char, 32> bus_id{};    // of its GPU, in its host
    uint64_t host = 0;                // which that is to NCCL, a hash of NCCL_HOSTID; 0: that of the topology
    std::array<char, 200> why{};      // if it has none
  };

  // nodes: the group's members, as 2D sees them. device: this rank's GPU. All but the nodes must outlive this.
  NcclSetup(const Config&, const Group&, const Selector&, Hosts nodes, int device);

  bool step();                        // never blocks; whether anything moved
  bool agreed() const { return communicators_ != nullptr; }  // that all can use NCCL
  bool done() const { return stage_ == Stage::done; }
  // Then: the communicators, or nullptr on all members.
  std::unique_ptr<NcclCommunicators> take() { return std::move(communicators_); }

 private:
  enum class Stage { offers, ids, connecting, done };
  // A communicator of this member, with whom, and where it goes.
  struct Planned {
    std::vector<int> members;
    std::unique_ptr<NcclCommunicator>* place;  // of communicators_
  };
  Offer own_offer();
  template <class Item> void gather(const std::vector<Item>& own, std::vector<Item>& all);
  void decide();
  void plan_all(size_t streams);
  void plan_2d();
  void make_ids();
  bool connect();
  bool connect_next();

  const Config& config_;
  const Group& group_;
  const Selector& selector_;
  const Hosts nodes_;
  const int device_;
  Stage stage_ = Stage::offers;
  const std::vector<Offer> own_offer_;
  std::vector<Offer> offers_;         // by member
  std::vector<Planned> planned_;
  std::vector<NcclUniqueId> own_ids_; // one for each planned, made where this member is its first
  std::vector<NcclUniqueId> ids_;     // those of all members, one behind the other
  std::unique_ptr<Work> work_;
  std::unique_ptr<NcclCommunicators> communicators_;
  size_t begun_ = 0;                  // communicators
};

// Whether all nodes have equally many members, more than one.
bool are_even(const Hosts& nodes);

// Why members with such offers, by member, cannot use NCCL together; "": they can.
std::string refuse_nccl(const Group&, const std::vector<NcclSetup::Offer>&);

}  // namespace lightcc

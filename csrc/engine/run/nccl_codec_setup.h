// How the members of a group that use NCCL come to run compressed all-reduces by it: each says whether its GPU has
// kernels of codecs and may use them, all decide alike, and the communicators that 2D has too are made, unless they are
// there.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "engine/run/nccl_connections.h"

namespace lightcc {

class NcclCodecSetup {
 public:
  struct Offer {                 // of a member; travels as it is here
    int32_t encodes = 0;
    std::array<char, 200> why{};  // it does not
  };

  // nodes: even ones. communicators: of the group; those in a node and between nodes are added to them. All outlive it.
  NcclCodecSetup(const Config&, const Group&, const Selector&, const Hosts& nodes, NcclCommunicators& communicators);

  bool step();                   // never blocks; whether anything moved
  bool done() const { return stage_ == Stage::done; }
  bool agreed() const { return refused_.empty(); }  // once it is done: that all GPUs encode

 private:
  enum class Stage { offers, connecting, done };
  Offer own_offer() const;
  void decide();

  const Config& config_;
  const Group& group_;
  const Hosts& nodes_;
  NcclCommunicators& communicators_;
  Stage stage_ = Stage::offers;
  const Offer own_offer_;
  std::vector<Offer> offers_;           // by member
  const std::unique_ptr<Work> gather_;  // of these
  std::string refused_;                 // why they cannot
  NcclConnections connections_;
};

}  // namespace lightcc

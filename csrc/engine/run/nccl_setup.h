// How the members of a group come to run collectives by NCCL: each says what it has, and all decide alike whether that
// is enough; then they make communicators (nccl_connections.h).
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "engine/run/nccl_connections.h"

namespace lightcc {

// Texts as they travel between members.
template <size_t N> void set_text(std::array<char, N>& to, const std::string& text) {
  to.fill(0);
  text.copy(to.data(), N - 1);
}
template <size_t N> std::string text_in(const std::array<char, N>& from) {
  return {from.begin(), std::ranges::find(from, 0)};
}

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
  bool done() const { return is_refused_ || connections_.done(); }
  // Then: the communicators, or nullptr on all members.
  std::unique_ptr<NcclCommunicators> take() { return std::move(communicators_); }

 private:
  Offer own_offer();
  void decide();

  const Config& config_;
  const Group& group_;
  const Hosts nodes_;
  const int device_;
  const Offer own_offer_;
  std::vector<Offer> offers_;                        // by member
  const std::unique_ptr<Work> gather_;               // of these
  bool is_refused_ = false;
  NcclConnections connections_;
  std::unique_ptr<NcclCommunicators> communicators_; // once it is agreed
};

// Why members with such offers, by member, cannot use NCCL together; "": they can.
std::string refuse_nccl(const Group&, const std::vector<NcclSetup::Offer>&);

}  // namespace lightcc

// How the members of a group come to run collectives by NCCL: each says what it has, and all decide alike whether that
// is enough; then one makes the id of a communicator, and each its end of it. What they say to each other travels in
// collectives of the host, which all start at the same place in the order of their batches.
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
    std::array<char, 32> bus_id{};    // of its GPU, in its host
    std::array<char, 200> why{};      // if it has none
  };

  // device: this rank's GPU. All must outlive this.
  NcclSetup(const Config&, const Group&, const Selector&, int device);
  ~NcclSetup();                       // aborts what nobody has taken

  bool step();                        // never blocks; whether anything moved
  bool done() const { return stage_ == Stage::done; }
  // Then: the communicator, or nullptr on all members.
  std::unique_ptr<NcclCommunicator> take() { return std::move(communicator_); }

 private:
  enum class Stage { offers, id, connecting, done };
  Offer own_offer();
  void exchange(Collective);
  void decide();
  void connect();

  const Config& config_;
  const Group& group_;
  const Selector& selector_;
  const int device_;
  Stage stage_ = Stage::offers;
  Offer own_;
  std::vector<Offer> offers_;         // by member
  NcclUniqueId id_{};
  std::unique_ptr<Work> work_;
  std::unique_ptr<NcclCommunicator> communicator_;
};

// Why members with such offers, by member, cannot use NCCL together; "": they can.
std::string refuse_nccl(const Group&, const std::vector<NcclSetup::Offer>&);

}  // namespace lightcc

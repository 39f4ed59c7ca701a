// A large broadcast between ranks of one host. Where the data of all of them lie in arenas, each rank, the root too,
// copies a part of the root's to all others, so that no core is idle while others copy. Else it is a CopyCollective.
#pragma once
#include <memory>

#include "collective/shared.h"

namespace lightcc {

class SharedBroadcast : public Work {
 public:
  static constexpr size_t kLeastBytes = 1 << 20;  // what is smaller is done before all have told where their data lie

  SharedBroadcast(SharedBackend&, const Collective&);
  bool step() override;
  bool done() const override { return copies_ ? copies_->done() : done_; }
  int waiting_for() const override { return copies_ ? copies_->waiting_for() : waiting_for_; }

 private:
  bool agree();
  bool copy_block();
  bool tell();

  SharedBackend& backend_;
  const Collective c_;
  OffsetExchange exchange_;
  std::unique_ptr<Work> copies_;    // if some lie in private memory
  size_t at_ = 0, end_ = 0;         // in bytes, of this rank's part
  std::vector<char> seen_;          // by member: that it has copied its part
  bool agreed_ = false, told_ = false, done_ = false;
  int waiting_for_ = 0;
};

}  // namespace lightcc

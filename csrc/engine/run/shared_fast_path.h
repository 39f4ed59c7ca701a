// The fast path of members that share a host: slots in shared memory, where all see them at once.
#pragma once
#include "collective/shared.h"
#include "engine/run/fast_path.h"

namespace lightcc {

class SharedFastPath : public FastPath {
 public:
  SharedFastPath(LocalRanks&, const Group&, SharedBackend&);

 private:
  bool has_written(int member, uint64_t turn) const override;
  Slot slot(int member, uint64_t turn, size_t bytes) const override;
  void write(uint64_t turn, uint64_t hash, const Collective*, bool eager) override;
  std::unique_ptr<Work> start(const Collective&, uint64_t turn) override;
  FastPathSlot& at(int member, uint64_t turn) const { return *slots_[size_t(member) * 2 + turn % 2]; }

  LocalRanks& local_ranks_;
  SharedBackend& shared_;
  std::vector<FastPathSlot*> slots_;  // two a member
};

}  // namespace lightcc

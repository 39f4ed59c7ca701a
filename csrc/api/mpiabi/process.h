// What this process has of MPI's: its communicators, by their handles. Invariants:
// 1. All ranks of the world split communicators in one order, which MPI asks for: so a communicator has one number, and
//    groups are made in one order.
// 2. A group that was made for a communicator serves all later ones of the same ranks. It is kept when the last of them
//    is freed, since only all ranks together can remove it, until a split finds no room.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/mpiabi/abi.h"
#include "api/mpiabi/communicator.h"
#include "api/mpiabi/split.h"

namespace lightcc::mpiabi {

class Process {
 public:
  // Forms the world, unless lightcc has one. What fails here, every later call says again.
  void init();
  // Waits until the other ranks end too, as operations of theirs may need what this one has yet to run; then leaves.
  void finalize();

  // Each throws Error for a handle that was never given out or was freed, and what a failed split failed with.
  std::shared_ptr<Communicator> communicator(MPIABI_Comm handle);
  // undefined: *made is MPIABI_COMM_NULL. If it fails, *made is a handle all the same, whose every use says why: jaxlib
  // does not look at what a split returns.
  void split(MPIABI_Comm handle, int colour, int key, MPIABI_Comm* made);
  void free(MPIABI_Comm handle);

 private:
  struct Kept {
    std::shared_ptr<Communicator> communicator;  // nullptr: it failed
    std::string fault;
  };
  std::shared_ptr<Communicator> do_split(MPIABI_Comm handle, int colour, int key);
  std::vector<SplitCall> exchange(const SplitCall& own);
  int group_of(const std::vector<int>& ranks);
  void remove_unused_groups();
  MPIABI_Comm keep(Kept kept);

  std::mutex splitting_;                         // one split at a time
  int splits_ = 0;                               // guarded by it, as is what follows
  int next_number_ = 1;
  std::map<std::vector<int>, int> groups_;       // by their ranks in the world's order
  std::vector<int> groups_of_split_;             // that the present split has come to so far

  std::mutex mutex_;                             // guards what follows; never held across a wait
  std::string fault_;                            // of init
  std::shared_ptr<Communicator> world_;
  MPIABI_Comm next_handle_ = 0x1000;             // far from constants of other MPIs
  std::unordered_map<MPIABI_Comm, Kept> communicators_;
};

Process& process();
// Only tests set it, whose ranks are threads: what the calling thread's rank has, or nullptr.
extern Process* (*process_of_thread)();

}  // namespace lightcc::mpiabi

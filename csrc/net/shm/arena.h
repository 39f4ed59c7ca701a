// One rank's shared memory: a sealed memfd, large and sparse (pages exist once touched), mapped by every rank
// of the host. The owner allocates from its heap part; single lines in its fixed part have one writer each.
// An arena belongs to one epoch. When the epoch fails, abandon() gives the owner private copies of
// everything it still has allocated, at the same addresses, so that a rank which was stopped and wakes
// later writes into memory that nobody looks at any more.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/fd.h"
#include "base/types.h"

namespace lightcc {

class Arena {
 public:
  static constexpr size_t kHeapBytes = size_t(64) << 30;  // of address space; memory is used when touched

  // The owner's: fixed_bytes, zeroed, then the heap. Peers map it from the descriptor.
  static std::shared_ptr<Arena> create(size_t fixed_bytes);
  static std::shared_ptr<Arena> map(int memfd, size_t fixed_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* base() const { return base_; }
  int memfd() const { return memfd_.get(); }
  void close_memfd() { memfd_ = Fd(); }  // once every peer has it; the mapping stays

  // Heap; any thread. allocate throws Error{internal} when address space runs out.
  std::byte* allocate(size_t bytes);
  void release(std::byte*);
  // Brings in the pages of an allocation that will be used whole, huge ones where the system has them: less work than
  // faults at first use, for the owner and, since a huge page is one fault, for every peer. A request, never an error:
  // what cannot be had now comes when touched. Contents stay.
  void populate(std::byte*, size_t bytes);
  // A device copies to and from this allocation: its pages stay where they are, also when the arena is abandoned.
  void keep_in_place(std::byte*);
  // The offset of [p, p + bytes) if it lies in one live allocation, else -1.
  int64_t offset_of(const void* p, size_t bytes) const;
  void abandon();
  void no_copy_in_child();  // a forked child does not map it

 private:
  Arena(Fd memfd, size_t fixed_bytes);
  void give_back(size_t offset, size_t bytes);

  Fd memfd_;
  size_t fixed_bytes_;
  std::byte* base_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> used_, free_;  // offset -> bytes
  std::set<size_t> kept_in_place_;        // offsets of used ones
  bool abandoned_ = false;
};

}  // namespace lightcc

// Records of one size in slabs: large pieces of memory that never move, so that a pointer to a record holds until the
// record is given back. A slab whose records are all given back returns to the system.
//
// A record begins with its header; what follows it belongs to the caller. Records are multiples of 16 bytes: no size
// from there on touches more cache lines than the next multiple of 64 would, and a row of 16 floats takes 80 bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightcc::embedding {

struct RowHeader {
  int64_t key;
  uint32_t count;  // updates that the row has seen
  uint32_t last;   // the table's step at the last of them; 0: the row has seen none
};
static_assert(sizeof(RowHeader) == 16);

class Slabs {
 public:
  static constexpr uint32_t kNone = ~0u;
  // limit_bytes: of all slabs together; 0: none.
  Slabs(size_t record_bytes, size_t limit_bytes);
  ~Slabs();
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  // After it, so many records can be taken without failure. False: memory does not suffice, and nothing has changed.
  bool reserve(size_t records);
  uint32_t take();  // the number of a record, which must have been reserved; its memory is not cleared
  void give_back(uint32_t row);
  void clear();

  std::byte* at(uint32_t row) const { return bases_[row >> shift_] + size_t(row & mask_) * record_bytes_; }
  RowHeader* header(uint32_t row) const { return reinterpret_cast<RowHeader*>(at(row)); }
  // The first record from this number on that is taken; kNone: there is none.
  uint32_t next_taken(uint32_t row) const;

  size_t record_bytes() const { return record_bytes_; }
  size_t bytes() const { return mapped_ * slab_bytes_; }
  int mapped() const { return int(mapped_); }

 private:
  struct Slab {
    std::byte* memory = nullptr;
    uint32_t taken = 0, fresh = 0;    // records from `fresh` on were never taken
    std::vector<uint32_t> free;       // given back, and below fresh
    std::vector<uint64_t> taken_bits;
  };
  bool map_one();
  void unmap(Slab&);
  size_t room_in(const Slab& s) const { return s.memory ? (size_t(mask_) + 1) - s.taken : 0; }

  size_t record_bytes_, limit_bytes_, slab_bytes_ = 0, mapped_ = 0, room_ = 0;
  uint32_t shift_ = 0, mask_ = 0;
  size_t filling_ = 0;  // the slab that records are taken from while it has room
  std::vector<Slab> slabs_;
  std::vector<std::byte*> bases_;  // of slabs_
};

}  // namespace lightcc::embedding

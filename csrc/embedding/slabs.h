// Records of one size in slabs: large pieces of memory that never move, so that a pointer to a record holds until the
// record is given back. A slab whose records are all given back returns to the system.
//
// A record begins with its header; what follows it belongs to the caller. Records are multiples of 16 bytes: no size
// from there on touches more cache lines than the next multiple of 64 would, and a row of 16 floats takes 80 bytes.
//
// Each 512 bytes of a slab have a mark at the slab's beginning, which is set while a record that begins there may have
// changed since it was read: so the reader of a few changes need not look at all headers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightcc::embedding {

struct RowHeader {
  int64_t key;
  uint32_t count : 30;   // updates that the row has seen, at most kMostUpdates
  uint32_t changed : 2;  // a bit for each lightcc_embedding_reader, which has not read the row as it is now
  uint32_t last;   // the table's step at the last of them; 0: the row has seen none
  static constexpr uint32_t kMostUpdates = ~0u >> 2, kChanged = 3;
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
  // The number of a record, which must have been reserved; its memory is not cleared. Throws std::bad_alloc only where
  // the slab that had the room was returned since, as its last record was given back, and there is no other.
  uint32_t take();
  void give_back(uint32_t row);
  void clear();

  std::byte* at(uint32_t row) const { return bases_[row >> shift_] + size_t(row & mask_) * record_bytes_; }
  RowHeader* header(uint32_t row) const { return reinterpret_cast<RowHeader*>(at(row)); }
  // The first record from this number on that is taken; kNone: there is none.
  uint32_t next_taken(uint32_t row) const;

  // The record becomes one that no reader has read.
  void set_changed(std::byte* record) const {
    reinterpret_cast<RowHeader*>(record)->changed = RowHeader::kChanged;
    mark_of(record) = RowHeader::kChanged;
  }
  // The first record from this number on that is taken and may have changed for one of these readers.
  uint32_t next_changed(uint32_t row, int readers) const;
  // visit(header) for each of them; returns whether it has changed still.
  template <class Visit> void each_changed(int readers, Visit visit) const {
    for (uint32_t row = next_changed(0, readers); row != kNone; row = next_changed(row, readers)) {
      uint8_t& mark = mark_of(at(row));
      bool still = false;
      do {
        still |= visit(*header(row));
        row = next_taken(row + 1);
      } while (row != kNone && &mark_of(at(row)) == &mark);
      if (!still) mark &= uint8_t(~readers);
    }
  }

  size_t record_bytes() const { return record_bytes_; }
  size_t bytes() const { return mapped_ * slab_bytes_; }
  int mapped() const { return int(mapped_); }

 private:
  struct Slab {
    std::byte* memory = nullptr;      // marks, then records
    uint32_t taken = 0, fresh = 0;    // records from `fresh` on were never taken
    std::vector<uint32_t> free;       // given back, and below fresh
    std::vector<uint64_t> taken_bits;
  };
  bool map_one();
  void unmap(Slab&);
  size_t room_in(const Slab& s) const { return s.memory ? (size_t(mask_) + 1) - s.taken : 0; }
  uint8_t& mark_of(const std::byte* record) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(record), slab = at & ~(align_ - 1);
    return reinterpret_cast<uint8_t*>(slab)[(at - slab) / kMarked];
  }

  static constexpr size_t kMarked = 512;  // bytes that have one mark
  size_t record_bytes_, limit_bytes_, marks_bytes_ = 0, slab_bytes_ = 0, mapped_ = 0, room_ = 0;
  uintptr_t align_ = 0;  // of slabs, and more than one is long: a record's address says where its slab begins
  uint32_t shift_ = 0, mask_ = 0;
  size_t filling_ = 0;  // the slab that records are taken from while it has room
  std::vector<Slab> slabs_;
  std::vector<std::byte*> bases_;  // where the records of slabs_ begin
};

}  // namespace lightcc::embedding

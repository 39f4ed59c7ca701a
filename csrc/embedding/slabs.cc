#include "embedding/slabs.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <span>

namespace lightcc::embedding {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLeastSlab = 16 << 20;  // of which less than one huge page, at the end, has small pages

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// align: at least a huge page. The first slab's first huge page has small pages: small tables take little memory.
std::byte* map_slab(size_t bytes, size_t align, bool is_first) {
  const size_t asked = bytes + align;
  void* mapped = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(mapped);
  const size_t skipped = (align - reinterpret_cast<uintptr_t>(begin) % align) % align;
  if (skipped) munmap(begin, skipped);
  munmap(begin + skipped + bytes, asked - skipped - bytes);
  const size_t small = is_first ? kHugePage : 0, whole = bytes / kHugePage * kHugePage;
  if (whole > small) madvise(begin + skipped + small, whole - small, MADV_HUGEPAGE);
  return begin + skipped;
}

// The first mark from this one on that has one of the readers; marks.size(): there is none.
size_t next_mark(std::span<const uint8_t> marks, size_t from, int readers) {
  const uint64_t any = 0x0101010101010101u * unsigned(readers);
  const auto are_clear = [&](size_t at) {
    uint64_t eight;
    std::memcpy(&eight, &marks[at], sizeof eight);
    return !(eight & any);
  };
  while (from < marks.size() && !(marks[from] & readers)) from += from % 8 == 0 && are_clear(from) ? 8 : 1;
  return from;
}

}  // namespace

Slabs::Slabs(size_t record_bytes, size_t limit_bytes) : record_bytes_(record_bytes), limit_bytes_(limit_bytes) {
  const size_t records = std::bit_ceil((kLeastSlab + record_bytes - 1) / record_bytes);
  shift_ = uint32_t(std::countr_zero(records));
  mask_ = uint32_t(records - 1);
  marks_bytes_ = whole_pages(records * record_bytes / (kMarked - 1) + 1);
  slab_bytes_ = whole_pages(marks_bytes_ + records * record_bytes);
  align_ = std::max(std::bit_ceil(slab_bytes_), kHugePage);
}

Slabs::~Slabs() {
  for (Slab& slab : slabs_) unmap(slab);
}

void Slabs::unmap(Slab& slab) {
  if (!slab.memory) return;
  munmap(slab.memory, slab_bytes_);
  room_ -= room_in(slab);
  --mapped_;
  slab = Slab();
}

bool Slabs::map_one() {
  size_t place = 0;
  while (place < slabs_.size() && slabs_[place].memory) ++place;
  if (place == slabs_.size()) {
    if (((place + 1) << shift_) > size_t(kNone)) return false;  // numbers have 32 bits
    slabs_.emplace_back();
    bases_.push_back(nullptr);
  }
  slabs_[place].taken_bits.assign((mask_ + 64) / 64, 0);
  slabs_[place].memory = map_slab(slab_bytes_, align_, place == 0);
  if (!slabs_[place].memory) return false;
  bases_[place] = slabs_[place].memory + marks_bytes_;
  ++mapped_;
  room_ += size_t(mask_) + 1;
  return true;
}

// The limit counts records in use, not slabs: those take memory only as records are written.
bool Slabs::reserve(size_t records) {
  const size_t used = (mapped_ << shift_) - room_;
  if (limit_bytes_ && (used + records) * record_bytes_ > limit_bytes_) return false;
  try {
    while (room_ < records)
      if (!map_one()) return false;
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

uint32_t Slabs::take() {
  if (room_ == 0 && !map_one()) throw std::bad_alloc();
  while (filling_ >= slabs_.size() || room_in(slabs_[filling_]) == 0)
    filling_ = filling_ + 1 < slabs_.size() ? filling_ + 1 : 0;
  Slab& slab = slabs_[filling_];
  uint32_t place = slab.fresh;
  if (slab.free.empty()) {
    ++slab.fresh;
  } else {
    place = slab.free.back();
    slab.free.pop_back();
  }
  ++slab.taken;
  --room_;
  slab.taken_bits[place / 64] |= uint64_t(1) << place % 64;
  return uint32_t(filling_ << shift_) | place;
}

void Slabs::give_back(uint32_t row) {
  Slab& slab = slabs_[row >> shift_];
  const uint32_t place = row & mask_;
  slab.taken_bits[place / 64] &= ~(uint64_t(1) << place % 64);
  slab.free.push_back(place);
  --slab.taken;
  ++room_;
  if (slab.taken == 0) unmap(slab);
}

void Slabs::clear() {
  for (Slab& slab : slabs_) unmap(slab);
  slabs_.clear();
  bases_.clear();
  filling_ = 0;
}

uint32_t Slabs::next_taken(uint32_t row) const {
  for (size_t number = row >> shift_; number < slabs_.size(); ++number, row = uint32_t(number << shift_)) {
    const Slab& slab = slabs_[number];
    if (!slab.memory) continue;
    for (uint32_t place = row & mask_; place < slab.fresh; place = (place / 64 + 1) * 64) {
      const uint64_t rest = slab.taken_bits[place / 64] >> place % 64;
      if (rest) return uint32_t(number << shift_) | (place + uint32_t(std::countr_zero(rest)));
    }
  }
  return kNone;
}

uint32_t Slabs::next_changed(uint32_t row, int readers) const {
  while ((row = next_taken(row)) != kNone && !(mark_of(at(row)) & readers)) {
    const size_t slab = row >> shift_;
    const size_t mark = next_mark({&mark_of(slabs_[slab].memory), slab_bytes_ / kMarked},
                                  size_t(at(row) - slabs_[slab].memory) / kMarked + 1, readers);
    const size_t place = (mark * kMarked - marks_bytes_ + record_bytes_ - 1) / record_bytes_;
    const size_t next = (slab << shift_) + std::min(place, size_t(mask_) + 1);
    if (next >= slabs_.size() << shift_) return kNone;
    row = uint32_t(next);
  }
  return row;
}

}  // namespace lightcc::embedding

#include "net/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr size_t kPage = 4096, kHugePage = 2 << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1; older headers do not have it

// New memory that begins at a border of a huge page, in the file at offset 0: a mapping that lies otherwise never gets
// huge pages. Private memory if fd is -1. nullptr if there is none.
std::byte* map_aligned(size_t bytes, int flags, int fd) {
  const size_t room = bytes + kHugePage;
  void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(reserved);
  auto* begin = first + (round_up(size_t(first), kHugePage) - size_t(first));
  if (mmap(begin, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, room);
    errno = error;
    return nullptr;
  }
  if (begin > first) munmap(first, size_t(begin - first));
  if (begin + bytes < first + room) munmap(begin + bytes, size_t(first + room - begin) - bytes);
  return begin;
}

}  // namespace

std::shared_ptr<Arena> Arena::create(size_t fixed_bytes) {
  Fd fd(memfd_create("lightcc", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("creating shared memory (memfd_create)");
  if (ftruncate(fd.get(), off_t(fixed_bytes + kHeapBytes)) != 0)
    throw system_error("sizing shared memory (is the file size limited? see ulimit -f)");
  // Without the seal a peer could shrink the file, and touching it would kill us with SIGBUS.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw system_error("sealing shared memory");
  return std::shared_ptr<Arena>(new Arena(std::move(fd), fixed_bytes));
}

std::shared_ptr<Arena> Arena::map(int memfd, size_t fixed_bytes) {
  int seals = fcntl(memfd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) throw Error(Code::internal, "a peer's shared memory is not sealed");
  if (lseek(memfd, 0, SEEK_END) != off_t(fixed_bytes + kHeapBytes))
    throw Error(Code::internal, "a peer's shared memory has another size: do all ranks run the same version?");
  return std::shared_ptr<Arena>(new Arena(Fd(fcntl(memfd, F_DUPFD_CLOEXEC, 0)), fixed_bytes));
}

Arena::Arena(Fd memfd, size_t fixed_bytes) : memfd_(std::move(memfd)), fixed_bytes_(fixed_bytes) {
  base_ = map_aligned(fixed_bytes_ + kHeapBytes, MAP_SHARED | MAP_NORESERVE, memfd_.get());
  if (!base_) throw system_error("mapping shared memory (is address space limited? see ulimit -v)");
  madvise(base_, fixed_bytes_ + kHeapBytes, MADV_DONTDUMP);
  free_[0] = kHeapBytes;
}

Arena::~Arena() { munmap(base_, fixed_bytes_ + kHeapBytes); }

std::byte* Arena::allocate(size_t bytes) {
  // Whole pages, so that an abandoned allocation shares none; large ones on huge-page borders.
  size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  size_t need = round_up(std::max<size_t>(bytes, 1), kPage);
  std::lock_guard lock(mutex_);
  if (abandoned_) throw Error(Code::shut_down, "shared memory of an ended epoch cannot be allocated");
  for (auto [offset, room] : free_) {
    size_t at = round_up(fixed_bytes_ + offset, unit) - fixed_bytes_;  // base_ lies on a border of both
    if (at + need > offset + room) continue;
    free_.erase(offset);
    if (at > offset) free_[offset] = at - offset;
    if (at + need < offset + room) free_[at + need] = offset + room - at - need;
    used_[at] = need;
    std::byte* p = base_ + fixed_bytes_ + at;
    if (unit == kHugePage) madvise(p, need, MADV_HUGEPAGE);
    return p;
  }
  throw Error(Code::internal, "no " + std::to_string(bytes) + " bytes of shared address space are left");
}

void Arena::populate(std::byte* p, size_t bytes) {
  // Whole huge pages only: what is left of an allocation comes page by page, else a small one would cost 2 MiB.
  std::byte* begin = base_ + round_up(size_t(p - base_), kHugePage);
  std::byte* end = base_ + size_t(p + bytes - base_) / kHugePage * kHugePage;
  if (begin >= end) return;
  // A range with nothing in it does not collapse. One page is the seed, where a fault does not bring a huge one anyway.
  for (std::byte* at = begin; at < end; at += kHugePage)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(at), 0, __ATOMIC_RELAXED);
  // Older kernels refuse, and so does any for want of memory, a cgroup's included: the rest comes when it is touched.
  madvise(begin, size_t(end - begin), kCollapse);
}

void Arena::release(std::byte* p) {
  std::lock_guard lock(mutex_);
  auto it = used_.find(size_t(p - base_) - fixed_bytes_);
  if (it == used_.end()) return;
  auto [offset, bytes] = *it;
  used_.erase(it);
  kept_in_place_.erase(offset);
  // Gives the pages back to the system; the next user finds zeros.
  madvise(p, bytes, abandoned_ ? MADV_DONTNEED : MADV_REMOVE);
  if (bytes >= kHugePage) madvise(p, bytes, MADV_NOHUGEPAGE);  // small allocations may lie here next
  give_back(offset, bytes);
}

void Arena::give_back(size_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

int64_t Arena::offset_of(const void* p, size_t bytes) const {
  auto* at = static_cast<const std::byte*>(p);
  if (at < base_ + fixed_bytes_ || at + bytes > base_ + fixed_bytes_ + kHeapBytes) return -1;
  size_t offset = size_t(at - base_) - fixed_bytes_;
  std::lock_guard lock(mutex_);
  if (abandoned_) return -1;
  auto it = used_.upper_bound(offset);
  if (it == used_.begin()) return -1;
  --it;
  return offset + bytes <= it->first + it->second ? int64_t(at - base_) : -1;
}

void Arena::keep_in_place(std::byte* p) {
  std::lock_guard lock(mutex_);
  kept_in_place_.insert(size_t(p - base_) - fixed_bytes_);
}

void Arena::abandon() {
  std::lock_guard lock(mutex_);
  if (std::exchange(abandoned_, true)) return;
  for (auto [offset, bytes] : used_) {
    if (kept_in_place_.contains(offset)) continue;
    std::byte* p = base_ + fixed_bytes_ + offset;
    std::byte* twin = map_aligned(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!twin) continue;  // no memory for a copy: the shared pages stay, still readable
    if (bytes >= kHugePage) madvise(twin, bytes, MADV_HUGEPAGE);
    std::memcpy(twin, p, bytes);
    mremap(twin, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, p);
  }
}

void Arena::no_copy_in_child() { madvise(base_, fixed_bytes_ + kHeapBytes, MADV_DONTFORK); }

}  // namespace lightcc

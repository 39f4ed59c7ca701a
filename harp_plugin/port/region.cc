#include "harp_plugin/port/region.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <string>
#include <utility>

namespace harp {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;
using lightcc::system_error;

namespace {

std::atomic<uint32_t> next_id{Region::kFirstId};

size_t whole_pages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > SIZE_MAX / 2) {
    throw Error(Code::invalid_argument, "a region of " + std::to_string(bytes) + " bytes");
  }
  return (bytes + page - 1) / page * page;
}

Fd sealed_memory(size_t bytes) {
  Fd fd(memfd_create("harp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("creating shared memory (memfd_create)");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw system_error("sizing shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("sealing shared memory");
  }
  return fd;
}

void* map(int fd, size_t bytes, int protection, int flags) { return mmap(nullptr, bytes, protection, flags, fd, 0); }

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

Mapping Mapping::anonymous(size_t bytes) {
  bytes = whole_pages(bytes);
  void* data = map(-1, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
  if (data == MAP_FAILED) throw system_error("mapping " + std::to_string(bytes) + " bytes");
  return {static_cast<uint8_t*>(data), bytes};
}

std::optional<Mapping> Mapping::of_peer(int fd, size_t bytes, bool writable) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat status;
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) != 0) return {};
  if (bytes == 0 || static_cast<uint64_t>(status.st_size) < bytes) return {};
  void* data = map(fd, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED);
  if (data == MAP_FAILED) return {};
  return Mapping(static_cast<uint8_t*>(data), bytes);
}

Mapping Mapping::of_ring(int fd, size_t bytes, uint64_t offset) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) throw system_error("mapping a ring of a socket");
  madvise(data, bytes, MADV_DONTFORK);
  return {static_cast<uint8_t*>(data), bytes};
}

Region::Region(size_t bytes)
    : id_(next_id.fetch_add(1, std::memory_order_relaxed)),
      fd_(sealed_memory(whole_pages(bytes))),
      mapping_(nullptr, 0) {
  bytes = whole_pages(bytes);
  void* data = map(fd_.get(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  if (data == MAP_FAILED) throw system_error("mapping a region of " + std::to_string(bytes) + " bytes");
  mapping_ = Mapping(static_cast<uint8_t*>(data), bytes);
}

}  // namespace harp

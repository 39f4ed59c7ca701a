// Memory that can be shown to other processes: a memfd that cannot shrink, mapped here, with an id.
// A port for shared memory sends from it without a copy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/fd.h"

namespace harp {

// Mapped pages with an owner.
class Mapping {
 public:
  static Mapping anonymous(size_t bytes);  // zeros; pages are there once touched
  // What another process has sent: nothing if it is no memfd, may shrink (a read would then kill this process), is
  // shorter than `bytes`, or cannot be mapped.
  static std::optional<Mapping> of_peer(int fd, size_t bytes, bool writable);
  // That a socket shares with the kernel; not in forked children, where it would keep the socket open.
  static Mapping of_ring(int fd, size_t bytes, uint64_t offset);

  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  friend class Region;
  Mapping(uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}
  uint8_t* data_;
  size_t bytes_;
};

class Region {
 public:
  explicit Region(size_t bytes);  // rounded up to pages
  uint8_t* data() const { return mapping_.data(); }
  size_t bytes() const { return mapping_.bytes(); }
  uint32_t id() const { return id_; }  // never twice in a process, never below kFirstId
  int descriptor() const { return fd_.get(); }

  static constexpr uint32_t kFirstId = 16;  // smaller ones mean something else in a packet's slot

 private:
  uint32_t id_;
  lightcc::Fd fd_;
  Mapping mapping_;
};

inline std::shared_ptr<Region> make_region(size_t bytes) { return std::make_shared<Region>(bytes); }

// A port that sends from regions without a copy. The port's thread calls. A region is removed when nothing that lies in
// it is under way any more (tx_done()); a receiver sees its bytes until it has released the packets.
class RegionUser {
 public:
  virtual ~RegionUser() = default;
  virtual void add_region(std::shared_ptr<Region>) = 0;
  virtual void remove_region(const Region&) = 0;
};

}  // namespace harp

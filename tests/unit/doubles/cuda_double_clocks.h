// Whether accesses to memory are ordered, whenever they really happen: vector clocks (Mattern 1989) of streams,
// computed when operations are queued. CudaDouble's lock guards all of this.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lightcc::test {

// How many operations of each stream come before.
class VectorClock {
 public:
  uint64_t of(size_t stream) const { return stream < counts_.size() ? counts_[stream] : 0; }
  void advance(size_t stream);
  void join(const VectorClock& other);

 private:
  std::vector<uint64_t> counts_;  // by stream
};

struct Access {
  const void* begin;
  size_t bytes;
  bool writes;
};

struct Actor {
  std::string what;    // "a copy on stream 2"
  int device;          // -1: the host
  size_t stream = 0;   // its place in clocks; the host has none
};

// The accesses of operations of which the host does not know yet that they are done. All others are ordered before
// whatever is still to come, so that the host needs no clock, and on all devices, because ranks that share memory tell
// each other, which is not seen here.
class AccessHistory {
 public:
  // One sentence for each access that is not ordered before this one, though one of both writes. verb: what this does.
  std::vector<std::string> conflicts(const Actor&, const VectorClock&, const Access&, const std::string& verb) const;
  void add(const Actor&, const VectorClock&, const Access&);
  void host_knows(const VectorClock& done);
  void forget(const void* begin, size_t bytes);
  size_t size() const { return past_.size(); }

 private:
  struct Past {
    Actor actor;
    uint64_t count;  // of its stream's operations, with this one
    Access access;
  };
  static bool before(const Past& past, const VectorClock& clock) { return past.count <= clock.of(past.actor.stream); }

  std::vector<Past> past_;
};

}  // namespace lightcc::test

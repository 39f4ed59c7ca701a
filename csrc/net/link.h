// A Link is an ordered, reliable stream of records from one rank to another, in the transport's own
// memory: the sender encodes into it, the receiver reduces straight out of it, nothing is copied between.
// Both ends issue the same sequence of record sizes, so there are no tags and no matching.
// Nothing blocks. One thread at a time may use a Link (the engine: whoever holds the progress lock).
// A broken Link throws Error{peer_lost} from any call.
#pragma once
#include <memory>

#include "base/types.h"

namespace lightcc {

struct Link {
  virtual ~Link() = default;
  // Room for one record of n bytes (contiguous, 64-byte aligned, n <= record_bytes()), or nullptr when
  // the peer has not consumed enough yet. The memory belongs to the transport until commit.
  virtual std::byte* reserve(size_t n) = 0;
  virtual void commit(size_t n) = 0;               // sends the record last reserved
  virtual const std::byte* peek(size_t n) = 0;     // the next incoming record of n bytes, or nullptr
  virtual void consume(size_t n) = 0;              // lets the sender have its memory back
  virtual size_t record_bytes() const = 0;         // the largest record
};

}  // namespace lightcc

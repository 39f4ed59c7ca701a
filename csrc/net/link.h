// A Link is an ordered, reliable stream of records from one rank to another, in the transport's own
// memory: the sender encodes into it, the receiver reduces straight out of it, nothing is copied between.
// Both ends issue the same sequence of record sizes, so there are no tags and no matching.
// Nothing blocks. One thread at a time may use a Link (the engine: whoever holds the progress lock).
// A broken Link throws Error{peer_lost} from any call.
#pragma once
#include <memory>

#include "base/types.h"

namespace lightcc {

// What some links can do beside: carry records between the callers' own memory, with no copy into or out of the link's.
// Each end decides for itself: a record sent from the caller's memory may be peeked, a committed one received into it.
struct BulkLink {
  virtual ~BulkLink() = default;
  // Commits a record that lies at `data` and stays there unchanged until it is released; only a record of this link
  // that is posted there afterwards may overwrite it. False: no room, as reserve().
  virtual bool send_from(const std::byte* data, size_t n) = 0;
  // Names where the next record that is neither consumed nor posted shall go. It has n bytes; peek(n) returns `to`.
  virtual void post(std::byte* to, size_t n) = 0;
  virtual uint64_t lent() const = 0;               // a mark behind all that send_from() has lent so far
  // Afterwards the link uses none of the memory that was lent before the mark: what is still to be sent of it was
  // copied to the link's own. Returns how many bytes were copied since the last release, in peek() too.
  virtual size_t release_lent(uint64_t before) = 0;
  // The same for all that was lent, and for what is posted: what has come and is not consumed was copied as well.
  virtual size_t release() = 0;
};

struct Link {
  virtual ~Link() = default;
  // Room for one record of n bytes (contiguous, 64-byte aligned, n <= record_bytes()), or nullptr when
  // the peer has not consumed enough yet. The memory belongs to the transport until commit.
  virtual std::byte* reserve(size_t n) = 0;
  virtual void commit(size_t n) = 0;               // sends the record last reserved
  virtual const std::byte* peek(size_t n) = 0;     // the next incoming record of n bytes, at any address, or nullptr
  virtual void consume(size_t n) = 0;              // lets the sender have its memory back
  virtual size_t record_bytes() const = 0;         // the largest record
  virtual BulkLink* bulk() { return nullptr; }     // nullptr: it cannot
};

}  // namespace lightcc

// Links between ranks of one host: a ring buffer of records in each direction, in the sender's arena.
#pragma once
#include "net/shm/local_ranks.h"

namespace lightcc {

class ShmLink : public Link {
 public:
  ShmLink(RingWriter out, RingReader in, size_t record_bytes, LocalRanks& local_ranks, int peer)
      : out_(std::move(out)), in_(in), record_bytes_(record_bytes), local_ranks_(local_ranks), peer_(peer) {}
  std::byte* reserve(size_t n) override { return out_.reserve(n); }
  void commit(size_t n) override { out_.commit(n), local_ranks_.mark(peer_); }
  const std::byte* peek(size_t n) override { return in_.peek(n); }
  void consume(size_t n) override { in_.consume(n), local_ranks_.mark(peer_); }
  size_t record_bytes() const override { return record_bytes_; }

 private:
  RingWriter out_;
  RingReader in_;
  size_t record_bytes_;
  LocalRanks& local_ranks_;
  int peer_;
};

}  // namespace lightcc

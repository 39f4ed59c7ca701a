// Links between ranks of one host: a ring of records in each direction, in the sender's arena.
#pragma once
#include "net/host.h"

namespace lightcc {

class ShmLink : public Link {
 public:
  ShmLink(StreamWriter out, StreamReader in, size_t record_bytes, Host& host, int peer)
      : out_(std::move(out)), in_(in), record_bytes_(record_bytes), host_(host), peer_(peer) {}
  std::byte* reserve(size_t n) override { return out_.reserve(n); }
  void commit(size_t n) override { out_.commit(n), host_.mark(peer_); }
  const std::byte* peek(size_t n) override { return in_.peek(n); }
  void consume(size_t n) override { in_.consume(n), host_.mark(peer_); }
  size_t record_bytes() const override { return record_bytes_; }

 private:
  StreamWriter out_;
  StreamReader in_;
  size_t record_bytes_;
  Host& host_;
  int peer_;
};

}  // namespace lightcc

// Allgather, broadcast and alltoall between ranks of one host. Each sender says where its data lie: in its arena,
// then the receivers copy straight from there; or in private memory, then it publishes them block by block,
// once for all receivers of the same data. So a byte is copied once or twice, and never forwarded.
#pragma once
#include "collective/shared.h"

namespace lightcc {

class CopyCollective : public Work {
 public:
  CopyCollective(SharedBackend&, const Collective&);
  bool step() override;
  bool done() const override { return done_; }
  int waiting_for() const override { return waiting_for_; }

 private:
  struct Transfer {          // what one member gives another; nothing is sent for an empty one
    std::byte* data = nullptr;
    size_t bytes = 0, moved = 0;
    bool offered = false;    // the receiver knows where the data lie
    bool direct = false;     // in the sender's arena
    bool acked = false;      // what is direct: the receiver has acknowledged that it has all of it
    const std::byte* from = nullptr;
    bool over() const { return moved == bytes; }
  };

  bool offer(Transfer&, int to);
  bool publish(Transfer&, int to);
  bool receive(Transfer&, int from);
  bool send_ack(int to);
  bool receive_ack(int from);
  bool copy_own();
  std::byte* reserve(int to, size_t n);
  void commit(int to, size_t n);
  const std::byte* peek(int from, size_t n);
  void consume(int from, size_t n);
  Transfer& outgoing(int to) { return out_[size_t(to_all_ ? c_.index : to)]; }

  SharedBackend& backend_;
  const Collective c_;
  const bool to_all_;               // every receiver gets the same, on the common stream
  std::vector<Transfer> out_, in_;  // by member; what goes to all stands at this rank's own place
  std::vector<char> acked_;         // by member, of what this rank gave it directly
  const std::byte* own_from_ = nullptr;
  Transfer own_;                   // what stays here
  bool done_ = false;
  int waiting_for_ = 0;
};

}  // namespace lightcc

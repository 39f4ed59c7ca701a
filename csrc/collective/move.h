// Allgather, broadcast and alltoall between ranks of one host. Each sender says where its data lie: in its arena,
// then the receivers copy straight from there; or in private memory, then it publishes them block by block,
// once for all receivers of the same data. So a byte is copied once or twice, and never forwarded.
#pragma once
#include "collective/shared.h"

namespace lightcc {

class Move : public Work {
 public:
  Move(SharedBackend&, const Collective&);
  bool step() override;
  bool done() const override { return done_; }
  int waiting_for() const override { return waiting_for_; }

 private:
  struct Part {              // what one member gives another; empty parts are never spoken of
    std::byte* data = nullptr;
    size_t bytes = 0, moved = 0;
    bool offered = false;    // the sender has said, and the receiver heard, where the data lie
    bool direct = false;     // in the sender's arena
    bool taken = false;      // what is direct: the receiver has said, and the sender heard, that it has all
    const std::byte* from = nullptr;
    bool over() const { return moved == bytes; }
  };

  bool offer(Part&, int to);
  bool publish(Part&, int to);
  bool take(Part&, int from);
  bool say_taken(int to);
  bool hear_taken(int from);
  bool copy_own();
  std::byte* reserve(int to, size_t n);
  void commit(int to, size_t n);
  const std::byte* peek(int from, size_t n);
  void consume(int from, size_t n);
  Part& out(int to) { return out_[size_t(to_all_ ? c_.index : to)]; }

  SharedBackend& backend_;
  const Collective c_;
  const bool to_all_;              // every receiver gets the same, on the common stream
  std::vector<Part> out_, in_;     // by member; what goes to all stands at this rank's own place
  std::vector<char> heard_taken_;  // by member, of what this rank gave it directly
  const std::byte* own_from_ = nullptr;
  Part own_;                       // what stays here
  bool done_ = false;
  int waiting_for_ = 0;
};

}  // namespace lightcc

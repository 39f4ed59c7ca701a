// What a rank that has joined puts into collectives that go on without it: requests of nobody, with inputs that change
// no result, and outputs that are dropped. All of them use one piece of memory, one batch after the other.
#pragma once
#include "device/device.h"
#include "engine/run.h"

namespace lightcc {

class Phantom {
 public:
  explicit Phantom(std::shared_ptr<Arena> arena) : buffer_(std::move(arena)) {}

  // Nobody's part in an item; it has no memory yet.
  static Entry entry(const Item&);

  // Gives a batch of them their memory and fills it, a bounded piece a call; true when the batch can run. The memory is
  // the next batch's once this one has run.
  bool prepare(const std::vector<Entry>&);
  void clear() { buffer_.clear(); }  // this rank has data again

 private:
  struct Piece {
    Reduction reduction;
    std::byte* at;
    size_t count;
  };
  void lay_out(const std::vector<Entry>&);

  FusionBuffer buffer_;
  std::vector<Piece> pieces_;  // to be filled, from the back
  bool laid_out_ = false;
};

}  // namespace lightcc

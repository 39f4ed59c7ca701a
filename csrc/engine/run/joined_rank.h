// What a rank that has joined puts into collectives that go on without it: placeholder requests with inputs that change
// no result and outputs that are dropped. All of them use one piece of memory, one batch after the other.
#pragma once
#include <unordered_map>

#include "device/device.h"
#include "engine/run/batch_execution.h"

namespace lightcc {

class JoinedRank {
 public:
  explicit JoinedRank(std::shared_ptr<Arena> arena) : buffer_(std::move(arena)) {}

  // This rank's part in a request that it has not made; it has no memory yet.
  static BatchItem placeholder(const Response&);

  // Gives a batch of them their memory and fills it, a bounded piece a call; true when the batch can run. The memory is
  // the next batch's once this one has run.
  bool prepare(const std::vector<BatchItem>&);
  void clear() { buffer_.clear(); }  // this rank has data again

 private:
  struct Piece {
    Reduction reduction;
    std::byte* at;
    size_t count;
  };
  void lay_out(const std::vector<BatchItem>&);

  FusionBuffer buffer_;
  std::vector<Piece> pieces_;  // to be filled, from the back
  bool laid_out_ = false;
};

// The residuals of compressed requests, by key: a rank that has joined still owns its shards, and finds here what it
// has left behind of them.
class JoinedResiduals {
 public:
  void remember(const Request&);  // whose batch is agreed
  void give(Request& placeholder);
  void clear() { kept_.clear(); }  // this rank has data again

 private:
  std::unordered_map<std::string, std::vector<std::weak_ptr<Residual>>> known_;
  std::unordered_map<std::string, Residuals> kept_;  // of requests whose own are gone, or were never made
};

}  // namespace lightcc

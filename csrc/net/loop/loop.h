// Links between N ranks that are threads of one process: the plain transport. Read it to learn what a Link and a
// Transport are; test with it, because it can be small, refuse, delay and break on demand. Every record is memory of
// its own, so a sanitizer sees each byte written past it, and both ends' sizes are checked against each other. What
// comes is at an odd address, as it may be: so a sanitizer also sees whoever takes it for aligned.
#pragma once
#include <memory>
#include <vector>

#include "net/transport.h"

namespace lightcc {

struct LoopFaults {
  size_t record_bytes = 64 << 10;
  size_t capacity = 4;  // records that a direction holds before reserve() says nullptr
  double refuse = 0;    // the chance that reserve() says nullptr although there is room
  double delay = 0;     // the chance, asked anew each time, that peek() does not see the next record yet
  uint64_t seed = 1;
};

// What joins the ranks. Its own members may be called from any thread, each Link and each Transport from one at a time;
// those that it made must not outlive it.
class LoopNetwork {
 public:
  explicit LoopNetwork(int size, const LoopFaults& = {});
  ~LoopNetwork();

  std::unique_ptr<Transport> transport(int rank);  // once a rank
  // For tests of Links alone, which this owns: rank `from`'s end of group 0, lane 0; nullptr if from == to.
  Link* link(int from, int to);
  std::vector<Link*> links(int from);              // one a rank

  void cut(int a, int b, int64_t records = 0);     // breaks what joins them once so many more records were committed
  void lose(int rank);                             // breaks all its links, as its death would

 private:
  class End;
  class RankTransport;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lightcc

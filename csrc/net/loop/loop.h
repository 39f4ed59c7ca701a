// Links between N ranks that are threads of one process: the plain transport. Read it to learn what a Link
// is; test with it, because it can be small, refuse, delay and break on demand. Every record is memory of its
// own, so a sanitizer sees each byte written past it, and both ends' sizes are checked against each other.
#pragma once
#include <memory>
#include <vector>

#include "net/link.h"

namespace lightcc {

struct LoopFaults {
  size_t record_bytes = 64 << 10;
  size_t capacity = 4;  // records that a direction holds before reserve() says nullptr
  double refuse = 0;    // the chance that reserve() says nullptr although there is room
  double delay = 0;     // the chance, asked anew each time, that peek() does not see the next record yet
  uint64_t seed = 1;
};

// Owns all links; must outlive their use. Members may be called from any thread, each Link from one at a time.
class LoopTransport {
 public:
  explicit LoopTransport(int size, const LoopFaults& = {});
  ~LoopTransport();

  Link* link(int from, int to) const;          // rank `from`'s end of its link with `to`; nullptr if from == to
  std::vector<Link*> links(int from) const;    // one a rank
  void cut(int a, int b, int64_t records = 0); // breaks their link once so many more records were committed
  void lose(int rank);                         // breaks all its links, as its death would

 private:
  struct Wire;
  class End;
  int size_;
  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<std::unique_ptr<End>> ends_;  // [from * size + to]
};

}  // namespace lightcc

// What an all-reduce costs on a cluster, and which algorithm is the quickest there: for the selector, and for those who
// ask why (lightcc-explain). Pure and in closed form: a round costs the longest latency of its messages and the time
// of the resource that has the most to carry, so that 100,000 ranks are priced in seconds. After Thakur, Rabenseifner
// and Gropp, 2005; simulate.h goes through the same messages one by one.
#pragma once
#include <string>
#include <vector>

#include "collective/cost/cluster.h"
#include "collective/cost/traffic.h"

namespace lightcc {

struct Price {
  double latency_s = 0;   // start-ups
  double transfer_s = 0;  // bytes
  double local_s = 0;     // inside hosts, as far as nothing else hides it
  std::string bound_by;   // the resource that has the most to carry: "NIC out", "memory", "one connection" ...
  double seconds() const { return latency_s + transfer_s + local_s; }
};

// together: so many such all-reduces at a time, rank by rank alike, as 2D's lanes.
Price price(const Traffic&, const Cluster&, double together = 1);

struct Candidate {
  std::string algorithm;  // as LIGHTCC_SELECT has it ("2d", "ring", "compressed" ...)
  std::string exchange;   // 2D and compressed: between the owners of a lane
  int lanes = 1;
  int64_t chunks = 1;
  Price price;
};

struct PriceOptions {
  int64_t chunk_bytes = 512 << 10;  // of a lane of 2D
  double compressed_share = 0;      // a codec's bytes for each byte of the vector, below 1; 0: there is no codec
  bool simulated = false;           // what crosses the network message by message (simulate.h), up to some 4,000 ranks
};

// All ways to reduce so many bytes on this cluster, the quickest first. Throws Error{invalid_argument} for a cluster
// or an option that cannot be.
std::vector<Candidate> allreduce_candidates(const Cluster&, int64_t bytes, const PriceOptions& = {});

}  // namespace lightcc

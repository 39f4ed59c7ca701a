// Rates of transfers that share resources: max-min fair, as connections of TCP in the long run. After Bertsekas and
// Gallager, Data Networks, 1992 (progressive filling): all rates grow alike until a resource is full or a transfer has
// its most; those that are concerned keep what they have, the others go on.
#pragma once
#include <vector>

#include "collective/cost/cluster.h"

namespace lightcc {

struct NetworkFlow {
  Resources::Path path;
  double bytes_per_s = 0;  // what FairSharing::share() sets
};

class FairSharing {
 public:
  explicit FairSharing(const Resources& resources) : bytes_per_s_(resources.bytes_per_s()) {
    of_resource_.resize(bytes_per_s_.size());
  }
  void share(std::vector<NetworkFlow*>& flows);

 private:
  struct OfResource {
    double left = 0, weight = 0;  // bytes/s that nobody has; of all transfers that still grow
    bool used = false;
  };
  void begin(const std::vector<NetworkFlow*>&);
  double most_for_all(const std::vector<NetworkFlow*>&) const;

  const std::vector<double>& bytes_per_s_;
  std::vector<OfResource> of_resource_;
  std::vector<int> used_;
  std::vector<NetworkFlow*> growing_;
};

}  // namespace lightcc

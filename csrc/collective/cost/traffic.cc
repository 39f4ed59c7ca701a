#include "collective/cost/traffic.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "collective/fold.h"

namespace lightcc {
namespace {

Fold fold_of(int rank, int ranks) {
  Collective c{};
  c.kind = Kind::allreduce;
  c.index = rank;
  c.size = ranks;
  return Fold(c);
}

Traffic ring(int ranks, double bytes) {
  const auto to_the_right = [=](bool added) {
    return [=](int rank, std::vector<Message>* out) { out->push_back({(rank + 1) % ranks, bytes / ranks, added}); };
  };
  return {ranks, {{ranks - 1, true, to_the_right(true)}, {ranks - 1, true, to_the_right(false)}}};
}

Traffic pairwise(int ranks, double bytes) {
  const auto to_all = [=](bool added) {
    return [=](int rank, std::vector<Message>* out) {
      for (int distance = 1; distance < ranks; ++distance)
        out->push_back({(rank + distance) % ranks, bytes / ranks, added});
    };
  };
  return {ranks, {{1, false, to_all(true)}, {1, false, to_all(false)}}};
}

// Both algorithms that exchange with rank XOR 1, 2, 4 ... among a power of two of ranks; the others hand theirs to a
// neighbour before, and get the result after.
class Folded {
 public:
  Folded(int ranks, double bytes) : ranks_(ranks), bytes_(bytes), fold_(fold_of(0, ranks)), traffic_{ranks, {}} {}

  void begin() {
    if (fold_.extras == 0) return;
    add([=](int rank, const Fold& fold, std::vector<Message>* out, double bytes) {
      if (fold.index < 0) out->push_back({rank + 1, bytes, true});
    }, bytes_);
  }
  void exchange(int mask, double bytes, bool added) {
    add([=](int, const Fold& fold, std::vector<Message>* out, double bytes) {
      if (fold.index >= 0) out->push_back({fold.rank(fold.index ^ mask), bytes, added});
    }, bytes);
  }
  Traffic end() {
    if (fold_.extras > 0)
      add([=](int rank, const Fold& fold, std::vector<Message>* out, double bytes) {
        if (fold.has_extra()) out->push_back({rank - 1, bytes});
      }, bytes_);
    return std::move(traffic_);
  }
  int power() const { return fold_.power; }

 private:
  template <class F>
  void add(F messages, double bytes) {
    traffic_.rounds.push_back({1, false, [=, ranks = ranks_](int rank, std::vector<Message>* out) {
                                 messages(rank, fold_of(rank, ranks), out, bytes);
                               }});
  }
  const int ranks_;
  const double bytes_;
  const Fold fold_;
  Traffic traffic_;
};

Traffic recursive_doubling(int ranks, double bytes) {
  Folded folded(ranks, bytes);
  folded.begin();
  for (int mask = 1; mask < folded.power(); mask *= 2) folded.exchange(mask, bytes, true);
  return folded.end();
}

Traffic halving_doubling(int ranks, double bytes) {
  Folded folded(ranks, bytes);
  folded.begin();
  for (int mask = 1; mask < folded.power(); mask *= 2) folded.exchange(mask, bytes / 2 / mask, true);
  for (int mask = folded.power() / 2; mask >= 1; mask /= 2) folded.exchange(mask, bytes / 2 / mask, false);
  return folded.end();
}

Traffic bruck(int ranks, double bytes) {
  Traffic traffic{ranks, {}};
  for (int distance = 1; distance < ranks; distance *= 2) {
    const double blocks = std::min(distance, ranks - distance);
    traffic.rounds.push_back({1, false, [=](int rank, std::vector<Message>* out) {
                                out->push_back({(rank - distance + ranks) % ranks, bytes * blocks});
                              }});
  }
  return traffic;
}

}  // namespace

Traffic allreduce_traffic(std::string_view algorithm, int ranks, double bytes) {
  if (ranks == 1) return {1, {}};
  if (algorithm == "ring") return ring(ranks, bytes);
  if (algorithm == "pairwise") return pairwise(ranks, bytes);
  if (algorithm == "recursive_doubling") return recursive_doubling(ranks, bytes);
  if (algorithm == "halving_doubling") return halving_doubling(ranks, bytes);
  throw Error(Code::invalid_argument, "no cost model for the all-reduce \"" + std::string(algorithm) + "\"");
}

Traffic allgather_traffic(std::string_view algorithm, int ranks, double bytes) {
  if (ranks == 1) return {1, {}};
  if (algorithm == "bruck") return bruck(ranks, bytes);
  if (algorithm != "ring")
    throw Error(Code::invalid_argument, "no cost model for the all-gather \"" + std::string(algorithm) + "\"");
  Traffic traffic = ring(ranks, bytes * ranks);
  traffic.rounds.erase(traffic.rounds.begin());
  return traffic;
}

}  // namespace lightcc

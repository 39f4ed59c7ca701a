// The messages of an all-reduce, by rule: who sends how much to whom in each round, of all ranks. What algorithms.h
// lists for one rank stands here for any number of them without a list: 100,000 ranks have a ring of 200,000 rounds
// each, which are all alike. That both are the same is tested, message by message.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace lightcc {

struct Message {
  int to;
  double bytes;
  bool added = false;  // to what the receiver has, which costs it more memory traffic than to keep them
};

struct Round {
  int64_t repeats = 1;   // so many rounds one after the other are like this
  bool chained = false;  // a rank goes on when its left neighbour has: delays add up along the ring, once round it
  std::function<void(int rank, std::vector<Message>*)> messages;  // that the rank sends, added to the list
};

struct Traffic {
  int ranks;
  std::vector<Round> rounds;
};

// algorithm: "ring", "pairwise", "recursive_doubling" or "halving_doubling", of algorithms.h. bytes: of the vector.
// Throws Error{invalid_argument} for any other.
Traffic allreduce_traffic(std::string_view algorithm, int ranks, double bytes);
// "ring" or "bruck"; bytes: of each rank's block.
Traffic allgather_traffic(std::string_view algorithm, int ranks, double bytes);

}  // namespace lightcc

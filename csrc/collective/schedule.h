// A Schedule is one rank's whole part in a collective, as data: rounds of steps. It is made by a pure
// function (algorithms.h), run by Execution, checked without I/O by the tests and priced by a cost model.
// The steps of a round go together, in any interleaving, and none writes what another of them reads or
// writes. Steps in one direction between two ranks happen in the order listed, on both of them.
#pragma once
#include <algorithm>
#include <vector>

#include "base/types.h"

namespace lightcc {

// dots: dot products for Adasum, float64; all others are of the collective's dtype.
enum class Memory : uint8_t { input, output, scratch, dots };

struct Place {
  Memory memory = Memory::scratch;
  int64_t offset = 0;  // in elements
};

struct Step {
  enum class Action : uint8_t { send, recv, recv_reduce, recv_dot, copy, reduce, combine };
  Action kind;
  int peer = -1;           // member of the group; -1 for copy and reduce
  int64_t count = 0;       // elements; a step of none is skipped, on both ranks
  Place from, to;          // recv_reduce: to = op(from, what arrives); `from` may be `to` itself
  bool completes = false;  // recv_reduce, copy, reduce, combine: these are the final values, to be postscaled
  // combine: to = adasum(from, theirs), where theirs came from `peer`; `from` may be `to` itself
  // reduce: to = op(from, all slots), rounded once; slots of `count` elements lie one after the other at `theirs`
  Place theirs = {};
  int64_t dots = 0;        // combine: where in Memory::dots the dot products of both are, three a tensor
  int slots = 0;           // reduce
  // send: what it reads may be lent to the link (BulkLink). No later round writes it, but with what is received from
  // the same peer, which is posted on the same link: the link keeps the two apart.
  bool may_lend = false;

  static Step send(int peer, Place from, int64_t count) { return {Action::send, peer, count, from, {}}; }
  static Step recv(int peer, Place to, int64_t count) { return {Action::recv, peer, count, {}, to}; }
  static Step recv_reduce(int peer, Place from, Place to, int64_t count, bool completes = false) {
    return {Action::recv_reduce, peer, count, from, to, completes};
  }
  static Step copy(Place from, Place to, int64_t count, bool completes = false) {
    return {Action::copy, -1, count, from, to, completes};
  }
  static Step reduce(Place ours, Place theirs, int slots, Place to, int64_t count, bool completes) {
    return {Action::reduce, -1, count, ours, to, completes, theirs, 0, slots};
  }
  // recv, and the dot products of `ours` with what arrives into Memory::dots at 0.
  static Step recv_dot(int peer, Place ours, Place to, int64_t count) {
    return {Action::recv_dot, peer, count, ours, to};
  }
  static Step combine(int peer, Place ours, Place theirs, Place to, int64_t count, int64_t dots, bool completes) {
    return {Action::combine, peer, count, ours, to, completes, theirs, dots};
  }
  bool is_local() const { return kind == Action::copy || kind == Action::reduce || kind == Action::combine; }
  bool reads() const { return kind != Action::recv; }   // uses `from`
  bool writes() const { return kind != Action::send; }  // uses `to`
};

using Schedule = std::vector<std::vector<Step>>;

// The elements of a memory of our own that a schedule touches.
inline int64_t count_in(Memory memory, const Schedule& rounds) {
  int64_t end = 0;
  for (const auto& round : rounds)
    for (const Step& step : round) {
      if (step.reads() && step.from.memory == memory) end = std::max(end, step.from.offset + step.count);
      if (step.writes() && step.to.memory == memory) end = std::max(end, step.to.offset + step.count);
    }
  return end;
}
inline int64_t scratch_count(const Schedule& rounds) { return count_in(Memory::scratch, rounds); }

}  // namespace lightcc

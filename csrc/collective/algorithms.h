// The algorithms: pure functions from one rank's view of a collective to its Schedule. They are correct for
// any number of ranks on any hosts, any counts (none, fewer than ranks, uneven), any root, and for allreduce also
// when input and output are the same memory. No I/O, no state, no pointer of the Collective is looked at.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "collective/collective.h"
#include "collective/hosts.h"
#include "collective/schedule.h"

namespace lightcc {

struct Algorithm {
  Kind kind;
  const char* name;              // unique within a kind
  Schedule (*rounds)(const Collective&, const Hosts&);  // for input that needs no prescaling
  const char* source;
  bool adasum = false;           // for op adasum, and for nothing else
  bool by_host = false;          // worth it between hosts where some have several members
};

std::span<const Algorithm> algorithms();
const Algorithm* find_algorithm(Kind, std::string_view name);  // nullptr if there is none
std::string algorithms_text();                                 // the table: kind, name, source

// The algorithm's schedule; where c.pre is not 1, behind a round that prescales the input into memory of
// our own (a copy step from Memory::input is where pre applies).
Schedule plan(const Algorithm&, const Collective&, const Hosts&);

}  // namespace lightcc

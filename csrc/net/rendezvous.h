// How the ranks of one host meet: through an abstract AF_UNIX socket named after the job, which works across
// PID and IPC namespaces and needs no file. Rank 0 listens; everyone hands it a note and descriptors and
// gets those of all ranks back. Only processes of the same user are heard.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"

namespace lightcc {

struct Card {                  // what a rank shows the others
  std::string note;
  std::vector<Fd> fds;
};

// A name on this host that says "I am here": others of the same user reach it, and nobody on any other host does.
// Throws Error{internal} if it is taken.
Fd be_found(const std::string& name);
bool is_found(const std::string& name);

// An all-gather of cards. Throws on every rank that came: Error{timeout} naming those that did not before the deadline,
// Error{invalid_argument} if ranks were started in worlds of different sizes or two say they are the same.
std::vector<Card> meet(const std::string& name, int rank, int size, Card mine, uint64_t deadline_ns);

}  // namespace lightcc

// The all-gather by which ranks of several hosts bootstrap: everyone brings a note and gets the notes of all. Rank 0
// serves; a launcher only has to tell where (launchers.h). Notes travel over connections that began with a handshake.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/address.h"
#include "net/handshake.h"

namespace lightcc {

class BootstrapExchange {
 public:
  virtual ~BootstrapExchange() = default;
  // An all-gather; every rank calls it the same number of times. Throws on every rank that came: Error{timeout} naming
  // those that did not before the deadline, why it was cancelled, what another rank brought to fail(), or
  // Error{peer_lost} if rank 0 has gone.
  virtual std::vector<std::string> exchange(const std::string& mine, const Deadline&) = 0;
  // This rank cannot go on: all others' exchange throws this error, naming the rank. Once it is cancelled nobody is
  // waited for, and only those are told that can be at once.
  virtual void fail(const Error&, const Cancellation* = nullptr) = 0;
  // From the first exchange on: how rank 0's host and this one see each other. The address of rank 0 that this rank
  // reached (none on rank 0), and that of this rank as rank 0 sees it. On rank 0, and on ranks of its host: its own
  // address as the first rank from elsewhere saw it, or none. Ports say nothing but that of root_address().
  virtual Address root_address() const = 0;
  virtual Address own_address() const = 0;
};

constexpr size_t kMostNoteBytes = 64 << 10;

struct Endpoint {
  std::string host;  // a name or a numeric address without brackets
  int port = 0;
};

// Rank 0 brings the listener, on which it serves from within exchange(); the others try the endpoints, the first ones
// first and all of them again until one is rank 0's; an endpoint of another job is skipped. One thread at a time may
// use it.
std::unique_ptr<BootstrapExchange> open_exchange(int rank, int size, const JobCredentials&,
                                                 const std::vector<Endpoint>&, Fd listener = Fd());

}  // namespace lightcc

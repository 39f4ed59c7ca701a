// How the ranks of one host exchange what they need for shared memory: at an abstract AF_UNIX socket, which works
// across PID and IPC namespaces and needs no file. Rank 0 listens; everyone sends it a RankInfo and gets those of all
// ranks back. Only processes of the same user are served. Others can connect, fill the listener's queue or bind a name:
// nothing here waits for them beyond its deadline.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"

namespace lightcc {

struct RankInfo {              // what a rank tells the others
  std::string note;
  std::vector<Fd> fds;         // at most 4
};

std::string random_name();     // for a socket; nobody knows it before he is told

// A listening socket by which ranks of the same user find out that they share this host: nobody on any other host
// reaches it. Throws Error{internal} if the name is taken. is_reachable_locally throws Error{timeout} if the queue
// there is full until the deadline.
Fd listen_locally(const std::string& name);
bool is_reachable_locally(const std::string& name, const Deadline&);

// As the BootstrapExchange (exchange.h), with descriptors. Rank 0 listens at the first of the names, and at the others
// if they are free: other users can bind a name or fill its queue only if they know it, and a rank that does not know
// the first may know another.
class LocalExchange {
 public:
  virtual ~LocalExchange() = default;
  // An all-gather; every rank calls it the same number of times. Throws on every rank that came: Error{timeout} naming
  // those that did not before the deadline, why it was cancelled, Error{invalid_argument} if ranks were started in
  // worlds of different sizes or two say they are the same, Error{internal} where descriptors are short, and what
  // another rank brought to fail().
  virtual std::vector<RankInfo> exchange(RankInfo mine, const Deadline&) = 0;
  // This rank cannot go on: all others' exchange throws this, naming the rank. Cancelled, it waits for nobody.
  virtual void fail(const Error&, const Cancellation* = nullptr) = 0;
};
std::unique_ptr<LocalExchange> open_local_exchange(const std::vector<std::string>& names, int rank, int size);

}  // namespace lightcc

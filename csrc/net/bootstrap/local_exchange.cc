#include "net/bootstrap/local_exchange.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/shortage.h"
#include "net/bootstrap/local_exchange_client.h"
#include "net/bootstrap/local_exchange_root.h"

namespace lightcc {

std::string random_name() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != ssize_t(sizeof bytes)) throw system_error("drawing a name");
  std::string name = "lightcc/" + std::to_string(geteuid()) + "/";
  for (unsigned char byte : bytes) name += "0123456789abcdef"[byte / 16], name += "0123456789abcdef"[byte % 16];
  return name;
}

Fd listen_locally(const std::string& name) {
  Fd listener = local_socket();
  const int error = bind_local(listener.get(), name);
  if (error) throw Error(Code::internal, "init: listening for the ranks of this host: " + reason_of(error));
  if (listen(listener.get(), SOMAXCONN) != 0) throw system_error("init: listening for the ranks of this host");
  return listener;
}

bool is_reachable_locally(const std::string& name, const Deadline& deadline) {
  const Fd fd = local_socket();
  int error;
  while ((error = connect_local(fd.get(), name)) == EAGAIN)
    if (!sleep_until(deadline))
      throw deadline.error(Error(Code::timeout, "init: another process of this host keeps the ranks from finding each "
                                                "other: it has filled the queue of the socket @" + name));
  // The kernel tells whose listener it is without its help, so nobody need accept.
  return error == 0 && same_user(fd.get());
}

std::unique_ptr<LocalExchange> open_local_exchange(const std::vector<std::string>& names, int rank, int size) {
  // Three descriptors come from each rank, and rank 0 has a connection with each.
  allow_descriptors(rlim_t(4 * size + 256));
  if (rank == 0) return std::make_unique<LocalExchangeRoot>(names, size);
  return std::make_unique<LocalExchangeClient>(names, rank, size);
}

}  // namespace lightcc

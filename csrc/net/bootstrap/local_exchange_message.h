// What the ranks of one host send each other in a LocalExchange: one message, one packet of a SOCK_SEQPACKET socket,
// which may carry descriptors. Nothing here blocks.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <optional>
#include <string>

#include "base/clock.h"
#include "net/bootstrap/local_exchange.h"

namespace lightcc {

struct LocalMessage {
  int rank = 0, size = 0;      // whose info it is, in a world of which size
  uint32_t round = 0;
  Code refusal = Code::ok;     // not ok: no info; why the rank cannot go on is the info's note
  RankInfo info;
  bool complete = true;        // received: false if there was no room for all of its descriptors
};

enum class LocalSent { yes, later, never };  // never: the other end is gone
// Throws Error{internal} if the message is larger than the system takes.
LocalSent send_message(int fd, const LocalMessage&);

enum class LocalReceived { message, later, nothing };  // nothing: the other end is gone, or what came is no message
LocalReceived receive_message(int fd, LocalMessage&);

Fd local_socket();             // throws if there is none
// ok, or errno; EAGAIN: the listener's queue is full.
int connect_local(int fd, const std::string& name);
int bind_local(int fd, const std::string& name);
std::optional<uid_t> user_of(int fd);  // who is at the other end, or listens there: the kernel's word
bool same_user(int fd);

}  // namespace lightcc

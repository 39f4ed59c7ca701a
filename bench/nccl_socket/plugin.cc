// What bench/nccl_net.py measures HARP's plugin against: a network plugin of version 12 that does what NCCL's own socket
// transport does (NCCL 2.26 to 2.30), over the kernel's TCP. A control connection carries the size of each message and up
// to 128 bytes of it; the rest follows on the same connection, or on NCCL_NSOCKS_PERTHREAD others in tasks of at least
// 64 KiB. All is done by test(), as NCCL does by default; its helper threads are left out, for each side has one core.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "nccl_abi/nccl_net.h"
#include "harp_plugin/port/interfaces.h"

namespace {

using nccl::Result;

constexpr size_t kInlineBytes = 128, kLeastTask = 64 << 10, kMostSockets = 64;

struct Handle {
  sockaddr_in address;
  uint32_t data_sockets;
};
static_assert(sizeof(Handle) <= nccl::kHandleBytes);

struct Socket {
  int fd = -1;
  ~Socket() {
    if (fd >= 0) close(fd);
  }
};

// Moves what can be moved at once. false: the connection is lost.
bool move(int fd, bool sends, void* data, size_t bytes, size_t* at) {
  while (*at < bytes) {
    auto* place = static_cast<uint8_t*>(data) + *at;
    const ssize_t n = sends ? send(fd, place, bytes - *at, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(fd, place, bytes - *at, MSG_DONTWAIT);
    if (n > 0) *at += static_cast<size_t>(n);
    else if (n == 0) return false;
    else if (errno == EAGAIN || errno == EINTR) return true;
    else return false;
  }
  return true;
}

struct Communicator;

struct Task {
  int fd;
  uint8_t* data;
  size_t bytes, at;
};

struct Request {
  enum class Stage { unused, size, data };
  Communicator* owner = nullptr;
  Stage stage = Stage::unused;
  uint8_t* data = nullptr;
  size_t bytes = 0, at = 0;
  uint8_t message[sizeof(uint32_t) + kInlineBytes];
  size_t message_at = 0;
  std::vector<Task> tasks;
};

struct Communicator {
  bool sends;
  std::vector<Socket> sockets;  // the last is the control connection
  size_t opened = 0, next = 0;
  std::array<Request, nccl::kMostRequests> requests;

  Communicator(bool its_sends, uint32_t data_sockets) : sends(its_sends), sockets(data_sockets + 1) {
    for (Request& request : requests) request.owner = this;
  }
  int control() const { return sockets.back().fd; }
};

struct Listener {
  Socket socket;
  uint32_t data_sockets;
  std::unique_ptr<Communicator> coming;
  Socket unnamed;  // accepted, and has not said which it is yet
};

size_t inline_part(size_t bytes) { return bytes <= kInlineBytes ? bytes : 0; }

// The size, and a short message with it. true: it is known on both sides.
Result exchange_size(Request& request, bool* known) {
  const Communicator& comm = *request.owner;
  *known = false;
  if (comm.sends) {
    const size_t length = sizeof(uint32_t) + inline_part(request.bytes);
    if (request.message_at == 0) {
      const auto size = static_cast<uint32_t>(request.bytes);
      std::memcpy(request.message, &size, sizeof size);
      std::memcpy(request.message + sizeof size, request.data, inline_part(request.bytes));
    }
    if (!move(comm.control(), true, request.message, length, &request.message_at)) return nccl::kRemoteError;
    *known = request.message_at == length;
    return nccl::kSuccess;
  }
  if (!move(comm.control(), false, request.message, sizeof(uint32_t), &request.message_at)) return nccl::kRemoteError;
  if (request.message_at < sizeof(uint32_t)) return nccl::kSuccess;
  uint32_t size;
  std::memcpy(&size, request.message, sizeof size);
  if (size > request.bytes) return nccl::kInvalidUsage;
  if (request.at < inline_part(size) &&
      !move(comm.control(), false, request.data, inline_part(size), &request.at))
    return nccl::kRemoteError;
  if (request.at < inline_part(size)) return nccl::kSuccess;
  request.bytes = size;
  *known = true;
  return nccl::kSuccess;
}

void cut(Request& request) {
  Communicator& comm = *request.owner;
  request.tasks.clear();
  request.at = inline_part(request.bytes);
  const size_t sockets = comm.sockets.size() - 1, rest = request.bytes - request.at;
  const size_t each = sockets ? std::max(kLeastTask, (rest + sockets - 1) / sockets) : rest;
  for (size_t at = request.at; at < request.bytes; at += each) {
    const int fd = sockets ? comm.sockets[comm.next++ % sockets].fd : comm.control();
    request.tasks.push_back({fd, request.data + at, std::min(each, request.bytes - at), 0});
  }
}

Result test(void* handle, int* done, int* size) {
  Request& request = *static_cast<Request*>(handle);
  *done = 0;
  if (request.stage == Request::Stage::size) {
    bool known = false;
    const Result result = exchange_size(request, &known);
    if (result != nccl::kSuccess || !known) return result;
    cut(request);
    request.stage = Request::Stage::data;
  }
  bool over = true;
  for (Task& task : request.tasks) {
    if (!move(task.fd, request.owner->sends, task.data, task.bytes, &task.at)) return nccl::kRemoteError;
    over &= task.at == task.bytes;
  }
  if (!over) return nccl::kSuccess;
  request.stage = Request::Stage::unused;
  if (size) *size = static_cast<int>(request.bytes);
  *done = 1;
  return nccl::kSuccess;
}

void* begin(Communicator& comm, void* data, size_t bytes) {
  for (Request& request : comm.requests) {
    if (request.stage != Request::Stage::unused) continue;
    request.stage = Request::Stage::size;
    request.data = static_cast<uint8_t*>(data);
    request.bytes = bytes;
    request.at = request.message_at = 0;
    return &request;
  }
  return nullptr;
}

Result isend(void* comm, void* data, size_t bytes, int, void*, void*, void** request) {
  *request = begin(*static_cast<Communicator*>(comm), data, bytes);
  return nccl::kSuccess;
}

Result irecv(void* comm, int n, void** data, size_t* bytes, int*, void**, void**, void** request) {
  *request = n == 1 ? begin(*static_cast<Communicator*>(comm), data[0], bytes[0]) : nullptr;
  return n == 1 ? nccl::kSuccess : nccl::kInternalError;
}

std::string address() {
  const char* pattern = std::getenv("NCCL_SOCKET_IFNAME");
  return harp::choose_interfaces(pattern ? pattern : "").front().address;
}

int tcp_socket() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

Result listen_on(void*, int, void* handle, void** made) {
  auto listener = std::make_unique<Listener>();
  const char* sockets = std::getenv("NCCL_NSOCKS_PERTHREAD");
  listener->data_sockets = sockets ? std::min<uint32_t>(uint32_t(std::atoi(sockets)), kMostSockets) : 0;
  Handle own{.address = {}, .data_sockets = listener->data_sockets};
  own.address.sin_family = AF_INET;
  inet_pton(AF_INET, address().c_str(), &own.address.sin_addr);
  socklen_t length = sizeof own.address;
  listener->socket.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  auto* name = reinterpret_cast<sockaddr*>(&own.address);
  if (bind(listener->socket.fd, name, length) != 0 || listen(listener->socket.fd, 1024) != 0 ||
      getsockname(listener->socket.fd, name, &length) != 0)
    return nccl::kSystemError;
  std::memcpy(handle, &own, sizeof own);
  *made = listener.release();
  return nccl::kSuccess;
}

// Opening connections may wait for the peer's kernel here; it is not what is measured.
Result connect_to(void*, int, void* handle, void** made, void**) {
  const Handle own = *static_cast<Handle*>(handle);
  auto comm = std::make_unique<Communicator>(true, own.data_sockets);
  for (size_t i = 0; i < comm->sockets.size(); ++i) {
    const auto index = static_cast<uint8_t>(i);
    int& fd = comm->sockets[i].fd = tcp_socket();
    if (connect(fd, reinterpret_cast<const sockaddr*>(&own.address), sizeof own.address) != 0 ||
        send(fd, &index, 1, MSG_NOSIGNAL) != 1)
      return nccl::kRemoteError;
  }
  *made = comm.release();
  return nccl::kSuccess;
}

Result accept_from(void* from, void** made, void**) {
  auto& listener = *static_cast<Listener*>(from);
  *made = nullptr;
  if (!listener.coming) listener.coming = std::make_unique<Communicator>(false, listener.data_sockets);
  Communicator& comm = *listener.coming;
  while (comm.opened < comm.sockets.size()) {
    int& fd = listener.unnamed.fd;
    if (fd < 0) fd = accept4(listener.socket.fd, nullptr, nullptr, SOCK_CLOEXEC);
    uint8_t index;
    if (fd < 0 || recv(fd, &index, 1, MSG_DONTWAIT) != 1) return nccl::kSuccess;
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    std::swap(comm.sockets[index].fd, fd);
    ++comm.opened;
  }
  *made = listener.coming.release();
  return nccl::kSuccess;
}

Result init(void** context, uint64_t, nccl::CommunicatorConfig*, nccl::Logger, nccl::ProfilerCallback) {
  *context = nullptr;
  return nccl::kSuccess;
}

Result devices(int* count) {
  *count = 1;
  return nccl::kSuccess;
}

Result properties(int device, nccl::PropertiesV12* is) {
  static char name[] = "tcp";
  if (device != 0) return nccl::kInvalidArgument;
  *is = {};
  is->name = name;
  is->pointer_support = nccl::kHostPointers;
  is->speed = 10'000;
  is->max_communicators = 65536;
  is->max_receives = is->max_multi_request = 1;
  is->virtual_device.count = 1;
  is->max_p2p_bytes = is->max_collective_bytes = size_t(1) << 30;
  return nccl::kSuccess;
}

Result finalize(void*) { return nccl::kSuccess; }
Result reg_mr(void*, void*, size_t, int, void** memory) {
  *memory = nullptr;
  return nccl::kSuccess;
}
Result dereg_mr(void*, void*) { return nccl::kSuccess; }

template <class Object>
Result close_it(void* object) {
  delete static_cast<Object*>(object);
  return nccl::kSuccess;
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) nccl::NetV12 ncclNetPlugin_v12 = {
    .name = "SocketBaseline",
    .init = init,
    .devices = devices,
    .get_properties = properties,
    .listen = listen_on,
    .connect = connect_to,
    .accept = accept_from,
    .path = {.reg_mr = reg_mr,
             .reg_mr_dma_buf = nullptr,
             .dereg_mr = dereg_mr,
             .isend = isend,
             .irecv = irecv,
             .iflush = nullptr,
             .test = test,
             .close_send = close_it<Communicator>,
             .close_recv = close_it<Communicator>,
             .close_listen = close_it<Listener>,
             .get_device_mr = nullptr,
             .irecv_consumed = nullptr},
    .make_virtual_device = nullptr,
    .finalize = finalize,
    .set_attributes = nullptr,
};
}

// The kernel's TCP in the pattern of NCCL's socket transport: four bytes of length, then the payload, which goes
// straight to where the receiver wants it. With several flows a message is cut into equal parts, one a flow. A request
// makes progress when it is tested, and so do those behind it, as far as the sockets take and give.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "base/error.h"
#include "harp_plugin/tools/bench/channel.h"
#include "harp_plugin/tools/bench/socket.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr size_t kHeader = sizeof(uint32_t), kMostFlows = 16, kMostRequests = 32;
constexpr size_t kLeastPart = 64 * 1024;  // of a message that is cut, as in NCCL

struct TcpRequest {
  uint8_t* data = nullptr;
  size_t capacity = 0;  // of a receive
  uint32_t bytes = 0;   // of the message: a receive learns it from the header
  size_t header_done = 0;
  size_t parts_left = 0;
  std::array<size_t, kMostFlows> done{};  // of each flow's part

  size_t part_begin(size_t flow, size_t flows) const { return std::min<size_t>(bytes, flow * part_bytes(flows)); }
  size_t part_end(size_t flow, size_t flows) const { return std::min<size_t>(bytes, (flow + 1) * part_bytes(flows)); }

 private:
  size_t part_bytes(size_t flows) const { return std::max(kLeastPart, (bytes + flows - 1) / flows); }
};

bool would_block() {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
  throw lightcc::system_error("tcp: send or receive");
}

class TcpChannel : public BenchChannel {
 public:
  explicit TcpChannel(std::vector<Fd> flows)
      : flows_(std::move(flows)), sends_(flows_.size()), receives_(flows_.size()) {
    for (TcpRequest& request : requests_) free_.push_back(&request);
  }

  void* send(const void* data, size_t bytes) override {
    TcpRequest* request = take(const_cast<void*>(data), sends_);
    if (!request) return nullptr;
    request->bytes = uint32_t(bytes);
    for (size_t flow = 0; flow < flows_.size(); ++flow) push(flow);
    return request;
  }
  void* receive(void* data, size_t capacity) override {
    TcpRequest* request = take(data, receives_);
    if (request) request->capacity = capacity;
    return request;
  }
  bool test(void* handle, size_t* bytes) override {
    TcpRequest* request = static_cast<TcpRequest*>(handle);
    for (size_t flow = 0; flow < flows_.size() && request->parts_left > 0; ++flow) {
      push(flow);
      pull(flow);
    }
    if (request->parts_left > 0) return false;
    *bytes = request->bytes;
    free_.push_back(request);
    return true;
  }

 private:
  using Queues = std::vector<std::deque<TcpRequest*>>;

  TcpRequest* take(void* data, Queues& queues) {
    if (free_.empty()) return nullptr;
    TcpRequest* request = free_.back();
    free_.pop_back();
    *request = TcpRequest{};
    request->data = static_cast<uint8_t*>(data);
    request->parts_left = flows_.size();
    for (auto& queue : queues) queue.push_back(request);
    return request;
  }

  void push(size_t flow) {
    auto& queue = sends_[flow];
    while (!queue.empty()) {
      TcpRequest& request = *queue.front();
      const size_t begin = request.part_begin(flow, flows_.size()), end = request.part_end(flow, flows_.size());
      size_t header = flow == 0 ? kHeader - request.header_done : 0;
      size_t rest = end - begin - request.done[flow];
      iovec pieces[2] = {{reinterpret_cast<char*>(&request.bytes) + request.header_done, header},
                         {request.data + begin + request.done[flow], rest}};
      msghdr message{};
      message.msg_iov = pieces + (header == 0);
      message.msg_iovlen = header == 0 ? 1 : 2;
      if (header + rest > 0) {
        const ssize_t sent = sendmsg(flows_[flow].get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && would_block()) return;
        const size_t of_header = std::min(header, size_t(sent));
        request.header_done += of_header;
        request.done[flow] += size_t(sent) - of_header;
        if (size_t(sent) < header + rest) continue;
      }
      --request.parts_left;
      queue.pop_front();
    }
  }

  void pull(size_t flow) {
    auto& queue = receives_[flow];
    while (!queue.empty()) {
      TcpRequest& request = *queue.front();
      if (request.header_done < kHeader && (flow > 0 || !pull_header(request))) return;
      const size_t begin = request.part_begin(flow, flows_.size()), end = request.part_end(flow, flows_.size());
      size_t& done = request.done[flow];
      while (begin + done < end) {
        const size_t got = pull_some(flow, request.data + begin + done, end - begin - done);
        if (got == 0) return;
        done += got;
      }
      --request.parts_left;
      queue.pop_front();
    }
  }

  bool pull_header(TcpRequest& request) {
    while (request.header_done < kHeader) {
      char* at = reinterpret_cast<char*>(&request.bytes) + request.header_done;
      const size_t got = pull_some(0, at, kHeader - request.header_done);
      if (got == 0) return false;
      request.header_done += got;
    }
    if (request.bytes > request.capacity) throw Error(Code::internal, "tcp: a message is longer than its buffer");
    return true;
  }

  size_t pull_some(size_t flow, void* to, size_t most) {
    const ssize_t got = recv(flows_[flow].get(), to, most, MSG_DONTWAIT);
    if (got < 0 && would_block()) return 0;
    if (got == 0) throw Error(Code::peer_lost, "tcp: the other side has closed the connection");
    return size_t(got);
  }

  const std::vector<Fd> flows_;
  Queues sends_, receives_;  // of each flow: a request is in those of all flows that still have a part of it
  std::array<TcpRequest, 2 * kMostRequests> requests_;
  std::vector<TcpRequest*> free_;
};

class TcpTransport : public Transport {
 public:
  TcpTransport(const Workload& settings, std::string address) : settings_(settings), address_(std::move(address)) {
    if (settings.flows > kMostFlows) throw Error(Code::invalid_argument, "--flows: at most 16");
  }

  std::string listen() override {
    listener_ = listen_at(address_ + ":0");
    tune(listener_);  // buffers count from the handshake on
    return own_address(listener_.get());
  }
  std::unique_ptr<BenchChannel> accept() override {
    return channel([&] { return accept_from(listener_.get()); });
  }
  std::unique_ptr<BenchChannel> connect(const std::string& where) override {
    return channel([&] { return connect_to(where); });
  }
  void progress() override {}
  std::string stats() override { return "null"; }

 private:
  template <class Make>
  std::unique_ptr<BenchChannel> channel(Make make) {
    std::vector<Fd> flows;
    for (uint64_t i = 0; i < settings_.flows; ++i) {
      flows.push_back(make());
      tune(flows.back());
    }
    return std::make_unique<TcpChannel>(std::move(flows));
  }

  void tune(const Fd& socket) const {
    const int yes = 1, buffer = int(settings_.socket_buffer);
    bool tuned = setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0;
    for (const int which : {SO_SNDBUF, SO_RCVBUF})
      if (buffer > 0) tuned &= setsockopt(socket.get(), SOL_SOCKET, which, &buffer, sizeof buffer) == 0;
    const std::string& name = settings_.congestion;
    if (!name.empty())
      tuned &= setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), socklen_t(name.size())) == 0;
    if (!tuned) throw lightcc::system_error("tcp: set the options of a socket");
  }

  const Workload settings_;
  const std::string address_;
  Fd listener_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp(const Workload& settings, const std::string& address) {
  return std::make_unique<TcpTransport>(settings, address);
}

}  // namespace harp::bench

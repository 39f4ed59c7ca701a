// A network plugin of NCCL's. Its communicators have one direction, so a channel has two.
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "harp_plugin/tools/bench/channel.h"
#include "nccl_abi/net_plugin.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::NetPlugin;

constexpr double kSetUpSeconds = 10;

struct NcclHandle {
  uint8_t bytes[nccl::kHandleBytes];
};

void check(const char* attempted, nccl::Result result) {
  if (result != nccl::kSuccess)
    throw Error(Code::internal, std::string("the plugin's ") + attempted + " returned " + std::to_string(result));
}

class PluginChannel : public BenchChannel {
 public:
  PluginChannel(NetPlugin& plugin, void* sender, void* receiver)
      : plugin_(plugin), sender_(sender), receiver_(receiver) {}
  ~PluginChannel() override {
    if (sender_) plugin_.close_send(sender_);
    if (receiver_) plugin_.close_recv(receiver_);
  }

  void* send(const void* data, size_t bytes) override {
    void* request = nullptr;
    check("isend", plugin_.isend(sender_, const_cast<void*>(data), bytes, 0, nullptr, &request));
    return request;
  }
  void* receive(void* data, size_t capacity) override {
    void *request = nullptr, *nothing = nullptr;
    int tag = 0;
    check("irecv", plugin_.irecv(receiver_, 1, &data, &capacity, &tag, &nothing, &request));
    return request;
  }
  bool test(void* request, size_t* bytes) override {
    int done = 0, size = 0;
    check("test", plugin_.test(request, &done, &size));
    *bytes = static_cast<size_t>(size);
    return done != 0;
  }
  void set_sender(void* sender) { sender_ = sender; }
  void set_receiver(void* receiver) { receiver_ = receiver; }
  void finish(void* request, const char* what) {
    size_t bytes = 0;
    wait_until([&] { return test(request, &bytes); }, kSetUpSeconds, what);
  }

 private:
  NetPlugin& plugin_;
  void *sender_, *receiver_;
};

// The plugin reads its environment when it starts.
std::string prepared(const Workload& settings) {
  for (const char* name : {"HARP_IFNAME", "NCCL_SOCKET_IFNAME"})
    if (!settings.interface.empty()) setenv(name, settings.interface.c_str(), 1);
  setenv("HARP_PORT", settings.port.c_str(), 1);
  setenv("NCCL_NSOCKS_PERTHREAD", settings.flows > 1 ? std::to_string(settings.flows).c_str() : "0", 1);
  if (settings.engine_mode != "auto") setenv("HARP_INLINE", settings.engine_mode == "inline" ? "1" : "2", 1);
  return settings.transport.substr(std::strlen(kPluginPrefix));
}

class PluginTransport : public Transport {
 public:
  explicit PluginTransport(const Workload& settings) : plugin_(prepared(settings), 0, nullptr) {
    check("init", plugin_.init(&context_, 1));
  }
  ~PluginTransport() override {
    if (listener_) plugin_.close_listen(listener_);
    plugin_.finalize(context_);
  }

  std::string listen() override {
    const NcclHandle handle = own_handle();
    return {reinterpret_cast<const char*>(handle.bytes), sizeof handle};
  }

  // The other side tells where to connect to, for the way back.
  std::unique_ptr<BenchChannel> accept() override {
    void* receiver = nullptr;
    check("accept", plugin_.accept(listener_, &receiver));
    if (!receiver) return nullptr;
    auto channel = std::make_unique<PluginChannel>(plugin_, nullptr, receiver);
    NcclHandle handle;
    channel->finish(begin([&] { return channel->receive(&handle, sizeof handle); }), "handle of the other side");
    channel->set_sender(connected(handle));
    return channel;
  }

  std::unique_ptr<BenchChannel> connect(const std::string& where) override {
    NcclHandle handle;
    if (where.size() != sizeof handle) throw Error(Code::mismatch, "the server sent something that is no handle");
    std::memcpy(&handle, where.data(), sizeof handle);
    auto channel = std::make_unique<PluginChannel>(plugin_, connected(handle), nullptr);
    if (!listener_) back_ = own_handle();
    channel->finish(begin([&] { return channel->send(&back_, sizeof back_); }), "handle to be sent");
    void* receiver = nullptr;
    wait_until(
        [&] {
          check("accept", plugin_.accept(listener_, &receiver));
          return receiver != nullptr;
        },
        kSetUpSeconds, "connection back");
    channel->set_receiver(receiver);
    return channel;
  }

  void progress() override {}
  std::string stats() override { return "null"; }

 private:
  NcclHandle own_handle() {
    NcclHandle handle;
    check("listen", plugin_.listen(context_, 0, handle.bytes, &listener_));
    return handle;
  }
  void* connected(NcclHandle handle) {
    void* sender = nullptr;
    wait_until(
        [&] {
          check("connect", plugin_.connect(context_, 0, handle.bytes, &sender));
          return sender != nullptr;
        },
        kSetUpSeconds, "connection");
    return sender;
  }
  static void* begin(const std::function<void*()>& post) {
    void* request = nullptr;
    wait_until([&] { return (request = post()) != nullptr; }, kSetUpSeconds, "request to begin");
    return request;
  }

  NetPlugin plugin_;
  void* context_ = nullptr;
  void* listener_ = nullptr;
  NcclHandle back_{};
};

}  // namespace

std::unique_ptr<Transport> make_plugin(const Workload& settings) {
  return std::make_unique<PluginTransport>(settings);
}

}  // namespace harp::bench

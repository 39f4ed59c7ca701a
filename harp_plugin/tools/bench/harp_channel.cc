// HARP, through its C API.
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "harp_plugin/harp.h"
#include "harp_plugin/tools/bench/channel.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;

[[noreturn]] void fail(const char* attempted, int code) {
  throw Error(Code::internal, std::string(attempted) + ": " + std::to_string(code) + ": " + harp_error());
}

// Whether it is done: else it is pending.
bool done(const char* attempted, int code) {
  if (code != HARP_OK && code != HARP_PENDING) fail(attempted, code);
  return code == HARP_OK;
}

class HarpChannel : public Records {
 public:
  HarpChannel(harp_context* context, harp_connection* connection) : context_(context), connection_(connection) {}
  ~HarpChannel() override { harp_close(connection_); }

  void* send(const void* data, size_t bytes) override {
    harp_request* request = nullptr;
    return done("harp_send", harp_send(connection_, data, bytes, &request)) ? request : nullptr;
  }
  void* receive(void* data, size_t capacity) override {
    harp_request* request = nullptr;
    return done("harp_recv", harp_recv(connection_, data, capacity, &request)) ? request : nullptr;
  }
  bool test(void* request, size_t* bytes) override {
    return done("harp_test", harp_test(static_cast<harp_request*>(request), bytes));
  }
  std::shared_ptr<uint8_t> memory(size_t bytes) override {
    auto* block = static_cast<uint8_t*>(harp_alloc(context_, bytes));
    if (!block) throw Error(Code::internal, std::string("harp_alloc: ") + harp_error());
    return {block, [](uint8_t*) {}};  // goes with the context
  }
  size_t record_bytes() override { return harp_record_bytes(connection_); }
  const void* next(size_t* bytes) override {
    const void* data = nullptr;
    return done("harp_recv_zc", harp_recv_zc(connection_, &data, bytes)) ? data : nullptr;
  }
  void consume(size_t records) override {
    if (const int code = harp_consume(connection_, records); code != HARP_OK) fail("harp_consume", code);
  }

 private:
  harp_context* context_;
  harp_connection* connection_;
};

class HarpTransport : public Transport {
 public:
  explicit HarpTransport(const Workload& settings) : mode_(settings.mode == "streams" ? HARP_STREAM : HARP_MESSAGE) {
    harp_options options{};
    options.size = sizeof options;
    options.port = settings.port.c_str();
    options.interface = settings.interface.empty() ? nullptr : settings.interface.c_str();
    options.engines = int32_t(settings.engines);
    options.inline_mode = settings.engine_mode == "inline" ? 1 : settings.engine_mode == "threads" ? 2 : 0;
    options.paths = uint32_t(settings.paths);
    options.mtu = uint32_t(settings.mtu);
    options.peer_timeout_ms = uint32_t(settings.peer_timeout_ms);
    options.authenticate = settings.secret.empty() ? 0 : 1;
    options.secret = settings.secret.empty() ? nullptr : settings.secret.c_str();
    if (const int code = harp_open(&options, &context_); code != HARP_OK) fail("harp_open", code);
  }
  ~HarpTransport() override {
    if (listener_) harp_stop_listening(listener_);
    harp_close_context(context_);
  }

  std::string listen() override {
    harp_handle handle;
    if (const int code = harp_listen(context_, &handle, &listener_); code != HARP_OK) fail("harp_listen", code);
    return {reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes};
  }
  std::unique_ptr<BenchChannel> accept() override {
    harp_connection* connection = nullptr;
    if (!done("harp_accept", harp_accept(listener_, &connection))) return nullptr;
    return std::make_unique<HarpChannel>(context_, connection);
  }
  std::unique_ptr<BenchChannel> connect(const std::string& where) override {
    harp_handle handle;
    if (where.size() != sizeof handle.bytes) throw Error(Code::mismatch, "the server sent something that is no handle");
    std::memcpy(handle.bytes, where.data(), where.size());
    harp_connection* connection = nullptr;
    const int code = harp_connect(context_, &handle, mode_, &connection);
    if (code != HARP_OK) fail("harp_connect", code);
    return std::make_unique<HarpChannel>(context_, connection);
  }
  void progress() override { done("harp_poll", harp_poll(context_)); }
  std::string stats() override {
    std::string json(harp_stats(context_, nullptr, 0), '\0');
    for (;;) {
      const size_t needed = harp_stats(context_, json.data(), json.size());
      if (needed <= json.size()) {
        json.resize(std::strlen(json.c_str()));
        return json.empty() ? "null" : json;
      }
      json.resize(needed);
    }
  }

 private:
  const int mode_;
  harp_context* context_ = nullptr;
  harp_listener* listener_ = nullptr;
};

}  // namespace

std::unique_ptr<Transport> make_harp(const Workload& settings) { return std::make_unique<HarpTransport>(settings); }

std::shared_ptr<uint8_t> BenchChannel::memory(size_t bytes) {
  constexpr size_t kPage = 4096;
  void* block = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (!block) throw lightcc::system_error("allocate the buffers");
  return {static_cast<uint8_t*>(block), std::free};
}

void wait_until(const std::function<bool()>& turn, double seconds, const std::string& what) {
  const uint64_t deadline = lightcc::now_ns() + uint64_t(seconds * 1e9);
  while (!turn())
    if (lightcc::now_ns() > deadline)
      throw Error(Code::timeout, "no " + what + " within " + std::to_string(seconds) + " s");
}

}  // namespace harp::bench

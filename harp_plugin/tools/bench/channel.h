// The message pattern of NCCL's network plugins, over HARP or the kernel's TCP: requests that are posted and then
// tested until they are done. One thread at a time uses a channel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "harp_plugin/tools/bench/settings.h"

namespace harp::bench {

class BenchChannel {
 public:
  virtual ~BenchChannel() = default;
  // nullptr: would block, come again. The memory stays with the channel until the request is done.
  virtual void* send(const void* data, size_t bytes) = 0;
  virtual void* receive(void* data, size_t capacity) = 0;
  virtual bool test(void* request, size_t* bytes) = 0;  // true: done, and the request is gone
  virtual std::shared_ptr<uint8_t> memory(size_t bytes);  // that it sends from best, page-aligned
};

// Records in the memory that they were received in.
class Records : public BenchChannel {
 public:
  virtual size_t record_bytes() = 0;
  virtual const void* next(size_t* bytes) = 0;  // nullptr: none has come
  virtual void consume(size_t records) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string listen() = 0;                                        // what connect() of the other side needs
  virtual std::unique_ptr<BenchChannel> accept() = 0;                           // nullptr: nobody has come yet
  virtual std::unique_ptr<BenchChannel> connect(const std::string& where) = 0;  // usable at once
  virtual void progress() = 0;                                             // what is to do besides test()
  virtual std::string stats() = 0;                                         // JSON
};

std::unique_ptr<Transport> make_harp(const Workload&);
// For a network plugin of NCCL's the transport is kPluginPrefix and the plugin's path.
constexpr char kPluginPrefix[] = "plugin=";
std::unique_ptr<Transport> make_plugin(const Workload&);
// `address` is this side's, of the control connection.
std::unique_ptr<Transport> make_tcp(const Workload&, const std::string& address);

// Calls turn() until it returns true; throws Error{timeout} that says what was waited for.
void wait_until(const std::function<bool()>& turn, double seconds, const std::string& what);

}  // namespace harp::bench

// Two communicators of a plugin with a connection between them, in one process.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nccl_abi/net_plugin.h"

namespace harp::plugtest {

using lightcc::NetPlugin;

using Bytes = std::vector<uint8_t>;

Bytes pattern(size_t bytes, uint64_t seed);

// Throws std::runtime_error with these words.
void expect(bool holds, const std::string& what);
void expect_ok(nccl::Result, const std::string& attempted);

void log(nccl::LogLevel, unsigned long, const char*, int, const char* format, ...);  // for a plugin
std::string last_warning();

// Calls turn() until it returns true; throws after 20 s.
void wait_until(const std::function<bool()>& turn, const std::string& what);

// What a request ended with.
struct End {
  nccl::Result result = nccl::kSuccess;
  std::vector<int> sizes;
};

class Requester {
 public:
  explicit Requester(NetPlugin& plugin) : plugin_(&plugin) {}
  // nullptr: would block. The request's place holds a stale pointer before, as NCCL's may.
  void* try_send(void* communicator, const void* data, size_t bytes, int tag = 0) const;
  void* try_receive(void* communicator, const std::vector<std::pair<void*, size_t>>& buffers,
                    std::vector<int> tags = {}) const;
  void* send(void* communicator, const Bytes&, int tag = 0) const;
  void* receive(void* communicator, Bytes&) const;
  // Tests them in turn, from a random one if there are dice, until all are over.
  std::vector<End> finish(std::vector<void*> requests, int parts = 1, uint64_t dice = 0) const;

 protected:
  NetPlugin* plugin_;
};

class Pair : public Requester {
 public:
  Pair(NetPlugin&, void* context);
  ~Pair();
  void close();
  // A message there, checked to the byte, into a buffer that is `more` larger; nothing may be written beyond that.
  void transfer(size_t bytes, uint64_t seed, size_t more = 0);

  void* sender = nullptr;
  void* receiver = nullptr;

 private:
  void* listener_ = nullptr;
};

// A plugin that is initialized while this lives.
class Started : public NetPlugin {
 public:
  Started(const std::string& path, int version) : NetPlugin(path, version, log) {
    expect_ok(init(&context, 1), "init");
  }
  ~Started() { finalize(context); }
  void* context = nullptr;
};

}  // namespace harp::plugtest

// Where the tables of pieces wait for being copied to a GPU: pinned memory, each with an event behind its last copy.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda/driver.h"

namespace lightcc {

// Of one GPU, whose context is the thread's current one. Any thread may call.
class CodecTables {
 public:
  // Pins a table's memory, which may wait for what the GPU has: so that copy() need not.
  void make_ready(const DriverFunctions&);
  // Queues that these bytes are copied to the GPU; they are the caller's again. Throws Error.
  void copy(const DriverFunctions&, void* stream, void* to, const void* table, size_t bytes);

 private:
  struct Pinned {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes = 0;
    void* event = nullptr;
    bool is_used = false;
  };
  // Of a table that no copy reads any more and that is as large.
  Pinned& take(const DriverFunctions&, size_t bytes);
  Pinned& make(const DriverFunctions&, size_t bytes);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Pinned>> all_;  // never freed: a copy may outlive whoever asked for it
};

}  // namespace lightcc

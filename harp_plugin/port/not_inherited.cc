#include "harp_plugin/port/not_inherited.h"

#include <pthread.h>
#include <unistd.h>

#include <array>

namespace harp {

namespace {

struct Table {
  std::array<std::atomic<int>, 1024> descriptors;
  Table() {
    for (auto& one : descriptors) one = -1;
  }
};

Table& table() {
  static Table* const table = new Table;  // forks may come late
  return *table;
}

void close_in_child() {
  for (auto& one : table().descriptors)
    if (const int descriptor = one.exchange(-1); descriptor >= 0) close(descriptor);
}

}  // namespace

NotInherited::NotInherited(int descriptor) : slot_(nullptr) {
  [[maybe_unused]] static const int registered = (table(), pthread_atfork(nullptr, nullptr, close_in_child));
  for (auto& one : table().descriptors) {
    int free = -1;
    if (one.compare_exchange_strong(free, descriptor)) {
      slot_ = &one;
      return;
    }
  }
}

}  // namespace harp

#include "engine/request/output_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

namespace lightcc {
namespace {

constexpr size_t kPage = 4096, kHugePage = 2 << 20;

std::mutex mutex;  // of all pools, so that fork() has one to hold; a pool is asked once for an output of a MiB or more
int forks = 0;     // that this process and those before it came from

// Eight sizes from one power of two to the next, so that outputs whose sizes differ a little share blocks.
size_t size_class(size_t bytes) {
  const size_t step = std::max(std::bit_floor(bytes) / 8, kPage);
  return (bytes + step - 1) / step * step;
}

void* map_block(size_t bytes) {
  // Room to begin at a border of a huge page; what is beside the block goes back at once.
  const size_t room = bytes + kHugePage;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(mapped);
  auto* begin = first + (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  if (begin > first) munmap(first, size_t(begin - first));
  if (begin + bytes < first + room) munmap(begin + bytes, size_t(first + room - begin) - bytes);
  madvise(begin, bytes, MADV_HUGEPAGE);  // a request; page by page where the system has none
  return begin;
}

}  // namespace

OutputPool::OutputPool(size_t most_bytes, uint64_t idle_ns, std::function<uint64_t()> clock, bool watches)
    : most_bytes_(most_bytes), idle_ns_(idle_ns), clock_(std::move(clock)), watches_(watches), generation_(forks) {}

OutputPool::~OutputPool() { close(); }

void* OutputPool::allocate(size_t bytes) {
  bytes = size_class(bytes);
  std::lock_guard lock(mutex);
  // The one that came back last is most likely still in the cache.
  const auto fits = [&](const Kept& kept) { return kept.bytes == bytes; };
  if (auto it = std::find_if(kept_.rbegin(), kept_.rend(), fits); it != kept_.rend()) {
    void* data = it->data;
    kept_.erase(std::next(it).base());
    kept_bytes_ -= bytes;
    out_[data] = bytes;
    return data;
  }
  void* data = map_block(bytes);
  while (!data && !kept_.empty()) {
    drop_oldest();
    data = map_block(bytes);
  }
  if (data) out_[data] = bytes;
  return data;
}

void OutputPool::give_back(void* data) {
  std::lock_guard lock(mutex);
  auto it = out_.find(data);
  if (it == out_.end()) return;
  const size_t bytes = it->second;
  out_.erase(it);
  if (closed_ || generation_ != forks || bytes > most_bytes_) {
    munmap(data, bytes);
    return;
  }
  while (kept_bytes_ + bytes > most_bytes_) drop_oldest();
  kept_.push_back({data, bytes, clock_()});
  kept_bytes_ += bytes;
  if (!watches_ || watching_) return;
  if (watcher_.joinable()) watcher_.join();  // it has ended, as nothing was kept
  try {
    watcher_ = std::thread([this] { watch(); });
    watching_ = true;
  } catch (const std::system_error&) {  // no more threads: then nobody would give back what is idle
    while (!kept_.empty()) drop_oldest();
  }
}

void OutputPool::drop_oldest() {
  munmap(kept_.front().data, kept_.front().bytes);
  kept_bytes_ -= kept_.front().bytes;
  kept_.erase(kept_.begin());
}

void OutputPool::drop_idle(uint64_t now) {
  while (!kept_.empty() && now - kept_.front().since_ns >= idle_ns_) drop_oldest();
}

void OutputPool::trim() {
  std::lock_guard lock(mutex);
  drop_idle(clock_());
}

void OutputPool::watch() {
  std::unique_lock lock(mutex);
  while (!closed_ && !kept_.empty()) {
    const uint64_t now = clock_();
    drop_idle(now);
    if (!kept_.empty()) ended_.wait_for(lock, std::chrono::nanoseconds(kept_.front().since_ns + idle_ns_ - now));
  }
  watching_ = false;
}

void OutputPool::close() {
  std::thread watcher;
  {
    std::lock_guard lock(mutex);
    if (generation_ != forks) {
      new std::thread(std::move(watcher_));  // leaked: in a child there is no such thread
      return;
    }
    closed_ = true;
    while (!kept_.empty()) drop_oldest();
    watcher.swap(watcher_);
  }
  ended_.notify_all();
  if (watcher.joinable()) watcher.join();
}

size_t OutputPool::kept_bytes() const {
  std::lock_guard lock(mutex);
  return kept_bytes_;
}

void OutputPool::before_fork() { mutex.lock(); }
void OutputPool::after_fork() { mutex.unlock(); }
void OutputPool::in_child() {
  new (&mutex) std::mutex;
  ++forks;
}

}  // namespace lightcc

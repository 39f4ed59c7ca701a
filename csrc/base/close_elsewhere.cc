#include "base/close_elsewhere.h"

#include <signal.h>
#include <sys/socket.h>

#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace lightcc {
namespace {

constexpr int kMostClosers = 64;  // threads; when all of them wait, descriptors stay open until one does not

// Lives as long as the process: a thread may wait in close() at its end.
struct Closers {
  std::mutex mutex;
  std::deque<Fd> waiting;
  int threads = 0;

  void run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    for (std::unique_lock lock(mutex);; lock.lock()) {
      if (waiting.empty()) return void(--threads);
      Fd next = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      const linger none{};
      setsockopt(next.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);  // where it is a socket
      next = Fd();
    }
  }
};

}  // namespace

void close_elsewhere(std::vector<Fd> descriptors) {
  static auto* const closers = new Closers;
  const std::lock_guard lock(closers->mutex);
  for (Fd& one : descriptors)
    if (one) closers->waiting.push_back(std::move(one));
  if (closers->waiting.empty() || closers->threads == kMostClosers) return;
  try {
    std::thread([] { closers->run(); }).detach();
    ++closers->threads;
  } catch (const std::system_error&) {  // no thread now: the next one closes these too
  }
}

void close_elsewhere(Fd descriptor) {
  std::vector<Fd> one;
  one.push_back(std::move(descriptor));
  close_elsewhere(std::move(one));
}

void close_listener(Fd listener) {
  shutdown(listener.get(), SHUT_RD);
  std::vector<Fd> connected;
  for (Fd next; (next = Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));)
    connected.push_back(std::move(next));
  close_elsewhere(std::move(connected));
}

}  // namespace lightcc

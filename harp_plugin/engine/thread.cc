// When an engine's thread runs and when it sleeps.
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>

#include "harp_plugin/engine/engine.h"

namespace harp {

namespace {

constexpr uint64_t kUnattendedNs = 10 * kMillisecond;  // inline mode: nobody polled for so long
constexpr uint64_t kLookAgainNs = 200 * kMicrosecond;  // while the port takes nothing or has not let go
constexpr uint64_t kNoDoorbellNs = kMillisecond;
constexpr uint64_t kGoodbyeNs = 200 * kMillisecond;
constexpr unsigned long kTimerSlackNs = 1'000;

// The thread gets no signals from its first instruction on: they are the application's.
template <class F>
std::thread start_without_signals(F body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(body);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace

Engine::Engine(std::unique_ptr<Port> port, const Options& options, Settings settings)
    : settings_(std::move(settings)), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), port_(std::move(port)),
      options_(options), endpoint_(options, settings_.random), rx_(kBatch),
      tx_(kBatch - kBatch % port_->caps().sent_together),
      habit_(settings_.spin_ns) {
  if (!bell_) throw lightcc::system_error("starting an engine (eventfd)");
  thread_ = start_without_signals([this] { thread(); });
}

Engine::~Engine() {
  stopping_ = true;
  ring();
  thread_.join();
  say_goodbye();
}

// Until the peers have answered, or for a moment: one that hears nothing finds out by its time-out.
void Engine::say_goodbye() {
  const uint64_t until_ns = lightcc::now_ns() + kGoodbyeNs;
  bool busy = false;
  while (try_round(&busy) && lightcc::now_ns() < until_ns) {
    if (busy) continue;
    if (endpoint_.next_ns() == UINT64_MAX && kept_ == kept_end_ && fenced_.empty()) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Engine::ring() {
  sleeping_.store(false, std::memory_order_seq_cst);
  const uint64_t one = 1;
  // Its only failure is a counter that is full already: then the thread wakes.
  [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof one);
}

void Engine::thread() {
  pthread_setname_np(pthread_self(), ("harp-engine-" + std::to_string(settings_.index)).substr(0, 15).c_str());
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  if (settings_.core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (settings_.core->core < CPU_SETSIZE) CPU_SET(settings_.core->core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused: it runs where the system puts it
  }
  while (!stopping_) {
    const uint64_t polls = polls_.load(std::memory_order_relaxed);
    if (settings_.runs_inline) {
      block(lightcc::now_ns() + kUnattendedNs, false);
      if (polls_.load(std::memory_order_relaxed) != polls) continue;
    }
    lightcc::SpinPolicy patience(habit_);
    while (!stopping_ && polls_.load(std::memory_order_relaxed) == polls) {
      bool busy = true;
      if (!try_round(&busy)) sched_yield();
      if (busy) {
        patience.reset();
      } else if (!patience.wait_a_little()) {
        sleep();
        patience.reset();
      }
    }
  }
}

// Until a packet, a submission, a command or a timer. The progress lock is free meanwhile.
void Engine::sleep() {
  if (progress_lock_.test_and_set(std::memory_order_acquire)) return;
  sleeping_.store(true, std::memory_order_seq_cst);
  const std::optional<uint64_t> until_ns = arm_port();
  progress_lock_.clear(std::memory_order_release);
  if (until_ns && !stopping_) block(*until_ns, true);
  sleeping_.store(false, std::memory_order_seq_cst);
}

std::optional<uint64_t> Engine::arm() {
  if (progress_lock_.test_and_set(std::memory_order_acquire)) return {};
  const std::optional<uint64_t> until_ns = arm_port();
  progress_lock_.clear(std::memory_order_release);
  return until_ns;
}

// Until when to sleep at most; nothing: there is something to do. For the holder of the progress lock.
std::optional<uint64_t> Engine::arm_port() {
  const uint64_t now_ns = lightcc::now_ns();
  uint64_t until_ns = endpoint_.next_ns();
  if (kept_ != kept_end_ || !fenced_.empty()) until_ns = std::min(until_ns, now_ns + kLookAgainNs);
  if (port_->descriptor() < 0) until_ns = std::min(until_ns, now_ns + kNoDoorbellNs);
  if (unpublished_) publish(now_ns);
  armed_ = true;
  const bool sends = kept_ == kept_end_ && endpoint_.wants_to_transmit(now_ns);  // more than a round does
  const bool nothing = !sends && port_->arm() && !queued_.load(std::memory_order_seq_cst) && mailbox_.empty();
  return nothing && until_ns > now_ns ? std::optional(until_ns) : std::nullopt;
}

void Engine::block(uint64_t until_ns, bool port_too) {
  pollfd watched[2] = {{bell_.get(), POLLIN, 0}, {port_->descriptor(), POLLIN, 0}};
  const uint64_t now_ns = lightcc::now_ns();
  const uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
  const timespec left{static_cast<time_t>(left_ns / kSecond), static_cast<long>(left_ns % kSecond)};
  ppoll(watched, port_too && watched[1].fd >= 0 ? 2 : 1, until_ns == UINT64_MAX ? nullptr : &left, nullptr);
  uint64_t rung;
  if (watched[0].revents && read(bell_.get(), &rung, sizeof rung) < 0) return;  // somebody else's wake-up: none is lost
}

}  // namespace harp

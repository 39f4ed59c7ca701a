#include "harp_plugin/tools/plugtest/pair.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <stdexcept>

#include "base/clock.h"

namespace harp::plugtest {

namespace {

constexpr uint64_t kPatienceNs = 20'000'000'000;
char stale;  // what a request's place points to before a call

std::mutex warning_mutex;
std::string warning;

}  // namespace

Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes data(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (uint8_t& byte : data) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return data;
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void expect_ok(nccl::Result result, const std::string& attempted) {
  expect(result == nccl::kSuccess,
         attempted + " returned " + std::to_string(result) + "; last warning: " + last_warning());
}

void log(nccl::LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level != nccl::kLogWarn) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const std::lock_guard lock(warning_mutex);
  warning = text;
}

std::string last_warning() {
  const std::lock_guard lock(warning_mutex);
  return warning;
}

void wait_until(const std::function<bool()>& turn, const std::string& what) {
  const uint64_t end_ns = lightcc::now_ns() + kPatienceNs;
  while (!turn()) expect(lightcc::now_ns() < end_ns, "waited 20 s for " + what);
}

void* Requester::try_send(void* communicator, const void* data, size_t bytes, int tag) const {
  void* request = &stale;
  expect_ok(plugin_->isend(communicator, const_cast<void*>(data), bytes, tag, nullptr, &request), "isend");
  expect(request != &stale, "isend left a stale request where it could not begin");
  return request;
}

void* Requester::try_receive(void* communicator, const std::vector<std::pair<void*, size_t>>& buffers,
                            std::vector<int> tags) const {
  std::vector<void*> data, nothing(buffers.size());
  std::vector<size_t> sizes;
  for (const auto& [address, bytes] : buffers) {
    data.push_back(address);
    sizes.push_back(bytes);
  }
  tags.resize(buffers.size());
  void* request = &stale;
  expect_ok(plugin_->irecv(communicator, static_cast<int>(buffers.size()), data.data(), sizes.data(), tags.data(),
                           nothing.data(), &request),
            "irecv");
  expect(request != &stale, "irecv left a stale request where it could not begin");
  return request;
}

void* Requester::send(void* communicator, const Bytes& data, int tag) const {
  void* request = nullptr;
  wait_until([&] { return (request = try_send(communicator, data.data(), data.size(), tag)) != nullptr; },
             "isend to begin");
  return request;
}

void* Requester::receive(void* communicator, Bytes& data) const {
  void* request = nullptr;
  wait_until([&] { return (request = try_receive(communicator, {{data.data(), data.size()}})) != nullptr; },
             "irecv to begin");
  return request;
}

std::vector<End> Requester::finish(std::vector<void*> requests, int parts, uint64_t dice) const {
  std::vector<End> ends(requests.size());
  size_t left = requests.size();
  wait_until(
      [&] {
        dice = dice * 6364136223846793005 + 1442695040888963407;
        const size_t first = dice >> 33;
        for (size_t n = 0; n < requests.size(); ++n) {
          const size_t i = (first + n) % requests.size();
          if (!requests[i]) continue;
          int done = 0;
          End& end = ends[i];
          end.sizes.assign(static_cast<size_t>(parts), -1);
          end.result = plugin_->test(requests[i], &done, end.sizes.data());
          if (!done && end.result == nccl::kSuccess) continue;
          requests[i] = nullptr;
          --left;
        }
        return left == 0;
      },
      "requests to end");
  return ends;
}

Pair::Pair(NetPlugin& plugin, void* context) : Requester(plugin) {
  uint8_t handle[nccl::kHandleBytes];
  expect_ok(plugin.listen(context, 0, handle, &listener_), "listen");
  wait_until(
      [&] {
        if (!sender) expect_ok(plugin.connect(context, 0, handle, &sender), "connect");
        if (!receiver) expect_ok(plugin.accept(listener_, &receiver), "accept");
        return sender && receiver;
      },
      "a connection");
}

Pair::~Pair() { close(); }

void Pair::close() {
  if (sender) plugin_->close_send(sender);
  if (receiver) plugin_->close_recv(receiver);
  if (listener_) plugin_->close_listen(listener_);
  sender = receiver = listener_ = nullptr;
}

void Pair::transfer(size_t bytes, uint64_t seed, size_t more) {
  constexpr size_t kGuard = 64;
  const Bytes data = pattern(bytes, seed), guard(kGuard, 0xee);
  Bytes got(bytes + more + kGuard, 0xee);
  void* received = nullptr;
  wait_until([&] { return (received = try_receive(receiver, {{got.data(), bytes + more}})) != nullptr; },
             "irecv to begin");
  void* sent = send(sender, data);
  const auto ends = finish({received, sent});
  const std::string what = "a message of " + std::to_string(bytes) + " bytes";
  for (const End& end : ends) {
    expect_ok(end.result, what);
    expect(end.sizes[0] == static_cast<int>(bytes), what + " was reported as " + std::to_string(end.sizes[0]));
  }
  expect(std::equal(data.begin(), data.end(), got.begin()), what + " came changed");
  expect(std::equal(guard.begin(), guard.end(), got.end() - kGuard), what + ": written beyond the buffer");
}

}  // namespace harp::plugtest

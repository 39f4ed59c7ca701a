#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "harp_plugin/tools/plugtest/cases.h"
#include "harp_plugin/tools/plugtest/pair.h"

namespace harp::plugtest {

namespace {

constexpr int kReloads = 100, kCommunicators = 64;

void connect_and_accept_do_not_block(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  uint8_t handle[nccl::kHandleBytes];
  void *listener = nullptr, *communicator = &handle;
  expect_ok(plugin.listen(plugin.context, 0, handle, &listener), "listen");
  expect_ok(plugin.accept(listener, &communicator), "accept with nobody there");
  expect(!communicator, "accept gave a communicator with nobody there");
  expect_ok(plugin.close_listen(listener), "closeListen");
}

void a_wrong_handle_is_refused(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  uint8_t handle[nccl::kHandleBytes];
  std::fill(std::begin(handle), std::end(handle), uint8_t(0x5a));
  void* communicator = nullptr;
  expect(plugin.connect(plugin.context, 0, handle, &communicator) != nccl::kSuccess,
         "connecting with a handle of something else is no error");
}

// HARP_CONNECT_TIMEOUT_MS says how long this takes.
void connecting_to_nobody_ends(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  uint8_t handle[nccl::kHandleBytes];
  void *listener = nullptr, *communicator = nullptr;
  expect_ok(plugin.listen(plugin.context, 0, handle, &listener), "listen");
  expect_ok(plugin.close_listen(listener), "closeListen");
  nccl::Result result = nccl::kSuccess;
  wait_until(
      [&] {
        result = plugin.connect(plugin.context, 0, handle, &communicator);
        return communicator || result != nccl::kSuccess;
      },
      "connect to end");
  if (!communicator) return;
  Bytes data(100);
  void* request = nullptr;
  wait_until(
      [&] {
        int done = 0;
        result = request ? plugin.test(request, &done, nullptr)
                         : plugin.isend(communicator, data.data(), data.size(), 0, nullptr, &request);
        return done || result != nccl::kSuccess;
      },
      "a send to end");
  expect(result == nccl::kRemoteError, "sending to nobody ended with " + std::to_string(result));
  expect_ok(plugin.close_send(communicator), "closeSend");
}

void many_communicators(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  std::vector<std::unique_ptr<Pair>> pairs;
  for (int i = 0; i < kCommunicators; ++i) pairs.push_back(std::make_unique<Pair>(plugin, plugin.context));
  for (size_t i = 0; i < pairs.size(); ++i) pairs[i]->transfer(10'000 + i, settings.seed + i);
}

// After closeRecv and closeSend, the memory is the caller's: nothing may write into it.
void closing_with_requests_under_way(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  for (uint64_t round = 0; round < 20; ++round) {
    Pair pair(plugin, plugin.context);
    auto got = std::make_unique<std::vector<Bytes>>(4, Bytes(1 << 20));
    auto data = std::make_unique<std::vector<Bytes>>(4, pattern(1 << 20, round));
    std::vector<void*> requests;
    for (Bytes& buffer : *got) requests.push_back(pair.receive(pair.receiver, buffer));
    for (Bytes& buffer : *data) requests.push_back(pair.send(pair.sender, buffer));
    int done = 0;
    for (uint64_t i = 0; i < round * 5; ++i) {
      if (!done) expect_ok(plugin.test(requests[0], &done, nullptr), "test");
    }
    if (round % 2) {
      plugin.close_send(std::exchange(pair.sender, nullptr));
      data.reset();
    } else {
      plugin.close_recv(std::exchange(pair.receiver, nullptr));
      for (Bytes& buffer : *got) std::fill(buffer.begin(), buffer.end(), uint8_t(0xaa));
      const auto then = *got;
      usleep(2000);
      expect(*got == then, "a buffer was written into after closeRecv");
    }
    pair.close();
  }
}

// Deregistering is the promise that nothing is written any more, whatever is under way.
void deregistering_memory_in_use(const PlugtestSettings& settings) {
  Bytes got(1 << 20);
  const Bytes data = pattern(got.size(), settings.seed);
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  void* memory = nullptr;
  expect_ok(plugin.reg_mr(pair.receiver, got.data(), got.size(), nccl::kHostPointers, &memory), "regMr");
  void* received = pair.receive(pair.receiver, got);
  pair.send(pair.sender, data);
  expect_ok(plugin.dereg_mr(pair.receiver, memory), "deregMr");
  const Bytes then = got;
  int done = 0;
  plugin.test(received, &done, nullptr);
  usleep(2000);
  expect(got == then, "a buffer was written into after deregMr");
}

void a_peer_that_closes_ends_requests(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  Bytes got(100);
  void* received = pair.receive(pair.receiver, got);
  plugin.close_send(std::exchange(pair.sender, nullptr));
  const nccl::Result result = pair.finish({received})[0].result;
  expect(result == nccl::kRemoteError, "a receive from a closed peer ended with " + std::to_string(result));
  expect(!last_warning().empty(), "nothing was logged");
}

void transfers(NetPlugin& plugin, void* context, uint64_t seed) {
  Pair pair(plugin, context);
  for (uint64_t i = 0; i < 10; ++i) pair.transfer(300'000 + i, seed + i);
}

// As NCCL has them: a service thread and a progress thread of each.
void two_communicators_with_threads(const PlugtestSettings& settings) {
  std::vector<std::string> faults(2);
  std::vector<std::thread> progress;
  Started plugin(settings.path, settings.version);
  for (size_t i = 0; i < faults.size(); ++i) {
    progress.emplace_back([&, i] {
      try {
        void* context = nullptr;
        expect_ok(plugin.init(&context, 10 + i), "init of another communicator");
        std::unique_ptr<Pair> pair;
        std::thread([&] { pair = std::make_unique<Pair>(plugin, context); }).join();
        for (uint64_t n = 0; n < 10; ++n) pair->transfer(200'000, settings.seed + n);
        std::thread([&] { pair.reset(); }).join();
        expect_ok(plugin.finalize(context), "finalize");
      } catch (const std::exception& error) {
        faults[i] = error.what();
      }
    });
  }
  for (std::thread& thread : progress) thread.join();
  for (const std::string& fault : faults) expect(fault.empty(), fault);
}

void loading_again_and_again(const PlugtestSettings& settings) {
  for (int i = 0; i < kReloads; ++i) {
    Started plugin(settings.path, settings.version);
    if (i % 10 == 0) transfers(plugin, plugin.context, settings.seed);
  }
}

int status_of_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      body();
      _exit(0);
    } catch (const std::exception& error) {
      fprintf(stderr, "in the child: %s\n", error.what());
      _exit(1);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void forking(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  pair.transfer(100'000, settings.seed);
  expect(status_of_child([] {}) == 0, "a child that does nothing did not end well");
  pair.transfer(100'000, settings.seed + 1);
  const int status = status_of_child([&] {
    void* context = nullptr;
    expect_ok(plugin.init(&context, 2), "init in a child");
    transfers(plugin, context, settings.seed);
  });
  expect(status == 0, "a child that starts anew did not end well");
  pair.transfer(100'000, settings.seed + 2);
}

}  // namespace

const std::vector<Case>& connection_cases() {
  static const std::vector<Case> all = {
      {"no-blocking", connect_and_accept_do_not_block},
      {"wrong-handle", a_wrong_handle_is_refused},
      {"nobody", connecting_to_nobody_ends},
      {"many", many_communicators},
      {"close-under-way", closing_with_requests_under_way},
      {"deregister-in-use", deregistering_memory_in_use},
      {"peer-closes", a_peer_that_closes_ends_requests},
      {"threads", two_communicators_with_threads},
      {"reload", loading_again_and_again},
      {"fork", forking},
  };
  return all;
}

}  // namespace harp::plugtest

#include "harp_plugin/tools/bench/pairs.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "harp_plugin/tools/bench/channel.h"
#include "harp_plugin/tools/bench/traffic.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;

constexpr uint64_t kMostPairs = 64;
constexpr double kOpenS = 30;

// What the pairs share, be they threads or processes.
struct Board {
  std::atomic<uint64_t> ready, failed;
  struct Result {
    double bytes_per_s, cores;
  } results[kMostPairs];
};

void run_pair(const Workload& s, uint64_t number, Board& board) {
  const std::vector<int> cores = core_list(s.cores);
  bind_to(std::to_string(cores.empty() ? int(number) : cores[number % cores.size()]));
  const auto here = make_harp(s), there = make_harp(s);
  const std::string handle = there->listen();
  std::unique_ptr<Party> sender, receiver;  // their buffers may be posted until the channels are closed
  const auto to = here->connect(handle);
  std::unique_ptr<BenchChannel> from;
  auto accepted = [&] {
    here->progress();
    there->progress();
    if (!from) from = there->accept();
    return from != nullptr;
  };
  wait_until(accepted, kOpenS, "connection over mem");
  Window sends(1), receives(1);
  sender = make_client_party(*to, s, sends);
  receiver = make_server_party(*from, s, receives);
  board.ready.fetch_add(1);
  auto all_ready = [&] {
    here->progress();
    there->progress();
    return board.ready.load() == s.pairs || board.failed.load() > 0;
  };
  wait_until(all_ready, kOpenS, "start of the other pairs");
  drive({receiver.get(), sender.get()}, s);
  const Usage used = receives.used();
  const double seconds = double(used.at_ns) * 1e-9;
  board.results[number] = {double(receiver->counted_bytes()) / seconds,
                           double(used.user_ns + used.system_ns) * 1e-9 / seconds};
}

void run_or_report(const Workload& s, uint64_t number, Board& board) {
  try {
    run_pair(s, number, board);
  } catch (const std::exception& error) {
    board.failed.fetch_add(1);
    std::fprintf(stderr, "harp-bench: pair %d: %s\n", int(number), error.what());
  }
}

void run_in_processes(const Workload& s, Board& board) {
  std::vector<pid_t> children;
  for (uint64_t number = 0; number < s.pairs; ++number) {
    const pid_t pid = fork();
    if (pid < 0) throw lightcc::system_error("fork");
    if (pid == 0) {
      run_or_report(s, number, board);
      _exit(0);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) board.failed.fetch_add(1);
  }
}

}  // namespace

std::string run_pairs(const Workload& given) {
  if (given.pairs > kMostPairs) throw Error(Code::invalid_argument, "--pairs: at most 64");
  Workload s = given;
  s.port = "mem";
  if (s.engine_mode == "auto") s.engine_mode = "inline";
  void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw lightcc::system_error("map the board of the pairs");
  Board& board = *new (shared) Board{};
  if (s.pairs_as == "processes") {
    run_in_processes(s, board);
  } else {
    std::vector<std::jthread> threads;
    for (uint64_t number = 0; number < s.pairs; ++number)
      threads.emplace_back([&s, &board, number] { run_or_report(s, number, board); });
  }
  if (board.failed.load() > 0) throw Error(Code::internal, "a pair has failed");
  double all = 0;
  std::string each;
  for (uint64_t number = 0; number < s.pairs; ++number) {
    const Board::Result& result = board.results[number];
    all += result.bytes_per_s;
    lightcc::JsonObject object;
    object.add("bytes_per_s", result.bytes_per_s).add("process_cores", result.cores);
    each += (each.empty() ? "" : ",") + object.text();
  }
  lightcc::JsonObject object;
  object.add("mode", "pairs").add("pairs", s.pairs).add("pairs_as", s.pairs_as).add("message", s.message_bytes);
  object.add("depth", s.depth).add("footprint", s.footprint_bytes).add("mtu", s.mtu).add("bytes_per_s", all);
  object.add("gbit_per_s", all * 8e-9).add_json("each", "[" + each + "]");
  munmap(shared, sizeof(Board));
  return object.text();
}

}  // namespace harp::bench

// Measures HARP, and the kernel's TCP in the very same message pattern; prints one line of JSON.
//
//   harp-bench --port shm                                  throughput between two processes of this machine
//   harp-bench --listen 4720 & harp-bench --connect 10.0.0.1:4720 --transport tcp --flows 4
//   harp-bench --mode latency --message 4K --port shm
//   harp-bench --pairs 2 --message 64K                     engines of one process over mem, one core a pair
//
// Throughput is what the receiver has got between the first and the last message of the measured part. CPU is that of
// all threads of a side's process; machine_busy is what /proc/stat says, which has the kernel's own threads as well.
#include <cstdio>
#include <exception>

#include "harp_plugin/tools/bench/pairs.h"
#include "harp_plugin/tools/bench/session.h"

int main(int count, char** arguments) {
  using namespace harp::bench;
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (!words.empty() && words[0] == "--help") {
    std::printf("harp-bench [--OPTION VALUE]...\n%s", help().c_str());
    return 0;
  }
  try {
    const Workload settings = parse(words);
    if (!settings.listen.empty()) {
      serve(settings);
      return 0;
    }
    std::printf("%s\n", (settings.pairs > 0 ? run_pairs(settings) : run_client(settings)).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "harp-bench: %s\n", error.what());
    return 1;
  }
  return 0;
}

// What huge pages are worth: ranks are processes, each with 64 MiB in an arena, and sum them in place: everyone reads
// its shard from all arenas and writes it to all. With pages of 4 KiB and with populated memory, by turns in one run.
// First use (fresh memory: its pages come in) and further uses are told apart; a repeat takes as long as its slowest
// rank.
//
//   ninja -C build/cmake pages_bench && build/cmake/pages_bench [ranks] [MiB] [repeats]
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/device.h"
#include "net/shm/arena.h"

using namespace lightcc;

namespace {

constexpr size_t kFixed = 4096, kBlock = 256 << 10;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// All ranks meet here; lies in memory that they share. If a rank dies, alarm() ends the others.
struct Meeting {
  std::atomic<int> arrived{0};
  void wait(int ranks) {
    const int mine = arrived.fetch_add(1) + 1, all = (mine + ranks - 1) / ranks * ranks;
    while (arrived.load() < all) sched_yield();
  }
};

struct Times { std::vector<double> allocate, fill, first, next; };

void print(const char* what, std::vector<double> small, std::vector<double> huge) {
  std::sort(small.begin(), small.end());
  std::sort(huge.begin(), huge.end());
  const auto row = [&](const char* which, size_t at) {
    std::printf("%-22s %-6s %9.2f ms %9.2f ms   ratio %.2f\n", what, which, small[at], huge[at], small[at] / huge[at]);
  };
  row("best", 0);
  row("median", small.size() / 2);
}

}  // namespace

int main(int count, char** words) {
  const int ranks = count > 1 ? std::atoi(words[1]) : 2, repeats = count > 3 ? std::atoi(words[3]) : 9;
  const size_t bytes = static_cast<size_t>(count > 2 ? std::atoi(words[2]) : 64) << 20;
  auto* meeting = new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Meeting;
  std::vector<std::shared_ptr<Arena>> owned;
  for (int i = 0; i < ranks; ++i) owned.push_back(Arena::create(kFixed));
  int rank = 0;
  for (int i = 1; i < ranks && rank == 0; ++i)
    if (fork() == 0) rank = i;
  alarm(600);
  std::vector<std::shared_ptr<Arena>> arenas;  // mapped anew, as peers do
  for (int i = 0; i < ranks; ++i) arenas.push_back(i == rank ? owned[i] : Arena::map(owned[i]->memfd(), kFixed));

  const size_t shard = bytes / static_cast<size_t>(ranks) / kLine * kLine, begin = shard * static_cast<size_t>(rank);
  const size_t end = rank == ranks - 1 ? bytes : begin + shard;
  const auto reduce_all = [&](size_t offset) {
    for (size_t at = begin; at < end; at += kBlock) {
      std::vector<void*> out;
      for (const auto& arena : arenas) out.push_back(arena->base() + offset + at);
      const std::vector<const void*> in(out.begin(), out.end());
      reduce({DType::float32, ReduceOp::sum}, out, in, std::min(kBlock, end - at) / sizeof(float));
    }
  };
  const auto timed = [&](std::vector<double>& times, auto&& work) {
    meeting->wait(ranks);
    const double start = now_ms();
    work();
    meeting->wait(ranks);
    times.push_back(now_ms() - start);
  };
  Times all[2];
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int huge : {repeat % 2, 1 - repeat % 2}) {
      Times& times = all[huge];
      std::byte* p = nullptr;
      timed(times.allocate, [&] {
        p = owned[rank]->allocate(bytes);
        if (huge) owned[rank]->populate(p, bytes);
        else madvise(p, bytes, MADV_NOHUGEPAGE);
      });
      const size_t offset = static_cast<size_t>(p - owned[rank]->base());  // the same on all ranks
      timed(times.fill, [&] { std::memset(p, 0, bytes); });
      timed(times.first, [&] { reduce_all(offset); });
      timed(times.next, [&] { reduce_all(offset); });
      timed(times.next, [&] { reduce_all(offset); });
      meeting->wait(ranks);
      owned[rank]->release(p);
      meeting->wait(ranks);
    }
  }
  if (rank != 0) return 0;
  bool whole = true;
  for (int status; wait(&status) > 0;) whole = whole && status == 0;
  if (!whole) return std::fprintf(stderr, "pages_bench: a rank failed\n"), 1;
  std::printf("%d ranks, %zu MiB each: small pages, populated, ratio\n", ranks, bytes >> 20);
  print("allocate", all[0].allocate, all[1].allocate);
  print("fill by the owner", all[0].fill, all[1].fill);
  print("first reduction", all[0].first, all[1].first);
  print("further reductions", all[0].next, all[1].next);
}

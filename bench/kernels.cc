// GB/s of reduce() by instruction set, size, and with or without streaming: two inputs, two outputs, bytes of all four
// counted. Called in blocks of 256 KiB, as a collective calls it. Variants take turns in random order in one run, the
// best of the repeats counts, and each repeat begins with a pass that is not timed.
//
//   ninja -C build/cmake kernels_bench && build/cmake/kernels_bench [dtype] [repeats] [largest MiB]
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device/cpu.h"

using namespace lightcc;

namespace {

constexpr size_t kBlock = 256 << 10, kSmallest = 16 << 10, kHugePage = 2 << 20;
constexpr size_t kWork = 8 << 20;  // bytes of one buffer that a sample goes over at least

struct Variant { Isa isa; size_t streamed; };

// Huge pages where there are some, so that the page table plays no part.
std::byte* memory(size_t bytes) {
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* at = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<size_t>(p), kHugePage));
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, 0, bytes);
  return at;
}

void pass(const Variant& v, DType dtype, const std::vector<std::byte*>& in, const std::vector<std::byte*>& out,
          size_t bytes) {
  for (size_t at = 0; at < bytes; at += kBlock) {
    const void* from[] = {in[0] + at, in[1] + at};
    void* to[] = {out[0] + at, out[1] + at};
    reduce_with(v.isa, {dtype, ReduceOp::sum}, to, from, std::min(kBlock, bytes - at) / size_of(dtype), v.streamed);
  }
}

double seconds_of(const Variant& v, DType dtype, const std::vector<std::byte*>& in, const std::vector<std::byte*>& out,
                  size_t bytes) {
  const size_t times = std::max<size_t>(1, kWork / bytes);
  pass(v, dtype, in, out, bytes);
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < times; ++i) pass(v, dtype, in, out, bytes);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(times);
}

void measure(DType dtype, bool in_place, int repeats, size_t largest) {
  std::vector<size_t> sizes;
  for (size_t size = kSmallest; size <= largest; size *= 4) sizes.push_back(size);
  std::vector<Variant> variants;
  for (size_t streamed : {0, 2})
    for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
      if (has(isa)) variants.push_back({isa, streamed});
  const std::vector<std::byte*> in{memory(largest), memory(largest)};
  const std::vector<std::byte*> out = in_place ? in : std::vector{memory(largest), memory(largest)};
  std::vector best(variants.size(), std::vector<double>(sizes.size(), 1e9));
  std::vector<size_t> order(variants.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  std::mt19937 random(1);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (size_t s = 0; s < sizes.size(); ++s) {
      std::shuffle(order.begin(), order.end(), random);
      for (size_t k : order) best[k][s] = std::min(best[k][s], seconds_of(variants[k], dtype, in, out, sizes[s]));
    }
  }
  std::printf("%s, sum, outputs %s\n%-18s", name_of(dtype), in_place ? "are the inputs" : "apart", "KiB a buffer");
  for (size_t size : sizes) std::printf("%9zu", size >> 10);
  for (size_t k = 0; k < variants.size(); ++k) {
    std::printf("\n%-8s%-10s", name_of(variants[k].isa), variants[k].streamed ? "streamed" : "");
    for (size_t s = 0; s < sizes.size(); ++s) std::printf("%9.1f", 4e-9 * static_cast<double>(sizes[s]) / best[k][s]);
  }
  std::printf("\n\n");
  for (std::byte* p : in) munmap(p, largest);
  for (std::byte* p : out)
    if (!in_place) munmap(p, largest);
}

}  // namespace

int main(int count, char** words) {
  const std::string wanted = count > 1 ? words[1] : "float32";
  const int repeats = count > 2 ? std::atoi(words[2]) : 9;
  const size_t largest = static_cast<size_t>(count > 3 ? std::atoi(words[3]) : 256) << 20;
  for (int i = 0; i < kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (wanted != name_of(dtype)) continue;
    for (bool in_place : {false, true}) measure(dtype, in_place, repeats, largest);
    return 0;
  }
  std::fprintf(stderr, "kernels_bench: no dtype is called %s\n", wanted.c_str());
  return 2;
}

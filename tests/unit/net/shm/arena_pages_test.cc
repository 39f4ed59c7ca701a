// The pages behind an arena: huge ones where the system has them, none where nothing was touched or asked for. What
// the kernel tells of a mapping (/proc/self/smaps) and of a file (its blocks) is what counts.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "labels.h"
#include "net/shm/arena.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr size_t kFixedBytes = 3 * 4096, kHuge = size_t(2) << 20, kLarge = size_t(64) << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE

// The sum of one of smaps' numbers over the mappings that begin in [from, from + bytes); in bytes.
size_t told_of(const std::byte* from, size_t bytes, const std::string& what) {
  std::ifstream smaps("/proc/self/smaps");
  size_t sum = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin, end, kib;
    const size_t first = size_t(from);
    if (sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = begin >= first && begin < first + bytes;
    else if (inside && line.starts_with(what + ":") && sscanf(line.c_str() + what.size() + 1, "%lu", &kib) == 1)
      sum += kib << 10;
  }
  return sum;
}

size_t in_memory(const Arena& arena) {
  struct stat status;
  EXPECT_EQ(fstat(arena.memfd(), &status), 0);
  return size_t(status.st_blocks) * 512;
}

// What an arena should manage, tried without one: why this system has no huge pages for such memory, or "".
std::string no_huge_pages(int flags, int advice, const char* what) {
  Fd file(memfd_create("probe", MFD_CLOEXEC));
  if (ftruncate(file.get(), off_t(2 * kHuge)) != 0) return "no memfd";
  void* room = mmap(nullptr, 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* at = reinterpret_cast<std::byte*>(round_up(size_t(room), kHuge));
  const int fd = flags & MAP_ANONYMOUS ? -1 : file.get();
  if (mmap(at, kHuge, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) == MAP_FAILED) return "mmap failed";
  if (advice == MADV_HUGEPAGE) madvise(at, kHuge, advice);
  *at = std::byte(1);
  if (advice != MADV_HUGEPAGE && madvise(at, kHuge, advice) != 0) return std::string("madvise: ") + strerror(errno);
  const size_t huge = told_of(at, kHuge, what);
  munmap(at, kHuge);
  return huge == kHuge ? "" : std::string(what) + " is " + std::to_string(huge);
}

#define SKIP_WITHOUT_HUGE_PAGES(...)                                                            \
  if (const std::string why = no_huge_pages(__VA_ARGS__); !why.empty())                         \
  GTEST_SKIP() << "this system gives no huge pages for such memory: " << why

TEST(ArenaPages, EveryMappingBeginsAtAHugePage) {
  auto own = Arena::create(kFixedBytes);
  auto peer = Arena::map(own->memfd(), kFixedBytes);
  EXPECT_EQ(size_t(own->base()) % kHuge, 0u);
  EXPECT_EQ(size_t(peer->base()) % kHuge, 0u);
}

TEST(ArenaPages, PopulatedMemoryIsHugeForOwnerAndPeer) {
  SKIP_WITHOUT_HUGE_PAGES(MAP_SHARED, kCollapse, "ShmemPmdMapped");
  auto own = Arena::create(kFixedBytes);
  auto peer = Arena::map(own->memfd(), kFixedBytes);
  std::byte* p = own->allocate(kLarge);
  own->populate(p, kLarge);
  EXPECT_GT(told_of(p, kLarge, "ShmemPmdMapped"), kLarge / 2) << "all, were it not for other users of memory";
  for (size_t i = 0; i < kLarge; i += 4096) ASSERT_EQ(p[i], std::byte(0)) << i;
  std::byte* seen = peer->base() + own->offset_of(p, kLarge);
  for (size_t i = 0; i < kLarge; i += kHuge) seen[i] = std::byte(7);
  EXPECT_GT(told_of(peer->base(), kFixedBytes + Arena::kHeapBytes, "ShmemPmdMapped"), kLarge / 2) << "one fault each";
  EXPECT_EQ(p[kLarge - kHuge], std::byte(7));
}

TEST(ArenaPages, PopulateKeepsContents) {
  auto own = Arena::create(kFixedBytes);
  std::byte* p = own->allocate(3 * kHuge);
  for (size_t i = 0; i < 3 * kHuge; i += 1000) p[i] = std::byte(i / 1000 | 1);
  own->populate(p, 3 * kHuge);
  for (size_t i = 0; i < 3 * kHuge; i += 1000) ASSERT_EQ(p[i], std::byte(i / 1000 | 1)) << i;
}

TEST(ArenaPages, OnlyWholeHugePagesArePopulated) {
  auto own = Arena::create(kFixedBytes);
  std::byte *small = own->allocate(1 << 20), *large = own->allocate(5 << 20);
  EXPECT_EQ(in_memory(*own), 0u);
  own->populate(small, 1 << 20);
  EXPECT_EQ(in_memory(*own), 0u) << "a small allocation must not bring in a huge page";
  small[0] = std::byte(1);
  EXPECT_LE(in_memory(*own), 1u << 20);
  const size_t before = in_memory(*own);
  own->populate(large, 5 << 20);
  EXPECT_LE(in_memory(*own) - before, 2 * kHuge);
  own->populate(large, kHuge - 1);
  own->populate(large + 1, 2 * kHuge - 1);  // no more than one whole huge page, and it is there
  EXPECT_LE(in_memory(*own) - before, 2 * kHuge);
}

TEST(ArenaPages, NothingIsThereBeforeItIsTouched) {
  auto own = Arena::create(kFixedBytes);
  std::byte* p = own->allocate(kLarge);
  EXPECT_EQ(in_memory(*own), 0u);
  p[10 * kHuge] = std::byte(1);
  EXPECT_LE(in_memory(*own), kHuge) << "at most the one huge page";
}

TEST(ArenaPages, ReleasedHugePagesGoBackAndSmallOnesMayFollow) {
  auto own = Arena::create(kFixedBytes);
  std::byte* p = own->allocate(kLarge);
  own->populate(p, kLarge);
  std::memset(p, 1, kLarge);
  own->release(p);
  EXPECT_EQ(in_memory(*own), 0u);
  std::byte* small = own->allocate(kHuge - 4096);
  std::byte* last = small + kHuge - 4097;
  ASSERT_GE(last, p) << "it does not lie where the large one was";
  EXPECT_EQ(*last, std::byte(0));
  *last = std::byte(1);
  EXPECT_EQ(in_memory(*own), 4096u) << "a small allocation must not bring in a huge page";
  std::byte* again = own->allocate(kLarge);
  EXPECT_EQ(size_t(again) % kHuge, 0u);
  own->populate(again, kLarge);
  EXPECT_EQ(again[kLarge - 1], std::byte(0));
}

TEST(ArenaPages, PrivateCopiesOfAnAbandonedArenaAreHuge) {
  SKIP_WITHOUT_HUGE_PAGES(MAP_PRIVATE | MAP_ANONYMOUS, MADV_HUGEPAGE, "AnonHugePages");
  auto own = Arena::create(kFixedBytes);
  std::byte* p = own->allocate(kLarge);
  std::memset(p, 5, kLarge);
  own->abandon();
  EXPECT_GT(told_of(p, kLarge, "AnonHugePages"), kLarge / 2) << "all, were it not for other users of memory";
  for (size_t i = 0; i < kLarge; i += 4096) ASSERT_EQ(p[i], std::byte(5)) << i;
}

}  // namespace
}  // namespace lightcc

// Shared memory: what allocate and release promise, what a peer can and cannot do, what abandon leaves behind.
#include "net/shm/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "base/error.h"
#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr size_t kFixed = 3 * 4096;

std::string thrown_by(const std::function<void()>& call, Code expected) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  return "nothing";
}

TEST(Arena, AFreshAllocationIsZeroAlignedAndVisibleToAPeer) {
  auto own = Arena::create(kFixed);
  auto peer = Arena::map(own->memfd(), kFixed);
  for (size_t bytes : {size_t(0), size_t(1), size_t(4096), size_t(100'000), size_t(3) << 20}) {
    std::byte* p = own->allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % (bytes >= size_t(2) << 20 ? 2 << 20 : 4096), 0u) << bytes;
    if (!bytes) continue;
    EXPECT_EQ(p[0], std::byte(0));
    EXPECT_EQ(p[bytes - 1], std::byte(0));
    std::byte* seen = peer->base() + own->offset_of(p, bytes);
    p[0] = std::byte(1), p[bytes - 1] = std::byte(2);
    EXPECT_EQ(seen[bytes - 1], std::byte(2));
    seen[0] = std::byte(3);
    EXPECT_EQ(p[0], std::byte(3));
  }
}

TEST(Arena, TheFileCannotBeShrunkOrGrown) {
  auto own = Arena::create(kFixed);
  EXPECT_EQ(ftruncate(own->memfd(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(own->memfd(), off_t(kFixed + Arena::kHeapBytes + 4096)), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(Arena, APeersFileMustBeSealedAndOfTheRightSize) {
  Fd loose(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(loose.get(), off_t(kFixed + Arena::kHeapBytes)), 0);
  EXPECT_EQ(thrown_by([&] { Arena::map(loose.get(), kFixed); }, Code::internal),
            "a peer's shared memory is not sealed");
  auto own = Arena::create(kFixed);
  EXPECT_NE(thrown_by([&] { Arena::map(own->memfd(), kFixed + 4096); }, Code::internal).find("another size"),
            std::string::npos);
}

TEST(Arena, MemoryOutlivesItsDescriptor) {
  auto own = Arena::create(kFixed);
  own->close_memfd();
  EXPECT_EQ(own->memfd(), -1);
  std::byte* p = own->allocate(4096);
  std::memset(p, 7, 4096);
  EXPECT_EQ(p[4095], std::byte(7));
}

TEST(Arena, ReleasedMemoryIsGivenOutAgainAndNeighboursGrowTogether) {
  auto own = Arena::create(kFixed);
  std::byte* parts[4];
  for (std::byte*& part : parts) part = own->allocate(4096);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(parts[i + 1], parts[i] + 4096);
  std::memset(parts[0], 7, 3 * 4096);
  // In each order of release the three become one piece again.
  for (const auto& order : {std::array{0, 1, 2}, std::array{2, 1, 0}, std::array{0, 2, 1}}) {
    for (int i : order) own->release(parts[i]);
    std::byte* whole = own->allocate(3 * 4096);
    EXPECT_EQ(whole, parts[0]);
    EXPECT_EQ(whole[5000], std::byte(0)) << "the pages came back with old contents";
    own->release(whole);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(own->allocate(4096), parts[i]);
  }
}

TEST(Arena, ReleaseOfWhatIsNotAllocatedDoesNothing) {
  auto own = Arena::create(kFixed);
  std::byte* p = own->allocate(8192);
  int elsewhere;
  own->release(nullptr);
  own->release(p + 4096);
  own->release(reinterpret_cast<std::byte*>(&elsewhere));
  EXPECT_GE(own->offset_of(p, 8192), 0);
  own->release(p);
  own->release(p);
  EXPECT_EQ(own->offset_of(p, 1), -1);
}

TEST(Arena, OffsetOfKnowsExactlyTheLiveAllocations) {
  auto own = Arena::create(kFixed);
  std::byte* p = own->allocate(8192);
  EXPECT_EQ(own->offset_of(p, 8192), p - own->base());
  EXPECT_EQ(own->offset_of(p + 100, 8092), p + 100 - own->base());
  EXPECT_EQ(own->offset_of(p + 100, 8093), -1) << "it ends beyond the allocation";
  EXPECT_EQ(own->offset_of(p - 1, 2), -1);
  EXPECT_EQ(own->offset_of(own->base(), 8), -1) << "the fixed part is nobody's tensor";
  EXPECT_EQ(own->offset_of(&own, sizeof own), -1);
  std::byte* next = own->allocate(4096);
  EXPECT_EQ(own->offset_of(p, 8192 + 4096), -1) << "two allocations are not one";
  EXPECT_EQ(own->offset_of(next, 4096), next - own->base());
}

TEST(Arena, AddressSpaceRunsOutWithAWord) {
  auto own = Arena::create(kFixed);
  EXPECT_NE(thrown_by([&] { own->allocate(Arena::kHeapBytes + 1); }, Code::internal).find("shared address space"),
            std::string::npos);
  std::byte* all = own->allocate(Arena::kHeapBytes - (size_t(2) << 20));  // but for what aligning it costs
  EXPECT_NE(all, nullptr);
}

// What is live never overlaps, keeps its contents, and all of it comes back.
TEST(Arena, AThousandAllocationsInAnyOrder) {
  const uint64_t seed = test::run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  auto own = Arena::create(kFixed);
  struct Live { std::byte* p; size_t bytes; std::byte mark; };
  std::vector<Live> live;
  const auto drop = [&](size_t i) {
    ASSERT_EQ(live[i].p[0], live[i].mark);
    ASSERT_EQ(live[i].p[live[i].bytes - 1], live[i].mark);
    own->release(live[i].p);
    live.erase(live.begin() + std::ptrdiff_t(i));
  };
  std::byte* first = nullptr;
  for (int turn = 0; turn < 1000; ++turn) {
    if (live.size() > 20 || (!live.empty() && random() % 3 == 0)) {
      drop(random() % live.size());
    } else {
      const size_t bytes = 1 + random() % 60'000;
      Live one{own->allocate(bytes), bytes, std::byte(turn)};
      if (!first) first = one.p;
      std::memset(one.p, turn & 0xff, bytes);
      live.push_back(one);
    }
  }
  while (!live.empty()) drop(0);
  EXPECT_EQ(own->allocate(1 << 20), first) << "some of the room is lost";
}

TEST(Arena, AbandonKeepsContentsAndDetachesFromThePeers) {
  auto own = Arena::create(kFixed);
  auto peer = Arena::map(own->memfd(), kFixed);
  std::byte *small = own->allocate(100), *large = own->allocate(5 << 20), *released = own->allocate(4096);
  std::memset(small, 1, 100);
  std::memset(large, 2, 5 << 20);
  own->release(released);
  std::byte* seen[] = {peer->base() + own->offset_of(small, 100), peer->base() + own->offset_of(large, 5 << 20)};
  own->abandon();
  own->abandon();  // once is enough, twice is no harm
  EXPECT_EQ(small[99], std::byte(1));
  EXPECT_EQ(large[(5 << 20) - 1], std::byte(2));
  std::memset(seen[0], 8, 100);
  std::memset(seen[1], 9, 5 << 20);
  EXPECT_EQ(small[99], std::byte(1)) << "a peer that woke late still writes into live memory";
  for (size_t i : {size_t(0), size_t(2) << 20, (size_t(5) << 20) - 1}) EXPECT_EQ(large[i], std::byte(2)) << i;
  large[0] = std::byte(3);
  EXPECT_EQ(seen[1][0], std::byte(9));
}

TEST(Arena, AfterAbandonMemoryCanBeReleasedButNotAllocated) {
  auto own = Arena::create(kFixed);
  std::byte* p = own->allocate(8192);
  std::memset(p, 5, 8192);
  own->abandon();
  EXPECT_EQ(own->offset_of(p, 8192), -1) << "no peer may be pointed to it";
  EXPECT_NE(thrown_by([&] { own->allocate(1); }, Code::shut_down).find("ended epoch"), std::string::npos);
  EXPECT_EQ(p[8191], std::byte(5));
  own->release(p);
  own->release(p);
}

}  // namespace
}  // namespace lightcc

// The kernel that copies many pieces (device/cuda/pack.h), run as plain C++.
#include "device/cuda/pack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "device/cuda.h"
#include "labels.h"
#include "unit/copy_cases.h"

LABEL(alone);

namespace lightcc {
namespace {

using packing::FewPieces;
using packing::ManyPieces;

// As grids of so many blocks and threads do it; returns how many launches these are.
template <class Pieces = FewPieces>
int copy_all(const std::vector<CudaCopy>& copies, uint32_t blocks, uint32_t threads) {
  int launches = 0;
  for (size_t taken = 0; taken < copies.size(); ++launches) {
    Pieces pieces{};
    taken += packing::take(pieces, copies.data() + taken, copies.size() - taken);
    for (uint32_t block = 0; block < blocks; ++block)
      for (uint32_t thread = 0; thread < threads; ++thread) packing::copy_share(thread, threads, block, blocks, pieces);
  }
  return launches;
}

template <class Pieces> class CudaPackOf : public testing::Test {};
using Rooms = testing::Types<FewPieces, ManyPieces>;
TYPED_TEST_SUITE(CudaPackOf, Rooms);

// What lies between outputs stays as it is.
TYPED_TEST(CudaPackOf, EveryByteOfThePiecesIsCopiedAndNoOther) {
  const std::vector<std::byte> from = test::copy_bytes(1), before = test::copy_bytes(2);
  std::vector<std::byte> to = before, want = before;
  uint32_t n = 0;
  for (const auto& cases : test::copy_cases()) {
    std::vector<CudaCopy> copies;
    for (const auto& [to_at, from_at, bytes] : cases) {
      copies.push_back({to.data() + to_at, from.data() + from_at, bytes});
      std::memcpy(want.data() + to_at, from.data() + from_at, bytes);
    }
    const uint32_t blocks = 1 + n % 3 * 50, threads = n % 2 ? 256 : 7;
    copy_all<TypeParam>(copies, blocks, threads);
    const auto differs = std::ranges::mismatch(to, want).in1;
    ASSERT_EQ(differs - to.begin(), to.end() - to.begin())
        << "set " << n << " of " << cases.size() << ", " << blocks << " blocks of " << threads;
    to = want = before;
    ++n;
  }
}

// Each piece lies in memory of its own, that of its input ends with it: sanitizers see every step beyond.
TEST(CudaPack, TouchesNothingBeyondAPiece) {
  std::mt19937_64 random(1);
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<CudaCopy> copies;
  for (int i = 0; i < 1000; ++i) {
    const size_t to_at = i % 2 ? random() % 32 : 0, from_at = i % 3 ? random() % 32 : 0;
    const size_t bytes = random() % 40'000 >> i % 16;
    memory.push_back(std::make_unique<std::byte[]>(from_at + bytes));
    auto* const from = memory.back().get() + from_at;
    std::generate(from, from + bytes, [&] { return std::byte(random()); });
    memory.push_back(std::make_unique<std::byte[]>(to_at + bytes));
    copies.push_back({memory.back().get() + to_at, from, bytes});
  }
  copy_all(copies, 100, 32);
  for (const auto& [to, from, bytes] : copies) ASSERT_EQ(std::memcmp(to, from, bytes), 0) << bytes << " bytes";
}

TYPED_TEST(CudaPackOf, ALaunchTakesAsManyAsItHasRoomFor) {
  constexpr uint32_t room = TypeParam::kRoom;
  std::vector<std::byte> from(2 * room, std::byte(1)), to(2 * room);
  for (size_t count : {1u, room, room + 1, 2 * room}) {
    std::vector<CudaCopy> copies;
    for (size_t i = 0; i < count; ++i) copies.push_back({&to[i], &from[i], 1});
    EXPECT_EQ(copy_all<TypeParam>(copies, 2, 32), int((count + room - 1) / room));
    EXPECT_EQ(size_t(std::ranges::count(to, std::byte(1))), count);
  }
  EXPECT_EQ(copy_all<TypeParam>({}, 1, 32), 0);
}

TEST(CudaPack, PiecesWithoutBytesTakeNoRoom) {
  std::vector<std::byte> byte(2);
  std::vector<CudaCopy> copies(1000, CudaCopy{nullptr, nullptr, 0});
  copies[500] = {&byte[0], &byte[1], 1};
  FewPieces pieces{};
  EXPECT_EQ(packing::tiles_of(pieces), 0u);
  EXPECT_EQ(packing::take(pieces, copies.data(), copies.size()), copies.size());
  EXPECT_EQ(pieces.count, 1u);
  EXPECT_EQ(packing::tiles_of(pieces), 1u);
}

TEST(CudaPack, TilesAreThoseOfThePieceInWhichTheyLie) {
  constexpr size_t tile = packing::kTileBytes;
  std::byte byte{};
  std::vector<CudaCopy> copies;
  for (size_t bytes : {size_t(1), tile, tile + 1, 5 * tile, size_t(7)}) copies.push_back({&byte, &byte, bytes});
  FewPieces pieces{};
  packing::take(pieces, copies.data(), copies.size());
  const uint32_t want[] = {0, 1, 2, 2, 3, 3, 3, 3, 3, 4};
  ASSERT_EQ(packing::tiles_of(pieces), std::size(want));
  for (uint32_t i = 0; i < std::size(want); ++i)
    for (uint32_t first = 0; first <= want[i]; ++first) EXPECT_EQ(packing::piece_of(pieces, i, first), want[i]) << i;
}

}  // namespace
}  // namespace lightcc

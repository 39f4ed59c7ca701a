// Allgather, broadcast and alltoall in shared memory: every kind, size and place of the data, against the plain result.
#include "collective/copy_collective.h"
#include "collective/shared_broadcast.h"

#include <gtest/gtest.h>

#include "device/device.h"
#include "unit/simulated.h"

namespace lightcc {
namespace {

using namespace test;

constexpr Kind kCopied[] = {Kind::allgather, Kind::broadcast, Kind::alltoall};

class CopyingRanks {
 public:
  explicit CopyingRanks(int size) : hosts_(LocalRanks::threads(size)), links_(size_t(size)) {
    std::vector<int> members;
    for (int rank = 0; rank < size; ++rank) members.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      std::vector<Link*> links;
      for (int peer = 0; peer < size; ++peer) {
        links_[size_t(rank)].push_back(peer == rank ? nullptr : hosts_[size_t(rank)]->data_link(0, 0, peer));
        links.push_back(links_[size_t(rank)].back().get());
      }
      backends_.push_back(std::make_unique<SharedBackend>(*hosts_[size_t(rank)], 0, 0, members, links));
    }
  }

  SharedBackend& backend(size_t rank) { return *backends_[rank]; }
  Arena& arena(size_t rank) { return *hosts_[rank]->arena(); }

  // in_arena: bit r says that rank r's data lie in its arena.
  void expect_right(const Problem& problem, unsigned in_arena) {
    std::vector<std::thread> threads;
    std::vector<char> right(hosts_.size());
    for (size_t rank = 0; rank < hosts_.size(); ++rank)
      threads.emplace_back([&, rank] {
        auto input = encode(problem.dtype, problem.input(int(rank)));
        auto output = encode(problem.dtype, problem.output(int(rank)));
        Arena& arena = *hosts_[rank]->arena();
        std::byte *shared_in = arena.allocate(input.size() + 1), *shared_out = arena.allocate(output.size() + 1);
        std::copy(input.begin(), input.end(), shared_in);
        std::copy(output.begin(), output.end(), shared_out);
        Collective c = problem.of(int(rank));
        const bool shared = in_arena >> rank & 1;
        c.input = shared ? shared_in : input.data(), c.output = shared ? shared_out : output.data();
        auto work = backends_[rank]->start(c, nullptr);
        try {
          drive(*work);
        } catch (const Error& error) {
          ADD_FAILURE() << "rank " << rank << " waits for " << work->waiting_for() << ": " << error.what();
        }
        if (shared) std::copy(shared_out, shared_out + output.size(), output.begin());
        right[rank] = output == encode(problem.dtype, problem.expected(int(rank)));
        // Nobody looks at it any more, or TSan sees it.
        std::fill(shared_in, shared_in + input.size(), std::byte(0xee));
        std::fill(shared_out, shared_out + output.size(), std::byte(0xee));
        arena.release(shared_in), arena.release(shared_out);
      });
    for (std::thread& thread : threads) thread.join();
    for (size_t rank = 0; rank < right.size(); ++rank) EXPECT_TRUE(right[rank]) << "rank " << rank;
  }

 private:
  std::vector<std::unique_ptr<LocalRanks>> hosts_;
  std::vector<std::vector<std::unique_ptr<Link>>> links_;
  std::vector<std::unique_ptr<SharedBackend>> backends_;
};

class CopyCollectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, CopyCollectives, testing::Range(1, 6), testing::PrintToStringParamName());

// Counts of nothing, of a line, of several blocks, and larger than a ring.
TEST_P(CopyCollectives, EveryKindIsRightWhereverMemoryIs) {
  const uint64_t seed = run_seed();
  CopyingRanks ranks(GetParam());
  uint64_t turn = 0;
  for (Kind kind : kCopied)
    for (int64_t count : {0, 5, 1000, 40'000, kWatched ? 140'000 : 300'000})
      for (unsigned in_arena : {0u, ~0u, 0b10101u}) {
        Problem problem(kind, GetParam(), count, seed + turn);
        problem.dtype = turn % 2 ? DType::int64 : DType::float16;  // uneven parts then end inside a line
        problem.root = int(turn % uint64_t(GetParam()));
        ++turn;
        SCOPED_TRACE(testing::Message() << name_of(kind) << " of " << count << ", arenas " << in_arena << ", seed "
                                        << seed);
        ranks.expect_right(problem, in_arena);
      }
}

// It copies while the receiver, who has only said where its memory is, does nothing.
TEST(CopyCollective, OfALargeBroadcastTheRootCopiesItsPart) {
  constexpr size_t kBytes = 2 * SharedBroadcast::kLeastBytes;
  CopyingRanks ranks(2);
  std::byte* const sent = ranks.arena(0).allocate(kBytes);
  std::byte* const received = ranks.arena(1).allocate(kBytes);
  std::fill_n(sent, kBytes, std::byte(7));
  std::fill_n(received, kBytes, std::byte(0));
  Collective c{};
  c.kind = Kind::broadcast, c.size = 2;
  c.count = int64_t(kBytes);
  c.output = sent;
  const auto root = ranks.backend(0).start(c, nullptr);
  c.index = 1, c.output = received;
  const auto receiver = ranks.backend(1).start(c, nullptr);
  receiver->step();
  while (root->step()) {}
  EXPECT_EQ(size_t(std::count(received, received + kBytes, std::byte(7))), kBytes / 2);
  EXPECT_FALSE(root->done());
  EXPECT_EQ(root->waiting_for(), 1);
  while (!receiver->done() || !root->done()) receiver->step(), root->done() || root->step();
  EXPECT_EQ(size_t(std::count(received, received + kBytes, std::byte(7))), kBytes);
  ranks.arena(0).release(sent), ranks.arena(1).release(received);
}

// The copies that are promised: one from an arena, two from private memory, and what stays on a rank is copied once.
TEST(CopyCollective, CopiesOnceOrTwice) {
  constexpr int64_t kCount = 50'000;
  CopyingRanks ranks(3);
  const auto copied = [&](Kind kind, unsigned in_arena) {
    Problem problem(kind, 3, kCount, 1);
    problem.dtype = DType::int32;
    problem.counts.assign(3, kCount);
    problem.matrix.assign(3, {kCount, kCount, kCount});
    const uint64_t before = copied_bytes() + staged_bytes();
    ranks.expect_right(problem, in_arena);
    return int64_t(copied_bytes() + staged_bytes() - before) / kCount / int64_t(sizeof(int32_t));
  };
  EXPECT_EQ(copied(Kind::broadcast, 7), 2);
  EXPECT_EQ(copied(Kind::broadcast, 0), 1 + 2);
  EXPECT_EQ(copied(Kind::allgather, 7), 3 * (1 + 2));
  EXPECT_EQ(copied(Kind::allgather, 0), 3 * (1 + 1 + 2));
  EXPECT_EQ(copied(Kind::alltoall, 7), 3 * (1 + 2));
  EXPECT_EQ(copied(Kind::alltoall, 0), 3 * (1 + 2 * 2));
}

}  // namespace
}  // namespace lightcc

// What every Backend must do (collective/collective.h). Ranks are threads on emulated hosts, and each steps its work as
// an engine does. A backend adds a row in tests/unit/collective/backend_contract_test.cc, the one file that includes
// this.
//
// 1. All members accept the same. What they accept ends with what a plain loop says, on every rank, and leaves the
//    input as it was; what they do not accept is refused before it begins, and what follows goes well.
// 2. All ranks end with equal bits, also where the order of adding up makes a difference.
// 3. step() never blocks, and waiting_for() names another member.
// 4. Where a network is between the ranks, one that is lost ends the collective: some rank hears which was lost (it is
//    the engine that tells the others), and none ends with a result.
//
// Adasum is tested with its algorithms (adasum_test.cc), and NCCL's backends on its double (nccl_hierarchical_test.cc).
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/algorithms.h"
#include "collective/collective.h"
#include "collective/residual.h"
#include "net/group.h"
#include "net/peers.h"
#include "unit/helpers.h"
#include "unit/simulated.h"
#include "unit/thread_peers.h"

namespace lightcc {

struct BackendCase {
  const char* name;
  std::vector<int> hosts;  // how many ranks each has
  // links[member] leads there, nullptr at our own place.
  std::unique_ptr<Backend> (*make)(Peers&, const Group&, const std::vector<Link*>& links);
  Codec codec = {};        // of what it is given
};
inline void PrintTo(const BackendCase& row, std::ostream* out) { *out << row.name; }

class BackendContract : public testing::TestWithParam<BackendCase> {
 protected:
  using Bytes = std::vector<std::byte>;
  using Problem = test::Problem;

  BackendContract()
      : hosts_(GetParam().hosts),
        size_(std::accumulate(hosts_.begin(), hosts_.end(), 0)),
        network_(size_, {.record_bytes = 1 << 10, .refuse = 0.1, .delay = 0.1, .seed = test::run_seed()}),
        peers_(test::thread_peers(hosts_, network_)),
        links_(size_t(size_)) {
    std::vector<int> ranks(static_cast<size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int rank = 0; rank < size_; ++rank) {
      Peers& peers = *peers_[size_t(rank)];
      groups_.push_back(std::make_unique<Group>(0, ranks, rank, peers.topology()));
      std::vector<Link*> links;
      for (int peer = 0; peer < size_; ++peer) {
        links_[size_t(rank)].push_back(peer == rank ? nullptr : peers.data_link(0, 0, peer));
        links.push_back(links_[size_t(rank)].back().get());
      }
      backends_.push_back(GetParam().make(peers, *groups_.back(), links));
      residuals_.push_back(std::make_shared<Residual>());
    }
  }

  // Every kind with every dtype and operation, of no elements, of one, and of some. An average is a sum with a factor.
  std::vector<Problem> problems() const {
    std::vector<Problem> all;
    for (int kind = 0; kind < kKinds; ++kind)
      for (int dtype = 0; dtype < kDTypes; ++dtype)
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::min, ReduceOp::max, ReduceOp::product,
                                  ReduceOp::adasum})
          for (const int64_t count : {0, 1, 100, 3000}) {
            Problem problem(Kind(kind), size_, count, test::run_seed() + all.size());
            if (!problem.reduces() && (op != ReduceOp::sum || dtype % 4)) continue;
            problem.dtype = DType(dtype);
            problem.op = op;
            problem.one_in = is_sparse() ? 8 : 1;
            if (op == ReduceOp::sum && count == 100 && problem.dtype != DType::boolean) problem.post = 0.5;
            all.push_back(problem);
          }
    return all;
  }
  std::vector<Problem> accepted() const {
    std::vector<Problem> all = problems();
    std::erase_if(all, [&](const Problem& problem) { return !backends_[0]->accepts(collective(problem, 0)); });
    return all;
  }
  // With so few elements that are not 0 nothing is left behind, whatever the codec's ratio.
  bool is_sparse() const { return GetParam().codec.kind != CodecKind::none; }

  Collective collective(const Problem& problem, int rank) const {
    Collective c = problem.of(rank);
    if (c.kind == Kind::allreduce && is_sparse()) {
      c.codec = GetParam().codec;
      c.tensors = {{0, c.count}};
      c.residuals = {residuals_[size_t(rank)]};
    }
    return c;
  }
  static const Algorithm* algorithm_for(const Collective& c) {
    for (const Algorithm& algorithm : algorithms())
      if (algorithm.kind == c.kind && algorithm.adasum == is_adasum(c)) return &algorithm;
    return nullptr;
  }
  static std::string text_of(const Problem& problem) {
    return std::string(name_of(problem.kind)) + " with op " + name_of(problem.op) + " of " +
           std::to_string(problem.count) + " " + name_of(problem.dtype);
  }

  std::unique_ptr<Work> start(Collective c, int rank, const void* input, void* output) {
    c.input = input;
    c.output = output;
    return backends_[size_t(rank)]->start(c, algorithm_for(c));
  }
  void finish(Work& work, int rank) {
    const auto deadline = test::Clock::now() + test::kDeadline;
    while (!work.done()) {
      const bool moved = work.step();
      if (!moved && !work.done()) {
        const int member = work.waiting_for();
        EXPECT_TRUE(member >= 0 && member < size_ && member != rank) << member;
      }
      step_peers(rank);
      if (one_has_failed_) throw Error(Code::shut_down, "another rank has ended");  // as an engine tells it
      if (test::Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
      if (!moved) std::this_thread::yield();
    }
  }
  void step_peers(int rank) {
    peers_[size_t(rank)]->step();
    peers_[size_t(rank)]->flush_and_wake();
  }
  // A collective on one rank; its output.
  Bytes run(const Problem& problem, int rank, bool in_place = false) {
    Bytes input = test::encode(problem.dtype, problem.input(rank));
    Bytes output = test::encode(problem.dtype, problem.output(rank));
    const Bytes before = input;
    finish(*start(collective(problem, rank), rank, input.data(), (in_place ? input : output).data()), rank);
    if (in_place) return input;
    EXPECT_EQ(input, before) << "the input was written";
    return output;
  }
  void expect_right(const Problem& problem, int rank, bool in_place = false) {
    SCOPED_TRACE(text_of(problem) + ", rank " + std::to_string(rank));
    EXPECT_EQ(run(problem, rank, in_place), test::encode(problem.dtype, problem.expected(rank)));
  }
  // A thread a rank. One that throws ends the others.
  template <class Body>
  void each(Body body) {
    const auto thrown = test::run_ranks(network_, size_, [&](int rank) {
      try {
        body(rank);
      } catch (...) {
        one_has_failed_ = true;
        throw;
      }
    });
    for (const auto& one : thrown) EXPECT_EQ(test::text_of(one), "");
  }

  const std::vector<int> hosts_;
  const int size_;
  LoopNetwork network_;
  const std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::vector<std::unique_ptr<Link>>> links_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::shared_ptr<Residual>> residuals_;
  std::atomic<bool> one_has_failed_{false};
};

TEST_P(BackendContract, AllMembersAcceptTheSame) {
  for (const Problem& problem : problems())
    for (int rank = 1; rank < size_; ++rank)
      EXPECT_EQ(backends_[size_t(rank)]->accepts(collective(problem, rank)),
                backends_[0]->accepts(collective(problem, 0))) << text_of(problem) << ", rank " << rank;
}

TEST_P(BackendContract, WhatItAcceptsEndsWithWhatAPlainLoopSays) {
  const std::vector<Problem> all = accepted();
  ASSERT_FALSE(all.empty());
  each([&](int rank) {
    for (const Problem& problem : all) expect_right(problem, rank);
  });
}

TEST_P(BackendContract, WhatItDoesNotAcceptIsRefusedAndHindersNothing) {
  const Problem after = accepted().back();
  each([&](int rank) {
    Bytes memory(1 << 20);
    for (const Problem& problem : problems()) {
      const Collective c = collective(problem, rank);
      if (backends_[size_t(rank)]->accepts(c)) continue;
      EXPECT_THROW(start(c, rank, memory.data(), memory.data()), Error) << text_of(problem);
    }
    expect_right(after, rank);
  });
}

TEST_P(BackendContract, AnAllReduceMayWriteWhereItReads) {
  std::vector<Problem> all = accepted();
  std::erase_if(all, [](const Problem& problem) { return problem.kind != Kind::allreduce; });
  ASSERT_FALSE(all.empty());
  each([&](int rank) {
    for (const Problem& problem : all) expect_right(problem, rank, true);
  });
}

TEST_P(BackendContract, AllRanksEndWithEqualBits) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    Problem problem(Kind::allreduce, size_, 5000, 1);
    problem.op = ReduceOp::sum;
    problem.dtype = dtype;
    if (!backends_[0]->accepts(collective(problem, 0))) continue;
    std::vector<Bytes> outputs(static_cast<size_t>(size_));
    each([&](int rank) {
      std::mt19937_64 random(test::run_seed() + uint64_t(rank));
      Bytes memory;
      for (int64_t i = 0; i < problem.count; ++i) {
        const float value = float(int32_t(random())) * 0x1p-29f;
        const uint16_t half = dtype == DType::float16 ? float16_of_float(value) : bfloat16_of_float(value);
        const auto* bytes = dtype == DType::float32 ? reinterpret_cast<const std::byte*>(&value)
                                                    : reinterpret_cast<const std::byte*>(&half);
        memory.insert(memory.end(), bytes, bytes + size_of(dtype));
      }
      finish(*start(collective(problem, rank), rank, memory.data(), memory.data()), rank);
      outputs[size_t(rank)] = memory;
    });
    for (const Bytes& output : outputs) EXPECT_EQ(output, outputs[0]) << name_of(dtype);
  }
}

TEST_P(BackendContract, ARankAloneIsNotBlockedAndSaysForWhomItWaits) {
  Problem problem(Kind::allreduce, size_, 3000, test::run_seed());
  problem.op = ReduceOp::sum;
  problem.dtype = DType::float32;
  problem.one_in = is_sparse() ? 8 : 1;
  std::vector<Bytes> memory;
  std::vector<std::unique_ptr<Work>> works;
  const auto start_one = [&](int rank) {
    std::byte* const data = memory[size_t(rank)].data();
    works.push_back(start(collective(problem, rank), rank, data, data));
  };
  for (int rank = 0; rank < size_; ++rank) memory.push_back(test::encode(problem.dtype, problem.input(rank)));
  start_one(0);
  for (int time = 0; time < 1000; ++time) works[0]->step(), step_peers(0);
  ASSERT_FALSE(works[0]->done());
  EXPECT_GT(works[0]->waiting_for(), 0);
  EXPECT_LT(works[0]->waiting_for(), size_);
  for (int rank = 1; rank < size_; ++rank) start_one(rank);
  const auto done = [](const auto& work) { return work->done(); };
  const auto deadline = test::Clock::now() + test::kDeadline;
  while (!std::all_of(works.begin(), works.end(), done)) {
    ASSERT_LT(test::Clock::now(), deadline);
    for (int rank = 0; rank < size_; ++rank) {
      if (!works[size_t(rank)]->done()) works[size_t(rank)]->step();
      step_peers(rank);
    }
  }
  for (const Bytes& bytes : memory) EXPECT_EQ(bytes, test::encode(problem.dtype, problem.expected(0)));
}

TEST_P(BackendContract, ARankThatIsLostOnTheNetworkEndsItWithTheCauseOnTheOthers) {
  if (hosts_.size() == 1) return;  // its end shows in shared memory, where the engine looks
  Problem problem(Kind::allreduce, size_, 100'000, test::run_seed());
  problem.op = ReduceOp::sum;
  problem.dtype = DType::float32;
  const int lost = size_ - 1;
  const auto thrown = test::run_ranks(network_, size_, [&](int rank) {
    Bytes memory = test::encode(problem.dtype, problem.input(rank));
    const auto work = start(collective(problem, rank), rank, memory.data(), memory.data());
    if (rank == lost) throw Error(Code::shut_down, "it leaves");
    try {
      finish(*work, rank);
    } catch (...) {
      one_has_failed_ = true;
      throw;
    }
  });
  int heard = 0;
  for (int rank = 0; rank < lost; ++rank) {
    const std::exception_ptr& one = thrown[size_t(rank)];
    EXPECT_TRUE(one) << "rank " << rank << " has a result";
    EXPECT_NE(test::code_of(one), Code::timeout) << "rank " << rank;
    heard += test::code_of(one) == Code::peer_lost && contains(test::text_of(one), "rank " + std::to_string(lost));
  }
  EXPECT_GT(heard, 0);
}

}  // namespace lightcc

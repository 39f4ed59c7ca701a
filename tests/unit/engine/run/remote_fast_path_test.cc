// Calls of two ranks on different hosts that skip negotiation: what the members tell each other, by script; and that an
// engine's sums have the bits that they have by negotiation. All else is tested with the fast path of one host
// (fast_path_test.cc).
#include "engine/run/remote_fast_path.h"

#include <cstring>
#include <deque>

#include "labels.h"
#include "unit/ranks.h"

LABEL(as_placed);

namespace lightcc::test {
namespace {

using State = FastPath::State;
constexpr int64_t kEager = RemoteFastPath::kEagerBytes / sizeof(float);  // numbers

// Both members, and what is on its way between them.
class TwoMembers : public testing::Test {
 protected:
  struct Member {
    Member(int index, std::deque<std::string>& to)
        : group(0, {0, 1}, index, Topology::by_leader({0, 1})),
          path(group, [&to](std::string bytes) { to.push_back(std::move(bytes)); },
               [this](const Collective&) -> std::unique_ptr<Work> { return ++started, std::make_unique<Done>(); }) {}
    Group group;
    int started = 0;
    RemoteFastPath path;
  };
  struct Done : Work {
    bool step() override { return true; }
    bool done() const override { return true; }
    int waiting_for() const override { return -1; }
  };

  // A sum of so many floats, all of them the member's number and one.
  void begin(int member, int64_t count, uint64_t hash) {
    data_[member].assign(size_t(count), float(member + 1));
    Collective& call = members_[member].path.call();
    call.dtype = DType::float32;
    call.op = ReduceOp::sum;
    call.count = count;
    call.input = call.output = data_[member].data();
    members_[member].path.begin(hash);
  }
  void deliver(int to) {
    for (; !ways_[to].empty(); ways_[to].pop_front()) members_[to].path.receive(ways_[to].front());
  }
  std::string error_of(const std::string& bytes) {
    try {
      members_[0].path.receive(bytes);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  std::deque<std::string> ways_[2];  // to each member
  std::array<Member, 2> members_{Member{0, ways_[1]}, Member{1, ways_[0]}};
  std::vector<float> data_[2];
};

TEST_F(TwoMembers, ASmallCallIsOverWithOneMessageEachWay) {
  for (int turn = 0; turn < 3; ++turn) {
    begin(0, kEager, 7), begin(1, kEager, 7);
    EXPECT_EQ(members_[0].path.step(), State::waiting);
    deliver(0), deliver(1);
    EXPECT_EQ(members_[0].path.step(), State::done);
    EXPECT_EQ(members_[1].path.step(), State::done);
    EXPECT_EQ(data_[0], std::vector<float>(size_t(kEager), 3));
    EXPECT_EQ(data_[1], data_[0]);
  }
  EXPECT_EQ(members_[0].started + members_[1].started, 0);
}

TEST_F(TwoMembers, ALargeOneBeginsWithItsHashAlone) {
  begin(0, kEager + 1, 7), begin(1, kEager + 1, 7);
  EXPECT_EQ(ways_[1].front().size(), sizeof(CallSlot));
  deliver(0), deliver(1);
  for (Member& member : members_) {
    EXPECT_EQ(member.path.step(), State::done);
    EXPECT_EQ(member.started, 1);
  }
}

TEST_F(TwoMembers, UnequalCallsAreRefusedByBoth) {
  begin(0, 8, 7), begin(1, 8, 9);
  deliver(0), deliver(1);
  EXPECT_EQ(members_[0].path.step(), State::refused);
  EXPECT_EQ(members_[1].path.step(), State::refused);
  EXPECT_EQ(data_[0], std::vector<float>(8, 1)) << "a refused call wrote its output";
}

TEST_F(TwoMembers, ABusyOneRefusesAndTheNextTurnRuns) {
  begin(0, 8, 7);
  EXPECT_FALSE(members_[1].path.refuse_if_awaited(0)) << "nobody waits yet";
  deliver(1);
  EXPECT_FALSE(members_[1].path.refuse_if_awaited(UINT64_MAX)) << "it may still come";
  EXPECT_TRUE(members_[1].path.refuse_if_awaited(0));
  EXPECT_FALSE(members_[1].path.refuse_if_awaited(0)) << "twice in a turn";
  deliver(0);
  EXPECT_EQ(members_[0].path.step(), State::refused);
  begin(0, 8, 8), begin(1, 8, 8);
  deliver(0), deliver(1);
  EXPECT_EQ(members_[0].path.step(), State::done);
  EXPECT_EQ(members_[1].path.step(), State::done);
}

TEST_F(TwoMembers, TheNextCallMayComeBeforeThisOneIsLookedAt) {
  begin(0, 8, 7), begin(1, 8, 7);
  deliver(0);
  EXPECT_EQ(members_[0].path.step(), State::done);
  begin(0, 8, 8);
  deliver(1);  // both turns
  EXPECT_EQ(members_[1].path.step(), State::done);
  EXPECT_EQ(data_[1], std::vector<float>(8, 3));
  begin(1, 8, 8);
  EXPECT_EQ(members_[1].path.step(), State::done);
}

TEST_F(TwoMembers, AReminderSaysNothingNew) {
  begin(0, 8, 7);
  members_[0].path.remind();
  deliver(1);
  EXPECT_EQ(members_[1].path.missing(), std::vector<int>{});
  begin(1, 8, 7);
  EXPECT_EQ(members_[1].path.step(), State::done);
  EXPECT_EQ(members_[0].path.missing(), std::vector<int>{1});
}

TEST_F(TwoMembers, OneThatLeavesIsWaitedForNoLonger) {
  begin(0, 8, 7), begin(1, 8, 7);
  deliver(0);
  members_[0].path.member_left(1);
  EXPECT_EQ(members_[0].path.step(), State::done) << "it came before it left";
  begin(0, 8, 8);
  EXPECT_EQ(members_[0].path.step(), State::refused);
}

TEST_F(TwoMembers, WhatIsOutOfTurnIsAFaultThatNamesTheSender) {
  const auto slot = [](uint64_t turn, size_t bytes = 0) {
    CallSlot slot;
    slot.turn = turn;
    return encode(slot, std::string(bytes, 'x'));
  };
  const std::string why = "rank 1 sent a call out of its turn";
  EXPECT_EQ(error_of(slot(0)), why);
  EXPECT_EQ(error_of(slot(2)), why);
  EXPECT_EQ(error_of(slot(1, RemoteFastPath::kEagerBytes + 1)), why);
  EXPECT_EQ(error_of(slot(1)), "");
  EXPECT_EQ(error_of(slot(2)), why) << "before this member's turn 1";
  EXPECT_THROW(call_slot(std::string(1, char(CallSlot::kTag))), Error);
  EXPECT_FALSE(call_slot("x"));
}

TEST_F(TwoMembers, DataOfAnotherLengthAreNeverAddedUp) {
  begin(0, 8, 7);
  CallSlot slot;
  slot.turn = 1, slot.hash = 7;
  members_[0].path.receive(encode(slot, "abc"));
  EXPECT_EQ(members_[0].path.step(), State::refused);
}

// ---- engines

TEST(RemoteFastPath, TakesCallsOfEverySize) {
  Ranks ranks(std::vector<int>{1, 1});
  constexpr int64_t kSizes[] = {1, 9, 10, kEager, kEager + 1, 300000};
  ranks.each([&](Engine& engine, int rank) {
    for (int64_t count : kSizes)
      for (int i = 0; i < 20; ++i) {
        std::vector<float> data(size_t(count), float(rank + i));
        done(engine, request(engine, Kind::allreduce, i % 2 ? "x" : "", {in_place(data)}));
        ASSERT_EQ(data, std::vector<float>(size_t(count), float(2 * i + 1)));
      }
  });
  // On a loaded machine a rank may wait so long that the other refuses.
  EXPECT_GT(ranks.count(Counters::fast_path), ranks.count(Counters::requests) / 4);
}

TEST(RemoteFastPath, BitsAreThoseOfNegotiation) {
  constexpr int64_t kCount = 1000;
  struct Case { DType dtype; ReduceOp op; double pre, post; };
  std::vector<Case> cases;
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64})
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::max})
      for (const double pre : {1.0, 0.3}) cases.push_back({dtype, op, pre, op == ReduceOp::sum ? 0.7 : 1.0});
  Ranks ranks(std::vector<int>{1, 1});
  ranks.each([&](Engine& engine, int rank) {
    for (const Case& one : cases) {
      std::vector<std::byte> in(kCount * size_of(one.dtype)), fast(in.size()), slow(in.size());
      for (size_t i = 0; i < in.size(); ++i) in[i] = std::byte((i * 37 + size_t(rank) * 11) % 60);  // no NaN
      const auto call = [&](void* out) {
        auto found = request(engine, Kind::allreduce, "x", {{one.dtype, {kCount}, in.data(), out}});
        found->what.op = one.op, found->what.pre = one.pre, found->what.post = one.post;
        return found;
      };
      done(engine, call(fast.data()));
      EXPECT_EQ(negotiated(engine, call(slow.data())), Code::ok);
      EXPECT_EQ(std::memcmp(fast.data(), slow.data(), in.size()), 0) << name_of(one.op) << " of dtype "
                                                                     << int(one.dtype) << " by " << one.pre;
    }
  });
  EXPECT_GT(ranks.count(Counters::fast_path), 0u);
}

TEST(RemoteFastPath, IsNotTakenWhereAWayIsForcedOrTuned) {
  Config forced, tuned;
  forced.select = "allreduce=ring";
  tuned.autotune = true;
  for (const Config& config : {forced, tuned}) {
    Ranks ranks(std::vector<int>{1, 1}, config);
    ranks.each([](Engine& engine, int) {
      std::vector<float> data(10, 1);
      for (int i = 0; i < 5; ++i) done(engine, request(engine, Kind::allreduce, "x", {in_place(data)}));
    });
    EXPECT_EQ(ranks.count(Counters::fast_path), 0u);
  }
}

TEST(RemoteFastPath, ALateRankIsWaitedFor) {
  Ranks ranks(std::vector<int>{1, 1});
  ranks.each([](Engine& engine, int rank) {
    for (int late = 0; late < 2; ++late) {
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(350));  // longer than until the reminders
      std::vector<float> data(10, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(data)}));
      ASSERT_EQ(data[0], 2);
    }
  });
}

TEST(RemoteFastPath, ARankThatNeverComesIsAStallThatNamesIt) {
  Config config;
  config.stall_warn_s = 0.2, config.stall_end_s = 0.6;
  Ranks ranks(std::vector<int>{1, 1}, config);
  ranks.each({0}, [](Engine& engine, int) {
    std::vector<float> data(10, 1);
    auto call = request(engine, Kind::allreduce, "x", {in_place(data)});
    EXPECT_EQ(outcome(engine, call), Code::timeout) << call->text;
    EXPECT_NE(call->text.find("rank 1"), std::string::npos) << call->text;
  });
}

}  // namespace
}  // namespace lightcc::test

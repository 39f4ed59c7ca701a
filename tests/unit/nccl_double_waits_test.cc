// What the NCCL of the other tests does later, whom its kernels wait for, and how communicators begin and end.
#include <algorithm>

#include "unit/nccl_double_ranks.h"

namespace lightcc {
namespace {

using namespace test;

TEST_F(NcclDoubles, InitIsInProgressUntilAllHaveCalled) {
  const NcclUniqueId id = unique_id();
  std::atomic<bool> has_looked{false};
  each_alone(2, [&](Rank& me) {
    while (me.rank == 1 && !has_looked) std::this_thread::yield();
    init(me, id);
    int result = kNcclSuccess;
    EXPECT_EQ(table.CommGetAsyncError(me.comm, &result), kNcclSuccess);
    EXPECT_TRUE(has_looked.exchange(true) || result == kNcclInProgress);
    EXPECT_EQ(me.done(kNcclInProgress), kNcclSuccess);
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, LaunchesAreInProgressAtTimes) {
  each(1, [&](Rank& me) {
    std::map<int, int> results;
    float* x = me.floats({1});
    while (results[kNcclSuccess] == 0 || results[kNcclInProgress] == 0) {
      const int result = me.all_reduce(x, x, 1);
      ++results[result];
      me.check(result);
    }
    EXPECT_EQ(results.size(), 2u);
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, NothingElseWhileALaunchIsInProgress) {
  each(1, [&](Rank& me) {
    float* x = me.floats({1});
    cuda.synchronize(0, me.stream);
    nccl.set_max_delay_us(100'000);
    int result = kNcclSuccess;
    for (int i = 0; i < 1000 && result != kInvalidUsage; ++i) {
      if (me.all_reduce(x, x, 1) != kNcclInProgress) continue;
      cuda.fill(0, me.stream, x, 1, 2);
      result = me.all_reduce(x, x, 1);
      me.check(kNcclInProgress);
    }
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"stream 1 of device 0 is given something before the kernel that was promised it",
                                  "NCCL's AllReduce is called for a communicator that is in progress"}));
}

// ---- kernels that wait

TEST_F(NcclDoubles, TwoCommunicatorsInOneOrder) {
  const NcclUniqueId ids[] = {unique_id(), unique_id()};
  each_alone(3, [&](Rank& one) {
    Rank two = one;
    CudaDouble::functions().create_stream(two.device, &two.stream);
    void* event = nullptr;
    CudaDouble::functions().create_event(one.device, &event);
    connect(one, ids[0]), connect(two, ids[1]);
    float* x = one.floats({1});
    for (int i = 0; i < 20; ++i)
      for (const auto& [before, after] : {std::pair(&one, &two), std::pair(&two, &one)}) {
        before->check(before->all_reduce(x, x, 1));
        CudaDouble::functions().record(one.device, event, before->stream);
        CudaDouble::functions().order(one.device, after->stream, event);
      }
    float result = 1;
    for (int i = 0; i < 40; ++i) result *= 3;
    EXPECT_EQ(cuda.read(one.device, one.stream, x, 1), std::vector<float>{result});
    one.leave(), two.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, AThreadHasOneCallInProgress) {
  const NcclUniqueId id = unique_id(), other = unique_id();
  each_alone(1, [&](Rank& me) {
    me.ranks = 2;  // of which the other one never comes
    init(me, id);
    void* comm = nullptr;
    NcclConfig config;
    EXPECT_EQ(table.CommInitRankConfig(&comm, 1, other, 0, &config), kInvalidUsage);
    me.abort();
  });
  EXPECT_EQ(cuda.faults(), Texts{"NCCL's CommInitRankConfig is called while a call of this thread for another "
                                 "communicator is in progress"});
}

TEST_F(NcclDoubles, TwoCommunicatorsInCrossedOrder) {
  nccl.set_patience(100);
  const NcclUniqueId ids[] = {unique_id(), unique_id()};
  each_alone(2, [&](Rank& one) {
    Rank two = one;
    connect(one, ids[0]), connect(two, ids[1]);
    float *x = one.floats({1}), *y = two.floats({1});
    if (one.rank == 0) one.check(one.all_reduce(x, x, 1));
    two.check(two.all_reduce(y, y, 1));
    if (one.rank == 1) one.check(one.all_reduce(x, x, 1));
    cuda.synchronize(one.device, one.stream);
    one.leave(), two.leave();
  });
  // When one of them ends, the other may go on.
  EXPECT_FALSE(cuda.faults().empty());
  const std::string order = ": launched in another order?";
  for (const std::string& fault : cuda.faults())
    EXPECT_TRUE(fault == "AllReduce of 1 float32 (sum) on rank 0 of communicator 1 waits for rank 1" + order ||
                fault == "AllReduce of 1 float32 (sum) on rank 1 of communicator 2 waits for rank 0" + order)
        << fault;
}

// Of the first communicator only rank 0 comes, and has the device until it is aborted.
TEST_F(NcclDoubles, ADeviceRunsOneKernelAtATime) {
  const NcclUniqueId ids[] = {unique_id(), unique_id()};
  std::atomic<bool> has_device{false}, is_aborted{false};
  each_alone(2, [&](Rank& one) {
    Rank two = one;
    CudaDouble::functions().create_stream(two.device, &two.stream);
    connect(one, ids[0]), connect(two, ids[1]);
    float *x = one.floats({1}), *y = two.floats({1});
    if (one.rank == 0) {
      cuda.synchronize(one.device, one.stream);
      one.check(one.all_reduce(x, x, 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      has_device = true;
    }
    while (!has_device) std::this_thread::yield();
    two.check(two.all_reduce(y, y, 1));
    std::atomic<bool> is_over{false};
    cuda.run(two.device, two.stream, "a kernel", {}, [&] { is_over = true; });
    if (one.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_FALSE(is_over);
      is_aborted = true;
    }
    while (!is_aborted) std::this_thread::yield();
    one.abort();
    two.expect(y, {2});
    two.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, AbortEndsAKernelThatWaits) {
  std::atomic<bool> has_ended{false};
  each(2, [&](Rank& me) {
    float *x = me.floats({1}), *y = me.floats({7});
    if (me.rank == 0) {
      me.check(me.all_reduce(x, y, 1));
      me.abort();
      me.expect(y, {7});
      has_ended = true;
    }
    while (!has_ended) std::this_thread::yield();
    if (me.rank == 1) me.abort();
    EXPECT_EQ(me.all_reduce(x, y, 1), kInvalidArgument);
  });
  EXPECT_EQ(nccl.leaks(), 0u);
  EXPECT_EQ(cuda.faults(), Texts{"NCCL's AllReduce is called for what is no communicator, or no longer"});
}

TEST_F(NcclDoubles, AbortOfOneLeavesTheOthersWaiting) {
  nccl.set_patience(50);
  each(2, [&](Rank& me) {
    float *x = me.floats({1}), *y = me.floats({7});
    if (me.rank == 0) me.check(me.all_reduce(x, y, 1));
    if (me.rank == 0) me.expect(y, {7});
    me.abort();
  });
  EXPECT_EQ(cuda.faults(), Texts{"AllReduce of 1 float32 (sum) on rank 0 of communicator 1 waits for rank 1: launched "
                                 "in another order?"});
}

TEST_F(NcclDoubles, TheEndOfTheDoubleEndsKernelsThatWait) {
  each(2, [&](Rank& me) {
    float* x = me.floats({1});
    if (me.rank == 0) me.check(me.all_reduce(x, x, 1));
  });
  EXPECT_EQ(nccl.leaks(), 2u);
  EXPECT_EQ(cuda.faults(), Texts{});
}

// ---- communicators

TEST_F(NcclDoubles, TwoRanksOfADeviceAreRefused) {
  const NcclUniqueId id = unique_id();
  each_alone(3, [&](Rank& me) {
    on_device(me.rank == 2 ? 1 : me.rank, [&] {
      init(me, id);
      EXPECT_EQ(me.done(kNcclInProgress), me.rank == 0 ? kRemoteError : kInvalidUsage);
      EXPECT_EQ(table.AllReduce(nullptr, nullptr, 0, kFloat32, kSum, me.comm, nullptr),
                me.rank == 0 ? kRemoteError : kInvalidUsage);
      me.abort();
    });
  });
  EXPECT_EQ(cuda.faults(), Texts{}) << "it is what NCCL says";
  EXPECT_EQ(nccl.leaks(), 0u);
}

TEST_F(NcclDoubles, CallsAreMadeOnTheDevice) {
  void* comm = nullptr;
  NcclConfig config;
  EXPECT_EQ(table.CommInitRankConfig(&comm, 1, unique_id(), 0, &config), kInvalidUsage);
  EXPECT_STREQ(table.GetLastError(nullptr), "NCCL's CommInitRankConfig is called outside of on_device");
  each(1, [&](Rank& me) {
    on_device(1, [&] { EXPECT_EQ(table.CommFinalize(me.comm), kInvalidUsage); });
    std::thread([&] { EXPECT_EQ(table.GroupStart(), kInvalidUsage); }).join();
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"NCCL's CommInitRankConfig is called outside of on_device",
                                  "NCCL's CommFinalize is called on device 1 for a communicator of device 0",
                                  "NCCL's GroupStart is called outside of on_device"}));
}

TEST_F(NcclDoubles, CommunicatorsAreMadeOfNewIdsAndDoNotBlock) {
  const NcclUniqueId id = unique_id();
  EXPECT_NE(std::memcmp(&id, unique_id().internal, sizeof id), 0);
  each_alone(1, [&](Rank& me) {
    const auto refused = [&](NcclConfig config, const NcclUniqueId& id, int ranks, int rank) {
      void* comm = nullptr;
      EXPECT_EQ(table.CommInitRankConfig(&comm, ranks, id, rank, &config), kInvalidArgument);
    };
    NcclConfig blocking, other;
    blocking.blocking = 1, other.magic = 0;
    refused(blocking, id, 1, 0);
    refused(other, id, 1, 0);
    refused({}, {}, 1, 0);
    refused({}, id, 1, 1);
    init(me, id);
    refused({}, id, 2, 1);
    EXPECT_EQ(me.done(kNcclInProgress), kNcclSuccess);
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"NCCL's CommInitRankConfig is to make a communicator that blocks",
                                  "NCCL's CommInitRankConfig is given no configuration of NCCL 2.14",
                                  "NCCL's CommInitRankConfig is given what is no unique id",
                                  "NCCL's CommInitRankConfig is called for rank 1 of 1",
                                  "NCCL's CommInitRankConfig is called for 2 ranks of communicator 1, which has 1"}));
}

TEST_F(NcclDoubles, CommunicatorsAreFinalizedBeforeTheyAreDestroyed) {
  std::atomic<bool> may_end{false};
  each(1, [&](Rank& me) {
    cuda.run(0, me.stream, "a long kernel", {}, [&] { while (!may_end) std::this_thread::yield(); });
    me.check(me.all_reduce(nullptr, nullptr, 0));
    EXPECT_EQ(nccl.leaks(), 1u);
    EXPECT_EQ(table.CommFinalize(me.comm), kNcclInProgress);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    int result = kNcclSuccess;
    EXPECT_EQ(table.CommGetAsyncError(me.comm, &result), kNcclSuccess);
    EXPECT_EQ(result, kNcclInProgress) << "until its kernels have run";
    EXPECT_EQ(table.CommDestroy(me.comm), kInvalidUsage);
    may_end = true;
    cuda.synchronize(0, me.stream);
  });
  each(1, [&](Rank& me) {
    EXPECT_EQ(table.CommDestroy(me.comm), kInvalidUsage);
    EXPECT_EQ(table.CommGetAsyncError(me.comm, nullptr), kInvalidArgument) << "it is gone nevertheless";
  });
  EXPECT_EQ(cuda.faults(), (Texts{"NCCL's CommDestroy is called for a communicator that is in progress",
                                  "NCCL's CommDestroy is called for a communicator that is not finalized",
                                  "NCCL's CommGetAsyncError is called for what is no communicator, or no longer"}));
  EXPECT_EQ(nccl.leaks(), 0u);
}

TEST_F(NcclDoubles, PlantedFailuresAreReported) {
  nccl.fail("AllReduce", 2, kRemoteError);
  nccl.set_version(21805);
  int version = 0;
  EXPECT_EQ(table.GetVersion(&version), kNcclSuccess);
  EXPECT_EQ(version, 21805);
  each(1, [&](Rank& me) {
    me.check(me.all_reduce(nullptr, nullptr, 0));
    EXPECT_EQ(me.all_reduce(nullptr, nullptr, 0), kRemoteError);
    me.check(me.all_reduce(nullptr, nullptr, 0));
    nccl.set_async_error(1, kInternalError);
    me.check(me.all_reduce(nullptr, nullptr, 0));
    nccl.set_async_error(0, kRemoteError);
    EXPECT_EQ(me.done(kNcclInProgress), kRemoteError);
    EXPECT_STREQ(table.GetErrorString(kRemoteError), "remote process exited or there was a network error");
    me.abort();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST(NcclDoubleTable, FailsWithoutADouble) {
  EXPECT_EQ(NcclDouble::functions().GroupStart(), kInternalError);
  EXPECT_STREQ(NcclDouble::functions().GetLastError(nullptr), "there is no NcclDouble");
  CudaDouble cuda(1);
  NcclDouble one(cuda);
  EXPECT_THROW(NcclDouble{cuda}, std::logic_error);
}

}  // namespace
}  // namespace lightcc

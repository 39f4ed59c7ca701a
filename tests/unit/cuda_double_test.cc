// The CUDA of the other tests: that it does what CUDA promises, no more, and finds what CUDA forbids.
#include "unit/doubles/cuda_double.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "device/device.h"

namespace lightcc {
namespace {

using namespace test;

constexpr size_t kCount = 1024, kBytes = kCount * sizeof(float);

using Texts = std::vector<std::string>;
std::vector<float> all(float value) { return std::vector<float>(kCount, value); }

class CudaDoubles : public testing::Test {
 protected:
  CudaDoubles() { check(table.pin(0, host.data(), kBytes)); }
  void TearDown() override {
    if (HasFailure()) ADD_FAILURE() << "LIGHTCC_TEST_SEED=" << cuda.seed();
  }

  static void check(const char* failure) { EXPECT_STREQ(failure, nullptr); }
  void* stream(int device = 0) {
    void* made = nullptr;
    check(table.create_stream(device, &made));
    return made;
  }
  void* event(int device = 0) {
    void* made = nullptr;
    check(table.create_event(device, &made));
    return made;
  }
  // Which stands for what the stream has so far.
  void* recorded(void* stream) {
    void* made = event();
    check(table.record(0, made, stream));
    return made;
  }
  void order(void* later, void* earlier) { check(table.order(0, later, recorded(earlier))); }
  void wait_for(void* event) {
    for (int reached = 0; !reached; std::this_thread::yield()) check(table.query(0, event, &reached));
  }
  float* allocated(void* stream) {  // in its order
    void* made = nullptr;
    check(table.allocate(0, stream, kBytes, &made));
    return static_cast<float*>(made);
  }
  float* memory(int device = 0) { return static_cast<float*>(cuda.allocate(device, kBytes)); }
  void fetch(void* stream, const float* from) { check(table.copy(0, stream, host.data(), from, kBytes)); }
  void deliver(void* stream, float* to) { check(table.copy(0, stream, to, host.data(), kBytes)); }

  std::vector<float> host = all(0);  // pinned; outlives the double, as it has to
  CudaDouble cuda;
  const CudaFunctions& table = CudaDouble::functions();
};

TEST_F(CudaDoubles, AStreamDoesWhatItIsGivenInOrder) {
  void* stream = this->stream();
  float *a = memory(), *b = memory();
  for (int i = 0; i < 20; ++i) {
    cuda.fill(0, stream, a, kCount, float(i));
    fetch(stream, a);
    deliver(stream, b);
  }
  EXPECT_EQ(cuda.read(0, stream, b, kCount), all(19));
  EXPECT_EQ(host, all(19));
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, NewMemoryHoldsNoNumbers) {
  for (float value : cuda.read(7, nullptr, memory(7), kCount)) EXPECT_NE(value, value);
  int devices = 0;
  check(table.count_devices(&devices));
  EXPECT_EQ(devices, 8);
}

TEST_F(CudaDoubles, TwoStreamsNeedAnEvent) {
  void* other = stream();
  float* data = memory();
  cuda.fill(0, nullptr, data, kCount, 1);
  order(other, nullptr);
  fetch(other, data);
  EXPECT_EQ(cuda.faults(), Texts{});
  cuda.synchronize(0, other);
  EXPECT_EQ(host, all(1));

  cuda.run(0, nullptr, "a kernel", {{data, kBytes, false}}, [] {});
  EXPECT_EQ(cuda.faults(), Texts{}) << "what the host has waited for is over";
  deliver(other, data);
  EXPECT_EQ(cuda.faults(), Texts{"a copy on stream 1 of device 0 writes 4096 bytes that a kernel on the default stream "
                                 "reads without order"});
}

TEST_F(CudaDoubles, OrderPassesFromStreamToStream) {
  void *second = stream(), *third = stream();
  float* data = memory();
  cuda.fill(0, nullptr, data, kCount, 1);
  order(second, nullptr);
  order(third, second);
  cuda.fill(0, third, data, kCount, 2);
  EXPECT_EQ(cuda.read(0, third, data, kCount), all(2));
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, AnEventIsWhatWasRecordedLastBeforeItWasAskedFor) {
  void *other = stream(), *event = this->event();
  int reached = 0;
  check(table.query(0, event, &reached));
  EXPECT_EQ(reached, 1) << "never recorded";
  check(table.order(0, other, event));

  float* data = memory();
  check(table.record(0, event, nullptr));
  cuda.fill(0, nullptr, data, kCount, 1);
  check(table.order(0, other, event));
  cuda.fill(0, other, data, 1, 2);
  EXPECT_EQ(cuda.faults(), Texts{"a kernel on stream 1 of device 0 writes 4 bytes that a kernel on the default stream "
                                 "writes without order"});
}

TEST_F(CudaDoubles, ReadsNeedNoOrderNorDoOtherBytes) {
  void* other = stream();
  float* data = memory();
  cuda.run(0, nullptr, "a kernel", {{data, 8, false}, {data + 2, 8, true}}, [] {});
  cuda.run(0, other, "a kernel", {{data, 8, false}, {data + 4, 8, true}}, [] {});
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, TheHostKnowsWhatItHasAskedFor) {
  void* other = stream();
  float* data = memory();
  cuda.fill(0, nullptr, data, kCount, 1);
  fetch(nullptr, data);
  wait_for(recorded(nullptr));
  cuda.host_writes(host.data(), kBytes);
  EXPECT_EQ(host, all(1));
  std::fill(host.begin(), host.end(), 2.0f);
  deliver(other, data);
  EXPECT_EQ(cuda.read(0, other, data, kCount), all(2));
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, TheHostKnowsWhatItIsCalledFor) {
  void* other = stream();
  float* data = memory();
  std::atomic<bool> called{false};
  cuda.fill(0, nullptr, data, kCount, 1);
  fetch(nullptr, data);
  check(table.call(0, nullptr, [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &called));
  while (!called) std::this_thread::yield();
  EXPECT_EQ(host, all(1));
  cuda.host_reads(host.data(), kBytes);
  cuda.fill(0, other, data, kCount, 2);
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, TheHostKnowsNothingElseEvenIfItHasHappened) {
  float* data = memory();
  fetch(nullptr, data);
  std::atomic<bool> over{false};
  cuda.run(0, nullptr, "a kernel", {}, [&] { over = true; });
  while (!over) std::this_thread::yield();
  cuda.host_reads(host.data() + 1, 4);
  EXPECT_EQ(cuda.faults(), Texts{"the host reads 4 bytes that a copy on the default stream of device 0 writes without "
                                 "order"});
}

TEST_F(CudaDoubles, WhatOneRankKnowsItMayHaveToldAnother) {
  float *data = memory(), *others = memory(1);
  fetch(nullptr, data);
  check(table.copy(1, nullptr, others, host.data(), kBytes));
  EXPECT_EQ(cuda.faults(), Texts{"a copy on the default stream of device 1 reads 4096 bytes that a copy on the default "
                                 "stream of device 0 writes without order"});
  wait_for(recorded(nullptr));
  check(table.copy(1, nullptr, others, host.data(), kBytes));
  EXPECT_EQ(cuda.faults().size(), 1u);
}

TEST_F(CudaDoubles, CopiesAreBetweenDevicesAndPinnedMemory) {
  const std::string who = "a copy on the default stream of device 0 ";
  std::vector<float> pageable = all(0);
  float* data = memory();
  EXPECT_EQ(table.copy(0, nullptr, data, pageable.data(), kBytes),
            who + "has a side that is neither a device's memory nor pinned");
  EXPECT_EQ(table.copy(0, nullptr, data, host.data() + 1, kBytes),
            who + "has a side that is neither a device's memory nor pinned");
  EXPECT_EQ(table.copy(0, nullptr, memory(1), host.data(), 1), who + "has no side that is the device's memory");
  EXPECT_EQ(cuda.faults().size(), 2u) << "each once";
  check(table.copy(0, nullptr, nullptr, nullptr, 0));
  check(table.pin(1, pageable.data(), kBytes));
  check(table.copy(0, nullptr, data, pageable.data(), kBytes));
  cuda.synchronize(0, nullptr);
  check(table.unpin(1, pageable.data()));
  EXPECT_EQ(cuda.faults().size(), 2u) << "memory is pinned for all devices";
}

TEST_F(CudaDoubles, BothSidesOfACopyNeedOrder) {
  float *data = memory(), *same = memory(), *others = memory(1);
  cuda.fill(0, nullptr, data, kCount, 1);
  check(table.copy(0, nullptr, same, data, kBytes));
  check(table.copy(0, nullptr, others, same, kBytes));
  check(table.order(1, nullptr, recorded(nullptr)));
  EXPECT_EQ(cuda.read(1, nullptr, others, kCount), all(1));
  EXPECT_EQ(cuda.faults(), Texts{});
  check(table.copy(1, nullptr, others, same, kBytes));
  cuda.fill(0, nullptr, same, 1, 2);
  check(table.copy(0, nullptr, same + 1, others + 1, 4));
  const std::string other = " 4 bytes that a copy on the default stream of device 1 ";
  EXPECT_EQ(cuda.faults(), (Texts{"a kernel on the default stream of device 0 writes" + other + "reads without order",
                                  "a copy on the default stream of device 0 reads" + other + "writes without order",
                                  "a copy on the default stream of device 0 writes" + other + "reads without order"}));
}

TEST_F(CudaDoubles, ABatchOfCopiesIsWithinADevice) {
  float *data = memory(), *same = memory(), *others = memory(1);
  cuda.fill(0, nullptr, data, kCount, 1);
  cuda.fill(0, nullptr, same, kCount, 2);
  const CudaCopy copies[] = {{same, data, 400}, {nullptr, nullptr, 0}, {same + 100, data, 4}, {same + 102, data, 4}};
  check(table.copy_all(0, nullptr, copies, 4));
  check(table.copy_all(0, nullptr, nullptr, 0));
  std::vector<float> want = all(2);
  std::fill_n(want.begin(), 101, 1.0f);
  want[102] = 1;
  EXPECT_EQ(cuda.read(0, nullptr, same, kCount), want);
  EXPECT_EQ(cuda.faults(), Texts{});

  const std::string who = "a batch of copies on the default stream of device 0 ";
  for (const CudaCopy& copy : {CudaCopy{others, data, 4}, CudaCopy{same, others, 4}, CudaCopy{same, host.data(), 4},
                               CudaCopy{same + 1, data, kBytes}})
    EXPECT_EQ(table.copy_all(0, nullptr, &copy, 1), who + "has a side that is not the device's memory");
  const std::vector<CudaCopy> overlaps[] = {{{same, data, 8}, {same + 1, data + 4, 4}},
                                            {{data + 1, same, 4}, {same + 4, data, 16}},
                                            {{same, data, 4}, {data + 4, same, 4}},
                                            {{data, data, 4}}};
  for (const auto& each : overlaps)
    EXPECT_EQ(table.copy_all(0, nullptr, each.data(), each.size()), who + "writes what it also reads, or writes twice");
  EXPECT_EQ(cuda.faults().size(), 2u) << "each once";
}

TEST_F(CudaDoubles, EachSideOfABatchOfCopiesNeedsOrder) {
  void* other = stream();
  float *data = memory(), *same = memory();
  cuda.fill(0, nullptr, data, 4, 1);
  cuda.fill(0, nullptr, same + 8, 2, 1);
  const CudaCopy copies[] = {{same, data + 2, 8}, {same + 4, data + 8, 4}, {same + 8, data + 9, 4}};
  check(table.copy_all(0, other, copies, 3));
  const std::string who = "a batch of copies on stream 1 of device 0 ",
                    writes = " bytes that a kernel on the default stream writes without order";
  EXPECT_EQ(cuda.faults(), (Texts{who + "reads 8" + writes, who + "writes 4" + writes}));
  check(table.copy(0, nullptr, host.data(), same, kBytes));
  EXPECT_EQ(cuda.faults().size(), 4u) << "of 8 bytes and, in the same words, of 4 and 4";
  order(nullptr, other);
  fetch(nullptr, same);
  EXPECT_EQ(cuda.faults().size(), 4u);
}

TEST_F(CudaDoubles, MemoryIsAllocatedAndReleasedInTheOrderOfAStream) {
  void *first = stream(), *second = stream();
  for (int i = 0; i < 20; ++i) {
    float* data = allocated(first);
    for (float value : cuda.read(0, first, data, kCount)) EXPECT_NE(value, value);
    check(table.release(0, first, data));
    data = allocated(first);
    cuda.fill(0, first, data, kCount, float(i));
    order(second, first);
    fetch(second, data);
    check(table.release(0, second, data));
    cuda.synchronize(0, second);
    EXPECT_EQ(host, all(float(i)));
  }
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, UsesOfAllocatedMemoryNeedOrder) {
  void *first = stream(), *second = stream();
  float *data = allocated(first), *other = memory();
  cuda.fill(0, second, data, kCount, 1);
  EXPECT_EQ(cuda.faults(), Texts{"a kernel on stream 2 of device 0 writes 4096 bytes that an allocation on stream 1 "
                                 "writes without order"});
  order(first, second);
  check(table.copy(0, second, other, data, kBytes));
  check(table.release(0, first, data));
  EXPECT_EQ(cuda.faults().back(), "a release on stream 1 of device 0 writes 4096 bytes that a copy on stream 2 reads "
                                  "without order");
  cuda.fill(0, first, data, kCount, 1);
  EXPECT_EQ(cuda.faults().back(),
            "a kernel on stream 1 of device 0 uses 4096 bytes that are neither the device's nor pinned");
  EXPECT_NE(table.release(0, first, data), nullptr) << "it is gone";
  EXPECT_NE(table.release(0, first, other), nullptr) << "not allocated in the order of a stream";
  EXPECT_EQ(cuda.faults().size(), 5u);
}

TEST_F(CudaDoubles, ScalingIsWhatReduceDoes) {
  std::vector<std::byte> values(kBytes), expected(kBytes);
  for (size_t i = 0; i < kBytes; ++i) values[i] = std::byte(i * 37 + i / 256);
  for (int dtype = 0; dtype < kDTypes; ++dtype)
    for (const double factor : {1.0, 1.0 / 3, -2.5}) {
      const size_t count = kBytes / size_of(DType(dtype)) - 1, bytes = count * size_of(DType(dtype));
      reduce({DType(dtype), ReduceOp::sum, factor, 1}, {{expected.data()}}, {{values.data()}}, count);
      float *from = memory(), *to = memory();
      cuda.run(0, nullptr, "a kernel", {{from, kBytes, true}}, [&, from] { move_bytes(from, values.data(), kBytes); });
      check(table.scale(0, nullptr, dtype, to, from, count, factor));
      check(table.scale(0, nullptr, dtype, from, from, count, factor));
      for (const float* scaled : {from, to}) {
        auto got = cuda.read(0, nullptr, reinterpret_cast<const std::byte*>(scaled), kBytes);
        EXPECT_EQ(got[bytes], scaled == to ? std::byte(0xff) : values[bytes]);
        EXPECT_TRUE(std::equal(got.begin(), got.begin() + long(bytes), expected.begin()))
            << name_of(DType(dtype)) << " times " << factor;
      }
    }
  check(table.scale(0, nullptr, 0, nullptr, nullptr, 0, 1));
  EXPECT_EQ(cuda.faults(), Texts{});
  EXPECT_STREQ(table.scale(0, nullptr, kDTypes, memory(), memory(), 1, 1),
               "a scaling on the default stream of device 0 is of no dtype there is");
  EXPECT_NE(table.scale(0, nullptr, 0, memory(1), memory(), 1, 1), nullptr) << "memory of another device";
}

TEST_F(CudaDoubles, FunctionsRunOnADevice) {
  std::vector<int> devices;
  check(table.on_device(3, [](void* seen) {
    auto& devices = *static_cast<std::vector<int>*>(seen);
    devices.push_back(CudaDouble::current_device());
    CudaDouble::functions().on_device(4, [](void* seen) {
      static_cast<std::vector<int>*>(seen)->push_back(CudaDouble::current_device());
    }, seen);
    devices.push_back(CudaDouble::current_device());
  }, &devices));
  devices.push_back(CudaDouble::current_device());
  EXPECT_EQ(devices, (std::vector<int>{3, 4, 3, -1}));
  EXPECT_STREQ(table.on_device(8, [](void*) { FAIL(); }, nullptr), "there is no device 8");
  char id[16];
  check(table.bus_id(3, id, sizeof id));
  EXPECT_STREQ(id, "double:3");
  EXPECT_STREQ(table.bus_id(3, id, 8), "a bus id has no room in 8 bytes");
}

TEST_F(CudaDoubles, APromisedKernelIsTheNext) {
  void* stream = this->stream();
  const auto run = [&](bool was_promised) { cuda.run(0, stream, "a kernel", {}, [] {}, was_promised); };
  EXPECT_TRUE(cuda.promise(0, stream));
  run(true);
  run(false);
  EXPECT_EQ(cuda.faults(), Texts{});
  EXPECT_TRUE(cuda.promise(0, stream));
  run(false);
  EXPECT_EQ(cuda.faults(), Texts{"stream 1 of device 0 is given something before the kernel that was promised it"});
  EXPECT_FALSE(cuda.promise(1, stream));
}

TEST_F(CudaDoubles, PinnedMemoryStaysUntilCopiesAreKnownToBeDone) {
  EXPECT_STREQ(table.pin(1, host.data() + 1, 4), "the memory is pinned already, or none");
  EXPECT_EQ(cuda.faults(), Texts{}) << "who pins has to expect that";
  fetch(nullptr, memory());
  check(table.unpin(0, host.data()));
  for (float value : host) EXPECT_NE(value, value) << "unpin waits, so that the test goes on";
  EXPECT_EQ(cuda.faults(), Texts{"the host unpins 4096 bytes that a copy on the default stream of device 0 writes "
                                 "without order"});
  EXPECT_STREQ(table.unpin(0, host.data()), "the host unpins what is no such memory, or no longer");
  check(table.pin(0, host.data(), kBytes));
  fetch(stream(), memory());
  EXPECT_EQ(cuda.faults().size(), 2u) << "each is told of once";
}

TEST_F(CudaDoubles, MemoryOfDevicesStaysUntilKernelsAreKnownToBeDone) {
  float* data = memory();
  cuda.fill(0, nullptr, data, kCount, 1);
  cuda.synchronize(0, nullptr);
  cuda.release(data);
  EXPECT_EQ(cuda.faults(), Texts{});
  EXPECT_NE(table.copy(0, nullptr, data, host.data(), kBytes), nullptr) << "it is gone";
  data = memory();
  cuda.fill(0, nullptr, data, kCount, 1);
  cuda.release(data);
  EXPECT_EQ(cuda.faults().back(),
            "the host releases 4096 bytes that a kernel on the default stream of device 0 writes without order");
  cuda.fill(0, nullptr, data, kCount, 1);
  EXPECT_EQ(cuda.faults().back(),
            "a kernel on the default stream of device 0 uses 4096 bytes that are neither the device's nor pinned");
}

TEST_F(CudaDoubles, HandlesThatAreGoneAreFaults) {
  void *stream = this->stream(), *event = this->event(), *others = this->event(1);
  std::atomic<bool> called{false};
  check(table.call(0, stream, [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &called));
  check(table.destroy_stream(0, stream));
  check(table.destroy_event(0, event));
  EXPECT_NE(table.record(0, event, nullptr), nullptr);
  EXPECT_NE(table.record(0, this->event(), stream), nullptr);
  EXPECT_NE(table.record(0, others, nullptr), nullptr);
  EXPECT_NE(table.destroy_stream(0, nullptr), nullptr);
  EXPECT_NE(table.create_event(8, &event), nullptr);
  EXPECT_EQ(cuda.faults(), (Texts{"there is no such event, or no longer", "device 0 has no such stream, or no longer",
                                  "an event of another device is recorded",
                                  "the default stream cannot be destroyed", "there is no device 8"}));
  while (!called) std::this_thread::yield();  // a stream that is destroyed does what it has
}

TEST_F(CudaDoubles, CalledFunctionsMustNotUseCuda) {
  check(table.call(0, nullptr, [](void*) {
    int count = 0;
    CudaDouble::functions().count_devices(&count);
  }, nullptr));
  cuda.synchronize(0, nullptr);
  EXPECT_EQ(cuda.faults(), Texts{"a function that CUDA calls uses CUDA (count_devices)"});
}

TEST_F(CudaDoubles, IgnoredOrderMakesFaults) {
  void* other = stream();
  float* data = memory();
  const auto exchange = [&] {
    cuda.fill(0, nullptr, data, kCount, 1);
    order(other, nullptr);
    fetch(other, data);
    order(nullptr, other);
    cuda.synchronize(0, nullptr);
    return cuda.faults().size();
  };
  EXPECT_EQ(exchange(), 0u);
  cuda.ignore_order(true);
  EXPECT_EQ(exchange(), 1u);
}

TEST_F(CudaDoubles, PlantedFailuresComeAtTheirCall) {
  cuda.fail("record", 2);
  void* event = this->event();
  check(table.record(0, event, nullptr));
  EXPECT_STREQ(table.record(0, event, nullptr), "planted");
  check(table.record(0, event, nullptr));
  cuda.fail("query", 1, true);
  for (int i = 0, reached = 0; i < 3; ++i) EXPECT_STREQ(table.query(0, event, &reached), "planted");
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(CudaDoubles, StreamsOvertakeEachOther) {
  void* other = stream();
  std::set<int> firsts;
  for (int i = 0; i < 10'000 && firsts.size() < 2; ++i) {
    std::atomic<int> first{0};
    int none = 0, nobody = 0;
    cuda.run(0, nullptr, "a kernel", {}, [&] { first.compare_exchange_strong(none, 1); });
    cuda.run(0, other, "a kernel", {}, [&] { first.compare_exchange_strong(nobody, 2); });
    cuda.synchronize(0, nullptr);
    cuda.synchronize(0, other);
    firsts.insert(first);
  }
  EXPECT_EQ(firsts, (std::set<int>{1, 2}));
}

TEST_F(CudaDoubles, RanksAreThreads) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 8; ++rank) ranks.emplace_back([&, rank] {
    std::vector<float> own = all(0);
    check(table.pin(rank, own.data(), kBytes));
    void *stream = this->stream(rank), *event = this->event(rank);
    auto* data = static_cast<float*>(cuda.allocate(rank, kBytes));
    for (int i = 0; i < 20; ++i) {
      cuda.fill(rank, nullptr, data, kCount, float(rank + i));
      check(table.record(rank, event, nullptr));
      check(table.order(rank, stream, event));
      check(table.copy(rank, stream, own.data(), data, kBytes));
      check(table.record(rank, event, stream));
      for (int reached = 0; !reached; std::this_thread::yield()) check(table.query(rank, event, &reached));
      cuda.host_reads(own.data(), kBytes);
      EXPECT_EQ(own, all(float(rank + i)));
    }
    check(table.destroy_event(rank, event));
    check(table.destroy_stream(rank, stream));
    check(table.unpin(rank, own.data()));
    cuda.release(data);
  });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST(CudaDoubleTable, FailsWithoutADouble) {
  int count = 0;
  EXPECT_STREQ(CudaDouble::functions().count_devices(&count), "there is no CudaDouble");
  CudaDouble one(1);
  EXPECT_EQ(CudaDouble::functions().count_devices(&count), nullptr);
  EXPECT_EQ(count, 1);
  EXPECT_THROW(CudaDouble(2), std::logic_error);
}

}  // namespace
}  // namespace lightcc

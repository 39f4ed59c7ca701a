// Ranks of an NcclDouble for its tests: threads, each with a device and a stream.
#pragma once
#include <gtest/gtest.h>

#include <cstring>

#include "device/half.h"
#include "doubles/nccl_double.h"

namespace lightcc::test {

inline constexpr int kFloat32 = 7, kSum = 0;  // of ncclDataType_t and ncclRedOp_t

using Texts = std::vector<std::string>;
using Bytes = std::vector<uint8_t>;
using Numbers = std::vector<double>;

template <class T> Bytes bytes_of(const Numbers& values, T (*convert)(double)) {
  Bytes bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = convert(values[i]);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}
template <class T> Bytes bytes_as(const Numbers& values) {
  return bytes_of<T>(values, [](double value) { return T(value); });
}
inline Bytes encoded(DType dtype, const Numbers& values) {
  switch (dtype) {
    case DType::int8: return bytes_as<int8_t>(values);
    case DType::uint8: return bytes_as<uint8_t>(values);
    case DType::int32: return bytes_as<int32_t>(values);
    case DType::int64: return bytes_as<int64_t>(values);
    case DType::uint32: return bytes_as<uint32_t>(values);
    case DType::uint64: return bytes_as<uint64_t>(values);
    case DType::float16: return bytes_of<uint16_t>(values, [](double value) { return float16_of_float(float(value)); });
    case DType::float64: return bytes_as<double>(values);
    case DType::bfloat16:
      return bytes_of<uint16_t>(values, [](double value) { return bfloat16_of_float(float(value)); });
    default: return bytes_as<float>(values);
  }
}

class NcclDoubles : public testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure()) ADD_FAILURE() << "LIGHTCC_TEST_SEED=" << cuda.seed();
  }

  // A rank in the thread of which it is, with its device.
  struct Rank {
    NcclDoubles& test;
    int rank, ranks, device;
    void* comm = nullptr;
    void* stream = nullptr;

    int done(int result) const {  // what a call has come to
      while (result == kNcclInProgress || result == kNcclSuccess) {
        EXPECT_EQ(test.nccl.functions().CommGetAsyncError(comm, &result), kNcclSuccess);
        if (result == kNcclSuccess) break;
      }
      return result;
    }
    void check(int result) const { EXPECT_EQ(done(result), kNcclSuccess) << test.table.GetLastError(comm); }
    void* memory(const Bytes& bytes) const {  // filled by a kernel
      void* made = test.cuda.allocate(device, bytes.size());
      test.cuda.run(device, stream, "a kernel", {{made, bytes.size(), true}},
                    [=] { move_bytes(made, bytes.data(), bytes.size()); });
      return made;
    }
    void* memory(DType dtype, const Numbers& values) const { return memory(encoded(dtype, values)); }
    float* floats(const Numbers& values) const { return static_cast<float*>(memory(DType::float32, values)); }
    Bytes read(const void* from, size_t bytes) const {
      return test.cuda.read(device, stream, static_cast<const uint8_t*>(from), bytes);
    }
    void expect(const void* from, DType dtype, const Numbers& values, const std::string& what) const {
      EXPECT_EQ(read(from, values.size() * size_of(dtype)), encoded(dtype, values))
          << what << " of " << name_of(dtype) << " on rank " << rank << " of " << ranks;
    }
    void expect(const float* from, const Numbers& values) const { expect(from, DType::float32, values, "values"); }
    int all_reduce(const float* input, float* output, size_t count) const {
      return test.table.AllReduce(input, output, count, kFloat32, kSum, comm, stream);
    }
    void leave() const {
      check(test.table.CommFinalize(comm));
      EXPECT_EQ(test.table.CommDestroy(comm), kNcclSuccess);
    }
    void abort() const { EXPECT_EQ(test.table.CommAbort(comm), kNcclSuccess); }
  };

  static void on_device(int device, const std::function<void()>& body) {
    const auto call = [](void* function) { (*static_cast<const std::function<void()>*>(function))(); };
    EXPECT_EQ(CudaDouble::functions().on_device(device, call, const_cast<std::function<void()>*>(&body)), nullptr);
  }
  NcclUniqueId unique_id() {
    NcclUniqueId id;
    EXPECT_EQ(table.GetUniqueId(&id), kNcclSuccess);
    return id;
  }
  void init(Rank& rank, const NcclUniqueId& id) {
    NcclConfig config;
    const int result = table.CommInitRankConfig(&rank.comm, rank.ranks, id, rank.rank, &config);
    EXPECT_TRUE(result == kNcclSuccess || result == kNcclInProgress) << table.GetLastError(nullptr);
  }
  void connect(Rank& rank, const NcclUniqueId& id) {
    init(rank, id);
    EXPECT_EQ(rank.done(kNcclInProgress), kNcclSuccess);
  }
  // Ranks, each in a thread, whose devices are 0, 1, ... They have a stream, but no communicator so far.
  void each_alone(int ranks, const std::function<void(Rank&)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < ranks; ++i) threads.emplace_back([&, i] {
      Rank rank{*this, i, ranks, i};
      CudaDouble::functions().create_stream(i, &rank.stream);
      on_device(i, [&] { body(rank); });
    });
    for (std::thread& thread : threads) thread.join();
  }
  // Those of a communicator.
  void each(int ranks, const std::function<void(Rank&)>& body) {
    const NcclUniqueId id = unique_id();
    each_alone(ranks, [&](Rank& rank) {
      connect(rank, id);
      body(rank);
    });
  }

  CudaDouble cuda;
  NcclDouble nccl{cuda};
  const NcclFunctions& table = NcclDouble::functions();
};

}  // namespace lightcc::test

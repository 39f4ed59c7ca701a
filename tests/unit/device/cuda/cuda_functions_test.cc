// The table by CUDA's driver (device/cuda/functions.cc), on a driver that only notes what it is asked for. What a real
// one makes of it, tests/gpu/cuda_functions.cu shows.
#include <gtest/gtest.h>

#include <thread>

#include "device/cuda.h"
#include "device/cuda/compile.h"
#include "device/cuda/gpu.h"
#include "device/cuda/pack.h"
#include "device/cuda/scale.h"
#include "device/device.h"
#include "unit/doubles/driver_double.h"

namespace lightcc {
namespace test {

void DriverDouble::note(const std::string& kernel, unsigned blocks, void* stream, void* argument) {
  const uint32_t pieces = kernel == "lightcc_copy_few"    ? static_cast<packing::FewPieces*>(argument)->count
                          : kernel == "lightcc_copy_many" ? static_cast<packing::ManyPieces*>(argument)->count
                                                          : 0;
  launches.push_back({kernel, blocks, stream, pieces});
}

}  // namespace test

namespace {

using test::DriverDouble;

const CudaFunctions& table() { return driver_functions(); }
void* const kStream = reinterpret_cast<void*>(uintptr_t(0x77));
std::string words(const char* failure) { return failure ? failure : ""; }

// So many copies of a byte each.
std::string copy_all(int device, size_t count) {
  static std::byte memory[2];
  const std::vector<CudaCopy> copies(count, CudaCopy{&memory[0], &memory[1], 1});
  return words(table().copy_all(device, kStream, copies.data(), copies.size()));
}

TEST(CudaFunctions, AThreadKeepsItsContext) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  void* const own = DriverDouble::context_of(device);
  for (void* before : {static_cast<void*>(nullptr), own, DriverDouble::context_of(9999)}) {
    DriverDouble::current_context() = before;
    void *seen[2] = {}, *event = nullptr;
    const auto see = [](void* to) {
      auto** at = static_cast<void**>(to);
      at[0] = DriverDouble::current_context();
      at[1] = reinterpret_cast<void*>(uintptr_t(DriverDouble::capture_mode()));
    };
    EXPECT_EQ(words(table().on_device(device, see, seen)), "");
    EXPECT_EQ(seen[0], own);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(seen[1]), uintptr_t(kCaptureModeRelaxed));
    driver.fail("EventCreate", 2);
    EXPECT_EQ(words(table().create_event(device, &event)), "cuEventCreate: it failed (CUDA_ERROR_2)");
    driver.forget_failures();
    EXPECT_EQ(words(table().create_event(device, &event)), "");
    EXPECT_EQ(DriverDouble::current_context(), before);
    EXPECT_EQ(DriverDouble::capture_mode(), 0);
  }
  DriverDouble::current_context() = nullptr;
  EXPECT_EQ(driver.calls("DevicePrimaryCtxRetain"), 1u);
}

TEST(CudaFunctions, ADeviceThatIsNotThereCallsNothing) {
  DriverDouble driver;
  driver.fail("DeviceGet", 101);
  bool called = false;
  const int device = DriverDouble::new_device();
  EXPECT_EQ(words(table().on_device(device, [](void* to) { *static_cast<bool*>(to) = true; }, &called)),
            "cuDeviceGet: it failed (CUDA_ERROR_101)");
  EXPECT_FALSE(called);
  EXPECT_EQ(DriverDouble::capture_mode(), 0);
  driver.forget_failures();
  EXPECT_EQ(words(table().on_device(device, [](void* to) { *static_cast<bool*>(to) = true; }, &called)), "");
  EXPECT_TRUE(called) << "a failure is not kept";
}

// A process that ends may give back what the driver has taken already; nothing else passes.
TEST(CudaFunctions, WhatIsGivenBackMayBeGone) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  void* event = nullptr;
  EXPECT_EQ(words(table().create_event(device, &event)), "");
  const auto give_back = [&] {
    return std::vector<std::string>{words(table().destroy_event(device, event)),
                                    words(table().destroy_stream(device, kStream)),
                                    words(table().unpin(device, event)),
                                    words(table().release(device, kStream, event))};
  };
  driver.fail("CtxGetCurrent", kCudaDeinitialized);
  EXPECT_EQ(give_back(), std::vector<std::string>(4));
  EXPECT_NE(words(table().record(device, event, kStream)), "");
  driver.forget_failures();
  for (const char* name : {"EventDestroy", "StreamDestroy", "MemHostUnregister", "MemFreeAsync"})
    driver.fail(name, kCudaDeinitialized);
  EXPECT_EQ(give_back(), std::vector<std::string>(4));
  for (const char* name : {"EventDestroy", "StreamDestroy", "MemHostUnregister", "MemFreeAsync"}) driver.fail(name, 1);
  EXPECT_EQ(give_back(), (std::vector<std::string>{"cuEventDestroy: it failed (CUDA_ERROR_1)",
                                                   "cuStreamDestroy: it failed (CUDA_ERROR_1)",
                                                   "cuMemHostUnregister: it failed (CUDA_ERROR_1)",
                                                   "cuMemFreeAsync: it failed (CUDA_ERROR_1)"}));
}

TEST(CudaFunctions, StreamsThatCannotTakePartAreRefused) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  EXPECT_EQ(words(table().refuse_stream(device, kStream)), "");
  EXPECT_NE(words(table().refuse_stream(device, reinterpret_cast<void*>(uintptr_t(2)))).find("per-thread"),
            std::string::npos);
  driver.fail("StreamIsCapturing", kCudaCaptureImplicit);
  EXPECT_NE(words(table().refuse_stream(device, nullptr)).find("captures a graph"), std::string::npos);
  driver.fail("StreamIsCapturing", kCudaInvalidValue);
  EXPECT_EQ(words(table().refuse_stream(device, kStream)), "") << "its next use says so";
}

TEST(CudaFunctions, AnEventThatIsNotReachedIsNoFailure) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  int reached = -1;
  EXPECT_EQ(words(table().query(device, kStream, &reached)), "");
  EXPECT_EQ(reached, 1);
  driver.fail("EventQuery", kCudaNotReady);
  EXPECT_EQ(words(table().query(device, kStream, &reached)), "");
  EXPECT_EQ(reached, 0);
  driver.fail("EventQuery", 700);
  EXPECT_EQ(words(table().query(device, kStream, &reached)), "cuEventQuery: it failed (CUDA_ERROR_700)");
}

// 1,169 pieces where driver and NVRTC are of 12.1 or later, else 144; a single one is a copy of the driver's.
TEST(CudaFunctions, ALaunchTakesAsManyPiecesAsDriverAndNvrtcAllow) {
  for (auto [version, nvrtc, many] : {std::tuple(13000, 13000, true), {12010, 12010, true}, {12000, 12040, false},
                                      {12040, 11080, false}, {11020, 11020, false}}) {
    DriverDouble driver(version, nvrtc);
    const int device = DriverDouble::new_device();
    EXPECT_EQ(copy_all(device, 1 + 1169 + 144), "");
    std::vector<std::pair<std::string, uint32_t>> got;
    for (const auto& launch : driver.launches) got.emplace_back(launch.kernel, launch.pieces);
    std::vector<std::pair<std::string, uint32_t>> want(9, {"lightcc_copy_few", 144});
    if (many) want = {{"lightcc_copy_many", 1169}, {"lightcc_copy_many", 145}};
    else want.emplace_back("lightcc_copy_few", 18);
    EXPECT_EQ(got, want) << version << " " << nvrtc;
    EXPECT_EQ(driver.launches[0].stream, kStream);
    EXPECT_EQ(copy_all(device, 1), "");
    EXPECT_EQ(driver.launches.size(), want.size());
    EXPECT_EQ(driver.calls("MemcpyAsync"), 1u);
    EXPECT_EQ(copy_all(device, 0), "");
  }
}

TEST(CudaFunctions, KernelsAreCompiledOnceAndLoadedOnEachDevice) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  void* stream = nullptr;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(words(table().create_stream(device, &stream)), "");
  EXPECT_EQ(words(table().load_kernels(device)), "");
  EXPECT_EQ(driver.calls("CompileProgram"), 2u) << "each device/cuda/*.cu";
  EXPECT_EQ(driver.calls("ModuleLoadData"), 2u);
  EXPECT_EQ(driver.calls("FuncGetAttribute"), size_t(GpuKernel::count)) << "it loads what is loaded lazily";
  EXPECT_EQ(words(table().load_kernels(DriverDouble::new_device())), "");
  EXPECT_EQ(driver.calls("ModuleLoadData"), 4u);
  EXPECT_EQ(std::ranges::count(driver.options, "--fmad=false"), 1);
  EXPECT_EQ(std::ranges::count(driver.options, "-DLIGHTCC_OWN_NAN_IS_NEGATIVE"), scaling::kOwnNanIsNegative)
      << "NVRTC does not know the CPU, whose NaN a kernel makes";
}

// As where the GPU has no memory left for it, which may change.
TEST(CudaFunctions, AKernelThatCannotBeLoadedIsNotOneThatIsMissing) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  driver.fail("ModuleGetFunction", 2);
  EXPECT_EQ(words(table().load_kernels(device)), "cuModuleGetFunction: it failed (CUDA_ERROR_2)");
  driver.forget_failures();
  EXPECT_EQ(words(table().load_kernels(device)), "");
}

TEST(CudaFunctions, EachDtypeIsScaledByItsKernel) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    EXPECT_EQ(words(table().scale(device, kStream, dtype, nullptr, nullptr, 1'000'000'000, 2)), "");
    EXPECT_EQ(driver.launches.back().kernel, "lightcc_scale_" + std::to_string(dtype));
    EXPECT_EQ(driver.launches.back().blocks, 32u * 4) << "of four multiprocessors";
  }
  EXPECT_EQ(words(table().scale(device, kStream, 7, nullptr, nullptr, 0, 2)), "");
  EXPECT_EQ(driver.launches.size(), size_t(kDTypes));
  EXPECT_EQ(words(table().scale(device, kStream, kDTypes, nullptr, nullptr, 1, 2)),
            "launch of the kernel that scales: it failed (CUDA_ERROR_1)");
}

// Tensors are copied one by one then; what cannot do without says why, and it is tried again when a stream is made.
TEST(CudaFunctions, WithoutKernelsTheDriverCopies) {
  DriverDouble driver;
  driver.nvrtc_refuses = true;
  const int device = DriverDouble::new_device();
  void* stream = nullptr;
  EXPECT_EQ(words(table().create_stream(device, &stream)), "");
  EXPECT_EQ(copy_all(device, 200), "");
  EXPECT_EQ(driver.calls("MemcpyAsync"), 200u);
  const std::string why = words(table().scale(device, kStream, 7, nullptr, nullptr, 1, 2));
  EXPECT_NE(why.find("NVRTC did not compile device/cuda/"), why.npos) << why;
  EXPECT_NE(why.find("NVRTC_ERROR_COMPILATION\nline 3: planted"), why.npos) << why;
  EXPECT_EQ(words(table().load_kernels(device)), why);
  driver.nvrtc_refuses = false;
  EXPECT_EQ(words(table().create_stream(device, &stream)), "");
  EXPECT_EQ(words(table().scale(device, kStream, 7, nullptr, nullptr, 1, 2)), "");
}

TEST(CudaFunctions, MemoryIsOfAPoolOfOurOwn) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  void* memory = nullptr;
  EXPECT_EQ(words(table().allocate(device, kStream, 100, &memory)), "");
  EXPECT_EQ(memory, reinterpret_cast<void*>(uintptr_t(100)));
  EXPECT_EQ(words(table().allocate(device, kStream, 0, &memory)), "");
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(driver.pool_settings, (std::map<int, uint64_t>{{kPoolReleaseThreshold, 256 << 20},
                                                           {kPoolReuseInternalDependencies, 0}}));
  EXPECT_EQ(driver.calls("MemPoolCreate"), 1u);
  driver.fail("MemAllocFromPoolAsync", 2);
  EXPECT_EQ(words(table().allocate(device, kStream, 1, &memory)), "cuMemAllocFromPoolAsync: it failed (CUDA_ERROR_2)");
}

TEST(CudaFunctions, TheCodeIsThatOfTheGpuOrPtxOfTheNewestBeforeIt) {
  DriverDouble driver;
  const auto target = [](int architecture) { return target_for(nvrtc(13000, architecture), architecture, 13000); };
  EXPECT_TRUE(target(90).is_machine);
  EXPECT_EQ(target(90).architecture, 90);
  EXPECT_TRUE(target(90).has_long_arguments);
  EXPECT_FALSE(target(61).has_long_arguments);
  EXPECT_FALSE(target(99).is_machine);
  EXPECT_EQ(target(99).architecture, 90);
  try {
    target(60);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "NVRTC 13.0 (a double) does not know GPUs as old as sm_60");
  }
}

}  // namespace
}  // namespace lightcc

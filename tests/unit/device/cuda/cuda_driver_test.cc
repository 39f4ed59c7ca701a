// What lightcc declares of CUDA's driver (device/cuda/driver.h): how old it is, what happens where some of it is not
// there, and, where CUDA's headers are installed, that it is what they say.
#include "device/cuda/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "labels.h"

#if __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>
#endif

LABEL(alone);

namespace lightcc {
namespace {

struct Row {
  std::string name;
  int version;
};
const std::vector<Row> kRows = {
#define LIGHTCC_ROW(name, suffix, version, arguments) {"cu" #name #suffix, version},
    LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_ROW)
#undef LIGHTCC_ROW
};

// A driver of this version: what is newer is not there.
DriverFunctions driver_of(int version, const std::string& without = "") {
  static int answer;
  answer = version;
  int (*get_version)(int*) = [](int* to) { return *to = answer, kCudaSuccess; };
  return find_driver_functions([&](const char* name) -> void* {
    const auto row = std::ranges::find(kRows, name, &Row::name);
    EXPECT_NE(row, kRows.end()) << name;
    return row->version <= version && name != without ? reinterpret_cast<void*>(get_version) : nullptr;
  });
}

std::string refusal(int version, const std::string& without = "") {
  try {
    driver_of(version, without);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "";
}

// There is no way around any of them, so none may be newer than the oldest driver that is taken.
TEST(CudaDriver, NoFunctionIsNewerThanTheOldestDriver) {
  for (const auto& [name, version] : kRows) EXPECT_LE(version, kLeastDriver) << name;
  EXPECT_EQ(refusal(kLeastDriver), "");
  EXPECT_EQ(refusal(13000), "");
}

TEST(CudaDriver, OneThatIsTooOldSaysWhatItMustBe) {
  for (int version : {9000, 11000, 11010})
    EXPECT_EQ(refusal(version), "it is too old: it is of CUDA " +
                                    cuda_version_text(version) +
                                    ", and lightcc needs 11.2, which comes with the drivers from 460 on");
}

TEST(CudaDriver, OneThatLacksAFunctionSaysWhich) {
  EXPECT_EQ(refusal(12040, "cuMemFreeAsync"),
            "it is of CUDA 12.4, but has no cuMemFreeAsync");
}

TEST(CudaDriver, VersionsAreWritten) {
  EXPECT_EQ(cuda_version_text(11020), "11.2");
  EXPECT_EQ(cuda_version_text(12080), "12.8");
  EXPECT_EQ(cuda_version_text(13000), "13.0");
}

#if __has_include(<cudaTypedefs.h>)
// An argument here and there: both are pointers, or numbers of one size.
template <class Ours, class Theirs>
constexpr bool kAreAlike = sizeof(Ours) == sizeof(Theirs) &&
                           (std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>);
template <class Ours, class Theirs> struct Alike : std::false_type {};
template <class... Ours, class... Theirs>
struct Alike<int (*)(Ours...), CUresult(CUDAAPI*)(Theirs...)>
    : std::bool_constant<sizeof...(Ours) == sizeof...(Theirs) && (kAreAlike<Ours, Theirs> && ...)> {};

#define LIGHTCC_TEXT(name) #name
#define LIGHTCC_EXPANDED(name) LIGHTCC_TEXT(name)

// cuda.h makes of a name that of its present version, which is ours; cudaTypedefs.h has a type for each version.
TEST(CudaDriver, FunctionsAreThoseOfTheHeader) {
#define LIGHTCC_CHECK(name, suffix, version, arguments)                                                           \
  EXPECT_STREQ(LIGHTCC_EXPANDED(cu##name), "cu" #name #suffix);                                                   \
  static_assert(Alike<decltype(DriverFunctions::name), PFN_cu##name##_v##version>::value, "cu" #name);            \
  static_assert(Alike<decltype(DriverFunctions::name), decltype(&::cu##name##suffix)>::value, "cu" #name #suffix);
  LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_CHECK)
#undef LIGHTCC_CHECK
}

TEST(CudaDriver, ValuesAreThoseOfTheHeader) {
  const std::map<int, int> values = {
      {kCudaSuccess, CUDA_SUCCESS},
      {kCudaInvalidValue, CUDA_ERROR_INVALID_VALUE},
      {kCudaDeinitialized, CUDA_ERROR_DEINITIALIZED},
      {kCudaNotFound, CUDA_ERROR_NOT_FOUND},
      {kCudaNotReady, CUDA_ERROR_NOT_READY},
      {kCudaNotSupported, CUDA_ERROR_NOT_SUPPORTED},
      {kCudaCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT}};
  for (const auto& [ours, theirs] : values) EXPECT_EQ(ours, theirs);
  EXPECT_EQ(kStreamNonBlocking, int(CU_STREAM_NON_BLOCKING));
  EXPECT_EQ(kEventDisableTiming, int(CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
  EXPECT_EQ(kCaptureModeRelaxed, int(CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT_EQ(kCaptureStatusNone, int(CU_STREAM_CAPTURE_STATUS_NONE));
  EXPECT_EQ(kAttributeMultiprocessors, int(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  EXPECT_EQ(kAttributeMajor, int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  EXPECT_EQ(kAttributeMinor, int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  EXPECT_EQ(kAttributeMemoryPools, int(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED));
  EXPECT_EQ(kFunctionAttributeRegisters, int(CU_FUNC_ATTRIBUTE_NUM_REGS));
  EXPECT_EQ(kPoolReuseInternalDependencies, int(CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES));
  EXPECT_EQ(kPoolReleaseThreshold, int(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
  EXPECT_EQ(kStreamPerThread, reinterpret_cast<uintptr_t>(CU_STREAM_PER_THREAD));
  EXPECT_EQ(sizeof(DriverPoolProperties), sizeof(CUmemPoolProps));
  EXPECT_EQ(offsetof(DriverPoolProperties, device),
            offsetof(CUmemPoolProps, location) + offsetof(CUmemLocation, id));
  const DriverPoolProperties ours;
  EXPECT_EQ(ours.allocation, int(CU_MEM_ALLOCATION_TYPE_PINNED));
  EXPECT_EQ(ours.location, int(CU_MEM_LOCATION_TYPE_DEVICE));
}
#endif

}  // namespace
}  // namespace lightcc

// lightcc's kernels on a GPU. One that is new needs three things: its code in a device/cuda/*.cu, as
//   extern "C" __global__ void lightcc_<name>(...)
// its line here or in codec_steps.h, and launch() with its arguments. Headers that it includes are plain C++17 without
// marks, which tests compile for the CPU; of the C++ library they have what standard.h has.
#pragma once
#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/cuda/driver.h"

namespace lightcc {

enum class GpuKernel : size_t {
  scale,  // of DType 0; those of the other DTypes follow
  copy_few = scale + 13,
  copy_many,  // none where arguments are short
  count
};
inline constexpr const char* kKernelNames[] = {
    "lightcc_scale_0",  "lightcc_scale_1",  "lightcc_scale_2",  "lightcc_scale_3",  "lightcc_scale_4",
    "lightcc_scale_5",  "lightcc_scale_6",  "lightcc_scale_7",  "lightcc_scale_8",  "lightcc_scale_9",
    "lightcc_scale_10", "lightcc_scale_11", "lightcc_scale_12", "lightcc_copy_few", "lightcc_copy_many"};
static_assert(std::size(kKernelNames) == size_t(GpuKernel::count));

// Kernels that are compiled and loaded together: who does not compress needs no codecs.
struct KernelSet {
  std::span<const char* const> programs, names;
};
inline constexpr const char* kElementPrograms[] = {"device/cuda/pack.cu", "device/cuda/scale.cu"};
inline constexpr KernelSet kElementKernels{kElementPrograms, kKernelNames};
extern const KernelSet kCodecKernels;  // in the order of CodecKernel (codec_steps.h)

// A set's kernels on one GPU. Any thread may call, with the GPU's context as its current one.
class Kernels {
 public:
  explicit Kernels(const KernelSet& set) : set_(set), functions_(set.names.size()) {}

  // Compiles and loads them, if that has not been done: later a launch would wait for all that the GPU has been given,
  // which may itself wait for another rank (CUDA's programming guide, "Lazy Loading"). After a failure it tries again.
  // Throws Error that says why there are none.
  void load(const DriverFunctions&, int architecture);
  // kernel: its place among the set's names. nullptr: there is none of this name. Loads them unless that has been
  // tried. Throws as load().
  void* get(const DriverFunctions&, int architecture, size_t kernel);
  void* get(const DriverFunctions& driver, int architecture, GpuKernel kernel) {
    return get(driver, architecture, size_t(kernel));
  }

 private:
  void load_locked(const DriverFunctions&, int architecture);

  std::mutex mutex_;
  const KernelSet set_;
  std::vector<void*> functions_;
  bool is_loaded_ = false;
  std::string failure_;  // "": not tried
};

}  // namespace lightcc

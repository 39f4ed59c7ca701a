// Compiles lightcc's kernels for a GPU. Their sources are part of the core (CMakeLists.txt): each device/cuda/*.cu is a
// program of its own, and what it includes comes with it.
#pragma once
#include <string>
#include <vector>

#include "device/cuda/image_cache.h"
#include "device/cuda/nvrtc.h"

namespace lightcc {

struct KernelSource {
  const char* name;  // as it is included: device/cuda/scale.cu
  const char* text;
};
extern const KernelSource kKernelSources[];  // programs and what they include; the last one has no name

std::vector<KernelSource> kernel_programs();

// For what a program is compiled.
struct KernelTarget {
  int architecture = 0;     // 90 is sm_90
  bool is_machine = true;   // code of the GPU's own; else PTX of this architecture, which the driver compiles
  bool has_long_arguments = false;
};

// For GPUs of this architecture: their own code, or PTX of the newest one before it where NVRTC does not know it.
// Throws Error{invalid_argument} if NVRTC knows none that is as old.
KernelTarget target_for(const Nvrtc&, int architecture, int driver_version);

// What the driver loads. Throws Error{internal} with NVRTC's messages.
std::string compile(const Nvrtc&, const KernelSource& program, const KernelTarget&);
// The same, once for all processes that share the cache.
std::string compile_once(const ImageCache&, const Nvrtc&, const KernelSource& program, const KernelTarget&);

}  // namespace lightcc

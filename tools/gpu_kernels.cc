// Compiles lightcc's kernels with a library of NVRTC for GPUs of some architectures, without a GPU, and says what came:
//   kernels LIBRARY ARCHITECTURE...
//   device/cuda/pack.cu sm_90: machine code, 87892 bytes, PTX 8.4, lightcc_copy_few lightcc_copy_many
// An architecture that NVRTC does not know gives PTX of the newest one before it. The bytes are what would be loaded.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "device/cuda/compile.h"
#include "device/cuda/driver.h"
#include "device/cuda/kernels.h"

namespace {

using lightcc::KernelTarget;

std::string ptx_version(const std::string& ptx) {
  const size_t at = ptx.find(".version ") + 9;
  return ptx.substr(at, ptx.find('\n', at) - at);
}

void compile_for(const lightcc::Nvrtc& nvrtc, int architecture) {
  const KernelTarget target = lightcc::target_for(nvrtc, architecture, nvrtc.version);
  KernelTarget as_ptx = target;
  as_ptx.is_machine = false;
  const std::string ptx = ptx_version(lightcc::compile(nvrtc, lightcc::kernel_programs().front(), as_ptx));
  for (const lightcc::KernelSource& program : lightcc::kernel_programs()) {
    const std::string image = lightcc::compile(nvrtc, program, target);
    std::printf("%s %s%d: %s, %zu bytes, PTX %s,", program.name, target.is_machine ? "sm_" : "compute_",
                target.architecture, target.is_machine ? "machine code" : "PTX", image.size(),
                (target.is_machine ? ptx : ptx_version(image)).c_str());
    for (const lightcc::KernelSet* set : {&lightcc::kElementKernels, &lightcc::kCodecKernels})
      for (const char* name : set->names) {
        const std::string whole = std::string(name) + (target.is_machine ? '\0' : '(');
        if (image.find(whole) != image.npos) std::printf(" %s", name);
      }
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s LIBRARY ARCHITECTURE...\n", arguments[0]);
    return 2;
  }
  try {
    const lightcc::Nvrtc nvrtc = lightcc::open_nvrtc(arguments[1]);
    std::printf("NVRTC %s\n", lightcc::cuda_version_text(nvrtc.version).c_str());
    std::fflush(stdout);
    for (int i = 2; i < count; ++i) compile_for(nvrtc, std::atoi(arguments[i]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

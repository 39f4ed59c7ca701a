// What this machine has for tensors of GPUs, in words: for `lightccrun --check-build`.
#pragma once
#include <string>
#include <vector>

namespace lightcc {

struct GpuSupport {
  bool is_there = false;
  std::string text;  // which, or why not
};

// The driver, and NVRTC as it would be found now.
std::vector<GpuSupport> gpu_support();

}  // namespace lightcc

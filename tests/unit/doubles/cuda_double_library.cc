// The library of LIGHTCC_CUDA_LIBRARY for Python tests: its table is a CudaDouble's, and ctypes calls what a framework
// does with a GPU.
#include <algorithm>
#include <cstring>

#include "cuda_double.h"

using lightcc::CudaFunctions;
using lightcc::test::CudaDouble;
using lightcc::test::move_bytes;

namespace {

// Never destroyed: its threads may still run when the process ends.
CudaDouble& cuda_double() {
  static auto& one = *new CudaDouble;
  return one;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const CudaFunctions* lightcc_cuda_functions() {
  cuda_double();
  return &CudaDouble::functions();
}

void* double_allocate(int device, size_t bytes) { return cuda_double().allocate(device, bytes); }
void double_release(void* memory) { cuda_double().release(memory); }
// nullptr if there is no such device.
void* double_create_stream(int device) {
  cuda_double();
  void* stream = nullptr;
  CudaDouble::functions().create_stream(device, &stream);
  return stream;
}
// An event, recorded there; double_wait has another stream wait for it, and double_forget gives it back.
void* double_record(int device, void* stream) {
  void* event = nullptr;
  CudaDouble::functions().create_event(device, &event);
  CudaDouble::functions().record(device, event, stream);
  return event;
}
void double_wait(int device, void* stream, void* event) { CudaDouble::functions().order(device, stream, event); }
void double_forget(int device, void* event) { CudaDouble::functions().destroy_event(device, event); }
// A kernel that writes what pattern_from holds now.
void double_fill(int device, void* stream, void* to, size_t bytes, const void* pattern_from) {
  const auto* begin = static_cast<const char*>(pattern_from);
  cuda_double().run(device, stream, "a kernel", {{to, bytes, true}},
                    [=, pattern = std::vector<char>(begin, begin + bytes)] { move_bytes(to, pattern.data(), bytes); });
}
// When the stream has done all it has so far.
void double_read(int device, void* stream, const void* from, void* to, size_t bytes) {
  const auto values = cuda_double().read(device, stream, static_cast<const char*>(from), bytes);
  std::copy(values.begin(), values.end(), static_cast<char*>(to));
}
// How many there are; their lines, as far as they fit with a zero at the end.
int double_faults(char* text, int capacity) {
  std::string lines;
  const auto faults = cuda_double().faults();
  for (const std::string& fault : faults) lines += fault + "\n";
  if (capacity > 0) text[lines.copy(text, size_t(capacity) - 1)] = 0;
  return int(faults.size());
}
void double_ignore_order(int ignored) { cuda_double().ignore_order(ignored != 0); }
// Which LIGHTCC_TEST_SEED brings the same delays.
uint64_t double_seed() { return cuda_double().seed(); }

}
#pragma GCC visibility pop

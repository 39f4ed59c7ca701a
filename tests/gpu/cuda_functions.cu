// The table of liblightcc_cuda.so (device/cuda.h) on a real GPU. Links nothing of lightcc; cuda_functions.sh starts it.
//
//   cuda_functions LIBRARY
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/cuda.h"

namespace {

constexpr size_t kBytes = size_t(64) << 20;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::exit(1);
}

void check(const char* failure) {
  if (!failure) return;
  std::fprintf(stderr, "%s\n", failure);
  std::exit(1);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) check(cudaGetErrorString(status));
}

void expect_words(const char* failure, const char* attempted, const char* name) {
  expect(failure, name);
  std::printf("%s\n", failure);
  expect(std::strstr(failure, attempted) == failure, attempted);
  expect(std::strstr(failure, name), name);
  expect(cudaGetLastError() == cudaSuccess, "no error is left behind");
}

template <class Function>
Function symbol(const char* library, const char* name) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!opened) check(dlerror());
  void* found = dlsym(opened, name);
  expect(found, name);
  return reinterpret_cast<Function>(found);
}

bool has_context() {
  static const auto get = symbol<CUresult (*)(CUcontext*)>("libcuda.so.1", "cuCtxGetCurrent");
  CUcontext context = nullptr;
  return get(&context) == CUDA_SUCCESS && context;
}

struct Gate {
  std::atomic<bool> open{false};
  std::atomic<int> rung{0};
};
void wait_at(void* gate) {
  while (!static_cast<Gate*>(gate)->open) usleep(100);
}
void ring(void* gate) { ++static_cast<Gate*>(gate)->rung; }

bool reached(const lightcc::CudaFunctions& cuda, int device, void* event) {
  int is = -1;
  check(cuda.query(device, event, &is));
  return is == 1;
}

// To the device on one stream and back on another, which an event orders.
void copies_both_ways(const lightcc::CudaFunctions& cuda, int device) {
  void *there = nullptr, *back = nullptr, *sent = nullptr, *received = nullptr;
  check(cuda.create_stream(device, &there));
  check(cuda.create_stream(device, &back));
  check(cuda.create_event(device, &sent));
  check(cuda.create_event(device, &received));
  expect(!has_context(), "a thread without a context gets none");

  std::vector<uint32_t> from(kBytes / sizeof(uint32_t)), to(from.size());
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i * 2654435761u);
  check(cuda.pin(device, from.data(), kBytes));
  check(cuda.pin(device, to.data(), kBytes));
  expect(!has_context(), "pinning leaves no context");
  check(cudaSetDevice(device));
  void* memory = nullptr;
  check(cudaMalloc(&memory, kBytes));

  Gate gate;
  check(cuda.call(device, there, wait_at, &gate));
  check(cuda.copy(device, there, memory, from.data(), kBytes));
  check(cuda.record(device, sent, there));
  check(cuda.order(device, back, sent));
  check(cuda.copy(device, back, to.data(), memory, kBytes));
  check(cuda.record(device, received, back));
  check(cuda.call(device, back, ring, &gate));
  check(cudaStreamSynchronize(nullptr));  // the default stream does not wait for these
  expect(!reached(cuda, device, sent) && !reached(cuda, device, received), "nothing passes the gate");
  expect(gate.rung == 0 && to[1] == 0, "the second stream waits for the first");
  expect(cudaGetLastError() == cudaSuccess, "what is not ready is no error");
  gate.open = true;
  while (gate.rung == 0) usleep(100);
  expect(reached(cuda, device, sent) && reached(cuda, device, received), "both events are reached when the call comes");
  expect(to == from, "what comes back is what was sent");

  expect_words(cuda.pin(device, from.data(), kBytes), "cudaHostRegister: ", "cudaErrorHostMemoryAlreadyRegistered");
  check(cuda.unpin(device, from.data()));
  check(cuda.unpin(device, to.data()));
  expect_words(cuda.unpin(device, to.data()), "cudaHostUnregister: ", "cudaErrorHostMemoryNotRegistered");
  check(cuda.destroy_event(device, sent));
  check(cuda.destroy_event(device, received));
  check(cuda.destroy_stream(device, there));
  check(cuda.destroy_stream(device, back));
  check(cudaFree(memory));
}

// What the table does on one device leaves the caller on another.
void keeps_the_device(const lightcc::CudaFunctions& cuda, int devices) {
  for (int mine = 0; mine < devices; ++mine) {
    check(cudaSetDevice(mine));
    for (int other = 0; other < devices; ++other) {
      void *event = nullptr, *stream = nullptr;
      check(cuda.create_stream(other, &stream));
      check(cuda.create_event(other, &event));
      check(cuda.record(other, event, stream));
      while (!reached(cuda, other, event)) usleep(100);
      check(cuda.destroy_event(other, event));
      check(cuda.destroy_stream(other, stream));
      int current = -1;
      check(cudaGetDevice(&current));
      expect(current == mine && has_context(), "the caller's device is unchanged");
    }
    void* stream = nullptr;
    expect_words(cuda.create_stream(devices, &stream), "cudaStreamCreateWithFlags: ", "cudaErrorInvalidDevice");
    int current = -1;
    check(cudaGetDevice(&current));
    expect(current == mine, "nor does a failure change it");
  }
}

// A graph that is being captured survives what this thread does meanwhile.
void captures_go_on(const lightcc::CudaFunctions& cuda, int device) {
  check(cudaSetDevice(device));
  cudaStream_t captured = nullptr;
  cudaGraph_t graph = nullptr;
  void *event = nullptr, *stream = nullptr;
  check(cuda.create_stream(device, &stream));
  check(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  check(cuda.create_event(device, &event));
  check(cuda.record(device, event, stream));
  while (!reached(cuda, device, event)) usleep(100);
  check(cudaStreamEndCapture(captured, &graph));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(captured));
  check(cuda.destroy_event(device, event));
  check(cuda.destroy_stream(device, stream));
}

}  // namespace

int main(int, char** argv) {
  using Table = const lightcc::CudaFunctions* (*)();
  const lightcc::CudaFunctions& cuda = *symbol<Table>(argv[1], "lightcc_cuda_functions")();
  expect(cuda.size == sizeof(lightcc::CudaFunctions), "the table is the one this was compiled with");
  int devices = 0;
  check(cuda.count_devices(&devices));
  expect(devices > 0 && !has_context(), "devices, and no context from counting them");
  copies_both_ways(cuda, devices - 1);
  keeps_the_device(cuda, devices);
  captures_go_on(cuda, devices - 1);
  std::printf("%d GPUs: ok\n", devices);
}

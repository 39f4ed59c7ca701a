// A GPU of this process: its primary context, which the framework's CUDA runtime uses too, and what lightcc has there.
#pragma once
#include <mutex>

#include "base/error.h"
#include "device/cuda/codec_tables.h"
#include "device/cuda/kernels.h"

namespace lightcc {

// Of a process that ends: the driver is no more.
struct DriverGone : Error {
  using Error::Error;
};

// Throws Error{internal}, or DriverGone, in the driver's words: "attempted: text (NAME)".
void check_driver(int status, const char* attempted);

struct Gpu {
  int device = 0;  // the driver's handle
  int architecture = 0, multiprocessors = 0;
  void* context = nullptr;
  Kernels kernels{kElementKernels}, codecs{kCodecKernels};
  CodecTables codec_tables;
  std::mutex pool_mutex;
  void* pool = nullptr;  // made at the first allocation
};

int architecture_of(const DriverFunctions&, int device);  // of the driver's handle: 90 is sm_90

// Made at the first call, and kept until the process ends. Throws Error if there is no such GPU, or no driver.
Gpu& gpu_of(int number);

// A graph that the framework captures in another thread is not ended by what this thread does meanwhile.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DriverFunctions& driver) : driver_(driver) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { driver_.ThreadExchangeStreamCaptureMode(&mode_); }

  const DriverFunctions& driver_;
  int mode_ = kCaptureModeRelaxed;
};

// The GPU's pool of memory for lightcc alone; made at the first call. Throws Error.
void* pool_of(const DriverFunctions&, Gpu&);

// Makes a GPU the thread's current one, and gives the thread back the context it had; a thread that had none gets none.
class OnDevice {
 public:
  explicit OnDevice(int number);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  const DriverFunctions& driver() const { return driver_; }
  Gpu& gpu() const { return gpu_; }

 private:
  const DriverFunctions& driver_;
  const RelaxedCapture relaxed_;
  Gpu& gpu_;
  void* before_ = nullptr;
};

}  // namespace lightcc

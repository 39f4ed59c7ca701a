// What the kernels of collectives and of numbers share.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>

#include "api/lightcc.h"
#include "api/tensorflow/c_api.h"

namespace lightcc::tf {

constexpr const char* kDevices[] = {"CPU", "GPU"};

// For the status of a request that was accepted, and of one that was not; docs/errors.md has the table.
StatusCode code_of(int status);
StatusCode code_of_refusal(int status);

// The attributes of an operation; whatever is wrong with them is reported once, at the end.
class Attributes {
 public:
  explicit Attributes(Construction* construction) : construction_(construction) {}
  int64_t number(const char* name) {
    int64_t value = 0;
    api.OpKernelConstruction_GetAttrInt64(construction_, name, &value, result_);
    return value;
  }
  int integer(const char* name) {  // what does not fit an int is no rank, group or operation either
    return int(std::clamp<int64_t>(number(name), INT32_MIN, INT32_MAX));
  }
  double factor(const char* name) {
    const int64_t bits = number(name);
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::string text(const char* name) {
    int32_t count = 0, size = 0;
    api.OpKernelConstruction_GetAttrSize(construction_, name, &count, &size, result_);
    std::string value(size_t(std::max(size, 0)), '\0');
    api.OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(), result_);
    return value;
  }
  void refuse(const std::string& why) { refusal_ = why; }
  void complain() {
    if (!refusal_.empty()) api.SetStatus(result_, kInvalidArgument, refusal_.c_str());
    if (!result_.ok()) api.OpKernelConstruction_Failure(construction_, result_);
  }

 private:
  Construction* construction_;
  Result result_;        // of the last call: each sets it anew
  std::string refusal_;
};

// What TensorFlow passes as `done` points at a std::function of the caller's stack frame, gone when compute returns.
class Completion {
 public:
  explicit Completion(Done* done) : copy_(*reinterpret_cast<const std::function<void()>*>(done)) {}
  void operator()() { api.RunAsyncOpKernelDoneCallback(reinterpret_cast<Done*>(&copy_)); }

 private:
  std::function<void()> copy_;
};

void fail(Context*, StatusCode, const std::string& text);

// Takes the builder. All arguments are in host memory.
void add_kernel(const char* operation, KernelBuilder*, std::initializer_list<const char*> arguments);
// XLA's compiler takes this for a kernel and shows what it says; without one it would list the operation as unknown.
void add_refusal(const char* operation);

void register_numbers();  // numbers.cc

}  // namespace lightcc::tf

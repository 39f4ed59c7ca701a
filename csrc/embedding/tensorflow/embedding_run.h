// One run of an operation that makes a call: its inputs, and how it ends.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "api/tensorflow/kernel.h"
#include "embedding/tensorflow/bound_table.h"
#include "embedding/tensorflow/call_thread.h"

namespace lightcc::tf {

// What a kernel knows of its operation.
struct EmbeddingKernel {
  std::vector<int64_t> tables;
  uint32_t flags = 0;  // of an update
};
void* create_embedding_kernel(Construction*);
void destroy_embedding_kernel(void* kernel);

struct DeleteTensor {
  void operator()(Tensor* tensor) const { api.DeleteTensor(tensor); }
};
using OwnedTensor = std::unique_ptr<Tensor, DeleteTensor>;

class EmbeddingRun {
 public:
  EmbeddingRun(const char* operation, const EmbeddingKernel& kernel, Context* context, Done* done)
      : kernel_(kernel), context_(context), operation_(operation), done_(done) {}
  virtual ~EmbeddingRun() = default;
  void start();  // takes the inputs, and hands itself to the call thread

 protected:
  virtual void make_call(std::vector<BoundTable> tables) = 0;  // on the call thread; fail() may be called once

  Tensor* input(size_t i) const { return inputs_[i].get(); }
  const void* data(size_t i) const { return api.TensorData(input(i)); }
  int64_t rows(size_t i) const { return api.Dim(input(i), 0); }
  void set_output(int index, OwnedTensor tensor);
  void* allocate(int index, DataType dtype, int64_t count, bool scalar = false);  // numbers of 8 bytes; nullptr: failed
  bool ok() const { return result_.ok(); }
  void fail(StatusCode code, const std::string& why);

  const EmbeddingKernel& kernel_;  // outlives its runs
  Context* const context_;

 private:
  void run();
  void finish();

  const char* const operation_;
  Completion done_;
  Result result_;
  std::vector<OwnedTensor> inputs_;
};

}  // namespace lightcc::tf

#include "embedding/tensorflow/embedding_run.h"

#include <utility>

namespace lightcc::tf {

void* create_embedding_kernel(Construction* construction) {
  auto kernel = std::make_unique<EmbeddingKernel>();
  Attributes attributes(construction);
  kernel->tables = parse_numbers(attributes.text("tables"));
  attributes.complain();
  return kernel.release();
}

void destroy_embedding_kernel(void* kernel) { delete static_cast<EmbeddingKernel*>(kernel); }

void EmbeddingRun::start() {
  for (int i = 0; i < api.NumInputs(context_) && ok(); ++i) {
    Tensor* tensor = nullptr;
    api.GetInput(context_, i, &tensor, result_);
    if (ok()) inputs_.emplace_back(tensor);
  }
  call_thread().post([this] { run(); });
}

void EmbeddingRun::run() {
  std::vector<BoundTable> tables;
  std::string why;
  call_thread().release_dropped();
  if (ok()) {
    if (find_tables(kernel_.tables, &tables, &why)) make_call(std::move(tables));
    else fail(kFailedPrecondition, why);
  }
  finish();
}

void EmbeddingRun::finish() {
  if (!ok()) api.OpKernelContext_Failure(context_, result_);
  Completion done = std::move(done_);
  delete this;
  done();
}

void EmbeddingRun::set_output(int index, OwnedTensor tensor) {
  api.SetOutput(context_, index, tensor.get(), result_);
}

void* EmbeddingRun::allocate(int index, DataType dtype, int64_t count, bool scalar) {
  OwnedTensor output(api.AllocateOutput(context_, index, dtype, &count, scalar ? 0 : 1, size_t(count) * 8, result_));
  return ok() ? api.TensorData(output.get()) : nullptr;
}

void EmbeddingRun::fail(StatusCode code, const std::string& why) {
  const int rank = lightcc_rank();  // -1 outside of an epoch
  const std::string here = rank < 0 ? ": " : " on rank " + std::to_string(rank) + ": ";
  api.SetStatus(result_, code, (operation_ + here + why).c_str());
}

}  // namespace lightcc::tf

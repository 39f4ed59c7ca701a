#include "api/tensorflow/kernel.h"

namespace lightcc::tf {
namespace {

void* refuse(Construction* construction) {
  Result result;
  api.SetStatus(result, kUnimplemented,
                "XLA cannot compile lightcc's operations, which talk to other processes. Take jit_compile=True off "
                "the function that calls them (in Keras: model.compile(jit_compile=False)); functions that it calls "
                "may keep it.");
  api.OpKernelConstruction_Failure(construction, result);
  return nullptr;
}

}  // namespace

StatusCode code_of(int status) {
  if (status == LIGHTCC_INVALID_ARGUMENT) return kInvalidArgument;
  return status == LIGHTCC_MISMATCH ? kFailedPrecondition : kUnknown;  // unknown: the epoch is over
}
StatusCode code_of_refusal(int status) {
  return status == LIGHTCC_SHUT_DOWN && !lightcc_initialized() ? kFailedPrecondition : code_of(status);
}

void fail(Context* context, StatusCode code, const std::string& text) {
  Result result;
  api.SetStatus(result, code, text.c_str());
  api.OpKernelContext_Failure(context, result);
}

void add_kernel(const char* operation, KernelBuilder* builder, std::initializer_list<const char*> arguments) {
  for (const char* argument : arguments) api.KernelBuilder_HostMemory(builder, argument);
  Result result;
  api.RegisterKernelBuilder(operation, builder, result);
}

void add_refusal(const char* operation) {
  for (const char* compiler : {"XLA_CPU_JIT", "XLA_GPU_JIT"})
    add_kernel(operation, api.NewKernelBuilder(operation, compiler, refuse, [](void*, Context*) {}, [](void*) {}), {});
}

}  // namespace lightcc::tf

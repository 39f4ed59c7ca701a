// What we use of TensorFlow's C API for operations and kernels (tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h),
// declared here, so that no TensorFlow is needed to build, and looked up in the one that the process has loaded. All of
// it is there, unchanged, from TensorFlow 2.13 to 2.21.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lightcc::tf {

struct Status;
struct Tensor;
struct OpBuilder;
struct KernelBuilder;
struct Construction;  // of a kernel
struct Context;       // of one run of a kernel
struct ShapeContext;
struct Shape;
struct Done;          // see kernels.cc
struct StringView {
  const char* data;
  size_t size;
};

using Create = void* (*)(Construction*);
using Compute = void (*)(void* kernel, Context*);
using ComputeAsync = void (*)(void* kernel, Context*, Done*);
using Delete = void (*)(void* kernel);
using InferShapes = void (*)(ShapeContext*, Status*);

enum StatusCode { kOk = 0, kUnknown = 2, kInvalidArgument = 3, kDeadlineExceeded = 4, kFailedPrecondition = 9,
            kUnimplemented = 12, kInternal = 13 };
enum DataType : int { kFloat = 1, kDouble, kInt32, kUint8, kInt16, kInt8, kString, kInt64 = 9, kBool, kBfloat16 = 14,
                      kUint16 = 17, kHalf = 19, kUint32 = 22, kUint64 };

// F(result, name, arguments): TF_<name>
#define LIGHTCC_TENSORFLOW_FUNCTIONS(F)                                                                              \
  F(Status*, NewStatus, ())                                                                                          \
  F(void, DeleteStatus, (Status*))                                                                                   \
  F(void, SetStatus, (Status*, StatusCode, const char*))                                                             \
  F(StatusCode, GetCode, (const Status*))                                                                            \
  F(const char*, Message, (const Status*))                                                                           \
  F(Tensor*, NewTensor, (DataType, const int64_t*, int, void*, size_t, void (*)(void*, size_t, void*), void*))         \
  F(void, DeleteTensor, (Tensor*))                                                                                   \
  F(DataType, TensorType, (const Tensor*))                                                                           \
  F(int, NumDims, (const Tensor*))                                                                                   \
  F(int64_t, Dim, (const Tensor*, int))                                                                              \
  F(void*, TensorData, (const Tensor*))                                                                              \
  F(OpBuilder*, NewOpDefinitionBuilder, (const char*))                                                               \
  F(void, OpDefinitionBuilderAddInput, (OpBuilder*, const char*))                                                    \
  F(void, OpDefinitionBuilderAddOutput, (OpBuilder*, const char*))                                                   \
  F(void, OpDefinitionBuilderAddAttr, (OpBuilder*, const char*))                                                     \
  F(void, OpDefinitionBuilderSetIsStateful, (OpBuilder*, bool))                                                      \
  F(void, OpDefinitionBuilderSetShapeInferenceFunction, (OpBuilder*, InferShapes))                                   \
  F(void, RegisterOpDefinition, (OpBuilder*, Status*))                                                               \
  F(Shape*, NewShapeHandle, ())                                                                                      \
  F(void, DeleteShapeHandle, (Shape*))                                                                               \
  F(int64_t, ShapeInferenceContextNumInputs, (ShapeContext*))                                                        \
  F(void, ShapeInferenceContextGetInput, (ShapeContext*, int, Shape*, Status*))                                      \
  F(void, ShapeInferenceContextSetOutput, (ShapeContext*, int, Shape*, Status*))                                     \
  F(Shape*, ShapeInferenceContextScalar, (ShapeContext*))                                                            \
  F(Shape*, ShapeInferenceContextVectorFromSize, (ShapeContext*, size_t))                                            \
  F(void, ShapeInferenceContextSubshape, (ShapeContext*, Shape*, int64_t, int64_t, Shape*, Status*))                 \
  F(void, ShapeInferenceContextConcatenateShapes, (ShapeContext*, Shape*, Shape*, Shape*, Status*))                  \
  F(void, ShapeInferenceContextWithRankAtLeast, (ShapeContext*, Shape*, int64_t, Shape*, Status*))                   \
  F(KernelBuilder*, NewKernelBuilder, (const char*, const char*, Create, Compute, Delete))                           \
  F(KernelBuilder*, NewAsyncKernelBuilder, (const char*, const char*, Create, ComputeAsync, Delete))                 \
  F(void, KernelBuilder_HostMemory, (KernelBuilder*, const char*))                                                   \
  F(void, RegisterKernelBuilder, (const char*, KernelBuilder*, Status*))                                             \
  F(StringView, OpKernelConstruction_GetName, (Construction*))                                                       \
  F(void, OpKernelConstruction_GetAttrInt64, (Construction*, const char*, int64_t*, Status*))                        \
  F(void, OpKernelConstruction_GetAttrSize, (Construction*, const char*, int32_t*, int32_t*, Status*))               \
  F(void, OpKernelConstruction_GetAttrString, (Construction*, const char*, char*, size_t, Status*))                  \
  F(void, OpKernelConstruction_Failure, (Construction*, Status*))                                                    \
  F(int, NumInputs, (Context*))                                                                                      \
  F(int64_t, GetIterId, (Context*))                                                                                  \
  F(void, GetInput, (Context*, int, Tensor**, Status*))                                                              \
  F(Tensor*, AllocateOutput, (Context*, int, DataType, const int64_t*, int, size_t, Status*))                        \
  F(Tensor*, ForwardInputOrAllocateOutput, (Context*, const int*, int, int, const int64_t*, int, int*, Status*))     \
  F(void, SetOutput, (Context*, int, const Tensor*, Status*))                                                        \
  F(void, OpKernelContext_Failure, (Context*, Status*))                                                              \
  F(void, RunAsyncOpKernelDoneCallback, (Done*))

struct Functions {
#define LIGHTCC_DECLARE(result, name, arguments) result(*name) arguments;
  LIGHTCC_TENSORFLOW_FUNCTIONS(LIGHTCC_DECLARE)
#undef LIGHTCC_DECLARE
};
extern Functions api;          // filled before anything is registered
const char* find_functions();  // fills it; what the TensorFlow that is loaded lacks, or nullptr

// Owners of what TensorFlow gives.
class Result {  // of a call that takes a status
 public:
  Result() : status_(api.NewStatus()) {}
  ~Result() { api.DeleteStatus(status_); }
  Result(const Result&) = delete;
  operator Status*() { return status_; }
  bool ok() const { return api.GetCode(status_) == kOk; }
  const char* text() const { return api.Message(status_); }

 private:
  Status* status_;
};

void register_operations();  // operations.cc
void register_kernels();     // kernels.cc

}  // namespace lightcc::tf

// The functions that JAX calls but those of point_to_point.cc. All of a communicator's operations have names of their
// own (Communicator::next_name), so they never meet what the program does with lightcc itself.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "api/lightcc.h"
#include "api/mpiabi/abi.h"
#include "api/mpiabi/calls.h"
#include "api/mpiabi/communicator.h"
#include "api/mpiabi/datatypes.h"
#include "api/mpiabi/process.h"
#include "base/error.h"

const int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 9, mpiwrapper_version_patch = 0;
const int MPIABI_SUCCESS = 0;
const int MPIABI_THREAD_SINGLE = 0, MPIABI_THREAD_FUNNELED = 1, MPIABI_THREAD_SERIALIZED = 2,
          MPIABI_THREAD_MULTIPLE = 3;
MPIABI_Status* const MPIABI_STATUS_IGNORE = nullptr;

namespace lightcc::mpiabi {
namespace {

thread_local std::string error_text;

int tell(const std::string& said, char* text, int* length) {
  *length = std::min(std::snprintf(text, kMostErrorCharacters, "%s", said.c_str()), kMostErrorCharacters - 1);
  return MPIABI_SUCCESS;
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, size_t(bytes));
}

// Memory that an output of this request is to have.
void into(lightcc_request& request, void* memory) {
  request.allocate = [](void* context, int, const int64_t*, int) { return context; };
  request.context = memory;
}

// Rows as the communicator orders its ranks, from rows as the group does; or the other way round.
void reorder(const Communicator& communicator, std::byte* communicators, std::byte* groups, int64_t bytes, bool back) {
  for (size_t i = 0; i < communicator.ordered.size(); ++i) {
    std::byte *one = communicators + communicator.ordered[i] * bytes, *other = groups + int64_t(i) * bytes;
    copy_bytes(back ? other : one, back ? one : other, bytes);
  }
}

std::unique_ptr<std::byte[]> spare(int64_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(size_t(bytes)); }

void allreduce(const void* sent, void* received, int count, MPIABI_Datatype type, MPIABI_Op op, MPIABI_Comm handle) {
  const auto communicator = process().communicator(handle);
  const Element& element = element_of(type);
  const int32_t lightcc_op = op_of(op, element);
  const int64_t numbers = counted(count, element) * element.numbers;
  if (communicator->size() == 1) return copy_bytes(received, sent, count * element.bytes);
  expect_writes(received, count * element.bytes);
  const lightcc_tensor tensor{sent, received, &numbers, element.dtype, 1, {}};
  const std::string name = communicator->next_name();
  lightcc_request request = request_of(LIGHTCC_ALLREDUCE, name, *communicator, tensor);
  request.op = lightcc_op;
  run(request);
}

void allgather(const void* sent, int count, MPIABI_Datatype type, void* received, MPIABI_Comm handle) {
  const auto communicator = process().communicator(handle);
  const Element& element = element_of(type);
  const int64_t bytes = counted(count, element) * element.bytes, shape[] = {1, bytes};
  if (communicator->size() == 1) return copy_bytes(received, sent, bytes);
  expect_writes(received, bytes * communicator->size());
  const lightcc_tensor tensor{sent, nullptr, shape, LIGHTCC_UINT8, 2, {}};
  const std::string name = communicator->next_name();
  lightcc_request request = request_of(LIGHTCC_ALLGATHER, name, *communicator, tensor);
  const auto rows = communicator->is_ordered ? nullptr : spare(bytes * communicator->size());
  into(request, rows ? rows.get() : received);
  run(request);
  if (rows) reorder(*communicator, static_cast<std::byte*>(received), rows.get(), bytes, false);
}

void reduce_scatter(const void* sent, void* received, const int counts[], MPIABI_Datatype type, MPIABI_Op op,
                    MPIABI_Comm handle) {
  const auto communicator = process().communicator(handle);
  const Element& element = element_of(type);
  const int32_t lightcc_op = op_of(op, element);
  const int64_t count = counted(counts[0], element), bytes = count * element.bytes;
  if (std::any_of(counts, counts + communicator->size(), [&](int one) { return one != count; }))
    throw Error(Code::invalid_argument, "a reduce-scatter of unequal parts, for which JAX has no operation");
  if (communicator->size() == 1) return copy_bytes(received, sent, bytes);
  expect_writes(received, bytes);
  const auto rows = communicator->is_ordered ? nullptr : spare(bytes * communicator->size());
  // What is sent is only read.
  if (rows) reorder(*communicator, static_cast<std::byte*>(const_cast<void*>(sent)), rows.get(), bytes, true);
  const int64_t shape[] = {communicator->size(), count * element.numbers};
  const lightcc_tensor tensor{rows ? rows.get() : sent, nullptr, shape, element.dtype, 2, {}};
  const std::string name = communicator->next_name();
  lightcc_request request = request_of(LIGHTCC_REDUCESCATTER, name, *communicator, tensor);
  request.op = lightcc_op;
  into(request, received);
  run(request);
}

}  // namespace

const std::string& last_error() { return error_text; }
void set_last_error(const std::string& text) { error_text = text; }

void expect_writes(void* memory, int64_t bytes) {
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t from = uintptr_t(memory), first = (from + kHuge - 1) / kHuge * kHuge,
                  end = (from + uintptr_t(bytes)) / kHuge * kHuge;
  // It is a hint, so nothing depends on its outcome.
  if (bytes >= int64_t(4 * kHuge) && first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

int64_t counted(int count, const Element& element) {
  if (count < 0)
    throw Error(Code::invalid_argument, std::string("2^31 or more elements of ") + element.name +
                                            " in one operation: JAX cannot tell MPI of so many; send parts");
  return count;
}

}  // namespace lightcc::mpiabi

using namespace lightcc::mpiabi;

int MPIABI_Init_thread(int*, char***, int, int* provided) {
  *provided = MPIABI_THREAD_MULTIPLE;
  return guard([] { process().init(); });
}

int MPIABI_Finalize() {
  return guard([] { process().finalize(); });
}

int MPIABI_Is_thread_main(int* flag) {  // every thread may do everything
  *flag = 1;
  return MPIABI_SUCCESS;
}

int MPIABI_Error_string(int, char* text, int* length) { return tell(last_error(), text, length); }

int MPIABI_Get_library_version(char* text, int* length) {
  return tell(std::string("lightcc ") + lightcc_version(), text, length);
}

void mpiwrapper_export_fortran_constants_() {}

int MPIABI_Comm_rank(MPIABI_Comm handle, int* rank) {
  *rank = 0;  // jaxlib goes on if this fails
  return guard([&] { *rank = process().communicator(handle)->rank; });
}

int MPIABI_Comm_size(MPIABI_Comm handle, int* size) {
  *size = 1;
  return guard([&] { *size = process().communicator(handle)->size(); });
}

int MPIABI_Comm_split(MPIABI_Comm handle, int color, int key, MPIABI_Comm* made) {
  return guard([&] { process().split(handle, color, key, made); });
}

int MPIABI_Comm_free(MPIABI_Comm* handle) {
  return guard([&] {
    process().free(*handle);
    *handle = MPIABI_COMM_NULL;
  });
}

int MPIABI_Allreduce(const void* sent, void* received, int count, MPIABI_Datatype type, MPIABI_Op op,
                     MPIABI_Comm handle) {
  return guard([&] { allreduce(sent, received, count, type, op, handle); });
}

int MPIABI_Allgather(const void* sent, int count, MPIABI_Datatype type, void* received, int, MPIABI_Datatype,
                     MPIABI_Comm handle) {
  return guard([&] { allgather(sent, count, type, received, handle); });
}

int MPIABI_Reduce_scatter(const void* sent, void* received, const int counts[], MPIABI_Datatype type, MPIABI_Op op,
                          MPIABI_Comm handle) {
  return guard([&] { reduce_scatter(sent, received, counts, type, op, handle); });
}

#include "device/nccl.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>

#include "base/error.h"

namespace lightcc {
namespace {

std::mutex mutex;
const NcclFunctions* opened = nullptr;

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

template <class Function> void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) refuse(std::string("this libnccl has no ") + name);
}

NcclFunctions functions_of(void* library) {
  NcclFunctions all{};
  look_up(library, "ncclGetVersion", all.GetVersion);
  int version = 0;
  if (all.GetVersion(&version) != kNcclSuccess || version < kLeastNcclVersion)
    refuse("this libnccl is version " + nccl_version_text(version) + ", and lightcc needs " +
           nccl_version_text(kLeastNcclVersion));
  look_up(library, "ncclGetUniqueId", all.GetUniqueId);
  look_up(library, "ncclCommInitRankConfig", all.CommInitRankConfig);
  look_up(library, "ncclCommFinalize", all.CommFinalize);
  look_up(library, "ncclCommDestroy", all.CommDestroy);
  look_up(library, "ncclCommAbort", all.CommAbort);
  look_up(library, "ncclCommGetAsyncError", all.CommGetAsyncError);
  look_up(library, "ncclGetErrorString", all.GetErrorString);
  look_up(library, "ncclGetLastError", all.GetLastError);
  look_up(library, "ncclGroupStart", all.GroupStart);
  look_up(library, "ncclGroupEnd", all.GroupEnd);
  look_up(library, "ncclAllReduce", all.AllReduce);
  look_up(library, "ncclReduce", all.Reduce);
  look_up(library, "ncclBroadcast", all.Broadcast);
  look_up(library, "ncclAllGather", all.AllGather);
  look_up(library, "ncclReduceScatter", all.ReduceScatter);
  look_up(library, "ncclSend", all.Send);
  look_up(library, "ncclRecv", all.Recv);
  return all;
}

const NcclFunctions* open_library(const std::string& given) {
  static std::optional<NcclFunctions> functions;  // of a library that is never closed
  const char* name = given.empty() ? "libnccl.so.2" : given.c_str();
  void* library = given.empty() ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse(std::string("NCCL could not be opened (") + dlerror() + ")");
  functions = functions_of(library);
  return &*functions;
}

}  // namespace

int nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::int8: return 0;
    case DType::uint8: return 1;
    case DType::int32: return 2;
    case DType::uint32: return 3;
    case DType::int64: return 4;
    case DType::uint64: return 5;
    case DType::float16: return 6;
    case DType::float32: return 7;
    case DType::float64: return 8;
    case DType::bfloat16: return 9;
    default: return -1;
  }
}

int nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return 0;
    case ReduceOp::product: return 1;
    case ReduceOp::max: return 2;
    case ReduceOp::min: return 3;
    default: return -1;
  }
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const NcclFunctions& nccl(const std::string& library) {
  std::lock_guard lock(mutex);
  if (!opened) opened = open_library(library);
  return *opened;
}

void set_nccl(const NcclFunctions* functions) {
  std::lock_guard lock(mutex);
  opened = functions;
}

}  // namespace lightcc

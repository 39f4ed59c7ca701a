// The functions of the table that an NcclDouble fills.
#include <iterator>

#include "nccl_double.h"

namespace lightcc::test {

struct NcclDouble::Table {
  static constexpr int kInternalError = 3;
  static inline thread_local char last_error[256];  // in words

  template <class Body>
  static int attempt(const char* function, Body body) {
    NcclDouble* one = current;
    std::string words = one ? "" : "there is no NcclDouble";
    const int result =
        one ? one->attempt(function, words, [&](Lock& lock) { return body(*one, lock); }) : kInternalError;
    if (!words.empty()) last_error[words.copy(last_error, sizeof last_error - 1)] = 0;
    return result;
  }
  static int collective(const char* function, Call call, void* comm, void* stream) {
    return attempt(function, [&](NcclDouble& one, Lock&) { return one.collective(std::move(call), comm, stream); });
  }

  static int GetVersion(int* version) {
    return attempt("GetVersion", [=](NcclDouble& one, Lock&) {
      *version = one.version_;
      return kNcclSuccess;
    });
  }
  static int GetUniqueId(NcclUniqueId* id) {
    return attempt("GetUniqueId", [=](NcclDouble& one, Lock&) { return one.get_unique_id(id); });
  }
  static int CommInitRankConfig(void** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
    return attempt("CommInitRankConfig",
                   [&](NcclDouble& one, Lock&) { return one.init(comm, ranks, id, rank, config); });
  }
  static int CommFinalize(void* comm) {
    return attempt("CommFinalize", [=](NcclDouble& one, Lock&) { return one.finalize(comm); });
  }
  static int CommDestroy(void* comm) {
    return attempt("CommDestroy", [=](NcclDouble& one, Lock&) { return one.destroy(comm); });
  }
  static int CommAbort(void* comm) {
    return attempt("CommAbort", [=](NcclDouble& one, Lock& lock) { return one.abort(lock, comm); });
  }
  static int CommGetAsyncError(void* comm, int* result) {
    return attempt("CommGetAsyncError", [=](NcclDouble& one, Lock&) {
      const MemberPtr member = one.find(comm);
      const auto planted = one.async_errors_.find(member->device);
      *result = planted != one.async_errors_.end() ? planted->second
                : member->is_in_progress()         ? kNcclInProgress
                                                   : member->result;
      return kNcclSuccess;
    });
  }
  static const char* GetErrorString(int result) {
    static constexpr const char* kWords[] = {"no error", "unhandled cuda error", "unhandled system error",
                                             "internal error", "invalid argument", "invalid usage",
                                             "remote process exited or there was a network error",
                                             "NCCL operation in progress"};
    return result >= 0 && size_t(result) < std::size(kWords) ? kWords[result] : "unknown result code";
  }
  static const char* GetLastError(void*) { return last_error; }
  static int GroupStart() {
    return attempt("GroupStart", [](NcclDouble& one, Lock&) { return one.start_group(); });
  }
  static int GroupEnd() {
    return attempt("GroupEnd", [](NcclDouble& one, Lock&) { return one.end_group(); });
  }
  static int AllReduce(const void* input, void* output, size_t count, int dtype, int op, void* comm, void* stream) {
    return collective("AllReduce", {Operation::all_reduce, {count, dtype, op}, 0, input, output}, comm, stream);
  }
  static int Reduce(const void* input, void* output, size_t count, int dtype, int op, int root, void* comm,
                    void* stream) {
    return collective("Reduce", {Operation::reduce, {count, dtype, op}, root, input, output}, comm, stream);
  }
  static int Broadcast(const void* input, void* output, size_t count, int dtype, int root, void* comm, void* stream) {
    return collective("Broadcast", {Operation::broadcast, {count, dtype}, root, input, output}, comm, stream);
  }
  static int AllGather(const void* input, void* output, size_t input_count, int dtype, void* comm, void* stream) {
    return collective("AllGather", {Operation::all_gather, {input_count, dtype}, 0, input, output}, comm, stream);
  }
  static int ReduceScatter(const void* input, void* output, size_t output_count, int dtype, int op, void* comm,
                           void* stream) {
    return collective("ReduceScatter", {Operation::reduce_scatter, {output_count, dtype, op}, 0, input, output}, comm,
                      stream);
  }
  static int Send(const void* input, size_t count, int dtype, int peer, void* comm, void* stream) {
    return collective("Send", {Operation::send, {count, dtype}, peer, input, nullptr}, comm, stream);
  }
  static int Recv(void* output, size_t count, int dtype, int peer, void* comm, void* stream) {
    return collective("Recv", {Operation::recv, {count, dtype}, peer, nullptr, output}, comm, stream);
  }
};

const NcclFunctions& NcclDouble::functions() {
  static constexpr NcclFunctions table{.GetVersion = Table::GetVersion,
                                       .GetUniqueId = Table::GetUniqueId,
                                       .CommInitRankConfig = Table::CommInitRankConfig,
                                       .CommFinalize = Table::CommFinalize,
                                       .CommDestroy = Table::CommDestroy,
                                       .CommAbort = Table::CommAbort,
                                       .CommGetAsyncError = Table::CommGetAsyncError,
                                       .GetErrorString = Table::GetErrorString,
                                       .GetLastError = Table::GetLastError,
                                       .GroupStart = Table::GroupStart,
                                       .GroupEnd = Table::GroupEnd,
                                       .AllReduce = Table::AllReduce,
                                       .Reduce = Table::Reduce,
                                       .Broadcast = Table::Broadcast,
                                       .AllGather = Table::AllGather,
                                       .ReduceScatter = Table::ReduceScatter,
                                       .Send = Table::Send,
                                       .Recv = Table::Recv};
  return table;
}

}  // namespace lightcc::test

// NCCL for tests (csrc/device/nccl.h): ranks are threads of one process, each with a device of a CudaDouble, on whose
// streams the kernels run after random delays. What NCCL forbids is described in words among the CudaDouble's faults.
//   - No call blocks. After kNcclInProgress the rest takes place in a thread of the double; until then only
//     CommGetAsyncError and CommAbort may be called for the communicator, the stream may be given nothing else, and the
//     thread may make no such call for another communicator: NCCL before 2.23 keeps one job a thread.
//   - All but GetVersion, GetUniqueId, GetErrorString, GetLastError and CommGetAsyncError is called inside on_device.
//   - A launch is one call, or all calls of a group, which are of one communicator and one stream here. Its kernel
//     waits until the other ranks' kernels of the same collectives (the n-th of each rank), or of the same Send or Recv
//     (the n-th between these two), have come: inputs are read before and outputs written afterwards.
//   - A device runs one kernel of NCCL at a time, or as many as a test says, from when its turn comes on its stream
//     until it is done. Kernels of more communicators than that without order on a device, or in different orders on
//     two, may wait for each other for ever.
//   - Ranks with one device: CommGetAsyncError says invalid usage (5) to them, and remote error (6) to the others.
//   - Not modelled: user-defined operations and averages, and communicators that block, split or shrink.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_double.h"
#include "device/nccl.h"

namespace lightcc::test {

// Of ncclResult_t.
inline constexpr int kCudaError = 1, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;

// What collectives are about, in NCCL's own numbers.
struct NcclNumbers {
  size_t count;
  int dtype, op = 0;
  bool operator==(const NcclNumbers&) const = default;
};
size_t nccl_size_of(int dtype);            // 0: there is no such dtype here
std::string in_words(const NcclNumbers&);  // "4 float32"
const char* nccl_op_name(int op);          // nullptr: there is no such operation here
// In the order of the inputs; numbers of 16 bits are rounded once, at the end.
std::vector<std::byte> nccl_reduced(const NcclNumbers&, const std::vector<const std::byte*>& inputs);

class NcclDouble {
 public:
  // There is one at a time. Its delays come from the CudaDouble's seed.
  explicit NcclDouble(CudaDouble&);
  ~NcclDouble();  // ends kernels that wait, without result; waits for its thread and all kernels
  NcclDouble(const NcclDouble&) = delete;
  NcclDouble& operator=(const NcclDouble&) = delete;

  static const NcclFunctions& functions();  // of the current double; without one they fail

  void set_max_delay_us(double max_delay_us);
  void set_patience(int ms);  // so long a kernel waits for its device and for others; then it ends, and it is a fault
  void set_kernels(int at_a_time);  // of a device
  void set_host_ids();              // as if each rank had an NCCL_HOSTID of its own: they may share a device
  void set_version(int version);
  size_t leaks() const;  // communicators of ranks, neither destroyed nor aborted

  // Planted. The `calls`-th call of the function ("AllReduce") from now on does nothing but return the result.
  void fail(const std::string& function, int calls, int result);
  // What CommGetAsyncError says from now on of communicators of the device; kNcclSuccess: what is true.
  void set_async_error(int device, int result);

 private:
  struct Table;
  enum class Operation { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, recv };
  struct Meeting;
  struct Call {
    Operation operation;
    NcclNumbers numbers;
    int root;  // or the peer
    const void* input;
    void* output;
    size_t input_bytes = 0, output_bytes = 0;  // that this rank reads and writes
    std::shared_ptr<Meeting> meeting = {};
    size_t place = 0;  // of this rank in it
  };
  struct Part {  // of a call that has come
    Call call;   // without its meeting
    std::vector<std::byte> input;
  };
  struct Meeting {  // of the kernels of one call
    std::vector<int> ranks;
    std::vector<std::unique_ptr<Part>> parts;  // by place; nullptr: still to come
    size_t callers = 0;                        // so many ranks have queued it
    bool is_broken = false;                    // they disagree
    std::vector<int> missing() const;
  };
  using MeetingKey = std::tuple<int, int, uint64_t>;  // from, to, which; -1 and -1: of all
  struct Member;
  struct Communicator {
    int number = 0;  // 1 for the first unique id
    int ranks = 0;
    std::map<int, std::shared_ptr<Member>> members = {};  // by rank
    std::map<MeetingKey, std::shared_ptr<Meeting>> meetings = {};
  };
  struct Member {
    Communicator* communicator;  // lives as long as the double
    int rank, device;
    bool is_ready = false;      // initialized
    bool is_launching = false;  // later
    bool is_finalized = false, is_finalizing = false;
    bool is_aborted = false;
    std::thread::id caller = {};  // of what is in progress
    int result = kNcclSuccess;  // of what was done later
    uint64_t launched = 0, finished = 0;  // kernels
    std::map<std::pair<int, int>, uint64_t> calls = {}, sends = {};  // by from and to
    bool is_in_progress() const;
  };
  using MemberPtr = std::shared_ptr<Member>;
  struct Launch {
    MemberPtr member;
    void* stream;
    std::vector<Call> calls;
    uint64_t number = 0;  // of its member
  };
  using LaunchPtr = std::shared_ptr<Launch>;
  struct Group {  // of a thread
    int depth = 0;
    int result = kNcclSuccess;  // of the first call that has failed
    LaunchPtr launch;
  };
  struct Failure {
    int result;
    std::string words;
    bool is_fault;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Time = std::chrono::steady_clock;

  int attempt(const std::string& function, std::string& words, const std::function<int(Lock&)>& body);
  [[noreturn]] static void refuse(const std::string& why, int result);
  static int device_of_call();
  MemberPtr find(void* comm);
  MemberPtr own(void* comm);    // of this thread's device
  MemberPtr ready(void* comm);  // and not in progress
  void begin(Member&);          // what will be in progress
  void later(std::function<void()> action);
  bool toss() { return std::bernoulli_distribution()(random_); }
  void work();

  int get_unique_id(NcclUniqueId*);
  int init(void** comm, int ranks, const NcclUniqueId&, int rank, const NcclConfig*);
  void complete(Communicator&);
  int finalize(void* comm);
  int destroy(void* comm);
  int abort(Lock&, void* comm);

  int start_group();
  int end_group();
  int collective(Call, void* comm, void* stream);
  static void check(Call&, const Member&);
  static std::vector<Access> accesses_of(const Call&);
  void meet(Call&, Member&);
  int start(LaunchPtr);
  bool queue(const LaunchPtr&, bool was_promised);

  void run(const Launch&);
  void exchange(Lock&, const Launch&, Time::time_point deadline);
  bool await(Lock&, const Launch&, Time::time_point deadline, const std::function<std::string()>& missing);
  void arrive(const Call&, const Communicator&, std::vector<std::byte> input);
  static std::vector<std::byte> result_of(const Call&);
  static std::string in_words(const Call&);
  static std::string in_words(const Launch&);

  static std::atomic<NcclDouble*> current;

  CudaDouble& cuda_;
  mutable std::mutex mutex_;         // guards all below; CudaDouble's may be taken inside of it
  std::condition_variable changed_;  // whatever somebody may wait for
  std::mt19937_64 random_;
  double max_delay_us_ = 200;
  std::chrono::milliseconds patience_{20'000};
  int version_ = 22703;
  bool is_ending_ = false;
  std::map<std::string, std::pair<int, int>> failures_;  // calls and result, by function
  std::map<int, int> async_errors_;                      // by device
  std::map<std::string, std::unique_ptr<Communicator>> communicators_;  // by unique id
  std::map<void*, MemberPtr> members_;
  std::map<std::thread::id, Group> groups_;
  std::map<int, std::vector<std::string>> running_;  // what, by device
  size_t at_a_time_ = 1;
  bool has_host_ids_ = false;
  size_t kernels_ = 0;                  // queued or running
  std::multimap<Time::time_point, std::function<void()>> later_;
  std::thread thread_;
};

}  // namespace lightcc::test

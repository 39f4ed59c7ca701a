// A CUDA for tests (csrc/device/cuda.h): the memory of its devices is the host's, and its streams are threads that come
// to what was queued after random delays. It finds faults and describes them in words: what CUDA forbids, and accesses
// to the same memory without order, whether or not they really happened in a wrong one.
// Ranks are threads of one process, each with a device of its own. Any thread may call.
//   - What one thread of the host knows to be done, all of them know. It comes from query, call and synchronize only:
//     what a called function waits for is no order.
//   - Accesses of the host are checked where a test declares them (host_reads, host_writes).
//   - Streams do not wait for the default stream, nor that for them.
//   - Memory allocated in the order of a stream is written by that, and once more when it is released: uses without
//     order to both are found like others.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_double_clocks.h"
#include "device/cuda.h"

namespace lightcc::test {

// Byte by byte or word by word, atomically: copies without order are faults that the double describes, not data races.
void move_bytes(void* to, const void* from, size_t bytes);

class CudaDouble {
 public:
  // There is one at a time; the seed is LIGHTCC_TEST_SEED or random.
  explicit CudaDouble(int devices = 8);
  ~CudaDouble();  // waits for all that is queued
  CudaDouble(const CudaDouble&) = delete;
  CudaDouble& operator=(const CudaDouble&) = delete;

  static const CudaFunctions& functions();  // of the current double; without one they fail
  uint64_t seed() const { return seed_; }   // to be printed when a test fails
  void set_max_delay_us(double max_delay_us);

  // Memory of a device at once, full of NaNs; nullptr if there is no such device.
  void* allocate(int device, size_t bytes);
  void release(void* memory);

  // Queues a kernel, which may use memory of its device and pinned memory. what: "a kernel", in faults. false: refused,
  // as a fault says.
  bool run(int device, void* stream, const std::string& what, std::vector<Access> accesses, std::function<void()> body,
           bool was_promised = false);
  // What the stream gets next will be a kernel that was promised: whatever comes before it is a fault.
  bool promise(int device, void* stream);
  void fill(int device, void* stream, float* to, size_t count, float value);
  // Waits for what the stream has so far.
  void synchronize(int device, void* stream);
  template <class T>
  std::vector<T> read(int device, void* stream, const T* from, size_t count) {
    synchronize(device, stream);
    host_reads(from, count * sizeof(T));
    std::vector<T> values(count);
    move_bytes(values.data(), from, count * sizeof(T));
    return values;
  }
  void host_reads(const void* begin, size_t bytes) { host_access({begin, bytes, false}, "reads"); }
  void host_writes(const void* begin, size_t bytes) { host_access({begin, bytes, true}, "writes"); }

  std::vector<std::string> faults() const;  // each once
  size_t pinned_bytes() const;              // now
  uint64_t calls(const std::string& function) const;  // of the table, so far
  void report(const std::string& fault);    // for what stands on this double

  static int current_device();  // of this thread, while on_device() runs its function; else -1

  // Planted. `function` of the table fails at the `calls`-th call from now on, and if it is sticky at all later ones.
  void fail(const std::string& function, int calls, bool is_sticky = false);
  void ignore_order(bool ignored);  // functions().order does nothing
  void forge_messages(int device);  // what it encodes from now on is no message

 private:
  struct Table;
  struct Record {  // a position in a stream
    VectorClock clock;
    bool is_reached = false;
  };
  struct Event {
    int device;
    std::shared_ptr<Record> latest;
  };
  struct Range {  // of memory, of a device or pinned
    int device;
    size_t bytes;
    bool is_of_stream = false;  // allocated in the order of one
    int unfinished = 0;         // operations
  };
  using Ranges = std::map<uintptr_t, Range>;
  using Uses = std::vector<Range*>;
  using Steps = std::vector<std::function<void()>>;
  struct Operation {
    Steps steps;
    std::vector<std::chrono::duration<double, std::micro>> delays;  // before each
    Uses uses;
  };
  struct Stream {
    int device;
    std::string name;
    size_t index;  // in clocks
    VectorClock clock;
    std::deque<Operation> queue;
    bool is_ending = false, is_running = false, is_promised = false;  // a kernel
    std::condition_variable wake;
    std::thread thread;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::string attempt(const std::string& function, const std::function<void(Lock&)>& body);
  [[noreturn]] void refuse(const std::string& why);
  void add_fault(const std::string& fault);
  void check_device(int device);
  Stream& stream_of(int device, void* handle);
  Event& event_of(void* handle);
  static Range* range_of(Ranges&, const void* begin, size_t bytes);
  Uses uses_of(int device, const std::string& who, const std::vector<Access>&);
  void host_access(const Access&, const std::string& verb);
  void check_access(const Actor&, const VectorClock&, const Access&, const std::string& verb);

  void queue(Stream&, Steps, Uses = {});
  void queue_access(Stream&, const std::string& what, const std::vector<Access>&, Steps, Uses);
  std::shared_ptr<Record> queue_record(Stream&);
  void work(Stream&);
  void wait(Lock&, const std::string& what, const std::function<bool()>& condition);  // aborts after 20 s
  void forget(Lock&, Ranges&, const void* begin, const std::string& verb);
  void give_back_released();

  void* create_stream(int device);
  void destroy_stream(int device, void* handle);
  void order(int device, void* stream, void* event);
  void call(int device, void* stream, void (*function)(void*), void* argument);
  void encode(int device, void* stream, int codec, const std::vector<CudaEncode>&);
  void decode(int device, void* stream, int codec, const std::vector<CudaDecode>&, uint64_t* error);
  void pin(int device, void* begin, size_t bytes);
  void copy(int device, void* stream, void* to, const void* from, size_t bytes);
  void copy_all(int device, void* stream, std::vector<CudaCopy> copies);
  void* allocate_in_order(int device, void* stream, size_t bytes);
  void release_in_order(int device, void* stream, void* memory);
  void scale(int device, void* stream, int dtype, void* to, const void* from, size_t count, double factor);

  static std::atomic<CudaDouble*> current;
  static std::atomic<uintptr_t> handles;  // none is used twice, so that the use of one that is gone is found
  static thread_local bool is_called_function;  // this thread runs one

  const int devices_;
  const uint64_t seed_;
  mutable std::mutex mutex_;              // guards all below
  std::condition_variable changed_;       // an operation is done, a record is reached, a thread has ended
  std::mt19937_64 random_;
  double max_delay_us_ = 200;
  bool ignores_order_ = false;
  int forging_device_ = -1;
  struct Failure {
    int calls;
    bool is_sticky;
  };
  std::map<std::string, Failure> failures_;  // by function
  std::map<std::string, uint64_t> calls_;
  std::vector<std::string> faults_;
  AccessHistory history_;
  Ranges memory_, pinned_;
  Ranges released_;  // in the order of a stream, but what was queued before has not run yet
  std::map<std::pair<int, void*>, std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Stream>> destroyed_;
  std::map<void*, Event> events_;
  std::vector<int> streams_of_device_;
  size_t streams_made_ = 0;
};

}  // namespace lightcc::test

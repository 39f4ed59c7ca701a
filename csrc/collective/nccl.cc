#include "collective/nccl.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

constexpr std::chrono::milliseconds kAbortPatience{500};

bool are_equal(const std::vector<int64_t>& counts) {
  return std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
}

// A call of CUDA's table that needs the device, with what it captures.
template <class Call> const char* with_device(const CudaFunctions& cuda, int device, Call& call) {
  return cuda.on_device(device, [](void* body) { (*static_cast<Call*>(body))(); }, &call);
}

// Runs one call of NCCL after the other until one fails.
class Calls {
 public:
  template <class Call> void operator()(Call call) {
    if (status_ == kNcclSuccess || status_ == kNcclInProgress) status_ = call();
  }
  int status() const { return status_; }

 private:
  int status_ = kNcclSuccess;
};

// The parts of members, one behind the other.
class Parts {
 public:
  Parts(const void* memory, const std::vector<int64_t>& counts, DType dtype)
      : next_(static_cast<std::byte*>(const_cast<void*>(memory))), counts_(counts), element_(size_of(dtype)) {}
  template <class Visit> void each(Visit visit) {
    for (size_t member = 0; member < counts_.size(); ++member) {
      if (counts_[member] > 0) visit(int(member), next_, size_t(counts_[member]));
      next_ += size_t(counts_[member]) * element_;
    }
  }

 private:
  std::byte* next_;
  const std::vector<int64_t>& counts_;
  const size_t element_;
};

// Queues the collective. What only moves is moved as bytes, since NCCL does not know all dtypes.
int queue(const Collective& c, const void* input, const NcclFunctions& nccl, void* comm, void* stream) {
  const int dtype = nccl_dtype(c.dtype), op = nccl_op(c.op), bytes = nccl_dtype(DType::uint8);
  const size_t element = size_of(c.dtype);
  const size_t own = c.counts.empty() ? 0 : size_t(c.counts[size_t(c.index)]);
  Calls calls;
  switch (c.kind) {
    case Kind::allreduce:
      calls([&] { return nccl.AllReduce(input, c.output, size_t(c.count), dtype, op, comm, stream); });
      break;
    case Kind::broadcast:
      calls([&] { return nccl.Broadcast(c.output, c.output, size_t(c.count) * element, bytes, c.root, comm, stream); });
      break;
    case Kind::allgather:
      if (are_equal(c.counts)) {
        calls([&] { return nccl.AllGather(input, c.output, own * element, bytes, comm, stream); });
        break;
      }
      Parts(c.output, c.counts, c.dtype).each([&](int member, std::byte* part, size_t count) {
        const void* from = member == c.index ? input : part;
        calls([&] { return nccl.Broadcast(from, part, count * element, bytes, member, comm, stream); });
      });
      break;
    case Kind::reducescatter:
      if (are_equal(c.counts)) {
        calls([&] { return nccl.ReduceScatter(input, c.output, own, dtype, op, comm, stream); });
        break;
      }
      Parts(input, c.counts, c.dtype).each([&](int member, std::byte* part, size_t count) {
        void* to = member == c.index ? c.output : part;  // the others' is not written
        calls([&] { return nccl.Reduce(part, to, count, dtype, op, member, comm, stream); });
      });
      break;
    default:
      Parts(input, c.send, c.dtype).each([&](int member, std::byte* part, size_t count) {
        calls([&] { return nccl.Send(part, count * element, bytes, member, comm, stream); });
      });
      Parts(c.output, c.counts, c.dtype).each([&](int member, std::byte* part, size_t count) {
        calls([&] { return nccl.Recv(part, count * element, bytes, member, comm, stream); });
      });
  }
  return calls.status();
}

}  // namespace

// ---- NcclCommunicator

void NcclCommunicator::on_device(const char* attempted, const std::function<int()>& call) {
  int status = kNcclSuccess;
  auto body = [&] { status = call(); };
  check_cuda(with_device(cuda_, device_, body), attempted, device_);
  if (status != kNcclSuccess && status != kNcclInProgress) refuse(attempted, status);
}

void NcclCommunicator::refuse(const char* attempted, int status) {
  const std::string text = std::string(attempted) + " on GPU " + std::to_string(device_) + ": NCCL: " +
                           nccl_.GetErrorString(status) + " (" + nccl_.GetLastError(comm_) + ")";
  if (status == kNcclRemoteError || status == kNcclSystemError) throw PeerSuspected(Code::internal, text);
  throw Error(Code::internal, text);
}

NcclCommunicator::NcclCommunicator(const CudaFunctions& cuda, const NcclFunctions& nccl, int device, int members,
                                   int member, const NcclUniqueId& id)
    : cuda_(cuda), nccl_(nccl), device_(device), members_(members), member_(member) {
  NcclConfig config;
  on_device("making a communicator", [&] { return nccl_.CommInitRankConfig(&comm_, members, id, member, &config); });
}

NcclCommunicator::~NcclCommunicator() { abort().wait_for(kAbortPatience); }

bool NcclCommunicator::ready() {
  int status = kNcclSuccess;
  const int asked = nccl_.CommGetAsyncError(comm_, &status);
  if (asked != kNcclSuccess) status = asked;
  if (status != kNcclSuccess && status != kNcclInProgress) refuse("a collective", status);
  return status == kNcclSuccess;
}

void NcclCommunicator::launch(const std::function<int(const NcclFunctions&, void* comm)>& body) {
  on_device("starting a collective", [&] {
    int status = nccl_.GroupStart();
    if (status == kNcclSuccess) status = body(nccl_, comm_);
    const int end = nccl_.GroupEnd();
    return status == kNcclSuccess || status == kNcclInProgress ? end : status;
  });
}

bool NcclCommunicator::finish(uint64_t deadline_ns) {
  const auto wait = [&] {
    while (!ready()) {
      if (now_ns() > deadline_ns) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  };
  try {
    if (!wait()) return false;
    on_device("ending a communicator", [&] { return nccl_.CommFinalize(comm_); });
    if (!wait()) return false;
    on_device("ending a communicator", [&] { return nccl_.CommDestroy(comm_); });
    comm_ = nullptr;
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::future<void> NcclCommunicator::abort() {
  std::promise<void> promise;
  std::future<void> ended = promise.get_future();
  if (!comm_) return promise.set_value(), std::move(ended);
  std::thread([&cuda = cuda_, &nccl = nccl_, device = device_, comm = std::exchange(comm_, nullptr),
               promise = std::move(promise)]() mutable {
    auto body = [&] { nccl.CommAbort(comm); };
    with_device(cuda, device, body);
    promise.set_value();
  }).detach();
  return ended;
}

// ---- NcclCommunicators

NcclCommunicators::~NcclCommunicators() {
  if (!all.empty()) end(0).wait_for(kAbortPatience);
}

void NcclCommunicators::check() {
  const auto check_one = [](const auto& one) {
    if (one) one->ready();
  };
  std::ranges::for_each(all, check_one);
  check_one(local);
  check_one(cross);
}

std::future<void> NcclCommunicators::end(uint64_t deadline_ns) {
  std::vector<std::unique_ptr<NcclCommunicator>> each = std::exchange(all, {});
  each.push_back(std::move(local));
  each.push_back(std::move(cross));
  std::erase(each, nullptr);
  std::promise<void> promise;
  std::future<void> ended = promise.get_future();
  std::thread([each = std::move(each), deadline_ns, promise = std::move(promise)]() mutable {
    const auto finish = [&](const auto& one) { return one->finish(deadline_ns); };
    if (deadline_ns == 0 || !std::ranges::all_of(each, finish)) {
      std::vector<std::future<void>> aborts;  // of which one may wait for another
      for (const auto& one : each) aborts.push_back(one->abort());
      for (const auto& one : aborts) one.wait();
    }
    promise.set_value();
  }).detach();
  return ended;
}

// ---- NcclBackend

// NCCL's minimum and maximum of a NaN and a number are the number: a diverged rank would go unnoticed.
bool nccl_reduces(const Collective& c) {
  if (is_floating(c.dtype) && (c.op == ReduceOp::min || c.op == ReduceOp::max)) return false;
  return nccl_op(c.op) >= 0 && nccl_dtype(c.dtype) >= 0 && c.codec.kind == CodecKind::none;
}

const void* nccl_scale(const CudaFunctions& cuda, int device, void* stream, DType dtype, double factor, void* to,
                       const void* from, size_t count) {
  if (factor == 1) return from;
  if (count > 0) check_cuda(cuda.scale(device, stream, int(dtype), to, from, count, factor), "scaling", device);
  return to;
}

bool NcclBackend::accepts(const Collective& c) const {
  if (!communicator_) return false;
  switch (c.kind) {
    case Kind::allreduce: return nccl_reduces(c);
    case Kind::reducescatter: return nccl_reduces(c) && c.pre == 1;  // nowhere lies what a factor makes of the parts
    case Kind::broadcast:
    case Kind::allgather:
    case Kind::alltoall: return true;
    default: return false;
  }
}

class NcclBackend::Launch : public Work {
 public:
  Launch(NcclBackend& backend, const Collective& c) : backend_(backend), c_(c) {
    const void* input = c_.input;
    if (c_.kind == Kind::allreduce) input = scale(c_.pre, input, size_t(c_.count));
    backend_.communicator_->launch([&](const NcclFunctions& nccl, void* comm) {
      return queue(c_, input, nccl, comm, backend_.stream_);
    });
  }
  bool step() override {
    if (done_ || !backend_.communicator_->ready()) return false;
    if (c_.kind == Kind::allreduce) scale(c_.post, c_.output, size_t(c_.count));
    if (c_.kind == Kind::reducescatter) scale(c_.post, c_.output, size_t(c_.counts[size_t(c_.index)]));
    return done_ = true;
  }
  bool done() const override { return done_; }
  int waiting_for() const override { return c_.index; }

 private:
  const void* scale(double factor, const void* from, size_t count) {
    return nccl_scale(*backend_.cuda_, backend_.communicator_->device(), backend_.stream_, c_.dtype, factor, c_.output,
                      from, count);
  }

  NcclBackend& backend_;
  const Collective c_;
  bool done_ = false;
};

std::unique_ptr<Work> NcclBackend::start(const Collective& c, const Algorithm*) {
  return std::make_unique<Launch>(*this, c);
}

}  // namespace lightcc

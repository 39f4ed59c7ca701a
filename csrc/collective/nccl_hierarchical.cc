#include "collective/nccl_hierarchical.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr size_t kPartBytes = 16;  // a member's part is so many bytes or a multiple: NCCL's widest access

}  // namespace

NcclHierarchicalBackend::Phase::Phase(const CudaFunctions& cuda, int device, void* its_stream)
    : stream(its_stream), launched{{CudaEvent(cuda, device), CudaEvent(cuda, device)}} {}

void NcclHierarchicalBackend::connect(const CudaFunctions& cuda, NcclCommunicators& communicators, void* stream) {
  const int device = communicators.all[0]->device();
  cuda_ = &cuda;
  communicators_ = &communicators;
  cross_stream_.emplace(cuda, device);
  reduced_.emplace(cuda, device, stream);
  exchanged_.emplace(cuda, device, cross_stream_->get());
}

bool NcclHierarchicalBackend::accepts(const Collective& c) const {
  return communicators_ && c.kind == Kind::allreduce && nccl_reduces(c) &&
         c.count * int64_t(size_of(c.dtype)) >= limits_.least_bytes;
}

class NcclHierarchicalBackend::Allreduce : public Work {
 public:
  Allreduce(NcclHierarchicalBackend& backend, const Collective& c)
      : backend_(backend),
        communicators_(*backend.communicators_),
        device_(communicators_.all[0]->device()),
        members_(communicators_.local->members()),
        c_(c) {
    const int64_t unit = members_ * int64_t(kPartBytes / size_of(c_.dtype));
    chunk_ = std::max<int64_t>(backend_.limits_.chunk_bytes / int64_t(size_of(c_.dtype)) / unit, 1) * unit;
    rest_ = c_.count % unit;
    chunks_ = (c_.count - rest_ + chunk_ - 1) / chunk_;
    input_ = scale(c_.pre, c_.input);
    launch_next();
  }
  // What was launched between nodes when this failed ends before whatever the backend's stream is given next.
  ~Allreduce() override {
    if (done_) return;
    try {
      exchanged().launched[0].record(exchanged().stream);
      exchanged().launched[0].order(device_, reduced().stream);
    } catch (const Error&) {
      // The GPU has failed.
    }
  }

  bool step() override {
    if (done_ || (in_flight_ && !in_flight_->ready())) return false;
    if (event_) event_->record(stream_);
    if (launch_next()) return true;
    scale(c_.post, c_.output);
    return done_ = true;
  }
  bool done() const override { return done_; }
  int waiting_for() const override { return c_.index; }

 private:
  Phase& reduced() { return *backend_.reduced_; }
  Phase& exchanged() { return *backend_.exchanged_; }
  const void* scale(double factor, const void* from) {
    return nccl_scale(*backend_.cuda_, device_, reduced().stream, c_.dtype, factor, c_.output, from,
                      size_t(c_.count));
  }

  // In each round all chunks that have begun go one phase on, and one more begins. false: all is launched.
  bool launch_next() {
    for (; round_ < chunks_ + 2; ++round_, phase_ = 0) {
      while (phase_ < 3) {
        const int phase = phase_++;
        const int64_t chunk = round_ - phase;
        if (chunk < 0 || chunk >= chunks_) continue;
        launch(phase, chunk);
        return true;
      }
    }
    if (rest_ == 0) return false;
    launch_rest(std::exchange(rest_, 0));
    return true;
  }

  void launch(int phase, int64_t chunk) {
    const size_t element = size_of(c_.dtype);
    const int dtype = nccl_dtype(c_.dtype), op = nccl_op(c_.op);
    const int64_t begin = chunk * chunk_, count = std::min(chunk_, c_.count - rest_ - begin);
    const size_t part = size_t(count / members_);
    const std::byte* const input = static_cast<const std::byte*>(input_) + size_t(begin) * element;
    std::byte* const output = static_cast<std::byte*>(c_.output) + size_t(begin) * element;
    std::byte* const own = output + size_t(communicators_.local->member()) * part * element;
    void* const local_stream = reduced().stream;
    void* const cross_stream = exchanged().stream;
    CudaEvent& is_reduced = reduced().launched[size_t(chunk % 2)];
    CudaEvent& is_exchanged = exchanged().launched[size_t(chunk % 2)];
    switch (phase) {
      case 0:
        return launch(*communicators_.local, &is_reduced, local_stream, [&](const NcclFunctions& nccl, void* comm) {
          return nccl.ReduceScatter(input, own, part, dtype, op, comm, local_stream);
        });
      case 1:
        is_reduced.order(device_, cross_stream);
        return launch(*communicators_.cross, &is_exchanged, cross_stream, [&](const NcclFunctions& nccl, void* comm) {
          return nccl.AllReduce(own, own, part, dtype, op, comm, cross_stream);
        });
      default:
        is_exchanged.order(device_, local_stream);
        return launch(*communicators_.local, nullptr, local_stream, [&](const NcclFunctions& nccl, void* comm) {
          return nccl.AllGather(own, output, part, dtype, comm, local_stream);
        });
    }
  }

  void launch_rest(int64_t count) {
    const size_t begin = size_t(c_.count - count) * size_of(c_.dtype);
    void* const stream = reduced().stream;
    launch(*communicators_.all[0], nullptr, stream, [&](const NcclFunctions& nccl, void* comm) {
      return nccl.AllReduce(static_cast<const std::byte*>(input_) + begin, static_cast<std::byte*>(c_.output) + begin,
                            size_t(count), nccl_dtype(c_.dtype), nccl_op(c_.op), comm, stream);
    });
  }

  // event: recorded behind it on the stream, once it is queued.
  void launch(NcclCommunicator& communicator, CudaEvent* event, void* stream,
              const std::function<int(const NcclFunctions&, void* comm)>& body) {
    communicator.launch(body);
    in_flight_ = &communicator;
    event_ = event;
    stream_ = stream;
  }

  NcclHierarchicalBackend& backend_;
  const NcclCommunicators& communicators_;
  const int device_;
  const int64_t members_;                   // of a node
  const Collective c_;
  const void* input_ = nullptr;
  int64_t chunk_, chunks_, rest_;           // elements of a chunk; chunks; elements that are left over
  int64_t round_ = 0;
  int phase_ = 0;                           // the next of the round: reduce-scatter, all-reduce, all-gather
  NcclCommunicator* in_flight_ = nullptr;   // of the last launch, which may not be queued yet
  CudaEvent* event_ = nullptr;              // to be recorded behind it, or nullptr
  void* stream_ = nullptr;
  bool done_ = false;
};

std::unique_ptr<Work> NcclHierarchicalBackend::start(const Collective& c, const Algorithm*) {
  return std::make_unique<Allreduce>(*this, c);
}

}  // namespace lightcc

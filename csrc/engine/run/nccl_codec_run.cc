#include "engine/run/nccl_codec_run.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/run/gpu_residuals.h"
#include "engine/run/memory_agreement.h"
#include "engine/run/nccl_codec_parts.h"

namespace lightcc {
namespace {

constexpr size_t kMostParts = 16;  // that are queued and have not run: of each, some 25 launches

// The words of the parts' decodings: zeros come from the first half of a slot, and what they became goes to the second.
class DecodingWords {
 public:
  DecodingWords(const CudaFunctions& cuda, PinnedPool& pool, NcclStream& stream, size_t parts)
      : cuda_(cuda), pool_(pool), stream_(stream), titles_(parts) {}

  size_t bytes() const { return titles_.size() * DecodingErrors::kWordBytes; }
  void set_memory(std::byte* words) { words_ = words; }  // of the GPU
  bool are_clear() const { return slot_ != nullptr; }
  void clear() {
    slot_ = pool_.take(cuda_, stream_.device(), 2 * bytes());
    std::memset(slot_->data(), 0, 2 * bytes());
    copy(words_, slot_->data());
  }
  uint64_t* of(size_t part) const { return reinterpret_cast<uint64_t*>(words_ + part * DecodingErrors::kWordBytes); }
  std::vector<std::string>& titles(size_t part) { return titles_[part]; }  // of the pieces that are decoded
  void read(DecodingErrors& errors) {  // behind all decodings
    const auto end = copy(slot_->data() + bytes(), words_);
    for (size_t p = 0; p < titles_.size(); ++p)
      errors.expect(end, slot_, bytes() + p * DecodingErrors::kWordBytes, std::move(titles_[p]));
  }

 private:
  std::shared_ptr<CudaEvent> copy(std::byte* to, const std::byte* from) {
    auto copied = std::make_shared<CudaEvent>(cuda_, stream_.device());
    check_cuda(cuda_.copy(stream_.device(), stream_.get(), to, from, bytes()), "copying words of a codec",
               stream_.device());
    copied->record(stream_.get());
    slot_->expect(copied);
    return copied;
  }

  const CudaFunctions& cuda_;
  PinnedPool& pool_;
  NcclStream& stream_;
  std::vector<std::vector<std::string>> titles_;  // by part
  std::byte* words_ = nullptr;
  std::shared_ptr<StagingSlot> slot_;
};

}  // namespace

// One all-reduce: what is left behind is made ready, the members agree, and all is launched.
class NcclCompressedAllreduce : public Work {
 public:
  NcclCompressedAllreduce(NcclCodecRun& run, const Collective& c, std::vector<GpuTensor> tensors)
      : run_(run),
        c_(c),
        links_(run.host_.links()),
        layout_(lay_out_compressed(c, links_, kCompressedPartBytes, 0)),
        tensors_(std::move(tensors)),
        parts_(c.dtype, layout_, tensors_, links_, *run.stream_),
        residuals_(*run.cuda_, *run.pool_, c_, layout_, tensors_, links_.node(), links_.nodes(), stream(),
                   run.stream_->memory()),
        words_(*run.cuda_, *run.pool_, *run.stream_, parts_.size()),
        exchanged_{{CudaEvent(*run.cuda_, device()), CudaEvent(*run.cuda_, device())}} {}

  bool step() override {
    if (done_) return false;
    if (!agreement_) return prepare();
    if (!agreement_->work().done()) return agreement_->work().step();
    return agreement_->is_lacking() ? give_up() : launch_next();
  }
  bool done() const override { return done_; }
  int waiting_for() const override {
    const int member = agreement_ && !agreement_->work().done() ? agreement_->work().waiting_for() : -1;
    return member < 0 ? c_.index : member;
  }
  std::optional<NoMemory> no_memory() const override { return no_memory_; }

 private:
  const CudaFunctions& cuda() const { return *run_.cuda_; }
  int device() const { return run_.stream_->device(); }
  void* stream() const { return run_.stream_->get(); }
  void* cross_stream() const { return run_.cross_->get(); }
  const CompressedShard& shard(size_t tensor) const { return layout_.tensors[tensor].shards[0]; }

  // ---- before anything is launched

  bool prepare() {
    if (residuals_.step(tensors_.size())) return true;
    try {
      if (!residuals_.refused()) words_.set_memory(parts_.take_memory(words_.bytes()));
    } catch (const Error& error) {
      residuals_.refuse(0, error);
    }
    agreement_.emplace(run_.selector_, c_, residuals_.refused());
    return true;
  }

  bool give_up() {
    const auto place_in = [&](const std::vector<int>& members) {
      return std::ranges::find(members, agreement_->member()) - members.begin();
    };
    const auto has_it = [&](const auto& members) { return size_t(place_in(members)) < members.size(); };
    const auto& node = *std::ranges::find_if(run_.nodes_, has_it);
    const CompressedTensor& tensor = layout_.tensors.at(agreement_->tensor());
    const size_t count = size_t(tensor.counts[size_t(place_in(node))]);
    no_memory_ = {agreement_->member(), agreement_->tensor(), device_residual_bytes(count, c_.codec.momentum > 0)};
    residuals_.let_go(tensors_.size());
    return done_ = true;
  }

  // ---- launches, one after the other: its stream is given nothing else before NCCL has queued one

  // Each part is reduced and encoded, exchanged, and then the one before it is decoded and gathered.
  bool launch_next() {
    if (in_flight_ && !in_flight_->ready()) return false;
    in_flight_ = nullptr;
    if (behind_) std::exchange(behind_, nullptr)();
    if (!words_.are_clear()) words_.clear();
    const size_t part = turn_ / 3, kind = turn_ % 3;
    const bool is_part = part < parts_.size();
    if (kind == 0 && is_part && !run_.has_room()) return false;
    ++turn_;
    if (kind == 0 && is_part) reduce(part);
    if (kind == 1 && is_part) exchange(part);
    if (kind == 2 && part > 0) gather(part - 1);
    if (part > parts_.size()) {
      words_.read(run_.errors_);
      done_ = true;
    }
    return true;
  }

  // behind: what follows on the streams once NCCL has queued the call; for no bytes there is none.
  void launch(NcclCommunicator& communicator, size_t bytes,
              const std::function<int(const NcclFunctions&, void* comm)>& call, std::function<void()> behind) {
    behind_ = std::move(behind);
    if (bytes == 0) return;
    communicator.launch(call);
    in_flight_ = &communicator;
  }

  void reduce(size_t p) {
    parts_.copy_in(p);
    const auto call = [&](const NcclFunctions& nccl, void* comm) {
      return nccl.ReduceScatter(parts_.inputs(p), parts_.own_share(p), parts_.share_bytes(p) / size_of(c_.dtype),
                                nccl_dtype(c_.dtype), nccl_op(c_.op), comm, stream());
    };
    launch(*run_.communicators_->local, parts_.share_bytes(p), call, [this, p] { encode(p); });
  }

  void encode(size_t p) {
    std::vector<CudaEncode> pieces;
    for (size_t t = parts_.begin(p); t < parts_.end(p); ++t) {
      std::byte* const body = parts_.own_message(p) + shard(t).body;
      const CudaEncode piece = residuals_.encoding_of(t, CodecRoute::nccl, parts_.own_shard(p, t), body);
      if (piece.count > 0) pieces.push_back(piece);
    }
    const auto encoded = std::make_shared<CudaEvent>(cuda(), device());
    const auto note_end = [&] {
      encoded->record(stream());
      residuals_.used(parts_.begin(p), parts_.end(p), encoded);
    };
    try {
      if (!pieces.empty())
        check_cuda(cuda().encode(device(), stream(), int(c_.codec.kind), pieces.data(), pieces.size()), "compressing",
                   device());
    } catch (...) {
      note_end();  // of what has been queued
      throw;
    }
    note_end();
    residuals_.let_go(parts_.end(p));
    encoded->order(device(), cross_stream());
    run_.encoded_.push_back(encoded);
  }

  void exchange(size_t p) {
    const auto call = [&](const NcclFunctions& nccl, void* comm) {
      return nccl.AllGather(parts_.own_message(p), parts_.messages(p), parts_.message_bytes(p),
                            nccl_dtype(DType::uint8), comm, cross_stream());
    };
    launch(*run_.communicators_->cross, parts_.message_bytes(p), call,
           [this, p] { exchanged_[p % 2].record(cross_stream()); });
  }

  void gather(size_t p) {
    exchanged_[p % 2].order(device(), stream());
    decode(p);
    const auto call = [&](const NcclFunctions& nccl, void* comm) {
      return nccl.AllGather(parts_.own_share(p), parts_.outputs(p), parts_.share_bytes(p), nccl_dtype(DType::uint8),
                            comm, stream());
    };
    launch(*run_.communicators_->local, parts_.share_bytes(p), call, [this, p] { parts_.copy_out(p); });
  }

  void decode(size_t p) {
    std::vector<CudaDecode> pieces;
    for (size_t t = parts_.begin(p); t < parts_.end(p); ++t) {
      if (shard(t).count == 0) continue;
      pieces.push_back(decoding_of(c_, shard(t), parts_.messages(p), parts_.message_bytes(p), links_.nodes(),
                                   parts_.own_shard(p, t)));
      words_.titles(p).push_back(tensors_[t].request->title());
    }
    if (pieces.empty()) return;
    check_cuda(
        cuda().decode(device(), stream(), int(c_.codec.kind), pieces.data(), pieces.size(), words_.of(p)),
        "decompressing", device());
  }

  NcclCodecRun& run_;
  const Collective c_;
  const NodeLinks& links_;
  const CompressedLayout layout_;
  const std::vector<GpuTensor> tensors_;
  NcclCodecParts parts_;
  GpuResiduals residuals_;
  DecodingWords words_;
  std::optional<MemoryAgreement> agreement_;
  std::optional<NoMemory> no_memory_;
  std::array<CudaEvent, 2> exchanged_;     // the last two parts, on the stream between nodes
  size_t turn_ = 0;                        // of the launches
  NcclCommunicator* in_flight_ = nullptr;  // of the last launch, which may not be queued yet
  std::function<void()> behind_;           // that one
  bool done_ = false;
};

bool NcclCodecRun::suits(const Collective& c) const {
  return (c.codec.kind == CodecKind::topk || c.codec.kind == CodecKind::int8) && host_.accepts(c);
}

void NcclCodecRun::connect(const CudaFunctions& cuda, PinnedPool& pool, NcclCommunicators& communicators,
                           NcclStream& stream, NcclStream& cross) {
  cuda_ = &cuda;
  pool_ = &pool;
  communicators_ = &communicators;
  stream_ = &stream;
  stream_->share_buffer(cross);
  cross_ = &cross;
}

// CUDA makes a thread wait that queues too much, and this one must not.
bool NcclCodecRun::has_room() {
  while (!encoded_.empty() && encoded_.front()->reached()) encoded_.pop_front();
  return encoded_.size() < kMostParts;
}

std::unique_ptr<Work> NcclCodecRun::start(const Collective& c, const Algorithm*) {
  throw Error(Code::internal, std::string(name_of(c.kind)) + " with compression " + text_of(c.codec) +
                                  " was given to NCCL as one vector");
}

std::unique_ptr<Work> NcclCodecRun::start(const Collective& c, std::vector<GpuTensor> tensors) {
  return std::make_unique<NcclCompressedAllreduce>(*this, c, std::move(tensors));
}

}  // namespace lightcc

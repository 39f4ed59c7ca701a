#include "engine/run/codec_run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "collective/phases.h"
#include "collective/piece_codec.h"
#include "engine/run/gpu_residual.h"

namespace lightcc {
namespace {

// Behind the messages of all nodes, in a slot and in the GPU's memory alike, is the word of a decoding.
constexpr size_t kWordBytes = sizeof(uint64_t);

}  // namespace

// One all-reduce. Its parts pass through three queues, each in their order: encoding, exchange, decoding.
class GpuCompressedAllreduce : public Work {
 public:
  GpuCompressedAllreduce(CodecRun& run, const Collective& c, NodeLinks& links,
                         std::unique_ptr<CompressedExchange> exchange, std::vector<GpuTensor> tensors)
      : run_(run),
        c_(c),
        links_(links),
        exchange_(std::move(exchange)),
        tensors_(std::move(tensors)),
        device_(tensors_[0].request->place.device),
        streams_(run.staging_.codec_streams(device_)),
        parts_(exchange_->parts()),
        times_(c.timed) {}

  ~GpuCompressedAllreduce() override {
    let_go();
    if (!done()) links_.give_up();
    for (GpuPart& part : parts_) give_back(part);
  }

  bool step() override {
    links_.check();
    times_.begin_step();
    bool moved = note_encoded();
    moved |= exchange_->step(encoded_);
    moved |= decode();
    moved |= encode();
    if (done()) exchange_->release();
    if (times_.timed() && moved) note_times();
    return moved;
  }
  bool done() const override { return decoded_ == parts_.size(); }
  int waiting_for() const override {
    if (done()) return -1;
    const int member = exchange_->waiting_for();
    return member < 0 ? c_.index : member;  // its own GPU
  }
  std::span<const TimedPhase> phases() const override { return times_.phases(); }
  std::optional<NoMemory> no_memory() const override { return exchange_->no_memory(); }

 private:
  struct GpuPart {
    std::byte* memory = nullptr;  // of the GPU; nullptr: there is none yet, or it was refused
    std::shared_ptr<StagingSlot> slot;
    std::shared_ptr<CudaEvent> encoded;  // the own message is in the slot
  };

  const CompressedPart& layout_of(size_t part) const { return exchange_->layout().parts[part]; }
  const CompressedTensor& tensor(size_t t) const { return exchange_->layout().tensors[t]; }
  const CompressedShard& shard(size_t t) const { return tensor(t).shards[0]; }  // the rank is alone on its host
  size_t message_bytes(size_t part) const { return exchange_->message_bytes(part, 0); }
  size_t word_at(size_t part) const { return round_up(message_bytes(part) * size_t(links_.nodes())); }
  bool has_velocity() const { return c_.codec.momentum > 0; }
  GpuResidual& device_residual(size_t t) const {
    return static_cast<GpuResidual&>(*c_.residuals[t]->pieces()[0].device);
  }
  int half() const { return c_.codec.kind == CodecKind::topk && c_.codec.width == DType::float16; }
  void check(const char* failure, const char* attempted) const { check_cuda(failure, attempted, device_); }

  void note_times() {
    times_.note("COMPRESS", queued_ > 0, encoded_ == parts_.size());
    times_.note("CROSS_ALLGATHER", exchange_->started() > 0, exchange_->exchanged() == parts_.size());
    times_.note("DECOMPRESS", decoded_ > 0, done());
  }

  // ---- encoding, a part a time

  bool note_encoded() {
    const size_t before = encoded_;
    const auto is_there = [&](const GpuPart& part) { return !part.encoded || part.encoded->reached(); };
    while (encoded_ < queued_ && is_there(parts_[encoded_])) ++encoded_;
    return encoded_ > before;
  }

  bool encode() {
    if (queued_ == parts_.size()) return false;
    const CompressedPart& layout = layout_of(queued_);
    while (held_ < layout.end - layout.begin) {
      if (!c_.residuals[layout.begin + held_]->try_hold()) return true;  // who copies it rings nobody
      ++held_;
    }
    for (; !refused_ && ready_ < layout.end - layout.begin; ++ready_)
      if (!make_ready(layout.begin + ready_)) return true;
    if (!refused_) take_memory();
    if (refused_)
      refuse();
    else
      queue_encoding();
    let_go();
    refused_.reset();
    ready_ = 0;
    ++queued_;
    return true;
  }

  void let_go() {
    const size_t begin = held_ > 0 ? layout_of(queued_).begin : 0;
    for (; held_ > 0; --held_) c_.residuals[begin + held_ - 1]->let_go();
  }

  // Whether what is left behind of a tensor is on this GPU, cut as it is now; else goes on with that.
  bool make_ready(size_t t) {
    Residual& residual = *c_.residuals[t];
    const std::vector<Residual::Range> ranges{{shard(t).first, shard(t).count}};
    const auto cut = [&] {
      residual.cut(tensor(t).place.count, links_.node(), links_.nodes(), ranges, has_velocity());
    };
    if (upload_) {
      if (upload_->step()) return false;
      ResidualPiece& piece = residual.pieces()[0];
      piece.values = {};
      piece.velocity = {};
      piece.device = std::exchange(arriving_, nullptr);
      upload_ = nullptr;
      return true;
    }
    const bool is_cut = residual.is_cut(tensor(t).place.count, ranges, has_velocity());
    if (is_cut && residual.pieces()[0].device && device_residual(t).device() == device_) {
      cut();  // which node this is
      return true;
    }
    if (residual.step_home()) return false;
    cut();
    if (shard(t).count == 0) return true;
    try {
      arriving_ = std::make_shared<GpuResidual>(run_.cuda_, streams_.out, size_t(shard(t).count), has_velocity());
    } catch (const Error& error) {
      lacks_memory(t, error);
      return false;
    }
    follow_allocations();
    upload_ = std::make_unique<ResidualUpload>(run_.cuda_, run_.pool_, *arriving_, residual.pieces()[0], streams_.in);
    return false;
  }

  // The first stream goes on behind what was allocated on the second.
  void follow_allocations() {
    CudaEvent allocated(run_.cuda_, device_);
    allocated.record(streams_.out->stream());
    allocated.order(device_, streams_.in);
  }

  void take_memory() {
    try {
      parts_[queued_].memory = static_cast<std::byte*>(streams_.out->allocate(word_at(queued_) + kWordBytes));
    } catch (const Error& error) {
      lacks_memory(layout_of(queued_).begin, error);
    }
  }

  // What CUDA says, only this rank knows.
  void lacks_memory(size_t t, const Error& error) {
    refused_ = t;
    log(Level::warning, tensors_[t].request->title() + " cannot be compressed on the GPU: " + error.what());
  }

  // Pinned memory for the messages, where the exchange of later all-reduces may still find them.
  void lend_slot() {
    GpuPart& part = parts_[queued_];
    part.slot = run_.pool_.take(run_.cuda_, device_, word_at(queued_) + kWordBytes);
    exchange_->lend(queued_, 0, std::shared_ptr<std::byte>(part.slot, part.slot->data()));
  }

  void refuse() {
    lend_slot();
    exchange_->refuse(queued_, *refused_);
  }

  void queue_encoding() {
    lend_slot();
    GpuPart& part = parts_[queued_];
    follow_allocations();
    const size_t message = message_bytes(queued_), own = message * size_t(links_.node());
    std::vector<CudaEncode> pieces;
    const Request* ordered = nullptr;
    for (size_t t = layout_of(queued_).begin; t < layout_of(queued_).end; ++t) {
      c_.residuals[t]->set_on_gpu(true);
      c_.residuals[t]->count(exchange_->totals_of(tensor(t)));
      if (std::exchange(ordered, tensors_[t].request) != tensors_[t].request)
        tensors_[t].request->ready->order(device_, streams_.in);
      if (shard(t).count > 0) pieces.push_back(encoding_of(t, part.memory + own + shard(t).body));
    }
    part.encoded = std::make_shared<CudaEvent>(run_.cuda_, device_);
    try {
      if (!pieces.empty())
        check(run_.cuda_.encode(device_, streams_.in, int(c_.codec.kind), pieces.data(), pieces.size()), "compressing");
      copy(streams_.in, part.slot->data() + own, part.memory + own, sizeof(MessageHeader), message);
    } catch (...) {
      note_end_of_encoding();  // of what has been queued
      throw;
    }
    note_end_of_encoding();
    run_.staging_.ring_behind_in(device_);
  }

  void note_end_of_encoding() {
    const GpuPart& part = parts_[queued_];
    part.encoded->record(streams_.in);
    part.slot->expect(part.encoded);
    for (size_t t = layout_of(queued_).begin; t < layout_of(queued_).end; ++t)
      if (shard(t).count > 0) device_residual(t).used(part.encoded);
  }

  // Bytes [begin, end).
  void copy(void* stream, std::byte* to, const std::byte* from, size_t begin, size_t end) const {
    if (begin == end) return;
    check(run_.cuda_.copy(device_, stream, to + begin, from + begin, end - begin), "copying messages");
  }

  CudaEncode encoding_of(size_t t, std::byte* body) const {
    const GpuResidual& residual = device_residual(t);
    residual.order(streams_.in);
    return {.gradient = tensors_[t].input,
            .residual = {residual.values(0), residual.values(1)},
            .velocity = {residual.velocity(0), residual.velocity(1)},
            .state = residual.state(),
            .body = body,
            .count = size_t(shard(t).count),
            .k = piece_elements(c_.codec, size_t(shard(t).count)),
            .scale = float(c_.pre),
            .momentum = float(c_.codec.momentum),
            .dtype = int(c_.dtype),
            .half = half()};
  }

  // ---- decoding, a part a time

  bool decode() {
    if (decoded_ == exchange_->exchanged()) return false;
    if (exchange_->check(decoded_, 0) && parts_[decoded_].memory) queue_decoding(decoded_);
    give_back(parts_[decoded_]);
    ++decoded_;
    return true;
  }

  // The memory of its messages, behind what uses it.
  void give_back(GpuPart& part) { streams_.out->give_back(std::exchange(part.memory, nullptr), part.encoded); }

  void queue_decoding(size_t p) {
    GpuPart& part = parts_[p];
    const size_t message = message_bytes(p), own = message * size_t(links_.node());
    void* const out = streams_.out->stream();
    std::vector<CudaDecode> pieces;
    std::vector<std::string> titles;
    for (size_t t = layout_of(p).begin; t < layout_of(p).end; ++t) {
      if (shard(t).count == 0) continue;
      pieces.push_back({part.memory + shard(t).body, message, tensors_[t].output, size_t(shard(t).count),
                        piece_elements(c_.codec, size_t(shard(t).count)), unsigned(links_.nodes()), c_.post,
                        int(c_.dtype), half()});
      titles.push_back(tensors_[t].request->title());
    }
    const auto decoded = std::make_shared<CudaEvent>(run_.cuda_, device_);
    const auto note_end = [&] {
      decoded->record(out);
      part.slot->expect(decoded);
    };
    try {
      auto* const word = reinterpret_cast<uint64_t*>(part.memory + word_at(p));
      const std::byte* const slot = part.slot->data();
      std::memset(part.slot->data() + word_at(p), 0, kWordBytes);
      copy(out, part.memory, slot, 0, own);
      copy(out, part.memory, slot, own + message, word_at(p) + kWordBytes);
      if (!pieces.empty())
        check(run_.cuda_.decode(device_, out, int(c_.codec.kind), pieces.data(), pieces.size(), word), "decompressing");
      copy(out, part.slot->data(), part.memory, word_at(p), word_at(p) + kWordBytes);
    } catch (...) {
      note_end();  // of what has been queued
      throw;
    }
    note_end();
    run_.decodings_.push_back({decoded, part.slot, word_at(p), std::move(titles)});
  }

  CodecRun& run_;
  const Collective c_;
  NodeLinks& links_;
  const std::unique_ptr<CompressedExchange> exchange_;
  const std::vector<GpuTensor> tensors_;
  const int device_;
  const Staging::CodecStreams streams_;
  std::vector<GpuPart> parts_;
  size_t queued_ = 0, encoded_ = 0, decoded_ = 0;  // so many parts; encoded: their own messages are in host memory
  size_t held_ = 0, ready_ = 0;                    // of part queued_ so many residuals, and those that are on the GPU
  std::optional<size_t> refused_;                  // there is no memory for this one of its tensors
  std::shared_ptr<GpuResidual> arriving_;          // of tensor ready_
  std::unique_ptr<ResidualUpload> upload_;         // into that
  PhaseTimes times_;
};

bool CodecRun::takes(const Row& row, const Codec& codec, const std::vector<GpuTensor>& tensors) const {
  const auto is_like_the_first = [&](const GpuTensor& one) {
    return one.request->encodes && one.request->place.device == tensors[0].request->place.device;
  };
  return row.backend == &backend_ && codec.kind != CodecKind::none && std::ranges::all_of(tensors, is_like_the_first);
}

std::unique_ptr<Work> CodecRun::start(const Collective& c, std::vector<GpuTensor> tensors) {
  return std::make_unique<GpuCompressedAllreduce>(*this, c, backend_.links(), backend_.exchange(c), std::move(tensors));
}

void CodecRun::watch() {
  while (!decodings_.empty() && decodings_[0].end->reached()) {
    const Decoding decoding = std::move(decodings_[0]);
    decodings_.erase(decodings_.begin());
    uint64_t word = 0;
    std::memcpy(&word, decoding.slot->data() + decoding.word_at, sizeof word);
    if (word == 0) continue;
    const size_t piece = size_t(word & 0xffffffff) - 1, node = size_t(word >> 32);
    throw Error(Code::internal, decoding.titles.at(piece) + ": host " + std::to_string(node) +
                                    " of the group sent compressed gradients that are none");
  }
}

}  // namespace lightcc

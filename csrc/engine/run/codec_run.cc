#include "engine/run/codec_run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "collective/phases.h"
#include "engine/run/gpu_residuals.h"

namespace lightcc {
namespace {

// Behind the messages of all nodes, in a slot and in the GPU's memory alike, is the word of a decoding.
constexpr size_t kWordBytes = DecodingErrors::kWordBytes;

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
        residuals_(run.cuda_, run.pool_, c_, exchange_->layout(), tensors_, links.node(), links.nodes(), streams_.in,
                   streams_.out),
        times_(c.timed) {}

  ~GpuCompressedAllreduce() override {
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
  const CompressedShard& shard(size_t t) const {
    return exchange_->layout().tensors[t].shards[0];  // the rank is alone on its host
  }
  size_t message_bytes(size_t part) const { return exchange_->message_bytes(part, 0); }
  size_t word_at(size_t part) const { return round_up(message_bytes(part) * size_t(links_.nodes())); }
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
    if (residuals_.step(layout_of(queued_).end)) return true;
    if (!residuals_.refused()) take_memory();
    if (residuals_.refused())
      refuse();
    else
      queue_encoding();
    residuals_.let_go(layout_of(queued_).end);
    ++queued_;
    return true;
  }

  void take_memory() {
    try {
      parts_[queued_].memory = static_cast<std::byte*>(streams_.out->allocate(word_at(queued_) + kWordBytes));
    } catch (const Error& error) {
      residuals_.refuse(layout_of(queued_).begin, error);
    }
  }

  // Pinned memory for the messages, where the exchange of later all-reduces may still find them.
  void lend_slot() {
    GpuPart& part = parts_[queued_];
    part.slot = run_.pool_.take(run_.cuda_, device_, word_at(queued_) + kWordBytes);
    exchange_->lend(queued_, 0, std::shared_ptr<std::byte>(part.slot, part.slot->data()));
  }

  void refuse() {
    lend_slot();
    exchange_->refuse(queued_, *residuals_.refused());
  }

  void queue_encoding() {
    lend_slot();
    GpuPart& part = parts_[queued_];
    residuals_.follow_allocations();
    const size_t message = message_bytes(queued_), own = message * size_t(links_.node());
    std::vector<CudaEncode> pieces;
    const Request* ordered = nullptr;
    for (size_t t = layout_of(queued_).begin; t < layout_of(queued_).end; ++t) {
      if (std::exchange(ordered, tensors_[t].request) != tensors_[t].request)
        tensors_[t].request->ready->order(device_, streams_.in);
      const CudaEncode piece =
          residuals_.encoding_of(t, CodecRoute::gpu, tensors_[t].input, part.memory + own + shard(t).body);
      if (piece.count > 0) pieces.push_back(piece);
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
    residuals_.used(layout_of(queued_).begin, layout_of(queued_).end, part.encoded);
  }

  // Bytes [begin, end).
  void copy(void* stream, std::byte* to, const std::byte* from, size_t begin, size_t end) const {
    if (begin == end) return;
    check(run_.cuda_.copy(device_, stream, to + begin, from + begin, end - begin), "copying messages");
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
      pieces.push_back(decoding_of(c_, shard(t), part.memory, message, links_.nodes(), tensors_[t].output));
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
    run_.errors_.expect(decoded, part.slot, word_at(p), std::move(titles));
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
  GpuResiduals residuals_;
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

}  // namespace lightcc

#include "collective/shared.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "collective/copy_collective.h"
#include "collective/shared_broadcast.h"
#include "device/device.h"

namespace lightcc {
namespace {

struct Part { size_t begin, count; };  // elements

// Shard v of an allreduce; borders on lines, so that no two owners write one.
Part shard(size_t count, int v, int size, size_t element) {
  size_t line = kLine / element;
  auto border = [&](int i) { return i == size ? count : std::min(count, round_up(count * i / size, line)); };
  return {border(v), border(v + 1) - border(v)};
}

std::byte* at(void* p, size_t bytes) { return static_cast<std::byte*>(p) + bytes; }
const std::byte* at(const void* p, size_t bytes) { return static_cast<const std::byte*>(p) + bytes; }

}  // namespace

SharedBackend::SharedBackend(LocalRanks& local_ranks, int group, int lane, std::vector<int> members,
                             std::vector<Link*> links)
    : local_ranks_(local_ranks),
      members_(std::move(members)),
      index_(int(std::find(members_.begin(), members_.end(), local_ranks.rank()) - members_.begin())),
      links_(std::move(links)),
      writer_(local_ranks.common_writer(group, lane, members_)) {
  for (int member : members_) readers_.push_back(local_ranks.common_reader(group, lane, member));
}

bool SharedBackend::accepts(const Collective& c) const {
  switch (c.kind) {
    case Kind::allreduce:
    case Kind::reducescatter: return c.op != ReduceOp::average && c.op != ReduceOp::adasum;
    case Kind::allgather:
    case Kind::broadcast:
    case Kind::alltoall: return true;
    default: return false;
  }
}

void SharedBackend::commit(size_t n) {
  writer_.commit(n);
  for (int member : members_)
    if (member != local_ranks_.rank()) local_ranks_.mark(member);
}
int SharedBackend::slowest_reader() const {
  const int reader = int(writer_.slowest_reader());  // among the others
  return reader < index_ ? reader : reader + 1;
}
void SharedBackend::consume(int member, size_t n) {
  readers_[member].consume(n);
  local_ranks_.mark(members_[member]);
}

bool OffsetExchange::step() {
  bool moved = false;
  if (offsets_.empty()) {
    std::byte* record = backend_.reserve(sizeof(ArenaOffsets));
    if (!record) return false;
    new (record) ArenaOffsets(own_);
    backend_.commit(sizeof(ArenaOffsets));
    offsets_.assign(backend_.members_.size(), own_);
    moved = true;
  }
  for (; !done(); ++seen_, moved = true) {
    if (seen_ == backend_.index_) continue;
    const std::byte* record = backend_.peek(seen_, sizeof(ArenaOffsets));
    if (!record) return moved;
    offsets_[size_t(seen_)] = *reinterpret_cast<const ArenaOffsets*>(record);
    backend_.consume(seen_, sizeof(ArenaOffsets));
  }
  return moved;
}

class FlatReduce : public Work {
 public:
  FlatReduce(SharedBackend& backend, const Collective& c)
      : backend_(backend), c_(c), bytes_(size_t(c.count) * size_of(c.dtype)), inputs_(c.size) {}

  bool step() override {
    bool moved = false;
    if (!inputs_[c_.index]) {
      std::byte* mine = backend_.reserve(bytes_);
      if (!mine) return false;
      stage(mine, c_.input, bytes_);
      backend_.commit(bytes_);
      inputs_[c_.index] = c_.input;
      moved = true;
    }
    for (; seen_ < c_.size; ++seen_, moved = true)
      if (seen_ != c_.index && !(inputs_[seen_] = backend_.peek(seen_, bytes_))) return moved;
    void* out = c_.output;
    reduce({c_.dtype, c_.op, c_.pre, c_.post}, {&out, 1}, inputs_, size_t(c_.count));
    for (int i = 0; i < c_.size; ++i)
      if (i != c_.index) backend_.consume(i, bytes_);
    done_ = true;
    return true;
  }
  bool done() const override { return done_; }
  int waiting_for() const override { return seen_; }

 private:
  SharedBackend& backend_;
  const Collective c_;
  size_t bytes_;
  std::vector<const void*> inputs_;
  int seen_ = 0;
  bool done_ = false;
};

// Direct and staged allreduce and reducescatter. Of the latter nothing is handed back.
class BlockReduce : public Work {
 public:
  // offsets: of all members, if they are known.
  BlockReduce(SharedBackend& backend, const Collective& c, std::vector<ArenaOffsets> offsets = {})
      : backend_(backend), c_(c), element_(size_of(c.dtype)), offsets_(std::move(offsets)) {
    size_t begin = 0;
    for (int v = 0; v < c_.size; ++v) {
      parts_.push_back(scatters() ? Part{begin, size_t(c_.counts[v])} : shard(size_t(c_.count), v, c_.size, element_));
      begin += parts_.back().count;
    }
    block_ = LocalRanks::kRecordBytes / element_;  // smaller blocks would overlap more, and yet are never faster
    cursors_.resize(c_.size);
    ins_.resize(c_.size);
    streams_ = !scatters() && c_.input != c_.output && outgrows_cache(begin * element_ * c_.size);
    tells_ = !scatters() || offsets_.empty();
    if (!offsets_.empty()) {
      choose_mode();
    } else if (scatters() && begin * element_ <= SharedBackend::kFlatBytes) {
      mode_ = staged;  // one hop, where direct takes two
    } else {
      exchange_.emplace(backend_, backend_.offsets_of(c_));
    }
  }

  bool step() override {
    switch (mode_) {
      case unknown: return agree();
      case direct: return step_direct();
      case staged: return step_staged();
    }
    return false;
  }
  bool done() const override { return done_; }
  int waiting_for() const override { return waiting_for_; }

 private:
  enum Mode { unknown, direct, staged };
  static constexpr size_t kAhead = 3;  // blocks that may be published before their results are taken: they fit a ring
  struct Cursors {
    size_t sent = 0, received = 0;      // elements of the part
    std::byte* records[kAhead] = {};    // where the blocks lie that were sent and not yet received
    bool seen = false;                  // that it has told
  };

  bool scatters() const { return c_.kind == Kind::reducescatter; }
  bool agree() {
    const bool moved = exchange_->step();
    waiting_for_ = exchange_->waiting_for();
    if (!exchange_->done()) return moved;
    offsets_ = exchange_->offsets();
    choose_mode();
    return true;
  }
  void choose_mode() {
    bool all = true, apart = true;
    for (auto& each : offsets_) {
      all = all && each.input >= 0 && (scatters() || each.output >= 0);
      apart = apart && each.input != each.output;
    }
    mode_ = all ? direct : staged;
    if (mode_ == direct) streams_ = streams_ && apart;
  }

  bool step_direct() {
    Part own = parts_[c_.index];
    if (reduced_ < own.count) {
      size_t n = std::min(block_, own.count - reduced_), from = (own.begin + reduced_) * element_;
      outs_.clear();
      for (int v = 0; v < c_.size; ++v) {
        std::byte* base = backend_.local_ranks_.base(backend_.members_[v]);
        ins_[v] = base + offsets_[v].input + from;
        if (!scatters()) outs_.push_back(base + offsets_[v].output + from);
      }
      if (scatters()) outs_.push_back(at(c_.output, reduced_ * element_));
      reduce({c_.dtype, c_.op, c_.pre, c_.post}, outs_, ins_, n, streams_ ? outs_.size() : 0);
      reduced_ += n;
      return true;
    }
    if (!tells_) return done_ = true;
    bool moved = false;
    if (!told_) {  // my part is read from all inputs and is in all outputs: say so, once
      if (!backend_.reserve(1)) return false;
      backend_.commit(1);
      told_ = moved = true;
    }
    for (int v = 0; v < c_.size; ++v) {
      if (v == c_.index || cursors_[v].seen) continue;
      waiting_for_ = v;
      if (!backend_.peek(v, 1)) return moved;
      backend_.consume(v, 1);
      cursors_[v].seen = moved = true;
    }
    done_ = true;
    return true;
  }

  bool step_staged() {
    bool moved = reduce_block(), finished = reduced_ == parts_[c_.index].count;
    for (int v = 0; v < c_.size; ++v) {
      if (v == c_.index) continue;
      moved |= publish_block(v) | receive_block(v);
      finished = finished && cursors_[v].sent == parts_[v].count && cursors_[v].received == parts_[v].count;
    }
    done_ = finished;
    return moved || finished;
  }
  bool publish_block(int v) {
    Part part = parts_[v];
    auto& [sent, received, records, seen] = cursors_[v];
    if (sent == part.count || (hands_back() && sent - received == kAhead * block_)) return false;
    size_t n = std::min(block_, part.count - sent);
    std::byte* record = backend_.links_[v]->reserve(n * element_);
    if (!record) return waiting_for_ = v, false;
    stage(record, at(c_.input, (part.begin + sent) * element_), n * element_);
    backend_.links_[v]->commit(n * element_);
    records[sent / block_ % kAhead] = record;
    sent += n;
    return true;
  }
  bool hands_back() const { return !scatters() && c_.size > 1; }
  // The result goes back into the very lines that the others published: they are in this core's cache already, and
  // nobody else ever reads them. Their owners leave them alone until they have taken it.
  bool reduce_block() {
    Part own = parts_[c_.index];
    if (reduced_ == own.count) return false;
    size_t n = std::min(block_, own.count - reduced_), from = (own.begin + reduced_) * element_;
    outs_.assign(1, at(c_.output, hands_back() ? from : reduced_ * element_));
    for (int v = 0; v < c_.size; ++v) {
      ins_[v] = v == c_.index ? at(c_.input, from) : backend_.links_[v]->peek(n * element_);
      if (!ins_[v]) return waiting_for_ = v, false;
      if (v != c_.index && hands_back()) outs_.push_back(const_cast<void*>(ins_[v]));
    }
    if (hands_back() && !backend_.reserve(1)) return false;
    reduce({c_.dtype, c_.op, c_.pre, c_.post}, outs_, ins_, n, streams_ ? 1 : 0);
    for (int v = 0; v < c_.size; ++v)
      if (v != c_.index) backend_.links_[v]->consume(n * element_);
    if (hands_back()) backend_.commit(1);
    reduced_ += n;
    return true;
  }
  bool receive_block(int v) {
    Part part = parts_[v];
    size_t& received = cursors_[v].received;
    if (scatters()) received = part.count;
    if (received == part.count) return false;
    size_t n = std::min(block_, part.count - received);
    if (!backend_.peek(v, 1)) return waiting_for_ = v, false;
    const std::byte* record = cursors_[v].records[received / block_ % kAhead];
    stage(at(c_.output, (part.begin + received) * element_), record, n * element_, streams_);
    backend_.consume(v, 1);
    received += n;
    return true;
  }

  SharedBackend& backend_;
  const Collective c_;
  size_t element_, block_;
  bool streams_ = false;  // outputs are not inputs, and no cache would keep them: past it they go
  Mode mode_ = unknown;
  std::vector<Part> parts_;
  std::vector<ArenaOffsets> offsets_;
  std::optional<OffsetExchange> exchange_;
  std::vector<Cursors> cursors_;
  std::vector<const void*> ins_;
  std::vector<void*> outs_;
  size_t reduced_ = 0;
  bool tells_ = true;     // the others when its own part is reduced; in 2D the all-gather says so
  bool told_ = false, done_ = false;
  int waiting_for_ = 0;
};

ArenaOffsets SharedBackend::offsets_of(const Collective& c) const {
  const Arena& arena = *local_ranks_.arena();
  if (c.kind == Kind::reducescatter) {
    const auto count = std::accumulate(c.counts.begin(), c.counts.end(), int64_t(0));
    return {arena.offset_of(c.input, size_t(count) * size_of(c.dtype)), -1};
  }
  const size_t bytes = size_t(c.count) * size_of(c.dtype);
  return {arena.offset_of(c.input, bytes), arena.offset_of(c.output, bytes)};
}

std::unique_ptr<Work> SharedBackend::start(const Collective& c, std::vector<ArenaOffsets> offsets) {
  return std::make_unique<BlockReduce>(*this, c, std::move(offsets));
}

std::unique_ptr<Work> SharedBackend::start(const Collective& c, const Algorithm*) {
  if (!accepts(c))
    throw Error(Code::internal, std::string(name_of(c.kind)) + " with op " + name_of(c.op) +
                                    " was given to shared memory");
  const bool is_large = size_t(c.count) * size_of(c.dtype) >= SharedBroadcast::kLeastBytes;
  if (c.kind == Kind::broadcast && c.size > 1 && is_large) return std::make_unique<SharedBroadcast>(*this, c);
  if (c.kind != Kind::allreduce && c.kind != Kind::reducescatter) return std::make_unique<CopyCollective>(*this, c);
  if (c.kind == Kind::allreduce && size_t(c.count) * size_of(c.dtype) <= kFlatBytes)
    return std::make_unique<FlatReduce>(*this, c);
  return std::make_unique<BlockReduce>(*this, c);
}

}  // namespace lightcc

#include "net/loop/loop.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <string>

#include "base/error.h"
#include "base/fd.h"

namespace lightcc {
namespace {

struct Record {
  struct Free {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{kLine}); }
  };
  explicit Record(size_t n) : data(new (std::align_val_t{kLine}) std::byte[n]), bytes(n) {}
  std::unique_ptr<std::byte[], Free> data;
  size_t bytes;
  const std::byte* lent = nullptr;            // in the sender's memory, not copied yet
  uint64_t number = 0;                        // of the sender's records here

  void take_back() {
    if (const std::byte* from = std::exchange(lent, nullptr)) std::memcpy(data.get(), from, bytes);
  }
};

// One link of two ranks.
struct Wire {
  std::deque<Record> records[2];              // to the lower rank, to the higher rank
};

// All that joins two ranks. Records are written and read outside the lock: a record belongs to one end.
struct Pair {
  std::mutex mutex;
  std::map<std::pair<int, int>, Wire> wires;  // by group and lane
  std::optional<int64_t> records_until_cut;
};

}  // namespace

struct LoopNetwork::Impl {
  struct Rank {
    Fd event{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};  // written by peers that have flushed
    std::optional<Error> ended;                        // under the mutex
  };
  Impl(int n, const LoopFaults& f) : size(n), faults(f), ranks(size_t(n)), pairs(size_t(n) * size_t(n)) {}
  Pair& pair(int a, int b) { return pairs[size_t(std::min(a, b)) * size_t(size) + size_t(std::max(a, b))]; }
  void signal(int rank) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(ranks[size_t(rank)].event.get(), &one, sizeof one);
  }

  const int size;
  const LoopFaults faults;
  std::mutex mutex;
  std::vector<Rank> ranks;
  std::vector<Pair> pairs;                             // [lower * size + higher]
  std::map<std::pair<int, int>, std::unique_ptr<Link>> links;  // that link() has handed out
};

class LoopNetwork::End : public Link, public BulkLink {
 public:
  // marked: what to set when the peer has to be told, or nullptr.
  End(Impl& network, int group, int lane, int me, int peer, char* marked)
      : pair_(network.pair(me, peer)), me_(me), peer_(peer), faults_(network.faults), marked_(marked) {
    std::lock_guard lock(pair_.mutex);
    Wire& wire = pair_.wires[{group, lane}];
    out_ = &wire.records[peer > me];
    in_ = &wire.records[me > peer];
    std::seed_seq seeds{faults_.seed, uint64_t(me), uint64_t(peer), uint64_t(group), uint64_t(lane)};
    random_.seed(seeds);
  }

  std::byte* reserve(size_t n) override {
    std::lock_guard lock(pair_.mutex);
    check("reserve a record to");
    if (n == 0 || n > faults_.record_bytes) fail("reserve " + std::to_string(n) + " bytes", "a record has 1 to " +
                                                 std::to_string(faults_.record_bytes));
    if (out_->size() >= faults_.capacity || chance(faults_.refuse)) return nullptr;
    reserved_.emplace(n);
    return reserved_->data.get();
  }

  void commit(size_t n) override {
    std::lock_guard lock(pair_.mutex);
    check("send to");
    if (!reserved_ || reserved_->bytes != n)
      fail("commit " + std::to_string(n) + " bytes",
           (reserved_ ? std::to_string(reserved_->bytes) : "none") + " are reserved");
    push_reserved();
  }

  const std::byte* peek(size_t n) override {
    std::lock_guard lock(pair_.mutex);
    check("receive from");
    if (in_->empty() || (!seen_ && chance(faults_.delay))) return nullptr;
    seen_ = true;
    if (in_->front().bytes != n)
      fail("receive " + std::to_string(n) + " bytes", std::to_string(in_->front().bytes) + " came");
    in_->front().take_back();  // as the wire would
    if (posted_.empty()) return shown();
    if (posted_.front().second != n)
      fail("receive " + std::to_string(n) + " bytes", std::to_string(posted_.front().second) + " were posted");
    std::memcpy(posted_.front().first, in_->front().data.get(), n);
    return posted_.front().first;
  }

  void consume(size_t n) override {
    std::lock_guard lock(pair_.mutex);
    check("receive from");
    if (!seen_ || in_->front().bytes != n) fail("consume " + std::to_string(n) + " bytes", "they were not seen");
    in_->pop_front();
    if (!posted_.empty()) posted_.pop_front();
    seen_ = false;
    shown_.reset();
    if (marked_) *marked_ = 1;
  }

  size_t record_bytes() const override { return faults_.record_bytes; }

  BulkLink* bulk() override { return this; }
  bool send_from(const std::byte* data, size_t n) override {
    if (!reserve(n)) return false;
    std::lock_guard lock(pair_.mutex);
    reserved_->lent = data;
    push_reserved();
    return true;
  }
  void post(std::byte* to, size_t n) override { posted_.emplace_back(to, n); }
  uint64_t lent() const override { return committed_; }
  size_t release_lent(uint64_t before) override {
    std::lock_guard lock(pair_.mutex);
    for (Record& record : *out_) {
      if (record.number >= before) break;
      if (record.lent) staged_ += record.bytes;
      record.take_back();
    }
    return std::exchange(staged_, 0);
  }
  size_t release() override {
    posted_.clear();
    return release_lent(committed_);
  }

 private:
  const std::byte* shown() {
    const Record& record = in_->front();
    if (!shown_) std::memcpy(shown_.emplace(record.bytes + 1).data.get() + 1, record.data.get(), record.bytes);
    return shown_->data.get() + 1;
  }
  void push_reserved() {
    reserved_->number = committed_++;
    out_->push_back(std::move(*reserved_));
    reserved_.reset();
    if (pair_.records_until_cut) --*pair_.records_until_cut;
    if (marked_) *marked_ = 1;
  }
  void check(const char* attempted) const {
    if (!pair_.records_until_cut || *pair_.records_until_cut > 0) return;
    throw Error(Code::peer_lost, "rank " + std::to_string(me_) + " cannot " + attempted + " rank " +
                                     std::to_string(peer_) + ": the link is cut");
  }
  [[noreturn]] void fail(const std::string& attempted, const std::string& instead) const {
    throw Error(Code::internal, "rank " + std::to_string(me_) + " tried to " + attempted +
                                    " on its link with rank " + std::to_string(peer_) + ", but " + instead);
  }
  bool chance(double probability) { return std::uniform_real_distribution<>()(random_) < probability; }

  Pair& pair_;
  std::deque<Record>* out_;
  std::deque<Record>* in_;
  const int me_, peer_;
  const LoopFaults& faults_;
  char* const marked_;
  std::mt19937_64 random_;          // each end has its own, so that a seed replays whatever the threads do
  std::optional<Record> reserved_;
  std::optional<Record> shown_;     // the next one to receive, at an odd address
  std::deque<std::pair<std::byte*, size_t>> posted_;
  uint64_t committed_ = 0;          // records
  size_t staged_ = 0;
  bool seen_ = false;               // the next record was shown by peek and stays visible
};

class LoopNetwork::RankTransport : public Transport {
 public:
  RankTransport(Impl& network, int rank) : network_(network), rank_(rank), marked_(size_t(network.size)) {}

  std::unique_ptr<Link> link(int group, int lane, int peer) override {
    return std::make_unique<End>(network_, group, lane, rank_, peer, &marked_[size_t(peer)]);
  }
  bool step() override {
    uint64_t count = 0;
    const bool signalled = read(descriptor(), &count, sizeof count) == sizeof count;
    std::lock_guard lock(network_.mutex);
    if (network_.ranks[size_t(rank_)].ended) return false;
    for (const auto& rank : network_.ranks)
      if (rank.ended) throw *rank.ended;
    return signalled;
  }
  void flush() override {
    for (int peer = 0; peer < network_.size; ++peer)
      if (std::exchange(marked_[size_t(peer)], 0)) network_.signal(peer);
  }
  int descriptor() const override { return network_.ranks[size_t(rank_)].event.get(); }
  // A fault passes without anybody saying so.
  uint64_t arm() override { return network_.faults.refuse > 0 || network_.faults.delay > 0 ? 1'000'000 : kForever; }
  bool busy() const override { return false; }
  void end(const Error& cause) override {
    std::lock_guard lock(network_.mutex);
    network_.ranks[size_t(rank_)].ended = cause;
    for (int peer = 0; peer < network_.size; ++peer) network_.signal(peer);
  }

 private:
  Impl& network_;
  const int rank_;
  std::vector<char> marked_;  // peers for which there is something new since the last flush
};

LoopNetwork::LoopNetwork(int size, const LoopFaults& faults) : impl_(std::make_unique<Impl>(size, faults)) {}

LoopNetwork::~LoopNetwork() = default;

std::unique_ptr<Transport> LoopNetwork::transport(int rank) { return std::make_unique<RankTransport>(*impl_, rank); }

Link* LoopNetwork::link(int from, int to) {
  if (from == to) return nullptr;
  std::lock_guard lock(impl_->mutex);
  auto& link = impl_->links[{from, to}];
  if (!link) link = std::make_unique<End>(*impl_, 0, 0, from, to, nullptr);
  return link.get();
}

std::vector<Link*> LoopNetwork::links(int from) {
  std::vector<Link*> all;
  for (int to = 0; to < impl_->size; ++to) all.push_back(link(from, to));
  return all;
}

void LoopNetwork::cut(int a, int b, int64_t records) {
  Pair& pair = impl_->pair(a, b);
  std::lock_guard lock(pair.mutex);
  pair.records_until_cut = records;
}

void LoopNetwork::lose(int rank) {
  for (int other = 0; other < impl_->size; ++other)
    if (other != rank) cut(rank, other);
}

}  // namespace lightcc

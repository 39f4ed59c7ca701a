#include "net/loop/loop.h"

#include <deque>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <string>

#include "base/error.h"

namespace lightcc {
namespace {

struct Record {
  struct Free {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{kLine}); }
  };
  explicit Record(size_t n) : data(new (std::align_val_t{kLine}) std::byte[n]), bytes(n) {}
  std::unique_ptr<std::byte[], Free> data;
  size_t bytes;
};

}  // namespace

// What two ranks share. Their records are written and read outside the lock: a record belongs to one end.
struct LoopTransport::Wire {
  std::mutex mutex;
  std::deque<Record> records[2];              // to the lower rank, to the higher rank
  std::optional<int64_t> records_until_cut;
};

class LoopTransport::End : public Link {
 public:
  End(Wire& wire, int me, int peer, const LoopFaults& faults)
      : wire_(wire), out_(wire.records[peer > me]), in_(wire.records[me > peer]), me_(me), peer_(peer),
        faults_(faults) {
    std::seed_seq seeds{faults.seed, uint64_t(me), uint64_t(peer)};
    random_.seed(seeds);
  }

  std::byte* reserve(size_t n) override {
    std::lock_guard lock(wire_.mutex);
    check("reserve a record to");
    if (n == 0 || n > faults_.record_bytes) fail("reserve " + std::to_string(n) + " bytes", "a record has 1 to " +
                                                 std::to_string(faults_.record_bytes));
    if (out_.size() >= faults_.capacity || chance(faults_.refuse)) return nullptr;
    reserved_.emplace(n);
    return reserved_->data.get();
  }

  void commit(size_t n) override {
    std::lock_guard lock(wire_.mutex);
    check("send to");
    if (!reserved_ || reserved_->bytes != n)
      fail("commit " + std::to_string(n) + " bytes",
           (reserved_ ? std::to_string(reserved_->bytes) : "none") + " are reserved");
    out_.push_back(std::move(*reserved_));
    reserved_.reset();
    if (wire_.records_until_cut) --*wire_.records_until_cut;
  }

  const std::byte* peek(size_t n) override {
    std::lock_guard lock(wire_.mutex);
    check("receive from");
    if (in_.empty() || (!seen_ && chance(faults_.delay))) return nullptr;
    seen_ = true;
    if (in_.front().bytes != n)
      fail("receive " + std::to_string(n) + " bytes", std::to_string(in_.front().bytes) + " came");
    return in_.front().data.get();
  }

  void consume(size_t n) override {
    std::lock_guard lock(wire_.mutex);
    check("receive from");
    if (!seen_ || in_.front().bytes != n) fail("consume " + std::to_string(n) + " bytes", "they were not seen");
    in_.pop_front();
    seen_ = false;
  }

  size_t record_bytes() const override { return faults_.record_bytes; }

 private:
  void check(const char* attempted) const {
    if (!wire_.records_until_cut || *wire_.records_until_cut > 0) return;
    throw Error(Code::peer_lost, "rank " + std::to_string(me_) + " cannot " + attempted + " rank " +
                                     std::to_string(peer_) + ": the link is cut");
  }
  [[noreturn]] void fail(const std::string& attempted, const std::string& instead) const {
    throw Error(Code::internal, "rank " + std::to_string(me_) + " tried to " + attempted +
                                    " on its link with rank " + std::to_string(peer_) + ", but " + instead);
  }
  bool chance(double probability) { return std::uniform_real_distribution<>()(random_) < probability; }

  Wire& wire_;
  std::deque<Record>& out_;
  std::deque<Record>& in_;
  const int me_, peer_;
  const LoopFaults faults_;
  std::mt19937_64 random_;          // each end has its own, so that a seed replays whatever the threads do
  std::optional<Record> reserved_;
  bool seen_ = false;               // the next record was shown by peek and stays visible
};

LoopTransport::LoopTransport(int size, const LoopFaults& faults) : size_(size), ends_(size_t(size) * size) {
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      Wire& wire = *wires_.emplace_back(std::make_unique<Wire>());
      ends_[a * size + b] = std::make_unique<End>(wire, a, b, faults);
      ends_[b * size + a] = std::make_unique<End>(wire, b, a, faults);
    }
}

LoopTransport::~LoopTransport() = default;

Link* LoopTransport::link(int from, int to) const { return ends_[from * size_ + to].get(); }

std::vector<Link*> LoopTransport::links(int from) const {
  std::vector<Link*> all;
  for (int to = 0; to < size_; ++to) all.push_back(link(from, to));
  return all;
}

void LoopTransport::cut(int a, int b, int64_t records) {
  // Wires stand in the order of (lower rank, higher rank).
  if (a > b) std::swap(a, b);
  Wire& wire = *wires_[size_t(a) * (2 * size_ - a - 1) / 2 + (b - a - 1)];
  std::lock_guard lock(wire.mutex);
  wire.records_until_cut = records;
}

void LoopTransport::lose(int rank) {
  for (int other = 0; other < size_; ++other)
    if (other != rank) cut(rank, other);
}

}  // namespace lightcc

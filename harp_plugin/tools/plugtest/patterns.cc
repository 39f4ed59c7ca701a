// Collectives as NCCL's proxy threads do them: slices of 1 MiB in a ring, of 128 KiB between pairs, 8 under way.
#include <algorithm>
#include <deque>
#include <memory>
#include <thread>

#include "harp_plugin/tools/plugtest/cases.h"
#include "harp_plugin/tools/plugtest/pair.h"

namespace harp::plugtest {

namespace {

constexpr size_t kRanks = 4, kDepth = 8;
constexpr size_t kRingSlice = 1 << 20, kPairSlice = 128 << 10;

// One direction of a rank: slices that are posted in order, at most kDepth at a time.
class Lane : public Requester {
 public:
  Lane(NetPlugin& plugin, void* communicator, bool sends, uint8_t* data, size_t bytes, size_t slice)
      : Requester(plugin), communicator_(communicator), sends_(sends), data_(data), bytes_(bytes), slice_(slice) {}
  bool over() const { return posted_ == bytes_ && under_way_.empty(); }
  void progress() {
    while (posted_ < bytes_ && under_way_.size() < kDepth) {
      const size_t size = std::min(slice_, bytes_ - posted_);
      void* request = sends_ ? try_send(communicator_, data_ + posted_, size)
                             : try_receive(communicator_, {{data_ + posted_, size}});
      if (!request) break;
      under_way_.push_back({request, size});
      posted_ += size;
    }
    while (!under_way_.empty()) {
      int over = 0, size = 0;
      expect_ok(plugin_->test(under_way_.front().first, &over, &size), sends_ ? "sending" : "receiving");
      if (!over) return;
      expect(static_cast<size_t>(size) == under_way_.front().second, "a slice has another size than was posted");
      under_way_.pop_front();
    }
  }

 private:
  void* communicator_;
  bool sends_;
  uint8_t* data_;
  size_t bytes_, slice_, posted_ = 0;
  std::deque<std::pair<void*, size_t>> under_way_;
};

void drive(std::vector<Lane>& lanes) {
  wait_until(
      [&] {
        for (Lane& lane : lanes) lane.progress();
        return std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.over(); });
      },
      "slices to be exchanged");
}

// Each body is a rank in a thread of its own.
void with_ranks(const std::function<void(size_t rank)>& body) {
  std::vector<std::string> faults(kRanks);
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        faults[rank] = "rank " + std::to_string(rank) + ": " + error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& fault : faults) expect(fault.empty(), fault);
}

void ring_all_reduce(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  std::vector<std::unique_ptr<Pair>> to_next;  // [rank]: from it to the next
  for (size_t i = 0; i < kRanks; ++i) to_next.push_back(std::make_unique<Pair>(plugin, plugin.context));
  constexpr size_t kCount = 5'000'001 / kRanks * kRanks, kChunk = kCount / kRanks;
  const auto value = [&](size_t rank, size_t i) { return static_cast<uint32_t>(i * 2654435761u * (rank + 1)); };
  with_ranks([&](size_t rank) {
    std::vector<uint32_t> data(kCount), incoming(kChunk);
    for (size_t i = 0; i < kCount; ++i) data[i] = value(rank, i);
    const auto step = [&](size_t sent, size_t received, bool reduce) {
      auto* from = reinterpret_cast<uint8_t*>(&data[sent * kChunk]);
      auto* to = reinterpret_cast<uint8_t*>(reduce ? incoming.data() : &data[received * kChunk]);
      constexpr size_t kBytes = kChunk * sizeof(uint32_t);
      std::vector<Lane> lanes = {
          {plugin, to_next[(rank + kRanks - 1) % kRanks]->receiver, false, to, kBytes, kRingSlice},
          {plugin, to_next[rank]->sender, true, from, kBytes, kRingSlice}};
      drive(lanes);
      for (size_t i = 0; reduce && i < kChunk; ++i) data[received * kChunk + i] += incoming[i];
    };
    for (size_t n = 0; n + 1 < kRanks; ++n)
      step((rank + kRanks - n) % kRanks, (rank + 2 * kRanks - n - 1) % kRanks, true);
    for (size_t n = 0; n + 1 < kRanks; ++n)
      step((rank + kRanks - n + 1) % kRanks, (rank + 2 * kRanks - n) % kRanks, false);
    for (size_t i = 0; i < kCount; ++i) {
      uint32_t sum = 0;
      for (size_t other = 0; other < kRanks; ++other) sum += value(other, i);
      expect(data[i] == sum, "the sum is wrong at " + std::to_string(i));
    }
  });
}

void all_to_all(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  std::vector<std::unique_ptr<Pair>> pairs;  // [from * kRanks + to]
  for (size_t i = 0; i < kRanks * kRanks; ++i) pairs.push_back(std::make_unique<Pair>(plugin, plugin.context));
  constexpr size_t kBytes = 3'000'017;
  with_ranks([&](size_t rank) {
    std::vector<Bytes> out, in(kRanks, Bytes(kBytes));
    for (size_t to = 0; to < kRanks; ++to) out.push_back(pattern(kBytes, settings.seed + rank * kRanks + to));
    std::vector<Lane> lanes;
    for (size_t other = 0; other < kRanks; ++other) {
      lanes.emplace_back(plugin, pairs[other * kRanks + rank]->receiver, false, in[other].data(), kBytes, kPairSlice);
      lanes.emplace_back(plugin, pairs[rank * kRanks + other]->sender, true, out[other].data(), kBytes, kPairSlice);
    }
    drive(lanes);
    for (size_t from = 0; from < kRanks; ++from)
      expect(in[from] == pattern(kBytes, settings.seed + from * kRanks + rank), "what came was changed");
  });
}

}  // namespace

const std::vector<Case>& pattern_cases() {
  static const std::vector<Case> all = {{"ring-all-reduce", ring_all_reduce}, {"all-to-all", all_to_all}};
  return all;
}

}  // namespace harp::plugtest

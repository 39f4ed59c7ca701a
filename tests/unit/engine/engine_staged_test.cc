// Tensors of GPUs that go through the host: large ones of every kind go there in slices, and pinned memory is kept, but
// not more of it than it may be, and not after the end. The GPUs are doubles (gpus.h).
#include <algorithm>
#include <numeric>

#include "engine/negotiate/control/fusion.h"
#include "labels.h"
#include "unit/gpus.h"

LABEL(on_hosts, "Staged.WhoHasJoined*");
LABEL(as_placed, "Staged.*-Staged.WhoHasJoined*");

namespace lightcc {
namespace {

using namespace test;

constexpr size_t kSlotFloats = kStagedSlotBytes / sizeof(float);
constexpr int64_t kLargeRows = int64_t(kSlotFloats / 4);  // of a block, of which a slot holds no two with their outputs

// Element i of what rank `from` has for rank `to`.
float value_of(int from, int to, size_t i) { return float(1000 * from + 100 * to) + float(i % 89); }

class Staged : public GpuTest {
 protected:
  Staged() { config_.nccl = false; }

  // One block behind the other, each of rank `from`: for rank 0, rank 1, ...
  void number(GpuTensor& tensor, int from, const std::vector<size_t>& counts) {
    std::vector<float> values;
    for (size_t to = 0; to < counts.size(); ++to)
      for (size_t i = 0; i < counts[to]; ++i) values.push_back(value_of(from, int(to), i));
    ASSERT_EQ(values.size(), tensor.count);
    cuda_.run(tensor.device, tensor.stream, "a kernel", {{tensor.data, values.size() * sizeof(float), true}},
              [values, to = tensor.data] { move_bytes(to, values.data(), values.size() * sizeof(float)); });
  }
  // What a rank is to have: block after block, of those that this function names.
  static std::vector<float> blocks(const std::vector<size_t>& counts, const std::function<float(int, size_t)>& value) {
    std::vector<float> values;
    for (size_t block = 0; block < counts.size(); ++block)
      for (size_t i = 0; i < counts[block]; ++i) values.push_back(value(int(block), i));
    return values;
  }
  uint64_t pins() const { return cuda_.calls("pin"); }

  // Blocking, as a program does it, and to the end of what its stream has; tensors of so many floats a rank.
  void run_one(Engine& engine, int rank, void* stream, Kind kind, size_t count) {
    GpuTensor x(*this, rank, count, stream);
    x.fill(1);
    const bool is_in_place = kind == Kind::allreduce || kind == Kind::broadcast;
    const auto one = is_in_place ? on_gpu(engine, kind, "x", {&x}, {&x}) : on_gpu(engine, kind, "x", {&x}, {});
    if (kind == Kind::broadcast) one->what.root = 0;
    EXPECT_EQ(negotiated(engine, one), Code::ok) << one->text;
    if (!is_in_place) taken(*one);
    cuda_.synchronize(rank, stream);
  }
};

constexpr Kind kOfData[] = {Kind::allreduce, Kind::broadcast, Kind::allgather, Kind::alltoall, Kind::reducescatter};

TEST_F(Staged, LargeOnesOfEveryKindAreRight) {
  const std::vector<std::vector<int>> all = kWatched ? std::vector<std::vector<int>>{{2, 1}}
                                                     : std::vector<std::vector<int>>{{1}, {2}, {3}, {1, 1}, {2, 1}};
  for (const std::vector<int>& hosts : all) {
    Ranks ranks(hosts, config_);
    const size_t n = size_t(ranks.size());
    SCOPED_TRACE(testing::Message() << hosts.size() << " hosts, " << n << " ranks");
    ranks.each([&](Engine& engine, int rank) {
      void* stream = stream_of(rank);
      // Rank 1 gathers nothing, the last one most.
      const auto gathered_of = [](int r) { return r == 1 ? size_t(0) : size_t(kLargeRows) * size_t(r + 1) + 3; };
      std::vector<size_t> counts;
      for (size_t r = 0; r < n; ++r) counts.push_back(gathered_of(int(r)));
      GpuTensor own(*this, rank, counts[size_t(rank)], stream);
      number(own, rank, {counts[size_t(rank)]});
      auto one = done(engine, on_gpu(engine, Kind::allgather, "g", {&own}, {}));
      EXPECT_EQ(taken(*one), blocks(counts, [](int r, size_t i) { return value_of(r, 0, i); }));

      // From rank r to rank v.
      const auto sent = [&](int r, int v) {
        return (r + v) % 3 == 1 ? size_t(5) : size_t(kLargeRows) + size_t(1000 * r + 7 * v);
      };
      std::vector<size_t> out, in;
      for (int v = 0; v < int(n); ++v) out.push_back(sent(rank, v)), in.push_back(sent(v, rank));
      GpuTensor mine(*this, rank, size_t(std::accumulate(out.begin(), out.end(), size_t(0))), stream);
      number(mine, rank, out);
      one = on_gpu(engine, Kind::alltoall, "a", {&mine}, {});
      one->what.splits.assign(out.begin(), out.end());
      done(engine, one);
      EXPECT_EQ(taken(*one), blocks(in, [&](int r, size_t i) { return value_of(r, rank, i); }));

      std::vector<size_t> parts(n, size_t(2 * kLargeRows));
      parts[0] += n > 1;  // the first ranks get one row more
      GpuTensor summed(*this, rank, size_t(std::accumulate(parts.begin(), parts.end(), size_t(0))), stream);
      number(summed, rank, parts);
      one = done(engine, on_gpu(engine, Kind::reducescatter, "r", {&summed}, {}));
      EXPECT_EQ(taken(*one), blocks({parts[size_t(rank)]}, [&](int, size_t i) {
        float sum = 0;
        for (int r = 0; r < int(n); ++r) sum += value_of(r, rank, i);
        return sum;
      }));
    });
  }
}

TEST_F(Staged, WhoHasJoinedTakesPartInSlices) {
  Ranks ranks(3, config_);
  ranks.each([&](Engine& engine, int rank) {
    if (rank < 2) {
      void* stream = stream_of(rank);
      GpuTensor x(*this, rank, size_t(6 * kLargeRows), stream);
      x.fill(1);
      auto one = done(engine, on_gpu(engine, Kind::allgather, "g", {&x}, {}));
      EXPECT_EQ(taken(*one), std::vector<float>(2 * x.count, 1));
      one = done(engine, on_gpu(engine, Kind::reducescatter, "r", {&x}, {}));
      EXPECT_EQ(taken(*one), std::vector<float>(x.count / 3, 2));
    }
    auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
    engine.submit(join, true);
    EXPECT_EQ(finish(engine, join), Code::ok);
  });
}

TEST_F(Staged, ASmallOneThatIsRepeatedPinsNothing) {
  Ranks ranks(2, config_);
  for (const Kind kind : kOfData) {
    ranks.each([&](Engine& engine, int rank) { run_one(engine, rank, stream_of(rank), kind, 256); });
    const uint64_t before = pins();
    for (int again = 0; again < 20; ++again)
      ranks.each([&](Engine& engine, int rank) { run_one(engine, rank, stream_of(rank), kind, 256); });
    EXPECT_EQ(pins(), before) << name_of(kind);
  }
  EXPECT_EQ(cuda_.calls("unpin"), 0u);
  EXPECT_LE(cuda_.pinned_bytes(), size_t(2 * 2) * (64 << 10));
}

// In four slots a rank, whatever their kind.
TEST_F(Staged, LargeOnesThatAreRepeatedPinLittle) {
  Ranks ranks(2, config_);
  for (int again = 0; again < (kWatched ? 2 : 6); ++again)
    for (const Kind kind : kOfData)
      ranks.each([&](Engine& engine, int rank) { run_one(engine, rank, stream_of(rank), kind, 3 * kSlotFloats); });
  EXPECT_LE(pins(), 2u * 2 * 4) << "of 4 MiB, and then of 8";
  EXPECT_EQ(cuda_.calls("unpin"), 0u);
  EXPECT_LE(cuda_.pinned_bytes(), 2 * 4 * (kStagedSliceBytes + kStagedSlotBytes));
}

// Adasum is never cut.
TEST_F(Staged, NoMoreIsKeptThanItMayBe) {
  config_.pinned_bytes = 1 << 20;
  Ranks ranks(2, config_);
  const size_t most = 2 * size_t(config_.pinned_bytes);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, kSlotFloats + 1000, stream);
    x.fill(1);
    for (int i = 0; i < 3; ++i) {
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->what.op = ReduceOp::adasum;
      done(engine, one);
    }
    run_one(engine, rank, stream, Kind::alltoall, 2 * kSlotFloats);
  });
  EXPECT_GT(pins(), 0u);
  for (uint64_t deadline = now_ns() + kPatienceNs; cuda_.pinned_bytes() > most && now_ns() < deadline;)
    ranks.each([&](Engine& engine, int) { done(engine, request(engine, Kind::barrier, "", {})); });
  EXPECT_LE(cuda_.pinned_bytes(), most);
}

TEST_F(Staged, AllIsGivenBackAtTheEnd) {
  for (const bool in_peace : {true, false}) {
    {
      Ranks ranks(2, config_);
      ranks.each([&](Engine& engine, int rank) {
        for (const Kind kind : kOfData) run_one(engine, rank, stream_of(rank), kind, 3 * kSlotFloats);
      });
      EXPECT_GT(cuda_.pinned_bytes(), 0u);
      if (!in_peace) ranks[1].abort("it is over");
    }
    EXPECT_EQ(cuda_.pinned_bytes(), 0u) << (in_peace ? "after shutdown" : "after a failure");
  }
}

// Callbacks take longer than small copies, so there is but the one that says that the data have come.
TEST_F(Staged, ASmallOneAsksForOneCallback) {
  constexpr int kTimes = 10;
  Ranks ranks(2, config_);
  for (const Kind kind : kOfData) {
    const uint64_t before = cuda_.calls("call");
    for (int again = 0; again < kTimes; ++again)
      ranks.each([&](Engine& engine, int rank) { run_one(engine, rank, stream_of(rank), kind, 256); });
    const uint64_t who_sends = kind == Kind::broadcast ? 1 : 2;
    EXPECT_EQ(cuda_.calls("call") - before, kTimes * who_sends) << name_of(kind);
  }
}

// As many as there are slots, and more; each stream has work that holds its tensors up.
TEST_F(Staged, ManyAtATimeWaitForSlots) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<std::unique_ptr<GpuTensor>> tensors;
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < 12; ++i) {
      tensors.push_back(std::make_unique<GpuTensor>(*this, rank, i % 3 ? 300 : kSlotFloats, stream_of(rank)));
      tensors[i]->fill(float(i));
      auto one = i % 2 ? on_gpu(engine, Kind::allgather, std::to_string(i), {tensors[i].get()}, {})
                       : on_gpu(engine, Kind::allreduce, std::to_string(i), {tensors[i].get()}, {tensors[i].get()});
      requests.push_back(one);
      engine.submit(one, false);
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
      if (i % 2)
        EXPECT_EQ(taken(*requests[i]), std::vector<float>(2 * tensors[i]->count, float(i)));
      else
        EXPECT_EQ(tensors[i]->read(), std::vector<float>(tensors[i]->count, float(2 * i)));
    }
  });
}

}  // namespace
}  // namespace lightcc

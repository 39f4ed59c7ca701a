// Compressed all-reduces whose messages a GPU makes (engine/run/codec_run.h): bit by bit what the CPU's come to,
// outputs and what is left behind, whatever happens in between. The GPUs are doubles (gpus.h), which run the kernels'
// own code.
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "device/float32.h"
#include "labels.h"
#include "unit/gpus.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;
using Floats = std::vector<float>;

constexpr Codec kTopK{CodecKind::topk, DType::float32, 0.02};
constexpr Codec kInt8{CodecKind::int8, DType::int8};

// Values as gradients have them, of a step, a rank and a tensor; some equal, some zero.
Floats gradient(int step, int rank, size_t tensor, size_t count) {
  std::mt19937_64 random(uint64_t(step) * 1'000'003 + uint64_t(rank) * 1'009 + tensor + 17 * count);
  std::normal_distribution<float> normal(0, 1 + float(step % 3));
  Floats values(count);
  for (float& value : values) value = random() % 8 == 0 ? float(int(random() % 5) - 2) : normal(random);
  return values;
}

class GpuCodec : public GpuTest {
 protected:
  GpuCodec() {
    config_.gpu_compression = true;
    config_.nccl = false;
  }

  // Memory of a GPU or of the host, with values of any dtype.
  struct Memory {
    GpuTest& gpus;
    CudaDouble& cuda;
    DevicePlace place;
    DType dtype;
    size_t count;
    std::byte* data;
    std::vector<std::byte> own;
    Memory(GpuTest& gpus_, CudaDouble& cuda_, DevicePlace place_, DType dtype_, size_t count_)
        : gpus(gpus_), cuda(cuda_), place(place_), dtype(dtype_), count(count_) {
      if (place.kind == DeviceKind::cpu) own.resize(bytes() + 1);
      data = place.kind == DeviceKind::cpu
                 ? own.data()
                 : static_cast<std::byte*>(cuda.allocate(place.device, bytes() + 1));
    }
    ~Memory() {
      if (place.kind == DeviceKind::cpu) return;
      cuda.synchronize(place.device, place.stream);
      cuda.release(data);
    }
    Memory(const Memory&) = delete;
    size_t bytes() const { return count * size_of(dtype); }
    void write(const Floats& values) {
      std::vector<std::byte> raw(bytes());
      from_float32(dtype, values.data(), raw.data(), count);
      if (place.kind == DeviceKind::cpu || count == 0) return void(std::copy(raw.begin(), raw.end(), own.begin()));
      cuda.run(place.device, place.stream, "a kernel", {{data, raw.size(), true}},
               [raw, to = data] { move_bytes(to, raw.data(), raw.size()); });
    }
    std::vector<std::byte> read() {
      if (place.kind == DeviceKind::cpu) return {own.begin(), own.begin() + long(bytes())};
      return cuda.read(place.device, place.stream, data, bytes());
    }
  };
  struct Exchange {  // of one name: its tensors, and what is left behind of them
    std::string name;
    std::vector<std::unique_ptr<Memory>> in, out;
    RequestPtr request;
  };
  using Left = std::map<std::string, std::vector<std::shared_ptr<Residual>>>;  // by name

  struct Form {
    Codec codec = kTopK;
    DType dtype = DType::float32;
    std::vector<std::vector<size_t>> counts{{1000}};  // by request and tensor
    double pre = 1, post = 1;
    bool in_place = true;
    int group = 0;
  };

  // One step of all requests of a form, all in flight at a time. Returns all outputs, one behind the other.
  std::vector<std::byte> step_of(Engine& engine, Left& left, const Form& form, DevicePlace place, int step,
                                 const std::string& prefix, Code expected = Code::ok) {
    std::vector<Exchange> exchanges;
    for (size_t r = 0; r < form.counts.size(); ++r) {
      Exchange& one = exchanges.emplace_back();
      one.name = prefix + std::to_string(r);
      RequestForm made(Kind::allreduce, one.name.c_str(), form.group);
      auto& residuals = left[one.name];
      residuals.resize(form.counts[r].size());
      for (size_t t = 0; t < form.counts[r].size(); ++t) {
        const size_t count = form.counts[r][t];
        one.in.push_back(std::make_unique<Memory>(*this, cuda_, place, form.dtype, count));
        one.in[t]->write(values_(step, engine.world().rank, r * 10 + t, count));
        if (!form.in_place) one.out.push_back(std::make_unique<Memory>(*this, cuda_, place, form.dtype, count));
        Memory& out = form.in_place ? *one.in[t] : *one.out[t];
        made.add_tensor({form.dtype, {int64_t(count)}}, one.in[t]->data, out.data);
        if (!residuals[t]) residuals[t] = std::make_shared<Residual>();
      }
      made.what.codec = form.codec;
      made.what.pre = form.pre, made.what.post = form.post;
      made.what.device = place.kind;
      made.place = place;
      made.residuals = {residuals.begin(), residuals.end()};
      one.request = std::make_shared<Request>(std::move(made));
      engine.submit(one.request, false);
    }
    std::vector<std::byte> outputs;
    for (Exchange& one : exchanges) {
      EXPECT_EQ(finish(engine, one.request), expected) << one.request->text;
      texts_[size_t(engine.world().rank)] = one.request->text;
      for (auto& memory : form.in_place ? one.in : one.out) {
        const auto bytes = memory->read();
        outputs.insert(outputs.end(), bytes.begin(), bytes.end());
      }
    }
    return outputs;
  }

  // What is left behind, of all tensors, one behind the other.
  static Floats left_behind(const Left& left, const std::string& prefix) {
    Floats all;
    for (const auto& [name, residuals] : left) {
      if (!name.starts_with(prefix)) continue;
      for (const auto& residual : residuals) {
        const HeldResidual held(residual);
        for (const ResidualPiece& piece : held->pieces())
          for (const bool velocity : {false, true}) {
            Floats room;
            const Floats& values = values_of(piece, velocity, &room);
            all.insert(all.end(), values.begin(), values.end());
          }
      }
    }
    return all;
  }
  static void expect_equal(const Floats& a, const Floats& b, const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    if (!a.empty()) { EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what; }
  }
  DevicePlace gpu(int device) { return {DeviceKind::cuda, device, stream_of(device)}; }

  // A step by both ways, which must agree.
  void compare_step(Engine& engine, Left& left, const Form& form, DevicePlace place, int step,
                    const std::string& what = "") {
    const auto mine = step_of(engine, left, form, place, step, "gpu" + what);
    const auto other = step_of(engine, left, form, {}, step, "cpu" + what);
    EXPECT_TRUE(mine == other) << what << ", step " << step << ", rank " << engine.world().rank;
  }
  void compare_left(const Left& left, const std::string& what = "") {
    expect_equal(left_behind(left, "gpu" + what), left_behind(left, "cpu" + what), what);
  }

  std::function<Floats(int step, int rank, size_t tensor, size_t count)> values_ = gradient;
  std::vector<std::string> texts_ = std::vector<std::string>(8);  // of the last failures, by rank
};

const std::vector<std::vector<size_t>> kCounts{{1, 1000, 0}, {70'001}, {33}, {257, 4096}};

TEST_F(GpuCodec, GivesTheBitsOfTheCpu) {
  struct Case {
    const char* name;
    Codec codec;
    DType dtype = DType::float32;
    double pre = 1, post = 1;
    bool in_place = true;
  };
  const Case cases[] = {{"topk", kTopK},
                        {"int8", kInt8, DType::float32, 0.25, 0.5},
                        {"topk16", {CodecKind::topk, DType::float16, 0.1}, DType::float32, 1, 1.0 / 3, false},
                        {"momentum", {CodecKind::topk, DType::float32, 0.05, 0.5}, DType::bfloat16, 2},
                        {"half", kTopK, DType::float16, 1, 0.5},
                        {"int8half", kInt8, DType::float16, 1, 1, false},
                        {"all", {CodecKind::topk, DType::float16, 0.6}}};
  for (const std::vector<int>& hosts : {std::vector<int>{1, 1}, {1, 1, 1}}) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      const DevicePlace place = gpu(rank);
      Left left;
      for (const Case& one : cases) {
        const Form form{one.codec, one.dtype, kCounts, one.pre, one.post, one.in_place};
        for (int step = 0; step < (kWatched ? 2 : 4); ++step) {
          compare_step(engine, left, form, place, step, one.name);
          if (step % 3 == 0) compare_left(left, one.name);
        }
        for (const auto& residual : left[std::string("gpu") + one.name + "1"]) EXPECT_TRUE(residual->on_gpu());
        for (const auto& residual : left[std::string("cpu") + one.name + "1"]) EXPECT_FALSE(residual->on_gpu());
      }
    });
  }
  EXPECT_GT(cuda_.calls("decode"), 0u);
}

// Sums that are not finite reach all, and are not left behind.
TEST_F(GpuCodec, WhatIsNotFiniteIsAsOnTheCpu) {
  values_ = [](int step, int rank, size_t tensor, size_t count) {
    Floats values = gradient(step, rank, tensor, count);
    if (step == 1 && rank == 1) values[count / 2] = std::nanf("");
    if (step == 2 && rank == 0) values[count - 1] = INFINITY;
    if (step == 3) std::ranges::fill(values, -0.0f);
    if (step == 4) std::ranges::fill(values, 1e-42f);
    return values;
  };
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const DevicePlace place = gpu(rank);
    Left left;
    for (int step = 0; step < 6; ++step)
      for (const Codec& codec : {kTopK, kInt8}) {
        compare_step(engine, left, {codec, DType::float32, {{900, 5}}}, place, step, codec == kInt8 ? "i" : "t");
        compare_left(left);
      }
  });
}

TEST_F(GpuCodec, MessagesAloneCrossTheBus) {
  constexpr size_t kCount = 3'000'000;
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.001}, DType::float32, {{kCount}}};
    for (int step = 0; step < 2; ++step) step_of(engine, left, form, gpu(rank), step, "x");
  });
  EXPECT_EQ(cuda_.calls("encode"), 2u * 2) << "3 M elements are one part";
  EXPECT_LT(cuda_.pinned_bytes(), 2 * (9u << 20)) << "two slots for the first values of a residual, and messages";
  EXPECT_EQ(cuda_.calls("call"), 2u * 2) << "the engine is rung when the own message is there, and not again";
}

TEST_F(GpuCodec, ProcessSetsThatCrossEachOther) {
  Ranks ranks(std::vector<int>{1, 1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const int first = add_group(engine, {0, 1}), second = add_group(engine, {1, 2});
    const DevicePlace place = gpu(rank);
    Left left;
    for (int step = 0; step < 4; ++step) {
      if (rank < 2) compare_step(engine, left, {kTopK, DType::float32, kCounts, 1, 1, true, first}, place, step, "a");
      if (rank > 0) compare_step(engine, left, {kInt8, DType::float32, kCounts, 1, 1, true, second}, place, step, "b");
      compare_step(engine, left, {kTopK, DType::float32, {{5000}}}, place, step, "w");
    }
    compare_left(left);
  });
}

// A rank that has joined needs no GPU: it takes part from host memory, with what it has left behind on its GPU.
TEST_F(GpuCodec, WhoHasJoinedTakesPartWithWhatItHasLeftBehind) {
  Ranks ranks(std::vector<int>{1, 1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const DevicePlace place = gpu(rank);
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.05, 0.5}, DType::float32, {{3000}, {20}}};
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step < (rank == 2 ? 2 : 5); ++step) compare_step(engine, left, form, place, step);
      auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
      engine.submit(join, true);
      EXPECT_EQ(finish(engine, join), Code::ok);
      compare_left(left);
    }
  });
}

// From one GPU to another, to the CPU and back; and from one epoch to the next, of more or fewer hosts.
TEST_F(GpuCodec, WhatIsLeftBehindGoesWithItsTensor) {
  std::vector<Left> lefts(3);
  int step = 0;
  for (const std::vector<int>& hosts : {std::vector<int>{1, 1, 1}, {1, 1}, {1, 1, 1}}) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left& left = lefts[size_t(rank)];
      const DevicePlace places[] = {gpu(rank), gpu(rank + 3), {}, gpu(rank)};
      int now = step;
      for (const DevicePlace& place : places)
        for (int again = 0; again < 2; ++again)
          compare_step(engine, left, {kTopK, DType::float32, {{3000, 70}, {5000}}}, place, now++, "small");
      const Form large{kTopK, DType::float32, {{1'060'000}}};  // more than a slot has
      if (hosts.size() == 2)
        for (const DevicePlace& place : places) compare_step(engine, left, large, place, now++, "large");
      compare_left(left, "small");
      compare_left(left, "large");
    });
    step += 12;
  }
}

// As a checkpoint does it (api/codecs.cc), on other hosts than before.
TEST_F(GpuCodec, WhatWasSavedIsTakenIn) {
  std::map<std::string, std::vector<SavedPart>> saved;  // of the GPU's, all ranks'
  std::mutex mutex;
  const Form form{{CodecKind::topk, DType::float32, 0.05, 0.5}, DType::float32, {{3000}}};
  {
    Ranks ranks(std::vector<int>{1, 1, 1}, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      for (int step = 0; step < 3; ++step) compare_step(engine, left, form, gpu(rank), step);
      for (const auto& [name, residuals] : left) {
        const HeldResidual held(residuals[0]);
        for (const bool velocity : {false, true}) {
          Floats room;
          const ResidualPiece& piece = held->pieces()[0];
          std::lock_guard lock(mutex);
          saved[name].push_back({velocity, held->node(), piece.first, values_of(piece, velocity, &room)});
        }
      }
    });
  }
  for (auto& [name, parts] : saved) std::ranges::stable_sort(parts, {}, &SavedPart::node);  // the sum has an order
  for (const bool is_known : {false, true}) {  // whether there is something on the GPU when it is loaded
    Ranks ranks(std::vector<int>{1, 1}, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      const DevicePlace place = gpu(rank);
      if (is_known) compare_step(engine, left, form, place, 9);
      for (const auto& [name, parts] : saved) {
        if (!left.contains(name)) left[name] = {std::make_shared<Residual>()};
        const HeldResidual held(left[name][0]);
        for (const SavedPart& part : parts) held->add_saved(3000, part);
      }
      for (int step = 0; step < 3; ++step) compare_step(engine, left, form, place, step);
      compare_left(left);
    });
  }
}

// A checkpoint is read while gradients are on their way: each reading is whole, and no exchange is disturbed.
TEST_F(GpuCodec, IsReadWhileItIsExchanged) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{kTopK, DType::float32, {{40'000}, {40'000}, {7}}};
    compare_step(engine, left, form, gpu(rank), 0);
    std::atomic<bool> is_over{false};
    std::thread reader([&, copy = left] {
      while (!is_over) left_behind(copy, "gpu");
    });
    for (int step = 1; step < 6; ++step) compare_step(engine, left, form, gpu(rank), step);
    is_over = true;
    reader.join();
    compare_left(left);
  });
}

TEST_F(GpuCodec, EachRankChoosesForItself) {
  std::vector<Config> configs(3, config_);
  configs[1].gpu_compression = false;
  cuda_.fail("load_codecs", 1);  // of rank 0 or 2
  Ranks ranks({1, 1, 1}, configs);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 3; ++step) compare_step(engine, left, {kTopK, DType::float32, kCounts}, gpu(rank), step);
    compare_left(left);
  });
  EXPECT_GT(cuda_.calls("encode"), 0u);
}

TEST_F(GpuCodec, WhatHasNoKernelsGoesThroughTheHost) {
  const auto run_it = [&](const std::vector<int>& hosts, const Codec& codec, const Config& config) {
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      compare_step(engine, left, {codec, DType::float32, {{3000}}}, gpu(rank), 0);
    });
  };
  run_it({1, 1}, {CodecKind::int4, DType::int8}, config_);
  run_it({2, 1}, kTopK, config_);
  Config off = config_;
  off.gpu_compression = false;
  run_it({1, 1}, kTopK, off);
  EXPECT_EQ(cuda_.calls("encode"), 0u);
}

TEST_F(GpuCodec, NoMemoryIsAnErrorOfThatAllreduceOnAllRanks) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  Left lefts[2];
  std::string errors[2];
  for (const int call : {1, 2, 3, 4}) {  // of either rank: of a residual or of messages
    const std::string name = "x" + std::to_string(call);
    cuda_.fail("allocate", call);
    ranks.each([&](Engine& engine, int rank) {
      step_of(engine, lefts[rank], {kTopK, DType::float32, {{500'000}}}, gpu(rank), 0, name, Code::internal);
      errors[rank] = texts_[size_t(rank)];
      EXPECT_NE(errors[rank].find("has no memory on its GPU to compress allreduce of tensor '" + name +
                                          "0', of which 4000064 bytes"),
                std::string::npos)
          << errors[rank];
      void* stream = stream_of(rank);
      GpuTensor dense(*this, rank, 1000, stream);
      dense.fill(1);
      done(engine, on_gpu(engine, Kind::allreduce, "dense", {&dense}, {&dense}));
      EXPECT_EQ(dense.read(), Floats(1000, 2));
      for (int step = 1; step < 3; ++step) compare_step(engine, lefts[rank], {}, gpu(rank), step, name);
    });
    EXPECT_EQ(errors[0], errors[1]);
  }
}

// Rank 1 compresses on its host, and rank 3 has joined.
TEST_F(GpuCodec, NoMemoryOfOneIsAnErrorWhereTheHostCompresses) {
  std::vector<Config> configs(4, config_);
  configs[1].gpu_compression = false;
  Ranks ranks({1, 1, 1, 1}, configs);
  cuda_.fail("allocate", 1);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    if (rank < 3) {
      step_of(engine, left, {kTopK, DType::float32, {{100, 5000}}}, gpu(rank), 0, "x", Code::internal);
      EXPECT_NE(texts_[size_t(rank)].find("has no memory on its GPU to compress allreduce of tensor 'x0'"),
                std::string::npos)
          << texts_[size_t(rank)];
      for (int step = 1; step < 3; ++step) compare_step(engine, left, {}, gpu(rank), step, "y");
    }
    auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
    engine.submit(join, true);
    EXPECT_EQ(finish(engine, join), Code::ok);
  });
}

TEST_F(GpuCodec, ForgedMessagesEndTheEpoch) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  cuda_.forge_messages(1);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 3000, stream);
    x.fill(1);
    std::string text;
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline;) {
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->what.codec = kTopK;
      one->residuals = {std::make_shared<Residual>()};
      if (outcome(engine, one) != Code::ok) {
        text = one->text;
        break;
      }
    }
    EXPECT_NE(text.find("allreduce of tensor 'x': host 1 of the group sent compressed gradients that are none"),
              std::string::npos)
        << text;
  });
}

// Rank 0 has encoded when rank 1, whose GPU has not come to it, is killed. Its residuals serve the next epoch, on other
// streams, and that GPU comes to the encoding of the last one only when that of the next is queued behind it.
TEST_F(GpuCodec, ARankIsKilledBetweenEncodingAndExchange) {
  std::vector<Left> lefts(2);
  std::vector<std::unique_ptr<GpuTensor>> tensors(2);
  std::atomic<bool> may_go_on{false};
  const auto await_encodings = [&](uint64_t calls) {
    for (const uint64_t end = now_ns() + kPatienceNs; cuda_.calls("encode") < calls && now_ns() < end;)
      std::this_thread::yield();
  };
  {
    Ranks ranks(std::vector<int>{1, 1}, config_);
    ranks.each([&](Engine& engine, int rank) {
      step_of(engine, lefts[size_t(rank)], {}, gpu(rank), 0, "gpu");
      auto& x = tensors[size_t(rank)] = std::make_unique<GpuTensor>(*this, rank, 1000, stream_of(rank));
      x->fill(1);
      if (rank == 1)
        cuda_.run(rank, x->stream, "a kernel that waits", {}, [&] {
          while (!may_go_on) std::this_thread::yield();
        });
      auto one = on_gpu(engine, Kind::allreduce, "gpu0", {x.get()}, {x.get()});
      one->what.codec = kTopK;
      one->residuals = {lefts[size_t(rank)]["gpu0"][0]};
      std::thread killer([&] {
        if (rank == 0) return;
        await_encodings(4);
        engine.abort("killed");
      });
      EXPECT_NE(outcome(engine, one), Code::ok);
      killer.join();
    });
  }
  Ranks ranks(std::vector<int>{1, 1}, config_);
  std::thread helper([&] {
    await_encodings(6);
    may_go_on = true;
  });
  ranks.each([&](Engine& engine, int rank) {
    for (int step = 1; step < 3; ++step) step_of(engine, lefts[size_t(rank)], {}, gpu(rank), step, "gpu");
    EXPECT_EQ(left_behind(lefts[size_t(rank)], "gpu").size(), 1000u);
  });
  helper.join();
}

// As a framework's allocator does it, when the program has heard that the exchange is done: before the GPU has run it.
TEST_F(GpuCodec, ATensorIsFreedInTheOrderOfItsStream) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  const CudaFunctions& functions = CudaDouble::functions();
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    for (int again = 0; again < 5; ++again) {
      void* memory = nullptr;
      check_cuda(functions.allocate(rank, stream, 40'000 * sizeof(float), &memory), "allocating", rank);
      cuda_.fill(rank, stream, static_cast<float*>(memory), 40'000, 1);
      RequestForm form(Kind::allreduce, "x");
      form.add_tensor({DType::float32, {40'000}}, memory, memory);
      form.what.codec = kInt8;
      form.what.device = DeviceKind::cuda;
      form.place = {DeviceKind::cuda, rank, stream};
      form.residuals = {std::make_shared<Residual>()};
      done(engine, std::make_shared<Request>(std::move(form)));
      check_cuda(functions.release(rank, stream, memory), "releasing", rank);
    }
    cuda_.synchronize(rank, stream);
  });
  EXPECT_GT(cuda_.calls("encode"), 0u);
}

TEST_F(GpuCodec, TensorsOfTheHostAndOfGpusDoNotMix) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    step_of(engine, left, {}, rank == 0 ? gpu(0) : DevicePlace{}, 0, "x", Code::mismatch);
    compare_step(engine, left, {}, gpu(rank), 1);
  });
}

// Without order the double finds that an encoding runs beside what makes its gradient, and that a residual is read
// while its word is turned. int8, of which no message is refused.
TEST_F(GpuCodec, WithoutOrderTheDoubleFindsFaults) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the kernels' accesses are not atomic: without order they race";
#endif
  expects_faults_ = true;
  Ranks ranks(std::vector<int>{1, 1}, config_);
  cuda_.ignore_order(true);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 2; ++step) {
      step_of(engine, left, {kInt8}, gpu(rank), step, "x");
      left_behind(left, "x");
    }
  });
  cuda_.ignore_order(false);
  std::string all;
  for (const std::string& fault : cuda_.faults()) all += fault + "\n";
  EXPECT_NE(all.find("an encoding"), std::string::npos) << all;
  EXPECT_NE(all.find("a decoding"), std::string::npos) << all;
}

}  // namespace
}  // namespace lightcc

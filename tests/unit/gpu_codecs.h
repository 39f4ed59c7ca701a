// Compressed all-reduces of tensors of GPUs that are doubles (gpus.h), beside the same ones of tensors of the CPU.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "device/float32.h"
#include "unit/gpus.h"

namespace lightcc::test {

using Floats = std::vector<float>;

inline constexpr Codec kTopK{CodecKind::topk, DType::float32, 0.02};
inline constexpr Codec kInt8{CodecKind::int8, DType::int8};

// Values as gradients have them, of a step, a rank and a tensor; some equal, some zero.
inline Floats gradient(int step, int rank, size_t tensor, size_t count) {
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
      if (count == 0) return;
      std::vector<std::byte> raw(bytes());
      from_float32(dtype, values.data(), raw.data(), count);
      if (place.kind == DeviceKind::cpu) return void(std::copy(raw.begin(), raw.end(), own.begin()));
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

  // As a framework's allocator does it, when the program has heard that the exchange is done: before the GPU has run
  // it.
  void expect_tensors_are_freed_in_the_order_of_their_stream(const std::vector<int>& hosts) {
    Ranks ranks(hosts, config_);
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

  void expect_tensors_of_the_host_and_of_gpus_do_not_mix(const std::vector<int>& hosts) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      step_of(engine, left, {}, rank == 0 ? gpu(0) : DevicePlace{}, 0, "x", Code::mismatch);
      compare_step(engine, left, {}, gpu(rank), 1);
    });
  }

  // As a checkpoint does it (api/codecs.cc), on other hosts than before.
  void expect_what_was_saved_is_taken_in(const std::vector<int>& before, const std::vector<int>& after,
                                         CodecRoute route) {
    std::map<std::string, std::vector<SavedPart>> saved;  // of all ranks'
    std::mutex mutex;
    const Form form{{CodecKind::topk, DType::float32, 0.05, 0.5}, DType::float32, {{3000}}};
    {
      Ranks ranks(before, config_);
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
    for (auto& [name, parts] : saved)  // the sum has an order
      std::ranges::stable_sort(parts, {}, [](const SavedPart& part) { return std::pair(part.node, part.first); });
    for (const bool is_known : {false, true}) {  // whether there is something on the GPU when it is loaded
      Ranks ranks(after, config_);
      ranks.each([&](Engine& engine, int rank) {
        Left left;
        if (is_known) compare_step(engine, left, form, gpu(rank), 9);
        for (const auto& [name, parts] : saved) {
          if (!left.contains(name)) left[name] = {std::make_shared<Residual>()};
          const HeldResidual held(left[name][0]);
          for (const SavedPart& part : parts) held->add_saved(3000, part);
        }
        for (int step = 0; step < 3; ++step) compare_step(engine, left, form, gpu(rank), step);
        compare_left(left);
        expect_route(left, route);
      });
    }
  }

  // Of all tensors that have elements.
  static void expect_route(const Left& left, CodecRoute route, const std::string& prefix = "gpu") {
    int exchanged = 0;
    for (const auto& [name, residuals] : left)
      for (const auto& residual : residuals) {
        if (!name.starts_with(prefix) || residual->elements() == 0) continue;
        EXPECT_STREQ(name_of(residual->route()), name_of(route)) << name;
        ++exchanged;
      }
    EXPECT_GT(exchanged, 0);
  }

  std::function<Floats(int step, int rank, size_t tensor, size_t count)> values_ = gradient;
  std::vector<std::string> texts_ = std::vector<std::string>(8);  // of the last failures, by rank
};

}  // namespace lightcc::test

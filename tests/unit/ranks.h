// Ranks that are threads of one process: an engine each, joined by real shared memory, and requests as a framework
// makes them.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "engine/engine.h"
#include "engine/lifecycle/calibrated.h"
#include "engine/request/fast_path_facts.h"
#include "engine/request/gpu_streams.h"
#include "engine/request/output_pool.h"
#include "engine/request/request.h"
#include "engine/timeline/counters.h"
#include "engine/timeline/trace.h"
#include "labels.h"
#include "net/bootstrap/world.h"
#include "net/group.h"
#include "thread_peers.h"

namespace lightcc::test {

inline constexpr uint64_t kSecondNs = 1'000'000'000;
// For what takes milliseconds, or a second where plain loops stand for a GPU: on a loaded machine under a sanitizer.
inline constexpr uint64_t kPatienceNs = 200 * kSecondNs;

class Ranks {
 public:
  // absent: ranks that have joined the host but whose engine never runs.
  explicit Ranks(int n, Config config = {}, const std::vector<int>& absent = {})
      : Ranks(thread_peers(spread(n)), config, absent) {}
  // On emulated hosts of so many ranks each.
  explicit Ranks(const std::vector<int>& hosts, Config config = {}) : Ranks(thread_peers(hosts), config) {}
  // Each rank with settings of its own.
  Ranks(const std::vector<int>& hosts, const std::vector<Config>& configs) : peers_(thread_peers(hosts)) {
    for (int rank = 0; rank < int(peers_.size()); ++rank) add(rank, configs[size_t(rank)]);
  }
  Ranks(std::vector<std::unique_ptr<Peers>> peers, Config config, const std::vector<int>& absent = {})
      : peers_(std::move(peers)) {
    for (int rank = 0; rank < int(peers_.size()); ++rank)
      if (std::find(absent.begin(), absent.end(), rank) == absent.end())
        add(rank, config);
      else
        engines_.push_back(nullptr);
  }
  int size() const { return int(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[size_t(rank)]; }

  // One thread a rank. What a body throws fails the test and ends the epoch, so that nobody waits for it.
  void each(const std::function<void(Engine&, int rank)>& body) {
    std::vector<int> all;
    for (int rank = 0; rank < size(); ++rank) all.push_back(rank);
    each(all, body);
  }
  void each(const std::vector<int>& ranks, const std::function<void(Engine&, int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank : ranks)
      threads.emplace_back([&, rank] {
        try {
          body((*this)[rank], rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
          (*this)[rank].abort("a test has failed");
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  uint64_t count(Counters::Name name) {  // over all ranks
    uint64_t sum = 0;
    for (auto& engine : engines_)
      if (engine) sum += engine->counters().values[name];
    return sum;
  }

 private:
  void add(int rank, Config config) {
    config.stall_check = config.stall_warn_s < 60 || config.stall_end_s > 0;
    World world;
    world.rank = rank, world.size = int(peers_.size());
    engines_.push_back(std::make_unique<Engine>(std::move(peers_[size_t(rank)]), world, std::move(config)));
  }
  // One host, unless the tests are to run as on several: LIGHTCC_TEST_RANKS_PER_HOST.
  static std::vector<int> spread(int n) {
    EXPECT_TRUE(has_label(labels::on_hosts) || has_label(labels::as_placed))
        << "may its ranks be on several hosts? Say LABEL(on_hosts) or LABEL(as_placed) in its file (tests/labels.h)";
    const char* given = std::getenv("LIGHTCC_TEST_RANKS_PER_HOST");
    const int most = given ? std::max(1, std::atoi(given)) : n;
    std::vector<int> hosts;
    for (; n > 0; n -= most) hosts.push_back(std::min(n, most));
    return hosts;
  }

  std::vector<std::unique_ptr<Peers>> peers_;  // of ranks that are absent
  std::vector<std::unique_ptr<Engine>> engines_;
};

template <class T> constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::float32;
  else if constexpr (std::is_same_v<T, double>) return DType::float64;
  else if constexpr (std::is_same_v<T, int64_t>) return DType::int64;
  else if constexpr (std::is_same_v<T, int32_t>) return DType::int32;
  else return DType::uint8;
}

struct Tensor {
  DType dtype;
  Shape shape;
  const void* input;
  void* output;
};
template <class T> Tensor in_place(T* data, int64_t count) { return {dtype_of<T>(), {count}, data, data}; }
template <class T> Tensor in_place(std::vector<T>& data) { return in_place(data.data(), int64_t(data.size())); }
template <class T> Tensor input_of(const std::vector<T>& data, Shape shape) {
  return {dtype_of<T>(), std::move(shape), data.data(), nullptr};
}

// name "": an automatic one.
inline RequestPtr request(Engine&, Kind kind, const std::string& name, const std::vector<Tensor>& tensors,
                          int group = 0) {
  RequestForm form(kind, name.empty() ? nullptr : name.c_str(), group);
  for (const Tensor& tensor : tensors) form.add_tensor({tensor.dtype, tensor.shape}, tensor.input, tensor.output);
  return std::make_shared<Request>(std::move(form));
}

// Waits to the end, in slices as the C API does. If there is no end, it makes one: the request's memory must not be
// written after the test.
inline Code finish(Engine& engine, const RequestPtr& request) {
  const auto wait = [&](uint64_t deadline_ns) {
    while (now_ns() < deadline_ns)
      if (engine.wait(*request, now_ns() + kSecondNs / 10)) return true;
    return false;
  };
  if (!wait(now_ns() + kPatienceNs)) {
    ADD_FAILURE() << request->title() << " on rank " << engine.world().rank << " has not finished";
    engine.abort("a test's patience has run out");
    wait(now_ns() + kPatienceNs);
  }
  engine.give_back(*request);
  if (!request->unordered) order_own_stream(*request);
  return request->code;
}
inline Code negotiated(Engine& engine, const RequestPtr& request) {
  engine.submit(request, true);
  return finish(engine, request);
}
// As a framework that blocks, by the same two ways as the C API.
inline Code run(Engine& engine, const RequestPtr& request) {
  const Announcement& what = request->what;
  FastPathFacts facts;
  facts.kind = what.kind;
  facts.op = what.op;
  facts.tensors = int(what.tensors.size());
  facts.device = what.device;
  facts.is_whole = facts.tensors == 1 && count_of(what.tensors[0].shape) > 0 && !request->callbacks.allocate &&
                   !request->callbacks.done;
  if (may_take_fast_path(facts)) {
    const std::string name = request->name();
    RequestPtr begun;
    bool done = engine.try_fast_path({request->group, request->automatic ? nullptr : name.c_str(), request->inputs[0],
                                      request->outputs[0], what.tensors[0].dtype, what.tensors[0].shape, what.op,
                                      what.pre, what.post},
                                     facts, &begun);
    if (begun) {
      finish(engine, begun);
      request->key = begun->key, request->code = begun->code, request->text = begun->text;
    }
    if (done) request->code = Code::ok;
    if (done || begun) return request->code;
  }
  return negotiated(engine, request);
}
// For requests that may come after the epoch's end: then submission itself is refused.
inline Code outcome(Engine& engine, const RequestPtr& request) {
  try {
    return run(engine, request);
  } catch (const Error& error) {
    request->text = error.what();
    return error.code();
  }
}
// For requests that must succeed.
inline RequestPtr done(Engine& engine, const RequestPtr& request) {
  EXPECT_EQ(run(engine, request), Code::ok) << request->text;
  return request;
}

template <class T> std::vector<T> result(const Request& request, size_t tensor = 0) {
  const Output& output = request.results[tensor];
  const T* data = static_cast<const T*>(output.data);
  return {data, data + count_of(output.shape)};
}

inline int add_group(Engine& engine, const std::vector<int>& ranks) {
  Tensor members{DType::uint8, Shape(ranks.begin(), ranks.end()), nullptr, nullptr};
  return done(engine, request(engine, Kind::add_group, "", {members}))->changed_group;
}
inline void remove_group(Engine& engine, int group) {
  done(engine, request(engine, Kind::remove_group, "", {{DType::uint8, {group}, nullptr, nullptr}}));
}

}  // namespace lightcc::test

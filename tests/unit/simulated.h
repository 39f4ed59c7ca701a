// What the tests of collectives share: problems with their answers in exact integers, worked out the plain way,
// and ranks that are threads joined by loop links.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "collective/collective.h"
#include "collective/hosts.h"
#include "device/half.h"
#include "net/loop/loop.h"

namespace lightcc::test {

using Values = std::vector<int64_t>;

// Sanitizers watch every access to memory: there, sizes that add nothing but time are left out.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kWatched = true;
#elif defined(__has_feature)
inline constexpr bool kWatched = __has_feature(thread_sanitizer) || __has_feature(address_sanitizer);
#else
inline constexpr bool kWatched = false;
#endif

// A new seed each run, printed; LIGHTCC_TEST_SEED=<seed> replays it.
inline uint64_t run_seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("LIGHTCC_TEST_SEED");
    const uint64_t chosen = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::printf("LIGHTCC_TEST_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

// One collective as all ranks together see it, with small whole numbers as data.
struct Problem {
  Kind kind;
  int size;
  int64_t count = 0;           // allreduce, broadcast
  Values counts;               // allgather, reducescatter
  std::vector<Values> matrix;  // alltoall: [from][to]
  int root = 0;
  ReduceOp op = ReduceOp::sum;
  double pre = 1, post = 1;
  DType dtype = DType::int64;
  uint64_t seed = 0;
  int64_t one_in = 1;          // of so many elements one is drawn, the others are 0

  // About `total` elements, unevenly divided, with ranks that have none.
  Problem(Kind k, int ranks, int64_t total, uint64_t s) : kind(k), size(ranks), count(total), seed(s) {
    std::mt19937_64 random(s);
    const auto part = [&] { return random() % 4 == 0 ? 0 : int64_t(random() % uint64_t(2 * total / size + 1)); };
    for (int r = 0; r < size; ++r) {
      counts.push_back(part());
      matrix.emplace_back();
      for (int to = 0; to < size; ++to) matrix[r].push_back(part());
    }
    constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
    op = kOps[random() % 4];
  }
  bool reduces() const { return kind == Kind::allreduce || kind == Kind::reducescatter; }

  Collective of(int rank) const {
    Collective c{};
    c.kind = kind;
    c.index = rank;
    c.size = size;
    c.dtype = dtype;
    c.op = op;
    c.pre = reduces() ? pre : 1;
    c.post = reduces() ? post : 1;
    if (kind == Kind::broadcast) c.root = root;
    if (kind == Kind::allreduce || kind == Kind::broadcast) c.count = count;
    if (kind == Kind::allgather || kind == Kind::reducescatter) c.counts = counts;
    if (kind == Kind::alltoall) {
      c.send = matrix[rank];
      for (int from = 0; from < size; ++from) c.counts.push_back(matrix[from][rank]);
    }
    return c;
  }

  Values input(int rank) const {
    switch (kind) {
      case Kind::allreduce: return data(rank, count);
      case Kind::allgather: return data(rank, counts[rank]);
      case Kind::reducescatter: return data(rank, sum(counts));
      case Kind::alltoall: return data(rank, sum(matrix[rank]));
      default: return {};
    }
  }
  // Before the collective; broadcast's root has the data there.
  Values output(int rank) const {
    if (kind == Kind::broadcast && rank == root) return data(root, count);
    return Values(expected(rank).size(), -99);
  }
  Values expected(int rank) const {
    Values all;
    const auto append = [&](const Values& from, int64_t offset, int64_t n) {
      all.insert(all.end(), from.begin() + offset, from.begin() + offset + n);
    };
    switch (kind) {
      case Kind::allreduce: return reduced();
      case Kind::reducescatter: append(reduced(), sum(counts, rank), counts[rank]); break;
      case Kind::broadcast: return data(root, count);
      case Kind::allgather:
        for (int r = 0; r < size; ++r) append(input(r), 0, counts[r]);
        break;
      case Kind::alltoall:
        for (int r = 0; r < size; ++r) append(input(r), sum(matrix[r], rank), matrix[r][rank]);
        break;
      default: break;
    }
    return all;
  }
  static int64_t scaled(double factor, int64_t value) { return int64_t(factor * double(value)); }
  static int64_t combine(ReduceOp op, int64_t a, int64_t b) {
    switch (op) {
      case ReduceOp::min: return std::min(a, b);
      case ReduceOp::max: return std::max(a, b);
      case ReduceOp::product: return a * b;
      default: return a + b;
    }
  }

 private:
  static int64_t sum(const Values& values, int first = -1) {
    return std::accumulate(values.begin(), first < 0 ? values.end() : values.begin() + first, int64_t(0));
  }
  // Even numbers, so that a factor of 0.5 is exact in every dtype; products stay within float16.
  Values data(int rank, int64_t n) const {
    const bool negative = is_floating(dtype) || dtype == DType::int8 || dtype == DType::int16 ||
                          dtype == DType::int32 || dtype == DType::int64;
    std::mt19937_64 random(seed * 1000 + uint64_t(rank));
    Values values;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t drawn = int64_t(random() % 21) * 2 - (negative ? 20 : 0);
      values.push_back(i % one_in ? 0 : op == ReduceOp::product ? random() % 8 ? 1 : 2 : drawn);
    }
    return values;
  }
  Values reduced() const {
    Values all;
    for (int r = 0; r < size; ++r) {
      const Values one = input(r);
      for (size_t i = 0; i < one.size(); ++i) {
        const int64_t value = scaled(pre, one[i]);
        if (r == 0) all.push_back(value);
        else all[i] = combine(op, all[i], value);
      }
    }
    for (int64_t& value : all) value = scaled(post, value);
    return all;
  }
};

// Exactly as long as the values, so that a sanitizer sees each byte read or written past them.
inline std::vector<std::byte> encode(DType dtype, const Values& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto put = [&](auto value) { std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value); };
    switch (dtype) {
      case DType::uint8: put(uint8_t(values[i])); break;
      case DType::int8: put(int8_t(values[i])); break;
      case DType::uint16: put(uint16_t(values[i])); break;
      case DType::int16: put(int16_t(values[i])); break;
      case DType::int32: put(int32_t(values[i])); break;
      case DType::int64: put(values[i]); break;
      case DType::float16: put(float16_of_float(float(values[i]))); break;
      case DType::float32: put(float(values[i])); break;
      case DType::float64: put(double(values[i])); break;
      case DType::boolean: put(uint8_t(values[i] != 0)); break;
      case DType::bfloat16: put(bfloat16_of_float(float(values[i]))); break;
      case DType::uint32: put(uint32_t(values[i])); break;
      case DType::uint64: put(uint64_t(values[i])); break;
    }
  }
  return bytes;
}

// Ways in which ranks can be placed on hosts: all on one, each on its own, pairs, one alone, in turns, at random.
inline std::vector<Hosts> placements(int size, uint64_t seed) {
  std::vector<Hosts> all{one_host(size)};
  const auto add = [&](auto host_of) {
    Hosts hosts;
    std::vector<int> known;  // hosts come in the order of their first members, as in a Group
    for (int rank = 0; rank < size; ++rank) {
      const auto found = std::find(known.begin(), known.end(), host_of(rank));
      if (found == known.end()) {
        known.push_back(host_of(rank));
        hosts.push_back({rank});
      } else {
        hosts[size_t(found - known.begin())].push_back(rank);
      }
    }
    all.push_back(hosts);
  };
  std::mt19937_64 random(seed);
  std::vector<int> drawn;
  for (int rank = 0; rank < size; ++rank) drawn.push_back(int(random() % uint64_t(size / 2 + 1)));
  add([](int rank) { return rank; });
  add([](int rank) { return rank / 2; });
  add([&](int rank) { return rank == size - 1; });
  add([](int rank) { return rank % 2; });
  add([](int rank) { return rank % 3; });
  add([&](int rank) { return drawn[size_t(rank)]; });
  return all;
}
inline std::string text_of(const Hosts& hosts) {
  std::string text;
  for (const auto& host : hosts) {
    text += text.empty() ? "" : " | ";
    for (const int member : host) text += (member == host[0] ? "" : " ") + std::to_string(member);
  }
  return text;
}

using Clock = std::chrono::steady_clock;
constexpr auto kDeadline = std::chrono::seconds(30);

// Steps all of the work, in the order given, until all is done.
inline void drive(const std::vector<Work*>& works, Clock::time_point deadline = Clock::now() + kDeadline) {
  for (;;) {
    bool moved = false, done = true;
    for (Work* work : works) {
      moved = (!work->done() && work->step()) || moved;
      done = done && work->done();
    }
    if (done) return;
    if (moved) continue;
    if (Clock::now() > deadline) throw Error(Code::timeout, "the test's deadline has passed");
    std::this_thread::yield();
  }
}
inline void drive(Work& work) { drive(std::vector<Work*>{&work}); }

// Runs one thread a rank. One that throws loses its links, as a rank that dies does; what it threw is returned.
inline std::vector<std::exception_ptr> run_ranks(LoopNetwork& transport, int size,
                                                 const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        thrown[size_t(rank)] = std::current_exception();
        transport.lose(rank);
      }
    });
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

// "" for no exception; else its text.
inline std::string text_of(const std::exception_ptr& thrown) {
  if (!thrown) return "";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    return e.what();
  }
}
inline Code code_of(const std::exception_ptr& thrown) {
  if (!thrown) return Code::ok;
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& e) {
    return e.code();
  } catch (...) {
    return Code::internal;
  }
}

}  // namespace lightcc::test

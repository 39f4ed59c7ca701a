// The C API of kernels on the caller's memory.
#include "embedding/dedup.h"
#include "embedding/handles.h"
#include "embedding/pool.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

template <class Body> int with_type(int dtype, Body body) {
  return guard([&] {
    if (dtype == LIGHTCC_FLOAT32) body(float());
    else if (dtype == LIGHTCC_FLOAT64) body(double());
    else throw Error(Code::invalid_argument, "kernels are for float32 and float64");
    return 0;
  });
}

void expect_offsets(const lightcc_embedding_bags& bags) {
  if (bags.size != sizeof bags) throw Error(Code::invalid_argument, "lightcc_embedding_bags has another size");
  if (bags.mode < 0 || bags.mode > LIGHTCC_EMBEDDING_MAX) throw Error(Code::invalid_argument, "there is no such mode");
  if (bags.mode == LIGHTCC_EMBEDDING_MAX && bags.weights)
    throw Error(Code::invalid_argument, "weights of samples are for sum and mean");
  if (bags.offsets[0] != 0 || bags.offsets[bags.bags] != bags.count)
    throw Error(Code::invalid_argument,
                "offsets begin at " + std::to_string(bags.offsets[0]) + " and end at " +
                    std::to_string(bags.offsets[bags.bags]) + "; they must begin at 0 and end at " +
                    std::to_string(bags.count) + ", the number of ids");
  for (int64_t bag = 0; bag < bags.bags; ++bag)
    if (bags.offsets[bag] > bags.offsets[bag + 1])
      throw Error(Code::invalid_argument, "offsets fall from " + std::to_string(bags.offsets[bag]) + " to " +
                                              std::to_string(bags.offsets[bag + 1]) + " at bag " + std::to_string(bag));
}

template <class T> Bags<T> bags_of(const lightcc_embedding_bags& b) {
  const auto *weights = static_cast<const T*>(b.weights), *rows = static_cast<const T*>(b.rows);
  return {b.dim, b.bags, PoolMode(b.mode), b.inverse, b.offsets, weights, rows};
}

}  // namespace

extern "C" {

int lightcc_embedding_dedup(const int64_t* keys, int64_t count, int64_t* unique_keys, int64_t* inverse,
                            int64_t* unique) {
  return guard([&] {
    thread_local Dedup dedup;
    *unique = dedup.run({keys, size_t(count)}, unique_keys, inverse);
    return 0;
  });
}

int lightcc_embedding_gather(int dtype, int64_t dim, const void* rows, const int64_t* inverse, int64_t count,
                             void* out) {
  return with_type(dtype, [&](auto number) {
    using T = decltype(number);
    gather(dim, static_cast<const T*>(rows), inverse, count, static_cast<T*>(out));
  });
}

int lightcc_embedding_add_by_row(int dtype, int64_t dim, const void* gradient, const int64_t* inverse, int64_t count,
                                 void* sums) {
  return with_type(dtype, [&](auto number) {
    using T = decltype(number);
    add_by_row(dim, static_cast<const T*>(gradient), inverse, count, static_cast<T*>(sums));
  });
}

int lightcc_embedding_sum_by_row(int dtype, int64_t dim, const void* gradient, const int64_t* inverse, int64_t count,
                                 int64_t rows, void* sums) {
  return with_type(dtype, [&](auto number) {
    using T = decltype(number);
    RowSums<T> by_row(dim, rows, static_cast<T*>(sums));
    by_row.add(static_cast<const T*>(gradient), inverse, count);
    by_row.clear_unseen();
  });
}

int lightcc_embedding_pool(const lightcc_embedding_bags* bags, void* out, int64_t* largest) {
  return with_type(bags->dtype, [&](auto number) {
    using T = decltype(number);
    expect_offsets(*bags);
    pool(bags_of<T>(*bags), static_cast<T*>(out), largest);
  });
}

int lightcc_embedding_pool_backward(const lightcc_embedding_bags* bags, const void* gradient, const int64_t* largest,
                                    void* sums, void* of_weights) {
  return with_type(bags->dtype, [&](auto number) {
    using T = decltype(number);
    expect_offsets(*bags);
    pool_backward(bags_of<T>(*bags), static_cast<const T*>(gradient), largest, static_cast<T*>(sums),
                  static_cast<T*>(of_weights));
  });
}

int lightcc_embedding_hash_strings(const char* text, const int64_t* offsets, int64_t count, int64_t* keys,
                                   uint32_t* checks) {
  for (int64_t i = 0; i < count; ++i) {
    const StringHash hash = hash_of(text + offsets[i], uint64_t(offsets[i + 1] - offsets[i]));
    keys[i] = int64_t(hash.key);
    checks[i] = hash.check;
  }
  return 0;
}
}

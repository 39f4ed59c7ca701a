// The loops over rows give the same bits with all instruction sets that this machine has.
#include <cstring>
#include <random>

#include "embedding/shard.h"
#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

constexpr int kRecords = 37, kSteps = 4;
constexpr Numbers kNumbers{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .l1 = 1e-3, .l2 = 1e-3, .l21 = 1e-3};

// The records of a table, and what is read from them, after some steps in which rows are missed.
template <class T> std::vector<std::byte> trained(RuleKind kind, int64_t dim, Instructions set) {
  const RecordLayout layout{dim, sizeof(T), SparseRule{kind, 0.1, 3}, false};
  const FirstValues first(Init::normal, 0, 1, 1, "table");
  Steps steps(layout.rule.terms);
  Slabs slabs(layout.record_bytes(), 0);
  Numbers numbers;
  EXPECT_TRUE(slabs.reserve(kRecords));
  std::vector<Shard::Record> records(kRecords);
  std::vector<int64_t> keys(kRecords);
  const auto arithmetic = make_arithmetic(layout, first, first, steps, numbers, slabs, set);
  for (int i = 0; i < kRecords; ++i) {
    records[size_t(i)] = slabs.at(slabs.take());
    std::memset(records[size_t(i)], 0, layout.record_bytes());
    reinterpret_cast<RowHeader*>(records[size_t(i)])->key = keys[size_t(i)] = i;
    arithmetic->birth(records[size_t(i)], kNumbers);
  }
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (uint32_t step = 1; step <= kSteps; ++step) {
    std::vector<Shard::Record> rows;
    for (uint32_t i = 0; i < kRecords; ++i)
      if (i % step == 0) rows.push_back(records[i]);
    std::vector<T> gradients(rows.size() * size_t(dim));
    for (T& g : gradients) g = T(normal(random));
    const double alpha = alpha_of(kind, kNumbers, step);
    arithmetic->update(rows, gradients.data(), kNumbers, alpha);
    numbers = kNumbers;
    steps.take(alpha);
  }
  std::vector<std::byte> all(size_t(kRecords) * size_t(dim) * sizeof(T));
  arithmetic->read(keys, records.data(), all.data());
  for (Shard::Record record : records) all.insert(all.end(), record, record + layout.record_bytes());
  return all;
}

TEST(EmbeddingInstructions, AllSetsGiveTheSameBits) {
  for (Instructions set : {Instructions::avx2, Instructions::avx512}) {
    if (!has(set)) continue;
    for (int kind = 0; kind < kRules; ++kind)
      for (int64_t dim : {1, 3, 8, 16, 31, 32, 50}) {
        SCOPED_TRACE("rule " + std::to_string(kind) + ", dim " + std::to_string(dim));
        const auto rule = RuleKind(kind);
        EXPECT_EQ(trained<float>(rule, dim, Instructions::plain), trained<float>(rule, dim, set));
        EXPECT_EQ(trained<double>(rule, dim, Instructions::plain), trained<double>(rule, dim, set));
      }
  }
}

}  // namespace
}  // namespace lightcc::embedding::test

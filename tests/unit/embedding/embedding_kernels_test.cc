// Kernels on the caller's memory, strings as keys, and 16-bit rows.
#include <cmath>
#include <limits>
#include <set>

#include "embedding/half.h"
#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

TEST(EmbeddingKernels, DedupKeepsTheOrderOfFirstAppearance) {
  const std::vector<int64_t> keys{5, -1, 5, 0, INT64_MIN, -1, 0};
  std::vector<int64_t> unique(7), inverse(7);
  int64_t count = 0;
  lightcc_embedding_dedup(keys.data(), 7, unique.data(), inverse.data(), &count);
  unique.resize(size_t(count));
  EXPECT_EQ(unique, (std::vector<int64_t>{5, -1, 0, INT64_MIN}));
  EXPECT_EQ(inverse, (std::vector<int64_t>{0, 1, 0, 2, 3, 1, 2}));
}

struct Pooled {
  std::vector<double> rows{1, 10, 2, 20, 3, 5}, weights{2, 3, 4};
  std::vector<int64_t> inverse{0, 1, 2}, offsets{0, 2, 2, 3}, largest = std::vector<int64_t>(6);
  std::vector<double> out = std::vector<double>(6), sums = std::vector<double>(6), of_weights = std::vector<double>(3);
  lightcc_embedding_bags bags{sizeof bags, LIGHTCC_FLOAT64, 2, 0, 0, 3, 3, inverse.data(), offsets.data(), nullptr,
                              rows.data()};
};

TEST(EmbeddingKernels, BagsAreSummedAveragedAndTheirLargestFound) {
  Pooled p;
  ASSERT_EQ(lightcc_embedding_pool(&p.bags, p.out.data(), nullptr), 0);
  EXPECT_EQ(p.out, (std::vector<double>{3, 30, 0, 0, 3, 5}));
  p.bags.mode = LIGHTCC_EMBEDDING_MEAN, p.bags.weights = p.weights.data();
  ASSERT_EQ(lightcc_embedding_pool(&p.bags, p.out.data(), nullptr), 0);
  EXPECT_EQ(p.out, (std::vector<double>{4, 40, 0, 0, 12, 20}));
  p.bags.mode = LIGHTCC_EMBEDDING_MAX, p.bags.weights = nullptr;
  ASSERT_EQ(lightcc_embedding_pool(&p.bags, p.out.data(), p.largest.data()), 0);
  EXPECT_EQ(p.out, (std::vector<double>{2, 20, 0, 0, 3, 5}));
  EXPECT_EQ(p.largest, (std::vector<int64_t>{1, 1, -1, -1, 2, 2}));
}

TEST(EmbeddingKernels, GradientsOfBagsGoToTheirRowsAndWeights) {
  Pooled p;
  const std::vector<double> gradient{1, 1, 7, 7, 2, 4};
  p.bags.mode = LIGHTCC_EMBEDDING_MEAN, p.bags.weights = p.weights.data();
  ASSERT_EQ(lightcc_embedding_pool_backward(&p.bags, gradient.data(), nullptr, p.sums.data(), p.of_weights.data()), 0);
  EXPECT_EQ(p.sums, (std::vector<double>{1, 1, 1.5, 1.5, 8, 16}));
  EXPECT_EQ(p.of_weights, (std::vector<double>{5.5, 11, 26}));
}

TEST(EmbeddingKernels, OffsetsThatFallOrOverrunAreRefused) {
  Pooled p;
  p.offsets = {0, 2, 1, 3};
  EXPECT_EQ(lightcc_embedding_pool(&p.bags, p.out.data(), nullptr), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_STREQ(lightcc_embedding_error(), "offsets fall from 2 to 1 at bag 1");
  p.offsets = {0, 1, 2, 4};
  EXPECT_EQ(lightcc_embedding_pool(&p.bags, p.out.data(), nullptr), LIGHTCC_INVALID_ARGUMENT);
}

TEST(EmbeddingKernels, StringsHaveDifferentKeysAndChecks) {
  std::set<int64_t> keys;
  std::set<uint32_t> checks;
  for (int i = 0; i < 20000; ++i) {
    const std::string text = "user " + std::to_string(i);
    const StringHash hash = hash_of(text.data(), text.size());
    keys.insert(int64_t(hash.key)), checks.insert(hash.check);
  }
  EXPECT_EQ(keys.size(), 20000u);
  EXPECT_GT(checks.size(), 19990u);
  EXPECT_NE(hash_of("a", 1).key, hash_of("a\0", 2).key);
}

TEST(EmbeddingKernels, TwoStringsOfOneKeyAreAnError) {
  Ranks one(1, Spec{.checked = 1});
  const std::vector<int64_t> keys{8};
  const std::vector<uint32_t> mine{1}, other{2};
  const std::vector<double> g(4, 1);
  lightcc_embedding_gradient gradient{nullptr, 0, keys.data(), mine.data(), 1, g.data()};
  const lightcc_embedding_step s{sizeof s, 1, one.tables[0], &gradient, 0.1, 0, 0, 0, 0, 0, 0};
  Call* call = nullptr;
  ASSERT_EQ(lightcc_embedding_update(one.groups[0].get(), &s, 1, 0, &call), 0) << lightcc_embedding_error();
  release({call});
  std::vector<double> row(4);
  EXPECT_EQ(lightcc_embedding_read(one.tables[0], keys.data(), mine.data(), 1, row.data()), 0);
  EXPECT_EQ(lightcc_embedding_read(one.tables[0], keys.data(), other.data(), 1, row.data()), LIGHTCC_INVALID_ARGUMENT);
}

TEST(EmbeddingKernels, ManyNumbersAreConvertedAsEachIs) {
  std::vector<float> numbers;
  for (int i = 0; i < 19; ++i) numbers.push_back(float(i - 9) * 0.123456F);
  for (float special : {0.F, -0.F, 65519.F, 65520.F, 6e-8F, 1e-9F, std::numeric_limits<float>::infinity()})
    numbers.insert(numbers.begin() + 3, special);
  std::vector<Float16> halves(numbers.size());
  convert(numbers.data(), halves.data(), int64_t(numbers.size()));
  std::vector<float> back(numbers.size());
  convert(halves.data(), back.data(), int64_t(numbers.size()));
  for (size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_EQ(float(halves[i]), float(Float16(numbers[i]))) << numbers[i];
    EXPECT_EQ(back[i], float(halves[i]));
  }
}

TEST(EmbeddingKernels, SumsByRowNeedNoClearedMemory) {
  const std::vector<float> gradient{1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> inverse{2, 0, 2};
  std::vector<float> sums(8, 9.F);
  ASSERT_EQ(lightcc_embedding_sum_by_row(LIGHTCC_FLOAT32, 2, gradient.data(), inverse.data(), 3, 4, sums.data()), 0);
  EXPECT_EQ(sums, (std::vector<float>{3, 4, 0, 0, 6, 8, 0, 0}));
}

TEST(EmbeddingKernels, RowsOfTheWireAreRounded) {
  for (int wire : {LIGHTCC_FLOAT16, LIGHTCC_BFLOAT16}) {
    Ranks ranks(2, Spec{.wire = wire});
    std::vector<Call*> calls{ranks.lookup(0, {1, 2, 3, 4}, 0), ranks.lookup(1, {}, 0)};
    ASSERT_EQ(finish(calls), (std::vector<int>{0, 0})) << lightcc_embedding_error();
    const auto got = rows_of(calls[0], 4);
    release(calls);
    const auto exact = read(ranks.tables[0], {1, 2, 3, 4});  // first values, the same on both
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], exact[i], wire == LIGHTCC_FLOAT16 ? 5e-4 : 4e-3);
      const auto value = float(exact[i]);
      EXPECT_EQ(got[i], wire == LIGHTCC_FLOAT16 ? double(Float16(value)) : double(float(BFloat16(value))));
    }
  }
}

}  // namespace
}  // namespace lightcc::embedding::test

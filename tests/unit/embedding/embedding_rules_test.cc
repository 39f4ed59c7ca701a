// The optimizers against their formulas, written plainly and dense, in double.
#include <algorithm>
#include <cmath>
#include <random>

#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

constexpr int kDim = 4;
using Row = std::vector<double>;

// Trains one table and the oracle on the same gradients. due(key, step): whether the key has a gradient then.
struct Trial {
  explicit Trial(const Spec& spec) : ranks(1, spec) {}
  Ranks ranks;
  std::mt19937 random{3};
  double size = 1;  // of gradients

  Row gradient() {
    std::normal_distribution<double> normal(0, size);
    Row g(kDim);
    for (double& x : g) x = normal(random);
    return g;
  }
  void step(const std::map<int64_t, Row>& gradients, const Numbers& n) {
    std::vector<int64_t> keys;
    std::vector<double> all;
    for (auto& [key, g] : gradients) keys.push_back(key), all.insert(all.end(), g.begin(), g.end());
    Call* lookup = ranks.lookup(0, keys, LIGHTCC_EMBEDDING_TRAINING);
    lightcc_embedding_gradient gradient{lookup, 0, nullptr, nullptr, 0, all.data()};
    lightcc_embedding_step s{sizeof s, 1, ranks.tables[0], &gradient, n.lr, n.beta1, n.beta2, n.eps, n.l1, n.l2, n.l21};
    Call* update = nullptr;
    ASSERT_EQ(lightcc_embedding_update(ranks.groups[0].get(), &s, 1, 0, &update), 0) << lightcc_embedding_error();
    ASSERT_EQ(lightcc_embedding_finish(update, 0), 0);
    release({lookup, update});
  }
};

struct DenseAdam {
  Row x, m = Row(kDim, 0), v = Row(kDim, 0);
  void step(const Row& g, const Numbers& n, int t) {
    const double alpha = n.lr * std::sqrt(1 - std::pow(n.beta2, t)) / (1 - std::pow(n.beta1, t));
    for (int i = 0; i < kDim; ++i) {
      m[size_t(i)] = n.beta1 * m[size_t(i)] + (1 - n.beta1) * g[size_t(i)];
      v[size_t(i)] = n.beta2 * v[size_t(i)] + (1 - n.beta2) * g[size_t(i)] * g[size_t(i)];
      if (v[size_t(i)] > 0) x[size_t(i)] -= alpha * m[size_t(i)] / (std::sqrt(v[size_t(i)]) + n.eps);
    }
  }
};

// The largest difference between SparseAdam and dense Adam; eps as given, the two agree exactly where it is 0.
double adam_difference(int terms, int every, double eps, double size) {
  Trial trial(Spec{.rule = LIGHTCC_EMBEDDING_SPARSE_ADAM, .terms = terms});
  trial.size = size;
  std::map<int64_t, DenseAdam> dense;
  double worst = 0;
  for (int t = 1; t <= 1200; ++t) {
    Numbers n{t < 500 ? 1e-3 : 5e-4, 0.9, 0.999, eps, 0, 0, 0};
    std::map<int64_t, Row> gradients;
    for (int64_t key = 0; key < 8; ++key)
      if ((t + key * 7) % every == 0) gradients[key] = trial.gradient();
    for (auto& [key, g] : gradients)
      if (!dense.count(key)) dense[key].x = read(trial.ranks.tables[0], {key});
    trial.step(gradients, n);
    for (auto& [key, adam] : dense) adam.step(gradients.count(key) ? gradients[key] : Row(kDim, 0), n, t);
    if (t % 50 != 17) continue;
    for (auto& [key, adam] : dense) {
      const Row row = read(trial.ranks.tables[0], {key});
      for (size_t i = 0; i < kDim; ++i) worst = std::max(worst, std::abs(row[i] - adam.x[i]));
    }
  }
  EXPECT_EQ(dense.size(), 8u);
  return worst;
}

// Dense Adam counts its first step from 1 for all rows: so do they here, as alpha depends on the table's step alone.
TEST(EmbeddingRules, SparseAdamIsDenseAdam) {
  EXPECT_LE(adam_difference(0, 10, 0, 1), 1e-12);
  EXPECT_LE(adam_difference(0, 300, 0, 1), 1e-12);
  EXPECT_LE(adam_difference(192, 10, 0, 1), 1e-12);
  EXPECT_LE(adam_difference(192, 300, 0, 1), 1e-8);
  EXPECT_LE(adam_difference(192, 10, 1e-8, 1e-2), 1e-6);
}

// Of two rules that must agree without thresholds, the largest difference through a change of lr; with one row that is
// born late and has small gradients.
double rules_difference(int a, int b, double eps_a, double eps_b, double initial) {
  Trial first(Spec{.rule = a, .initial = initial}), second(Spec{.rule = b, .initial = initial});
  for (int t = 1; t <= 1100; ++t) {
    std::map<int64_t, Row> gradients;
    for (int64_t key = 0; key < 5; ++key)
      if ((t + key) % 3) gradients[key] = first.gradient();
    if (t >= 1000) {
      gradients[77] = first.gradient();
      for (double& g : gradients[77]) g *= 1e-7;
    }
    const double lr = t < 300 ? 0.05 : 0.02;
    first.step(gradients, {lr, 0.9, 0.999, eps_a, 0, 0, 0});
    second.step(gradients, {lr, 0.9, 0.999, eps_b, 0, 0, 0});
  }
  const std::vector<int64_t> keys{0, 1, 2, 3, 4, 77};
  const Row x = read(first.ranks.tables[0], keys), y = read(second.ranks.tables[0], keys);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(x[i] - y[i]));
  return worst;
}

TEST(EmbeddingRules, GroupRulesWithoutThresholdsAreThePlainOnes) {
  EXPECT_LE(rules_difference(LIGHTCC_EMBEDDING_GROUP_ADAGRAD, LIGHTCC_EMBEDDING_ADAGRAD, 0, 0, 0.1), 1e-12);
  EXPECT_LE(rules_difference(LIGHTCC_EMBEDDING_GROUP_ADAM, LIGHTCC_EMBEDDING_LAZY_ADAM, 1e-8, 1e-8, 0), 1e-12);
}

TEST(EmbeddingRules, GroupAdagradKeepsTheFirstValueAtBirthAndZeroesSmallRows) {
  Trial trial(Spec{.rule = LIGHTCC_EMBEDDING_GROUP_ADAGRAD, .initial = 0.1});
  const Row before = read(trial.ranks.tables[0], {5});
  const Numbers n{0.01, 0, 0, 0, 0.01, 0.02, 0.03};
  trial.step({{5, Row(kDim, 0)}}, n);
  const Row after = read(trial.ranks.tables[0], {5});
  for (size_t i = 0; i < kDim; ++i) EXPECT_NEAR(after[i], before[i], 1e-12);
  trial.step({{5, Row(kDim, 0)}}, {0.01, 0, 0, 0, 0, 0, 1e9});
  EXPECT_EQ(read(trial.ranks.tables[0], {5}), Row(kDim, 0));
}

TEST(EmbeddingRules, RowwiseAdagradKeepsTheMeanOfSquares) {
  Trial trial(Spec{.rule = LIGHTCC_EMBEDDING_ROWWISE_ADAGRAD});
  Row x = read(trial.ranks.tables[0], {9});
  double v = 0;
  for (int t = 0; t < 20; ++t) {
    const Row g = trial.gradient();
    trial.step({{9, g}}, {0.1, 0, 0, 1e-10, 0, 0, 0});
    double mean = 0;
    for (double e : g) mean += e * e / kDim;
    v += mean;
    for (size_t i = 0; i < kDim; ++i) x[i] -= 0.1 * g[i] / (std::sqrt(v) + 1e-10);
  }
  const Row row = read(trial.ranks.tables[0], {9});
  for (size_t i = 0; i < kDim; ++i) EXPECT_NEAR(row[i], x[i], 1e-13);
}

}  // namespace
}  // namespace lightcc::embedding::test

// Milliseconds of lookup and update of one shard, one core, without exchange: 10^6 rows of 16 floats, 65,536 ids that
// are bounded Zipf 1.05 or uniform. Rules take turns; the median of the repeats counts.
//
//   ninja -C build/cmake embedding_table_bench && build/cmake/embedding_table_bench [repeats]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "embedding/handles.h"

using namespace lightcc::embedding;

namespace {

constexpr int64_t kRows = 1000000, kIds = 65536, kDim = 16;
// Of this thread's core, so that what else runs on the machine counts less.
double now_ms() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}
double ms_since(double start) { return now_ms() - start; }

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Ids of 64 bits whose ranks of frequency are spread at random.
class Ids {
 public:
  explicit Ids(bool zipf) : zipf_(zipf) {
    std::iota(of_.begin(), of_.end(), 0);
    std::shuffle(of_.begin(), of_.end(), random_);
    double sum = 0;
    for (int64_t i = 0; i < kRows; ++i) cdf_[size_t(i)] = sum += std::pow(double(i + 1), -1.05);
  }
  std::vector<int64_t> batch() {
    std::vector<int64_t> ids(kIds);
    std::uniform_real_distribution<double> unit(0, 1);
    for (int64_t& id : ids) {
      const double u = unit(random_);
      const auto at = std::lower_bound(cdf_.begin(), cdf_.end(), u * cdf_.back());
      id = int64_t(mix(uint64_t(of_[zipf_ ? size_t(at - cdf_.begin()) : size_t(u * kRows)])));
    }
    return ids;
  }
  const std::vector<int64_t>& all() const { return of_; }

 private:
  bool zipf_;
  std::mt19937_64 random_{1};
  std::vector<int64_t> of_ = std::vector<int64_t>(kRows);
  std::vector<double> cdf_ = std::vector<double>(kRows);
};

struct Subject {
  lightcc_embedding_group* group = nullptr;
  lightcc_embedding_table* table = nullptr;
  std::map<std::string, std::vector<double>> times;

  Subject(int kind, const std::string& name) {
    lightcc_embedding_open(0, 0, 1, &group);
    lightcc_embedding_options o{};
    o.size = sizeof o, o.dtype = LIGHTCC_FLOAT32, o.dim = kDim, o.name = name.c_str();
    o.init = LIGHTCC_EMBEDDING_NORMAL, o.b = 0.01;
    const lightcc_embedding_rule rule{sizeof rule, kind, kind == LIGHTCC_EMBEDDING_GROUP_ADAGRAD ? 0.1 : 0.0, 192, 0};
    lightcc_embedding_create(group, &o, &table);
    lightcc_embedding_attach(table, &rule);
  }
  void update(lightcc_embedding_call* lookup, const std::vector<int64_t>& keys, const float* g) {
    lightcc_embedding_gradient gradient{lookup, 0, keys.data(), nullptr, int64_t(keys.size()), g};
    const lightcc_embedding_step s{sizeof s, 1, table, &gradient, 1e-3, 0.9, 0.999, 1e-8, 0, 0, 0};
    lightcc_embedding_call* call = nullptr;
    if (lightcc_embedding_update(group, &s, 1, 0, &call)) std::puts(lightcc_embedding_error()), std::exit(1);
    lightcc_embedding_release(call);
  }
  void fill() {
    const std::vector<float> g(size_t(kDim) * 10000, 0.01f);
    for (int64_t first = 0; first < kRows; first += 10000) {
      std::vector<int64_t> keys;
      for (int64_t i = first; i < first + 10000; ++i) keys.push_back(int64_t(mix(uint64_t(i))));
      update(nullptr, keys, g.data());
    }
  }
  void once(const std::vector<int64_t>& ids, const std::string& kind, const std::vector<float>& gradient) {
    lightcc_embedding_wanted w{};
    w.size = sizeof w, w.table = table, w.keys = ids.data(), w.count = kIds;
    lightcc_embedding_call* call = nullptr;
    const auto start = now_ms();
    lightcc_embedding_lookup(group, &w, 1, LIGHTCC_EMBEDDING_TRAINING, &call);
    const double lookup = ms_since(start);
    update(call, {}, gradient.data());
    const double both = ms_since(start);
    lightcc_embedding_release(call);
    const auto before = now_ms();
    lightcc_embedding_read(table, ids.data(), nullptr, kIds, out_.data());
    times[kind + " read"].push_back(ms_since(before));
    times[kind + " dedup + lookup"].push_back(lookup);
    times[kind + " update"].push_back(both - lookup);
    times[kind + " all"].push_back(both);
  }
  std::vector<float> out_ = std::vector<float>(size_t(kIds * kDim));
};

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 15;
  const std::vector<std::pair<int, std::string>> rules{{LIGHTCC_EMBEDDING_SGD, "SGD"},
                                                       {LIGHTCC_EMBEDDING_ROWWISE_ADAGRAD, "row-wise Adagrad"},
                                                       {LIGHTCC_EMBEDDING_ADAGRAD, "Adagrad"},
                                                       {LIGHTCC_EMBEDDING_SPARSE_ADAM, "SparseAdam"}};
  std::vector<std::unique_ptr<Subject>> subjects;
  for (auto& [kind, name] : rules) subjects.push_back(std::make_unique<Subject>(kind, name)), subjects.back()->fill();
  Ids zipf(true), uniform(false);
  std::vector<float> gradient(size_t(kIds * kDim), 0.01f);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto z = zipf.batch(), u = uniform.batch();
    for (auto& subject : subjects) subject->once(z, "zipf", gradient), subject->once(u, "uniform", gradient);
  }
  for (size_t i = 0; i < rules.size(); ++i)
    for (auto& [what, times] : subjects[i]->times)
      std::printf("%-18s %-24s %7.2f ms\n", rules[i].second.c_str(), what.c_str(), median(times));
  lightcc_embedding_stats stats{};
  stats.size = sizeof stats;
  for (size_t i = 0; i < rules.size(); ++i) {
    lightcc_embedding_get_stats(subjects[i]->table, &stats);
    std::printf("%-18s %.1f bytes a key\n", rules[i].second.c_str(), double(stats.bytes) / double(stats.rows));
  }
}

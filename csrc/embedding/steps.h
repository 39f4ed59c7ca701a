// The steps that a table has taken, and what SparseAdam needs of those that a row has missed.
//
// A row with moments m and v that was last updated at step tau would, under dense Adam, have moved in each later step j
// by alpha_(tau+j) * r^j * m / sqrt(v), with r = beta1 / sqrt(beta2). So all of them together are one sum a tau,
// S(tau), which is the same for all rows of that tau.
#pragma once
#include <cstdint>
#include <vector>

namespace lightcc::embedding {

// What each update brings along; equal on all ranks.
struct Numbers {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, l1 = 0, l2 = 0, l21 = 0;
  bool operator==(const Numbers&) const = default;
};

class Steps {
 public:
  explicit Steps(int terms) : terms_(terms) {}

  uint32_t now() const { return uint32_t(alphas_.size()); }
  const std::vector<double>& alphas() const { return alphas_; }
  void set_alphas(std::vector<double> alphas);
  void reserve_next() { alphas_.reserve(alphas_.size() + 1); }
  void take(double alpha) { alphas_.push_back(alpha); }

  // Before the functions below, with the betas that they are for.
  void prepare(double beta1, double beta2);
  // The sum over the steps that a row whose last one was `last` has missed, and what its moments fade by.
  double missed(uint32_t last);
  double beta1_power(uint32_t n) { return beta1_.power(n); }
  double beta2_power(uint32_t n) { return beta2_.power(n); }

 private:
  struct Powers {
    double base = -1;
    std::vector<double> of;
    void set(double b);
    double power(uint32_t n);
  };
  double sum_from(uint32_t last) const;

  uint32_t terms_;
  std::vector<double> alphas_;   // alphas_[t - 1] is that of step t
  double ratio_ = -1;
  uint32_t prepared_ = ~0u;      // the step that recent_ is for
  std::vector<double> recent_;   // recent_[n]: S of step now - n, as far as the sum reaches now at most
  std::vector<double> settled_;  // by step: S where it has all its terms, and will not change; NaN: not asked for
  Powers beta1_, beta2_;
};

}  // namespace lightcc::embedding

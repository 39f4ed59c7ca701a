#include "embedding/steps.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lightcc::embedding {

void Steps::Powers::set(double b) {
  if (b == base) return;
  base = b;
  of.assign(1, 1.0);
}

double Steps::Powers::power(uint32_t n) {
  constexpr uint32_t kKept = 1 << 15;  // later ones are rare, and as good as zero
  if (n >= kKept) return std::pow(base, double(n));
  while (of.size() <= n) of.push_back(of.back() * base);
  return of[n];
}

void Steps::set_alphas(std::vector<double> alphas) {
  alphas_ = std::move(alphas);
  ratio_ = -1;
  prepared_ = ~0u;
}

// S of the step before is r * (alpha + S), so all recent ones cost one multiplication each.
void Steps::prepare(double beta1, double beta2) {
  beta1_.set(beta1);
  beta2_.set(beta2);
  const double ratio = beta2 > 0 ? beta1 / std::sqrt(beta2) : 0;
  if (ratio != ratio_) settled_.clear();
  if (ratio == ratio_ && prepared_ == now()) return;
  ratio_ = ratio;
  prepared_ = now();
  const uint32_t reach = terms_ ? std::min(terms_, now()) : now();
  recent_.assign(1, 0.0);
  for (uint32_t n = 1; n <= reach; ++n) recent_.push_back(ratio_ * (alphas_[now() - n] + recent_.back()));
}

double Steps::sum_from(uint32_t last) const {
  double sum = 0;
  for (uint32_t j = terms_; j > 0; --j) sum = ratio_ * (alphas_[last + j - 1] + sum);
  return sum;
}

double Steps::missed(uint32_t last) {
  const uint32_t n = now() - last;
  if (n < recent_.size()) return recent_[n];
  if (settled_.size() <= last) settled_.resize(now(), std::numeric_limits<double>::quiet_NaN());
  if (std::isnan(settled_[last])) settled_[last] = sum_from(last);
  return settled_[last];
}

}  // namespace lightcc::embedding

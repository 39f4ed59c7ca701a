// How a row takes its gradient: the optimizers' formulas, for float and double. d is the width of a row, g the
// gradient, x the weights, and m, v and z the slots.
//
// Sources: Adagrad (Duchi et al. 2011), Adam (Kingma and Ba 2015), and adaptive optimizers with sparse group lasso (Yue
// et al., ECML PKDD 2021), here with z in units of lr: equal for one lr, and equal to Adagrad without thresholds
// through changes of lr.
#pragma once
#include <cmath>
#include <cstdint>

#include "embedding/instructions.h"
#include "embedding/steps.h"

namespace lightcc::embedding {

enum class RuleKind : int32_t {  // the values are part of the C API
  sgd, adagrad, rowwise_adagrad, lazy_adam, sparse_adam, group_adagrad, group_adam
};
inline constexpr int kRules = 7;
struct SparseRule {
  RuleKind kind = RuleKind::sgd;
  double initial = 0;
  int terms = 0;
  bool operator==(const SparseRule&) const = default;
};
// The elements of slot 0, 1, 2 of a row, in the order m, v, z as far as the rule has them; 0: no more slots.
int64_t slot_width(const SparseRule&, int slot, int64_t dim);
bool has_moment(RuleKind);  // m stands first
double alpha_of(RuleKind, const Numbers&, uint32_t step);

// Sums are of eight lanes, whichever instructions the compiler finds for them: the same bits everywhere.
template <class T> LIGHTCC_ROW_INLINE T sum_of_squares(const T* g, int64_t d) {
  T lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= d; i += 8)
    for (int k = 0; k < 8; ++k) lanes[k] += g[i + k] * g[i + k];
  for (; i < d; ++i) lanes[i % 8] += g[i] * g[i];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// A row's parts, and the numbers of a step in the row's own type.
template <class T> struct RowParts { T* __restrict x; T* __restrict m; T* __restrict v; T* __restrict z; };
template <class T> struct StepNumbers {
  T lr, beta1, beta2, eps, alpha, l1, l2, l21;  // l1 and l2 are times lr, l21 times lr and the root of d
  StepNumbers(const Numbers& n, double alpha, int64_t d)
      : lr(T(n.lr)), beta1(T(n.beta1)), beta2(T(n.beta2)), eps(T(n.eps)), alpha(T(alpha)), l1(T(n.l1 * n.lr)),
        l2(T(n.l2 * n.lr)), l21(T(n.l21 * n.lr * std::sqrt(double(d)))) {}
};

template <class T>
LIGHTCC_ROW_INLINE void sgd(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA { row.x[i] -= n.lr * g[i]; });
}

template <class T>
LIGHTCC_ROW_INLINE void adagrad(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA {
    row.v[i] += g[i] * g[i];
    row.x[i] -= n.lr * g[i] / (std::sqrt(row.v[i]) + n.eps);
  });
}

template <class T>
LIGHTCC_ROW_INLINE void rowwise_adagrad(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  *row.v += sum_of_squares(g, d) / T(d);
  const T root = std::sqrt(*row.v) + n.eps;
  const T rate = root == 0 ? T(0) : n.lr / root;
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA { row.x[i] -= rate * g[i]; });
}

template <class T>
LIGHTCC_ROW_INLINE void moments(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  const T one_less_1 = 1 - n.beta1, one_less_2 = 1 - n.beta2;
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA {
    row.m[i] = n.beta1 * row.m[i] + one_less_1 * g[i];
    row.v[i] = n.beta2 * row.v[i] + one_less_2 * g[i] * g[i];
  });
}

template <class T>
LIGHTCC_ROW_INLINE void lazy_adam(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  moments(row, g, d, n);
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA {
    row.x[i] -= n.alpha * row.m[i] / (std::sqrt(row.v[i]) + n.eps);
  });
}

// x - missed * m / (sqrt(v) + eps), where m is not zero: v is zero only where m is.
template <class T>
LIGHTCC_ROW_INLINE void caught_up(const T* x, const T* m, const T* v, int64_t d, T missed, T eps, T* out) {
  each_number(d, [&](int64_t i) LIGHTCC_ROW_LAMBDA {
    const T divisor = std::sqrt(v[i]) + eps;
    out[i] = x[i] - missed * m[i] / (divisor == 0 ? T(1) : divisor);
  });
}

// x of z: root_i + divisor is what s is divided by.
template <class T>
LIGHTCC_ROW_INLINE void solve(RowParts<T> row, int64_t d, const StepNumbers<T>& n, T divisor) {
  T squares = 0;
  for (int64_t i = 0; i < d; ++i) {
    const T clipped = row.z[i] < -n.l1 ? -n.l1 : row.z[i] > n.l1 ? n.l1 : row.z[i];
    row.x[i] = clipped - row.z[i];
    squares += row.x[i] * row.x[i];
  }
  const T norm = std::sqrt(squares);
  const T kept = norm <= n.l21 ? T(0) : 1 - n.l21 / norm;
  for (int64_t i = 0; i < d; ++i) row.x[i] = kept == 0 ? T(0) : row.x[i] * kept / (std::sqrt(row.v[i]) + divisor);
}

template <class T>
LIGHTCC_ROW_INLINE void group_adagrad(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n) {
  for (int64_t i = 0; i < d; ++i) {
    const T before = std::sqrt(row.v[i]);
    row.v[i] += g[i] * g[i];
    row.z[i] += n.lr * g[i] - (std::sqrt(row.v[i]) - before) * row.x[i];
  }
  solve(row, d, n, 2 * n.l2);
}

// The z for which solve yields the row's first value.
template <class T>
LIGHTCC_ROW_INLINE void group_adagrad_birth(RowParts<T> row, int64_t d, const StepNumbers<T>& n) {
  T squares = 0;
  for (int64_t i = 0; i < d; ++i) {
    row.z[i] = (std::sqrt(row.v[i]) + 2 * n.l2) * row.x[i];
    squares += row.z[i] * row.z[i];
  }
  if (squares == 0) return;
  const T stretched = 1 + n.l21 / std::sqrt(squares);
  for (int64_t i = 0; i < d; ++i) {
    const T s = row.z[i] * stretched;
    row.z[i] = -s - (s > 0 ? n.l1 : s < 0 ? -n.l1 : T(0));
  }
}

template <class T>
LIGHTCC_ROW_INLINE void group_adam(RowParts<T> row, const T* g, int64_t d, const StepNumbers<T>& n, bool first_visit) {
  const T first_eps = first_visit ? n.eps : T(0);
  for (int64_t i = 0; i < d; ++i) {
    const T before = std::sqrt(row.v[i]);
    row.m[i] = n.beta1 * row.m[i] + (1 - n.beta1) * g[i];
    row.v[i] = n.beta2 * row.v[i] + (1 - n.beta2) * g[i] * g[i];
    row.z[i] += n.alpha * row.m[i] - (std::sqrt(row.v[i]) - before + first_eps) * row.x[i];
  }
  solve(row, d, n, n.eps + 2 * n.l2);
}

}  // namespace lightcc::embedding

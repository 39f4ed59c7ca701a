#include "embedding/rules.h"

namespace lightcc::embedding {

bool has_moment(RuleKind kind) {
  return kind == RuleKind::lazy_adam || kind == RuleKind::sparse_adam || kind == RuleKind::group_adam;
}

int64_t slot_width(const SparseRule& rule, int slot, int64_t dim) {
  switch (rule.kind) {
    case RuleKind::sgd: return 0;
    case RuleKind::adagrad: return slot < 1 ? dim : 0;
    case RuleKind::rowwise_adagrad: return slot < 1 ? 1 : 0;
    case RuleKind::lazy_adam:
    case RuleKind::sparse_adam:
    case RuleKind::group_adagrad: return slot < 2 ? dim : 0;
    case RuleKind::group_adam: return slot < 3 ? dim : 0;
  }
  return 0;
}

double alpha_of(RuleKind kind, const Numbers& numbers, uint32_t step) {
  if (!has_moment(kind)) return numbers.lr;
  const double t = step;
  return numbers.lr * std::sqrt(1 - std::pow(numbers.beta2, t)) / (1 - std::pow(numbers.beta1, t));
}

}  // namespace lightcc::embedding

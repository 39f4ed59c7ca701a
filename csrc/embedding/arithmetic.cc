// The loops over rows, for float and double: each rule has its own, so that the choice is made once a block.
#include <cmath>
#include <cstring>

#include "embedding/pool.h"
#include "embedding/shard.h"

namespace lightcc::embedding {
namespace {

constexpr size_t kAhead = 6;  // rows whose memory is asked for before they are used

template <class T>
class ArithmeticOf : public Arithmetic {
 public:
  ArithmeticOf(const RecordLayout& layout, const FirstValues& first, const FirstValues& absent, Steps& steps,
               const Numbers& numbers, const Slabs& records)
      : dim_(layout.dim), bytes_(layout.record_bytes()), rule_(layout.rule), first_(first), absent_(absent),
        steps_(steps), numbers_(numbers), records_(records) {
    const int v = has_moment(rule_.kind) ? 1 : 0;
    m_ = v == 1 ? layout.slot_offset(0) : 0;
    v_ = layout.slot_offset(v);
    z_ = layout.slot_offset(v + 1);
  }

  void read(std::span<const int64_t> keys, const Shard::Record* found, Shard::Record to) override {
    const bool may_miss = rule_.kind == RuleKind::sparse_adam;
    if (may_miss) steps_.prepare(numbers_.beta1, numbers_.beta2);
    T* out = reinterpret_cast<T*>(to);
    const size_t read_bytes = may_miss ? bytes_ : sizeof(RowHeader) + size_t(dim_) * sizeof(T);
    for (size_t i = 0; i < keys.size(); ++i, out += dim_) {
      if (i + kAhead < keys.size() && found[i + kAhead]) ask_for(found[i + kAhead], read_bytes);
      if (!found[i]) absent_.fill(keys[i], dim_, out);
      else if (may_miss && has_missed(found[i])) read_caught_up(found[i], out);
      else copy_row(out, weights_of(found[i]), dim_);
    }
  }

  void birth(Shard::Record record, const Numbers& numbers) override {
    const RowParts<T> row = parts_of(record);
    first_.fill(reinterpret_cast<RowHeader*>(record)->key, dim_, row.x);
    const int64_t width = slot_width(rule_, has_moment(rule_.kind) ? 1 : 0, dim_);
    if (!has_moment(rule_.kind))
      for (int64_t i = 0; i < width; ++i) row.v[i] = T(rule_.initial);
    if (rule_.kind == RuleKind::group_adagrad)
      group_adagrad_birth(row, dim_, StepNumbers<T>(numbers, numbers.lr, dim_));
  }

  void update(std::span<const Shard::Record> rows, const void* gradients, const Numbers& numbers,
              double alpha) override {
    const StepNumbers<T> n(numbers, alpha, dim_);
    const T* g = static_cast<const T*>(gradients);
    switch (rule_.kind) {
      case RuleKind::sgd: return each(rows, g, [&](auto row, const T* of, bool) { sgd(row, of, dim_, n); });
      case RuleKind::adagrad: return each(rows, g, [&](auto row, const T* of, bool) { adagrad(row, of, dim_, n); });
      case RuleKind::rowwise_adagrad:
        return each(rows, g, [&](auto row, const T* of, bool) { rowwise_adagrad(row, of, dim_, n); });
      case RuleKind::sparse_adam: steps_.prepare(numbers_.beta1, numbers_.beta2); [[fallthrough]];
      case RuleKind::lazy_adam: return each(rows, g, [&](auto row, const T* of, bool) { lazy_adam(row, of, dim_, n); });
      case RuleKind::group_adagrad:
        return each(rows, g, [&](auto row, const T* of, bool) { group_adagrad(row, of, dim_, n); });
      case RuleKind::group_adam:
        return each(rows, g, [&](auto row, const T* of, bool first) { group_adam(row, of, dim_, n, first); });
    }
  }

 private:
  static uint32_t last_of(Shard::Record record) { return reinterpret_cast<const RowHeader*>(record)->last; }
  static T* weights_of(Shard::Record record) { return reinterpret_cast<T*>(record + sizeof(RowHeader)); }
  static void ask_for(Shard::Record record, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(record + at, 1);
  }
  RowParts<T> parts_of(Shard::Record record) const {
    auto at = [&](size_t offset) { return reinterpret_cast<T*>(record + offset); };
    return {weights_of(record), at(m_), at(v_), at(z_)};
  }

  // A row that was born in this step has last 0 and has missed nothing.
  bool has_missed(Shard::Record record) const { return last_of(record) && last_of(record) < steps_.now(); }
  void read_caught_up(Shard::Record record, T* out) {
    const RowParts<T> row = parts_of(record);
    caught_up<T>(row.x, row.m, row.v, dim_, T(steps_.missed(last_of(record))), T(numbers_.eps), out);
  }
  // With the numbers of the step before, as it was read.
  void catch_up(Shard::Record record) {
    const RowParts<T> row = parts_of(record);
    const uint32_t missed = steps_.now() - last_of(record);
    read_caught_up(record, row.x);
    const T fade1 = T(steps_.beta1_power(missed)), fade2 = T(steps_.beta2_power(missed));
    for (int64_t i = 0; i < dim_; ++i) {
      row.m[i] *= fade1;
      row.v[i] *= fade2;
    }
  }

  template <class Apply> void each(std::span<const Shard::Record> rows, const T* g, Apply apply) {
    const uint32_t step = steps_.now() + 1;
    for (size_t i = 0; i < rows.size(); ++i, g += dim_) {
      if (i + kAhead < rows.size()) ask_for(rows[i + kAhead], bytes_);
      auto* header = reinterpret_cast<RowHeader*>(rows[i]);
      if (rule_.kind == RuleKind::sparse_adam && has_missed(rows[i])) catch_up(rows[i]);
      apply(parts_of(rows[i]), g, header->last == 0);
      header->last = step;
      if (header->count != RowHeader::kMostUpdates) ++header->count;
      records_.set_changed(rows[i]);
    }
  }

  int64_t dim_;
  size_t bytes_, m_, v_, z_;
  SparseRule rule_;
  const FirstValues& first_;
  const FirstValues& absent_;
  Steps& steps_;
  const Numbers& numbers_;
  const Slabs& records_;
};

}  // namespace

std::unique_ptr<Arithmetic> make_arithmetic(const RecordLayout& layout, const FirstValues& first,
                                            const FirstValues& absent, Steps& steps, const Numbers& numbers,
                                            const Slabs& records) {
  if (layout.number_bytes == sizeof(double))
    return std::make_unique<ArithmeticOf<double>>(layout, first, absent, steps, numbers, records);
  return std::make_unique<ArithmeticOf<float>>(layout, first, absent, steps, numbers, records);
}

}  // namespace lightcc::embedding

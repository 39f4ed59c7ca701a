// The loops over rows, for float and double and for each instruction set: each rule has its own, so that the choice is
// made once a block.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "embedding/instructions.h"
#include "embedding/pool.h"
#include "embedding/shard.h"

namespace lightcc::embedding {
namespace {

constexpr size_t kAhead = 12;  // rows whose memory is asked for before they are used

template <class T>
class ArithmeticOf : public Arithmetic {
 public:
  ArithmeticOf(const RecordLayout& layout, const FirstValues& first, const FirstValues& absent, Steps& steps,
               const Numbers& numbers, const Slabs& records, Instructions instructions)
      : instructions_(instructions), dim_(layout.dim), bytes_(layout.record_bytes()), rule_(layout.rule),
        first_(first), absent_(absent), steps_(steps), numbers_(numbers), records_(records) {
    const int v = has_moment(rule_.kind) ? 1 : 0;
    m_ = v == 1 ? layout.slot_offset(0) : 0;
    v_ = layout.slot_offset(v);
    z_ = layout.slot_offset(v + 1);
  }

  void read(std::span<const int64_t> keys, const Shard::Record* found, Shard::Record to) override {
    if (rule_.kind != RuleKind::sparse_adam) return copy_rows(keys, found, reinterpret_cast<T*>(to));
    steps_.prepare(numbers_.beta1, numbers_.beta2);
    switch (instructions_) {
      case Instructions::plain: return read_plain(keys, found, reinterpret_cast<T*>(to));
      case Instructions::avx2: return read_avx2(keys, found, reinterpret_cast<T*>(to));
      case Instructions::avx512: return read_avx512(keys, found, reinterpret_cast<T*>(to));
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
    if (rule_.kind == RuleKind::sparse_adam) steps_.prepare(numbers_.beta1, numbers_.beta2);
    const Update step{rows, static_cast<const T*>(gradients), StepNumbers<T>(numbers, alpha, dim_)};
    switch (instructions_) {
      case Instructions::plain: return update_plain(step);
      case Instructions::avx2: return update_avx2(step);
      case Instructions::avx512: return update_avx512(step);
    }
  }

 private:
  struct Update {
    std::span<const Shard::Record> rows;
    const T* gradients;
    StepNumbers<T> numbers;
  };
  void update_plain(const Update& step) { update_with(step); }
  LIGHTCC_ROW_AVX2 void update_avx2(const Update& step) { update_with(step); }
  LIGHTCC_ROW_AVX512 void update_avx512(const Update& step) { update_with(step); }
  using Keys = std::span<const int64_t>;
  void read_plain(Keys keys, const Shard::Record* found, T* out) { read_with(keys, found, out); }
  LIGHTCC_ROW_AVX2 void read_avx2(Keys keys, const Shard::Record* found, T* out) { read_with(keys, found, out); }
  LIGHTCC_ROW_AVX512 void read_avx512(Keys keys, const Shard::Record* found, T* out) { read_with(keys, found, out); }

  void copy_rows(Keys keys, const Shard::Record* found, T* out) const {
    for (size_t i = 0; i < keys.size(); ++i, out += dim_)
      found[i] ? copy_row(out, weights_of(found[i]), dim_) : absent_.fill(keys[i], dim_, out);
  }
  LIGHTCC_ROW_INLINE void read_with(Keys keys, const Shard::Record* found, T* out) {
    for (size_t i = 0; i < keys.size(); ++i, out += dim_) {
      if (!found[i]) absent_.fill(keys[i], dim_, out);
      else if (has_missed(found[i])) read_caught_up(found[i], out);
      else copy_row(out, weights_of(found[i]), dim_);
    }
  }

  LIGHTCC_ROW_INLINE void update_with(const Update& step) {
    const StepNumbers<T> n = step.numbers;
    switch (rule_.kind) {
      case RuleKind::sgd:
        return each(step, [&](auto row, const T* g, bool) LIGHTCC_ROW_LAMBDA { sgd(row, g, dim_, n); });
      case RuleKind::adagrad:
        return each(step, [&](auto row, const T* g, bool) LIGHTCC_ROW_LAMBDA { adagrad(row, g, dim_, n); });
      case RuleKind::rowwise_adagrad:
        return each(step, [&](auto row, const T* g, bool) LIGHTCC_ROW_LAMBDA { rowwise_adagrad(row, g, dim_, n); });
      case RuleKind::sparse_adam:
      case RuleKind::lazy_adam:
        return each(step, [&](auto row, const T* g, bool) LIGHTCC_ROW_LAMBDA { lazy_adam(row, g, dim_, n); });
      case RuleKind::group_adagrad:
        return each(step, [&](auto row, const T* g, bool) LIGHTCC_ROW_LAMBDA { group_adagrad(row, g, dim_, n); });
      case RuleKind::group_adam:
        return each(step, [&](auto row, const T* g, bool first) LIGHTCC_ROW_LAMBDA {
          group_adam(row, g, dim_, n, first);
        });
    }
  }

  static uint32_t last_of(Shard::Record record) { return reinterpret_cast<const RowHeader*>(record)->last; }
  static T* weights_of(Shard::Record record) { return reinterpret_cast<T*>(record + sizeof(RowHeader)); }
  RowParts<T> parts_of(Shard::Record record) const {
    auto at = [&](size_t offset) { return reinterpret_cast<T*>(record + offset); };
    return {weights_of(record), at(m_), at(v_), at(z_)};
  }

  // A row that was born in this step has last 0 and has missed nothing.
  bool has_missed(Shard::Record record) const { return last_of(record) && last_of(record) < steps_.now(); }
  LIGHTCC_ROW_INLINE void read_caught_up(Shard::Record record, T* out) {
    const RowParts<T> row = parts_of(record);
    caught_up<T>(row.x, row.m, row.v, dim_, T(steps_.missed(last_of(record))), T(numbers_.eps), out);
  }
  // With the numbers of the step before, as it was read.
  LIGHTCC_ROW_INLINE void catch_up(Shard::Record record) {
    const RowParts<T> row = parts_of(record);
    const uint32_t missed = steps_.now() - last_of(record);
    read_caught_up(record, row.x);
    const T fade1 = T(steps_.beta1_power(missed)), fade2 = T(steps_.beta2_power(missed));
    each_number(dim_, [&](int64_t i) LIGHTCC_ROW_LAMBDA {
      row.m[i] *= fade1;
      row.v[i] *= fade2;
    });
  }

  template <class Apply> LIGHTCC_ROW_INLINE void each(const Update& update, Apply apply) {
    const uint32_t step = steps_.now() + 1;
    const bool may_miss = rule_.kind == RuleKind::sparse_adam;
    const std::span<const Shard::Record> rows = update.rows;
    const T* g = update.gradients;
    for (size_t i = 0; i < std::min(kAhead, rows.size()); ++i) ask_for(rows[i], bytes_);
    for (size_t i = 0; i < rows.size(); ++i, g += dim_) {
      if (i + kAhead < rows.size()) ask_for(rows[i + kAhead], bytes_);
      auto* header = reinterpret_cast<RowHeader*>(rows[i]);
      if (may_miss && has_missed(rows[i])) catch_up(rows[i]);
      apply(parts_of(rows[i]), g, header->last == 0);
      header->last = step;
      if (header->count != RowHeader::kMostUpdates) ++header->count;
      records_.set_changed(rows[i]);
    }
  }

  const Instructions instructions_;
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
                                            const Slabs& records, Instructions set) {
  if (layout.number_bytes == sizeof(double))
    return std::make_unique<ArithmeticOf<double>>(layout, first, absent, steps, numbers, records, set);
  return std::make_unique<ArithmeticOf<float>>(layout, first, absent, steps, numbers, records, set);
}

}  // namespace lightcc::embedding

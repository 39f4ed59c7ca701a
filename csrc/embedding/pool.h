// Rows to outputs and gradients of outputs to gradients of rows, for float and double.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "embedding/instructions.h"

namespace lightcc::embedding {

enum class PoolMode : int32_t { sum, mean, max };  // the values are part of the C API

template <class T> struct Bags {
  int64_t dim, bags;
  PoolMode mode;
  const int64_t* inverse;
  const int64_t* offsets;
  const T* weights;  // nullptr: 1
  const T* rows;

  T weight(int64_t i, int64_t bag) const {
    const T own = weights ? weights[i] : T(1);
    return mode == PoolMode::mean ? own / T(offsets[bag + 1] - offsets[bag]) : own;
  }
};

// Widths that are common, without a call.
template <class T> void copy_row(T* to, const T* from, int64_t dim) {
  switch (dim) {
    case 8: std::memcpy(to, from, 8 * sizeof(T)); return;
    case 16: std::memcpy(to, from, 16 * sizeof(T)); return;
    case 32: std::memcpy(to, from, 32 * sizeof(T)); return;
    default: std::memcpy(to, from, size_t(dim) * sizeof(T));
  }
}

template <class T> void gather(int64_t dim, const T* rows, const int64_t* inverse, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i, out += dim) copy_row(out, rows + inverse[i] * dim, dim);
}

template <class T> void add(T* __restrict to, const T* __restrict from, T factor, int64_t dim) {
  for (int64_t k = 0; k < dim; ++k) to[k] += factor * from[k];
}

template <class T> void add_by_row(int64_t dim, const T* gradient, const int64_t* inverse, int64_t count, T* sums) {
  for (int64_t i = 0; i < count; ++i, gradient += dim) add(sums + inverse[i] * dim, gradient, T(1), dim);
}

// Sums by row in memory that is not cleared: a row's first gradient is put there, and later ones are added.
template <class T> class RowSums {
 public:
  RowSums(int64_t dim, int64_t rows, T* sums) : dim_(dim), sums_(sums), seen_(size_t(rows), 0) {}
  void add(const T* gradient, const int64_t* inverse, int64_t count) {
    switch (best_instructions()) {
      case Instructions::plain: return add_plain(gradient, inverse, count);
      case Instructions::avx2: return add_avx2(gradient, inverse, count);
      case Instructions::avx512: return add_avx512(gradient, inverse, count);
    }
  }
  void clear_unseen() {
    for (size_t row = 0; row < seen_.size(); ++row)
      if (!seen_[row]) std::memset(sums_ + row * size_t(dim_), 0, size_t(dim_) * sizeof(T));
  }

 private:
  void add_plain(const T* g, const int64_t* inverse, int64_t count) { add_with(g, inverse, count); }
  LIGHTCC_ROW_AVX2 void add_avx2(const T* g, const int64_t* inverse, int64_t count) { add_with(g, inverse, count); }
  LIGHTCC_ROW_AVX512 void add_avx512(const T* g, const int64_t* inverse, int64_t count) { add_with(g, inverse, count); }
  LIGHTCC_ROW_INLINE void add_with(const T* gradient, const int64_t* inverse, int64_t count) {
    T* const sums = sums_;
    uint8_t* const all_seen = seen_.data();
    const int64_t dim = dim_;
    for (int64_t i = 0; i < count; ++i, gradient += dim) {
      T* const to = sums + inverse[i] * dim;
      const T* const from = gradient;
      uint8_t& seen = all_seen[inverse[i]];
      if (seen) each_number(dim, [=](int64_t k) LIGHTCC_ROW_LAMBDA { to[k] += from[k]; });
      else each_number(dim, [=](int64_t k) LIGHTCC_ROW_LAMBDA { to[k] = from[k]; });
      seen = 1;
    }
  }

  int64_t dim_;
  T* sums_;
  std::vector<uint8_t> seen_;
};

template <class T> void pool_largest(const Bags<T>& b, int64_t bag, T* out, int64_t* largest) {
  std::memset(out, 0, size_t(b.dim) * sizeof(T));
  for (int64_t k = 0; k < b.dim; ++k) largest[k] = -1;
  for (int64_t i = b.offsets[bag]; i < b.offsets[bag + 1]; ++i) {
    const T* row = b.rows + b.inverse[i] * b.dim;
    for (int64_t k = 0; k < b.dim; ++k) {
      if (largest[k] >= 0 && !(row[k] > out[k])) continue;
      out[k] = row[k];
      largest[k] = b.inverse[i];
    }
  }
}

// The weights are applied first and the sum is divided last, as torch.nn.functional.embedding_bag does it.
template <class T> void pool_sum(const Bags<T>& b, int64_t bag, T* out) {
  std::memset(out, 0, size_t(b.dim) * sizeof(T));
  const int64_t begin = b.offsets[bag], end = b.offsets[bag + 1];
  for (int64_t i = begin; i < end; ++i) add(out, b.rows + b.inverse[i] * b.dim, b.weights ? b.weights[i] : T(1), b.dim);
  if (b.mode == PoolMode::mean && end > begin)
    for (int64_t k = 0; k < b.dim; ++k) out[k] /= T(end - begin);
}

template <class T> void pool(const Bags<T>& b, T* out, int64_t* largest) {
  for (int64_t bag = 0; bag < b.bags; ++bag, out += b.dim) {
    if (b.mode == PoolMode::max) pool_largest(b, bag, out, largest + bag * b.dim);
    else pool_sum(b, bag, out);
  }
}

template <class T> T dot(const T* a, const T* b, int64_t dim) {
  T sum = 0;
  for (int64_t k = 0; k < dim; ++k) sum += a[k] * b[k];
  return sum;
}

template <class T>
void pool_backward(const Bags<T>& b, const T* gradient, const int64_t* largest, T* sums, T* of_weights) {
  for (int64_t bag = 0; bag < b.bags; ++bag, gradient += b.dim) {
    if (b.mode == PoolMode::max) {
      for (int64_t k = 0; k < b.dim; ++k)
        if (const int64_t row = largest[bag * b.dim + k]; row >= 0) sums[row * b.dim + k] += gradient[k];
      continue;
    }
    const T share = b.mode == PoolMode::mean ? T(b.offsets[bag + 1] - b.offsets[bag]) : T(1);
    for (int64_t i = b.offsets[bag]; i < b.offsets[bag + 1]; ++i) {
      add(sums + b.inverse[i] * b.dim, gradient, b.weight(i, bag), b.dim);
      if (of_weights) of_weights[i] = dot(gradient, b.rows + b.inverse[i] * b.dim, b.dim) / share;
    }
  }
}

}  // namespace lightcc::embedding

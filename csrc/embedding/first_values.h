// What a row is before its first update: values of a counter-based generator (splitmix64) of (seed, table, key), so
// that they depend on no other key, no order and no number of ranks.
#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "embedding/hash.h"

namespace lightcc::embedding {

enum class Init : int32_t { zeros, constant, uniform, normal };  // the values are part of the C API

struct FirstValues {
  Init init = Init::zeros;
  double a = 0, b = 0;
  uint64_t stream = 0;  // of seed and table

  FirstValues() = default;
  FirstValues(Init init, double a, double b, uint64_t seed, std::string_view table)
      : init(init), a(a), b(b), stream(mix(seed) ^ hash_of(table.data(), table.size()).key) {}

  template <class T> void fill(int64_t key, int64_t dim, T* out) const {
    const uint64_t start = mix(uint64_t(key) ^ stream);
    if (init == Init::uniform) return fill_uniform(start, dim, out);
    if (init == Init::normal) return fill_normal(start, dim, out);
    for (int64_t i = 0; i < dim; ++i) out[i] = init == Init::constant ? T(a) : T(0);
  }

 private:
  static double unit(uint64_t start, int64_t i) {  // from 0 to below 1
    return double(mix(start + uint64_t(i) * 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
  }
  template <class T> void fill_uniform(uint64_t start, int64_t dim, T* out) const {
    const T low = T(a), high = T(b);
    for (int64_t i = 0; i < dim; ++i) {
      const T value = T(a + (b - a) * unit(start, i));
      out[i] = value < high || low == high ? value : std::nextafter(high, low);  // rounding may have reached it
    }
  }
  template <class T> void fill_normal(uint64_t start, int64_t dim, T* out) const {  // Box and Muller, two at a time
    for (int64_t i = 0; i < dim; i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - unit(start, i)));
      const double angle = 2 * std::numbers::pi * unit(start, i + 1);
      out[i] = T(a + b * radius * std::cos(angle));
      if (i + 1 < dim) out[i + 1] = T(a + b * radius * std::sin(angle));
    }
  }
};

}  // namespace lightcc::embedding

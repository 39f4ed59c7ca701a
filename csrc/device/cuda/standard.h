// What kernels use of the C++ library: NVRTC, which has none, is given this file under the names of its headers
// (compile.cc). Only NVRTC reads it.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
using size_t = decltype(sizeof 0);

namespace std {

template <class T> struct numeric_limits {  // of integers
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = int(8 * sizeof(T)) - is_signed;
  static constexpr T max() { return T(~(is_signed ? uint64_t{1} << digits | (~uint64_t{0} << (digits % 64)) : 0)); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
};
template <> struct numeric_limits<float> { static constexpr int digits = 24; };
template <> struct numeric_limits<double> { static constexpr int digits = 53; };

}  // namespace std

#if __CUDACC_VER_MAJOR__ < 12  // these do not know it
namespace lightcc {

template <class To, class From> To bits_as(const From& from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace lightcc
#define __builtin_bit_cast(To, ...) lightcc::bits_as<To>(__VA_ARGS__)
#endif

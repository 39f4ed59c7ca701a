// The two passes over payload that Adasum takes (collective/adasum.h), for float16, bfloat16, float32 and float64.
// Pointers as in device.h. Every instruction set gives the same bits.
#pragma once
#include "device/cpu.h"

namespace lightcc {

inline constexpr size_t kDotProducts = 3;  // a.a, a.b and b.b of two vectors, in this order

// Adds the dot products of `count` elements to sums[kDotProducts]. Multiplied and added up in double, in an order that
// depends on count alone.
void add_dot_products(DType, const void* a, const void* b, size_t count, double* sums);

// out[i] = round(by_a * a[i] + by_b * b[i]), computed as reduce() does: float16 and bfloat16 in float32, others in
// their own precision.
void add_scaled(DType, const void* a, double by_a, const void* b, double by_b, void* out, size_t count);

// Tests compare the instruction sets.
void add_dot_products_with(Isa, DType, const void* a, const void* b, size_t count, double* sums);
void add_scaled_with(Isa, DType, const void* a, double by_a, const void* b, double by_b, void* out, size_t count);

}  // namespace lightcc

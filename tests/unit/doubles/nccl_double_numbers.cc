// What NcclDouble's collectives compute, with plain loops.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "device/half.h"
#include "nccl_double.h"

namespace lightcc::test {
namespace {

struct DTypeWords {
  size_t size;
  const char* name;
};
constexpr DTypeWords kDTypeWords[] = {{1, "int8"}, {1, "uint8"}, {4, "int32"}, {4, "uint32"},
                                      {8, "int64"}, {8, "uint64"},
                                      {2, "float16"}, {4, "float32"}, {8, "float64"}, {2, "bfloat16"}};
constexpr const char* kOpNames[] = {"sum", "product", "max", "min"};

template <class T>
T combined(int op, T a, T b) {
  return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? std::max(a, b) : std::min(a, b);
}
// Narrower integers too: they wrap around when they are stored.
template <>
int64_t combined(int op, int64_t a, int64_t b) {
  if (op == 0) return int64_t(uint64_t(a) + uint64_t(b));
  if (op == 1) return int64_t(uint64_t(a) * uint64_t(b));
  return op == 2 ? std::max(a, b) : std::min(a, b);
}

template <class Stored>
Stored stored(const std::byte* from, size_t i) {
  Stored value;
  std::memcpy(&value, from + i * sizeof value, sizeof value);
  return value;
}

template <class Stored, class Widen, class Narrow>
std::vector<std::byte> reduced(const NcclNumbers& numbers, const std::vector<const std::byte*>& inputs, Widen widen,
                               Narrow narrow) {
  std::vector<std::byte> result(numbers.count * sizeof(Stored));
  for (size_t i = 0; i < numbers.count; ++i) {
    auto value = widen(stored<Stored>(inputs[0], i));
    for (size_t k = 1; k < inputs.size(); ++k)
      value = combined(numbers.op, value, widen(stored<Stored>(inputs[k], i)));
    const Stored rounded = narrow(value);
    std::memcpy(result.data() + i * sizeof rounded, &rounded, sizeof rounded);
  }
  return result;
}

template <class Stored, class Computed>
std::vector<std::byte> reduced_as(const NcclNumbers& numbers, const std::vector<const std::byte*>& inputs) {
  return reduced<Stored>(numbers, inputs, [](Stored value) { return Computed(value); },
                         [](Computed value) { return Stored(value); });
}

}  // namespace

size_t nccl_size_of(int dtype) {
  return dtype >= 0 && size_t(dtype) < std::size(kDTypeWords) ? kDTypeWords[dtype].size : 0;
}

const char* nccl_op_name(int op) { return op >= 0 && size_t(op) < std::size(kOpNames) ? kOpNames[op] : nullptr; }

std::string in_words(const NcclNumbers& numbers) {
  return std::to_string(numbers.count) + " " + kDTypeWords[numbers.dtype].name;
}

std::vector<std::byte> nccl_reduced(const NcclNumbers& numbers, const std::vector<const std::byte*>& inputs) {
  switch (numbers.dtype) {
    case 0: return reduced_as<int8_t, int64_t>(numbers, inputs);
    case 1: return reduced_as<uint8_t, int64_t>(numbers, inputs);
    case 2: return reduced_as<int32_t, int64_t>(numbers, inputs);
    case 3: return reduced_as<uint32_t, uint64_t>(numbers, inputs);
    case 4: return reduced_as<int64_t, int64_t>(numbers, inputs);
    case 5: return reduced_as<uint64_t, uint64_t>(numbers, inputs);
    case 6: return reduced<uint16_t>(numbers, inputs, float_of_float16, float16_of_float);
    case 7: return reduced_as<float, float>(numbers, inputs);
    case 8: return reduced_as<double, double>(numbers, inputs);
    default: return reduced<uint16_t>(numbers, inputs, float_of_bfloat16, bfloat16_of_float);
  }
}

}  // namespace lightcc::test

#include "base/types.h"

#include <charconv>

#include "base/limits.h"

namespace lightcc {
namespace {
struct DTypeRow { const char* name; size_t bytes; };
constexpr DTypeRow kDTypeTable[kDTypes] = {
    {"uint8", 1}, {"int8", 1},    {"uint16", 2},  {"int16", 2}, {"int32", 4},    {"int64", 8},
    {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bool", 1},  {"bfloat16", 2}, {"uint32", 4}, {"uint64", 8}};
constexpr const char* kOpNames[] = {"average", "sum", "adasum", "min", "max", "product"};
constexpr const char* kKindNames[kKinds] = {"allreduce",     "allgather", "broadcast",       "alltoall",
                                            "reducescatter", "barrier",   "send",            "recv",
                                            "add_process_set", "remove_process_set", "join"};

template <class Values>
std::string join(const Values& values) {
  std::string text;
  for (auto value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return text;
}
}  // namespace

size_t size_of(DType t) { return kDTypeTable[int(t)].bytes; }
bool is_floating(DType t) {
  return t == DType::float16 || t == DType::float32 || t == DType::float64 || t == DType::bfloat16;
}
const char* name_of(DType t) { return kDTypeTable[int(t)].name; }
const char* name_of(ReduceOp op) { return kOpNames[int(op)]; }
const char* name_of(Kind kind) { return kKindNames[int(kind)]; }
const char* name_of(DeviceKind kind) { return kind == DeviceKind::cuda ? "cuda" : "cpu"; }

const char* fault_of(const Codec& codec) {
  const bool floats = codec.width == DType::float32 || codec.width == DType::float16;
  switch (codec.kind) {
    case CodecKind::none: return codec == Codec{} ? nullptr : "no codec, yet a width, a ratio or a momentum";
    case CodecKind::topk:
      if (!floats) return "topk sends values as float32 or float16";
      if (!(codec.ratio > 0 && codec.ratio <= 1)) return "the ratio must be above 0 and at most 1";
      return codec.momentum >= 0 && codec.momentum < 1 ? nullptr : "the momentum must be at least 0 and below 1";
    case CodecKind::int8:
      if (codec.width != DType::int8) return "int8 sends values as int8";
      return codec.ratio == 1 && codec.momentum == 0 ? nullptr : "int8 has a ratio of 1 and no momentum";
    case CodecKind::int4:
      if (codec.width != DType::int8) return "int4 sends values in bytes, as int8";
      return codec.ratio == 1 && codec.momentum == 0 ? nullptr : "int4 has a ratio of 1 and no momentum";
  }
  return "unknown kind";
}

std::string text_of(const Codec& codec) {
  const auto number = [](double value) {
    char text[32];
    return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
  };
  if (codec.kind == CodecKind::none) return "none";
  if (codec.kind == CodecKind::int8) return "int8";
  if (codec.kind == CodecKind::int4) return "int4";
  return "topk of ratio " + number(codec.ratio) + " as " + name_of(codec.width) +
         (codec.momentum > 0 ? " with momentum " + number(codec.momentum) : "");
}

bool is_countable(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t d : shape)
    if (d < 0 || __builtin_mul_overflow(count, d == 0 ? 1 : d, &count) || count > kMostElements) return false;
  return shape.size() <= kMostDimensions;
}

int64_t count_of(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}
std::string text_of(const Shape& shape) { return "[" + join(shape) + "]"; }
std::string text_of(const std::vector<int>& ranks) { return join(ranks); }

}  // namespace lightcc

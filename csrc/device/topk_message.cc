#include "device/topk_message.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/wire.h"

namespace lightcc {
namespace {

size_t bytes_of_entry(DType values) {
  if (values != DType::float32 && values != DType::float16) {
    throw Error(Code::internal, std::string("top-k: values are sent as float32 or float16, not ") + name_of(values));
  }
  return sizeof(uint16_t) + size_of(values);
}

[[noreturn]] void malformed(const std::string& what) {
  throw Error(Code::internal, "a top-k message is malformed: " + what);
}

template <class T>
T value_at(const std::byte* from, size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

float number(float x) { return x; }
float number(uint16_t x) { return float_of_float16(x); }

template <class Value>
void add(float* out, const std::byte* indices, const std::byte* values, size_t n) {
  for (size_t i = 0; i < n; ++i) out[value_at<uint16_t>(indices, i)] += number(value_at<Value>(values, i));
}

}  // namespace

size_t topk_message_bytes(size_t count, size_t k, DType values) {
  return blocks_of(count) * sizeof(uint32_t) + k * bytes_of_entry(values);
}

void write_topk_message(const TopKSelected& selected, DType values, size_t from, size_t to, std::byte* body) {
  bytes_of_entry(values);
  std::byte* indices = body + selected.counts.size_bytes();
  std::byte* numbers = indices + selected.indices.size_bytes();
  if (from == 0) std::memcpy(body, selected.counts.data(), selected.counts.size_bytes());
  if (from == to) return;
  std::memcpy(indices + from * sizeof(uint16_t), &selected.indices[from], (to - from) * sizeof(uint16_t));
  if (values == DType::float32) {
    std::memcpy(numbers + from * sizeof(float), &selected.values[from], (to - from) * sizeof(float));
    return;
  }
  for (size_t i = from; i < to; ++i) {
    const uint16_t half = send_float16(selected.values[i]);
    std::memcpy(numbers + i * sizeof half, &half, sizeof half);
  }
}

TopKMessage::TopKMessage(ConstSpan body, size_t count, DType values) : count_(count), type_(values) {
  const size_t entry = bytes_of_entry(values), blocks = blocks_of(count);
  if (body.size() / sizeof(uint32_t) < blocks) malformed("it ends in the counts of its blocks");
  begins_.reserve(blocks + 1);
  begins_.push_back(0);
  for (size_t b = 0; b < blocks; ++b) {
    const auto n = value_at<uint32_t>(body.data(), b);
    if (n > length_of(b)) malformed("block " + std::to_string(b) + " has more entries than elements");
    begins_.push_back(begins_.back() + n);
  }
  const size_t counts = blocks * sizeof(uint32_t);
  if (body.size() - counts != k() * entry) {
    malformed(std::to_string(body.size() - counts) + " bytes for " + std::to_string(k()) + " entries");
  }
  indices_ = body.data() + counts;
  values_ = indices_ + k() * sizeof(uint16_t);
}

size_t TopKMessage::length_of(size_t block) const { return std::min(kCodecBlock, count_ - block * kCodecBlock); }

void TopKMessage::add_to(float* out, size_t block) const {
  const size_t begin = begins_[block], n = begins_[block + 1] - begin;
  if (n == 0) return;
  const std::byte* indices = indices_ + begin * sizeof(uint16_t);
  bool ascending = true;
  for (size_t i = 1; i < n; ++i) ascending &= value_at<uint16_t>(indices, i - 1) < value_at<uint16_t>(indices, i);
  if (!ascending || value_at<uint16_t>(indices, n - 1) >= length_of(block)) {
    malformed("indices of block " + std::to_string(block) + " are not ascending, or beyond its end");
  }
  const std::byte* values = values_ + begin * size_of(type_);
  if (type_ == DType::float32) add<float>(out + block * kCodecBlock, indices, values, n);
  else add<uint16_t>(out + block * kCodecBlock, indices, values, n);
}

}  // namespace lightcc

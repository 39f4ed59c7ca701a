// Bytes to values and back, every read checked. Little-endian hosts only, so values travel as they lie.
#pragma once
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace lightcc {
static_assert(std::endian::native == std::endian::little);

class WireWriter {
 public:
  template <class T> requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  WireWriter& put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  WireWriter& put(std::string_view text) {
    put(uint32_t(text.size()));
    bytes_.append(text);
    return *this;
  }
  template <class T> WireWriter& put(const std::vector<T>& values) {
    put(uint32_t(values.size()));
    for (const T& value : values) put(value);
    return *this;
  }
  template <size_t n> WireWriter& put(const std::array<uint8_t, n>& bytes) {  // the reader knows n
    bytes_.append(reinterpret_cast<const char*>(bytes.data()), n);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Throws Error{internal} when the bytes end early, so a reader of foreign bytes needs no checks of its own
// beyond the ranges of what it read.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T> requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  // An enum whose values are 0..count-1.
  template <class T> T get_enum(int count) {
    auto value = get<int32_t>();
    if (value < 0 || value >= count) fail();
    return T(value);
  }
  template <size_t n> std::array<uint8_t, n> bytes() {
    std::array<uint8_t, n> values;
    std::memcpy(values.data(), take(n).data(), n);
    return values;
  }
  std::string text() { return std::string(take(get<uint32_t>())); }
  template <class T> std::vector<T> values() {
    auto n = get<uint32_t>();
    if (n > bytes_.size() / sizeof(T)) fail();
    std::vector<T> values(n);
    for (T& value : values) value = get<T>();
    return values;
  }
  uint32_t length(size_t least_bytes_each) {  // how many records follow
    auto n = get<uint32_t>();
    if (n > bytes_.size() / least_bytes_each) fail();
    return n;
  }
  bool empty() const { return bytes_.empty(); }
  [[noreturn]] static void fail() { throw Error(Code::internal, "a control message is malformed"); }

 private:
  std::string_view take(size_t n) {
    if (n > bytes_.size()) fail();
    auto head = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return head;
  }
  std::string_view bytes_;
};

}  // namespace lightcc

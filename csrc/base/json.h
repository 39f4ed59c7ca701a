// Writing JSON: strings and flat objects. Whatever the bytes, what comes out is valid.
#pragma once
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace lightcc {

// In quotes. A byte that belongs to no UTF-8 character becomes U+FFFD.
std::string json_string(std::string_view bytes);

// An object, member by member: JsonObject().add("dtype", "float32").add("bytes", 12)
class JsonObject {
 public:
  JsonObject& add(std::string_view name, std::string_view text) { return put(name, json_string(text)); }
  JsonObject& add(std::string_view name, std::integral auto number) { return put(name, std::to_string(number)); }
  JsonObject& add(std::string_view name, std::floating_point auto number) { return add_float(name, number); }
  JsonObject& add_json(std::string_view name, std::string_view value) { return put(name, value); }  // written already
  bool empty() const { return members_.empty(); }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  JsonObject& add_float(std::string_view name, double number);  // null if it is not finite
  JsonObject& put(std::string_view name, std::string_view value) {
    (members_ += empty() ? "" : ",").append(json_string(name)).append(":").append(value);
    return *this;
  }
  std::string members_;
};

}  // namespace lightcc

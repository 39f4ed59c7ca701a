#include "base/json.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace lightcc {
namespace {

// The length of the UTF-8 character that `bytes` begins with; 0: none (RFC 3629, section 4).
size_t character_length(std::string_view bytes) {
  auto at = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
  auto follows = [&](size_t i) { return at(i) >= 0x80 && at(i) <= 0xBF; };
  const unsigned first = at(0), second = at(1);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {  // no longer form of a shorter character, no half of a UTF-16 pair
    const bool allowed = (first != 0xE0 || second >= 0xA0) && (first != 0xED || second <= 0x9F);
    return allowed && follows(1) && follows(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {  // likewise, and nothing above U+10FFFF
    const bool allowed = (first != 0xF0 || second >= 0x90) && (first != 0xF4 || second <= 0x8F);
    return allowed && follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

JsonObject& JsonObject::add_float(std::string_view name, double number) {
  if (!std::isfinite(number)) return put(name, "null");
  char text[32];
  return put(name, {text, std::to_chars(text, text + sizeof text, number).ptr});
}

std::string json_string(std::string_view bytes) {
  std::string text = "\"";
  while (!bytes.empty()) {
    const char c = bytes[0];
    const size_t n = character_length(bytes);
    if (n == 0) {
      text += "\\ufffd";
    } else if (c == '"' || c == '\\') {
      text += {'\\', c};
    } else if (c == '\n') {
      text += "\\n";
    } else if (n == 1 && (c < 0x20 || c == 0x7F)) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", unsigned(c));
      text += escape;
    } else {
      text += bytes.substr(0, n);
    }
    bytes.remove_prefix(n ? n : 1);
  }
  return text + '"';
}

}  // namespace lightcc

// Text that travels between processes: how it is made to fit, and made safe to show; what ranks are called.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace lightcc {

// At most so many bytes of it, without half a character of UTF-8 at the end.
inline std::string_view truncate_utf8(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (text[most] & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

// What came from a process that is not known may end up in a log or on a terminal.
inline std::string printable(std::string_view text) {
  std::string safe(text);
  for (char& c : safe)
    if ((uint8_t(c) < ' ' && c != '\n') || c == '\x7f') c = '?';
  return safe;
}

// A value that a user gave, for an error: in one line whatever is in it, and no longer than a line of text.
inline std::string shown(std::string_view text) {
  constexpr size_t kMost = 64;
  std::string safe;
  for (const char c : truncate_utf8(text, kMost))
    if (uint8_t(c) >= ' ' && c != '\x7f') {
      safe += c;
    } else if (c == '\n') {
      safe += "\\n";
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", unsigned(uint8_t(c)));
      safe += escaped;
    }
  return text.size() <= kMost ? safe : safe + "... (" + std::to_string(text.size()) + " bytes)";
}

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace lightcc

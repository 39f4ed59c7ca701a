#include "net/bootstrap/slurm.h"

#include <charconv>

#include "base/error.h"
#include "base/text.h"

namespace lightcc {
namespace {

constexpr size_t kMost = 100'000;

[[noreturn]] void refuse(std::string_view list) {
  throw Error(Code::invalid_argument, "Slurm's list '" + shown(list) +
                                          "' is not understood; set LIGHTCC_STORE_ADDR=host:port to do without it");
}

int number(std::string_view digits, std::string_view list) {
  int value = 0;
  const char* end = digits.data() + digits.size();
  auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (digits.empty() || error != std::errc() || stop != end || value < 0) refuse(list);
  return value;
}

// Splits at commas that stand outside brackets.
std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t from = 0;
  for (size_t at = 0; at < list.size(); ++at) {
    depth += (list[at] == '[') - (list[at] == ']');
    if (list[at] != ',' || depth != 0) continue;
    parts.push_back(list.substr(from, at - from));
    from = at + 1;
  }
  parts.push_back(list.substr(from));
  return parts;
}

// "01-03,7": 01, 02, 03, 7. A range keeps the width of its first number.
std::vector<std::string> numbers(std::string_view ranges, std::string_view list) {
  std::vector<std::string> found;
  for (std::string_view range : split(ranges)) {
    const size_t dash = range.find('-');
    const std::string_view first = range.substr(0, dash);
    const int from = number(first, list);
    const int to = dash == range.npos ? from : number(range.substr(dash + 1), list);
    if (to < from || size_t(to - from) >= kMost - found.size()) refuse(list);
    for (int i = from; i <= to; ++i) {
      std::string digits = std::to_string(i);
      if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
      found.push_back(std::move(digits));
    }
  }
  return found;
}

}  // namespace

std::vector<std::string> expand_hosts(std::string_view list) {
  std::vector<std::string> hosts;
  for (std::string_view name : split(list)) {
    std::vector<std::string> expanded{""};
    while (!name.empty()) {
      const size_t open = name.find('['), close = name.find(']');
      for (std::string& prefix : expanded) prefix += name.substr(0, std::min(open, close));
      if (open == name.npos && close == name.npos) break;
      if (open == name.npos || close == name.npos || close < open) refuse(list);
      std::vector<std::string> longer;
      const std::vector<std::string> all = numbers(name.substr(open + 1, close - open - 1), list);
      if (expanded.size() * all.size() > kMost) refuse(list);
      for (const std::string& prefix : expanded)
        for (const std::string& digits : all) longer.push_back(prefix + digits);
      expanded = std::move(longer);
      name.remove_prefix(close + 1);
    }
    if (expanded[0].empty() || hosts.size() + expanded.size() > kMost) refuse(list);
    hosts.insert(hosts.end(), expanded.begin(), expanded.end());
  }
  return hosts;
}

std::vector<int> tasks_per_node(std::string_view list) {
  std::vector<int> counts;
  for (std::string_view part : split(list)) {
    const size_t open = part.find("(x");
    if (open != part.npos && part.back() != ')') refuse(list);
    const int tasks = number(part.substr(0, open), list);
    const int nodes = open == part.npos ? 1 : number(part.substr(open + 2, part.size() - open - 3), list);
    if (size_t(nodes) > kMost - counts.size()) refuse(list);
    counts.insert(counts.end(), size_t(nodes), tasks);
  }
  return counts;
}

}  // namespace lightcc

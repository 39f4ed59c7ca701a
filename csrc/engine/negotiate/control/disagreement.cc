#include "engine/negotiate/control/disagreement.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

namespace lightcc {
namespace {

// So many digits that factors which differ never look the same.
std::string factor_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// The dimensions that must agree: allgather and alltoall may differ in the first.
std::string shape_text(const Announcement& a, size_t t) {
  const Shape& shape = a.tensors[t].shape;
  bool free_rows = a.kind == Kind::allgather || a.kind == Kind::alltoall;
  if (!free_rows || shape.empty()) return text_of(shape);
  std::string rest = text_of(Shape(shape.begin() + 1, shape.end()));
  return shape.size() == 1 ? "[any]" : "[any, " + rest.substr(1);
}

}  // namespace

std::string disagreement(const std::vector<Announcement>& what, const std::vector<char>& announced,
                         const std::vector<int>& rank_of) {
  auto differ = [&](const std::string& part, auto text) -> std::string {
    std::map<std::string, std::vector<int>> groups;
    for (size_t i = 0; i < what.size(); ++i)
      if (announced[i]) groups[text(what[i])].push_back(rank_of[i]);
    if (groups.size() < 2) return "";
    std::vector<std::pair<std::vector<int>, std::string>> sides;
    for (auto& [value, ranks] : groups) sides.push_back({ranks, value});
    std::sort(sides.begin(), sides.end());
    std::string line;
    for (auto& [ranks, value] : sides)
      line += (line.empty() ? "" : ", ") + std::string(ranks.size() > 1 ? "ranks " : "rank ") + text_of(ranks) +
              (ranks.size() > 1 ? " have " : " has ") + value;
    return "ranks disagree on " + part + ": " + line;
  };
  const auto first = std::find(announced.begin(), announced.end(), char(1));
  if (first == announced.end()) return "";
  const size_t tensors = what[size_t(first - announced.begin())].tensors.size();
  std::string found = differ("operation", [](auto& a) { return name_of(a.kind); });
  if (found.empty()) found = differ("number of tensors", [](auto& a) { return std::to_string(a.tensors.size()); });
  if (found.empty()) found = differ("device", [](auto& a) { return name_of(a.device); });
  for (size_t t = 0; found.empty() && t < tensors; ++t) {
    std::string which = tensors == 1 ? "" : " of tensor " + std::to_string(t + 1) + "of" + std::to_string(tensors);
    found = differ("dtype" + which, [&](auto& a) { return name_of(a.tensors[t].dtype); });
    if (found.empty()) found = differ("shape" + which, [&](auto& a) { return shape_text(a, t); });
  }
  if (found.empty()) found = differ("reduce op", [](auto& a) { return name_of(a.op); });
  if (found.empty()) found = differ("root rank", [](auto& a) { return std::to_string(a.root); });
  if (found.empty()) found = differ("prescale factor", [](auto& a) { return factor_text(a.pre); });
  if (found.empty()) found = differ("postscale factor", [](auto& a) { return factor_text(a.post); });
  if (found.empty()) found = differ("compression", [](auto& a) { return text_of(a.codec); });
  return found;
}

}  // namespace lightcc

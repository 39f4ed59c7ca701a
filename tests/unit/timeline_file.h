// A timeline's file, read back: one event a line.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace lightcc::test {

class TimelineText {
 public:
  explicit TimelineText(const std::string& path) {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    text = all.str();
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
  }
  size_t count(const std::string& part) const {
    return size_t(std::count_if(lines.begin(), lines.end(), [&](auto& line) { return line.find(part) != line.npos; }));
  }
  // A line's "name":value, without quotes; "" if it has none.
  static std::string field(const std::string& line, const std::string& name) {
    const std::string key = "\"" + name + "\":";
    size_t at = line.find(key);
    if (at == line.npos) return "";
    at += key.size();
    if (line[at] == '"') return line.substr(at + 1, line.find('"', at + 1) - at - 1);
    return line.substr(at, line.find_first_of(",}", at) - at);
  }
  // The events of a row in order: "B NAME", "E NAME", "X NAME".
  std::vector<std::string> row(const std::string& name) const {
    std::string id;
    std::vector<std::string> events;
    for (const std::string& line : lines) {
      if (line.find("\"args\":{\"name\":\"" + name + "\"}") != line.npos) id = field(line, "tid");
      if (line.starts_with("{\"ph") && field(line, "tid") == id)
        events.push_back(field(line, "ph") + " " + field(line, "name"));
    }
    return events;
  }

  // An array of objects, one a line, with nothing missing.
  void expect_complete() const {
    ASSERT_GE(lines.size(), 4u) << text;
    EXPECT_EQ(lines.front(), "[");
    EXPECT_EQ(lines.back(), "]");
    for (size_t i = 1; i + 1 < lines.size(); ++i) {
      EXPECT_EQ(lines[i].front(), '{') << lines[i];
      EXPECT_TRUE(lines[i].ends_with(i + 2 < lines.size() ? "}," : "}")) << lines[i];
    }
  }
  // Every 'E' ends the last 'B' of its row, none is left open, no time goes back.
  void expect_nested() const {
    std::map<std::string, std::vector<std::string>> open;
    std::map<std::string, double> last;
    for (const std::string& line : lines) {
      if (!line.starts_with("{\"ph")) continue;
      const std::string id = field(line, "tid");
      auto& row = open[id];
      EXPECT_GE(std::stod(field(line, "ts")), last[id]) << line;
      last[id] = std::stod(field(line, "ts"));
      if (field(line, "ph") == "B") row.push_back(field(line, "name"));
      if (field(line, "ph") != "E") continue;
      ASSERT_FALSE(row.empty()) << line;
      EXPECT_EQ(row.back(), field(line, "name"));
      row.pop_back();
    }
    for (auto& [id, row] : open) EXPECT_TRUE(row.empty()) << "row " << id << " has an open " << row.back();
  }

  std::string text;
  std::vector<std::string> lines;
};

}  // namespace lightcc::test

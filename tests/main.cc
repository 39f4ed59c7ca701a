// GoogleTest's main, and --labels (labels.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>
#include <vector>

#include "labels.h"

namespace lightcc::test {
namespace {

struct Given {
  std::string label, file, names;
  bool used = false;
};
std::vector<Given>& all_given() {
  static std::vector<Given> given;
  return given;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool matches(const char* pattern, const char* text) {
  if (*pattern == '*') return matches(pattern + 1, text) || (*text && matches(pattern, text + 1));
  return *pattern == *text && (!*text || matches(pattern + 1, text + 1));
}

std::string full_name(const testing::TestInfo& test) { return std::string(test.test_suite_name()) + "." + test.name(); }

bool matches_any(const std::string& patterns, const std::string& name) {
  for (const std::string& pattern : split(patterns, ':'))
    if (matches(pattern.c_str(), name.c_str())) return true;
  return false;
}

bool stands_for(const Given& given, const testing::TestInfo& test) {
  if (given.names.empty()) return given.file == test.file();
  const std::vector<std::string> with_and_without = split(given.names, '-');
  const std::string name = full_name(test);
  return matches_any(with_and_without[0], name) &&
         (with_and_without.size() == 1 || !matches_any(with_and_without[1], name));
}

std::vector<std::string> labels_of(const testing::TestInfo& test) {
  std::vector<std::string> labels;
  for (Given& given : all_given())
    if (stands_for(given, test)) labels.push_back(given.label), given.used = true;
  return labels;
}

std::vector<const testing::TestInfo*> all_tests() {
  std::vector<const testing::TestInfo*> tests;
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  for (int i = 0; i < unit.total_test_suite_count(); ++i)
    for (int j = 0; j < unit.GetTestSuite(i)->total_test_count(); ++j)
      tests.push_back(unit.GetTestSuite(i)->GetTestInfo(j));
  return tests;
}

bool is_chosen(const std::vector<std::string>& labels, const std::vector<std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const std::string& want) {
    const bool without = want[0] == '-';
    return (std::find(labels.begin(), labels.end(), want.substr(without)) != labels.end()) != without;
  });
}

bool is_label(const std::string& want) {
  const std::string label = want.substr(want[0] == '-');
  for (const char* known : {labels::on_hosts, labels::as_placed, labels::watches_network, labels::alone, labels::idle,
                            labels::no_descriptors})
    if (label == known) return true;
  std::fprintf(stderr, "--labels: there is no label '%s' (tests/labels.h)\n", label.c_str());
  return false;
}

}  // namespace

Label::Label(const char* label, const char* file, const char* names) { all_given().push_back({label, file, names}); }

bool has_label(const std::string& label) {
  const testing::TestInfo* now = testing::UnitTest::GetInstance()->current_test_info();
  const std::vector<std::string> labels = now ? labels_of(*now) : std::vector<std::string>();
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}

bool choose_by_labels(int argc, char** argv) {
  std::map<const testing::TestInfo*, std::vector<std::string>> labels;
  for (const testing::TestInfo* test : all_tests()) labels[test] = labels_of(*test);
  for (const Given& given : all_given())
    if (!given.used) {
      std::fprintf(stderr, "%s: no test has the label %s, %s\n", given.file.c_str(), given.label.c_str(),
                   given.names.c_str());
      return false;
    }
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i], option = "--labels=";
    if (argument.compare(0, option.size(), option) != 0) continue;
    const std::vector<std::string> wanted = split(argument.substr(option.size()), ',');
    if (!std::all_of(wanted.begin(), wanted.end(), is_label)) return false;
    std::string filter;
    for (const auto& [test, has] : labels)
      if (is_chosen(has, wanted)) filter += (filter.empty() ? "" : ":") + full_name(*test);
    testing::GTEST_FLAG(filter) = filter;
  }
  return true;
}

}  // namespace lightcc::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return lightcc::test::choose_by_labels(argc, argv) ? RUN_ALL_TESTS() : 2;
}

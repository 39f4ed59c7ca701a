// The files from which fuzzers start, held against what the code writes now.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <source_location>
#include <string>

namespace lightcc::test {

// Expects the files of a fuzz target, bytes by name. LIGHTCC_WRITE_CORPUS=1 writes them anew after the format has
// changed. test: the caller, since the compiler is given its whole path, and only a relative one of this file.
inline void expect_corpus(const char* target, const std::map<std::string, std::string>& files,
                          const std::source_location test = std::source_location::current()) {
  namespace fs = std::filesystem;
  fs::path tests = test.file_name();
  while (tests.has_relative_path() && tests.filename() != "tests") tests = tests.parent_path();
  const fs::path folder = tests / "fuzz/corpus" / target;
  for (const auto& [name, bytes] : files) {
    if (std::getenv("LIGHTCC_WRITE_CORPUS")) {
      fs::create_directories(folder);
      std::ofstream(folder / name, std::ios::binary) << bytes;
    }
    std::ifstream file(folder / name, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes)
        << folder / name << " is old: run this test with LIGHTCC_WRITE_CORPUS=1";
  }
}

}  // namespace lightcc::test

#include "base/cache_file.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/log.h"

namespace lightcc {
namespace {

uint64_t fnv1a(const std::string& text) {  // the same in each build, unlike std::hash
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

std::map<std::string, std::string> read(const std::string& path) {
  std::map<std::string, std::string> values;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (const size_t equals = line.find('='); equals != std::string::npos)
      values[line.substr(0, equals)] = line.substr(equals + 1);
  return values;
}

}  // namespace

CacheFile CacheFile::of(const std::string& directory, const std::string& subject) {
  if (directory.empty()) return {};
  char name[32];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(fnv1a(subject)));
  return CacheFile(directory + "/" + name);
}

std::optional<std::string> CacheFile::get(const std::string& name) const {
  const auto values = read(path_);
  const auto found = values.find(name);
  return found == values.end() ? std::nullopt : std::optional(found->second);
}

void CacheFile::put(const std::string& name, const std::string& value) const {
  if (path_.empty()) return;
  auto values = read(path_);
  values[name] = value;
  const std::string draft = path_ + "." + std::to_string(getpid());
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), error);
  std::ofstream file(draft, std::ios::trunc);
  for (const auto& [one, text] : values) file << one << '=' << text << '\n';
  file.close();
  if (file) std::filesystem::rename(draft, path_, error);
  if (file && !error) return;
  log(Level::debug, "nothing can be kept in " + path_ + ": " + (error ? error.message() : "it cannot be written"));
  std::filesystem::remove(draft, error);
}

}  // namespace lightcc

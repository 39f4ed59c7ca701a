// A small file of lines "name=value" in which a run leaves what later ones need not find out again. Whatever is wrong
// with it (it is not there, it cannot be written, somebody has edited it) only means that nothing is known.
#pragma once
#include <optional>
#include <string>

namespace lightcc {

class CacheFile {
 public:
  CacheFile() = default;                          // keeps nothing
  explicit CacheFile(std::string path) : path_(std::move(path)) {}
  // In this directory ("": keeps nothing), by a hash of what its values belong to.
  static CacheFile of(const std::string& directory, const std::string& subject);

  const std::string& path() const { return path_; }
  std::optional<std::string> get(const std::string& name) const;
  // Replaces the file as a whole: a reader sees the old one or the new one. name and value have no line ends, name no
  // '='.
  void put(const std::string& name, const std::string& value) const;

 private:
  std::string path_;
};

}  // namespace lightcc

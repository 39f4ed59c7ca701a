// Compiled kernels that processes of this user leave for later ones, a file each. Whatever is wrong with a file or the
// folder only means that the kernels are compiled again.
#pragma once
#include <optional>
#include <string>

#include "base/fd.h"

namespace lightcc {

class ImageCache {
 public:
  // "": keeps nothing. The folder is made when the first image is put there, for this user alone. One that others own
  // or may write to is not believed.
  explicit ImageCache(std::string folder) : folder_(std::move(folder)) {}

  // key: all that the image depends on.
  std::optional<std::string> get(const std::string& key) const;
  // Replaces the file as a whole: a reader sees all of it or nothing. What goes wrong is logged once, at info.
  void put(const std::string& key, const std::string& image) const;
  // Held by one process at a time, so that ranks of a host compile only once. Ends with what is returned, in a forked
  // process too. If it cannot be had for half a minute, since its holder has been stopped, the caller goes on without.
  class FileLock;
  FileLock wait_for_turn(const std::string& key) const;

 private:
  std::string path_of(const std::string& key) const;
  const std::string folder_;
};

class ImageCache::FileLock {
 public:
  explicit FileLock(Fd file) : file_(std::move(file)) {}
  FileLock(FileLock&&) = default;
  ~FileLock();

 private:
  Fd file_;
};

}  // namespace lightcc

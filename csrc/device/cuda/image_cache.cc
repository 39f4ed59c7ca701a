#include "device/cuda/image_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/hmac.h"
#include "base/log.h"

namespace lightcc {
namespace {

constexpr size_t kMostBytes = size_t(64) << 20;  // of a file
constexpr std::chrono::milliseconds kLongestWait{30'000}, kLook{5};

std::string hex_of(const std::string& text) {
  std::string hex;
  for (const uint8_t byte : sha256(text)) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    hex += digits;
  }
  return hex;
}

// The first line of a file: it tells whether all of what follows is there, and whether it is what the key means.
std::string header_of(const std::string& key, const std::string& image) { return hex_of(key + image) + "\n"; }

bool is_own(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Why a folder is not believed; "": it is.
std::string refused(const std::string& folder) {
  struct stat status {};
  if (lstat(folder.c_str(), &status) != 0) return std::strerror(errno);
  if (!S_ISDIR(status.st_mode)) return "it is no folder";
  return is_own(status) ? "" : "others own it or may write to it";
}

std::optional<std::string> read_all(const Fd& file, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = read(file.get(), text.data() + done, bytes - done);
    if (count <= 0) return std::nullopt;
    done += size_t(count);
  }
  return text;
}

bool write_all(const Fd& file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(file.get(), text.data() + done, text.size() - done);
    if (count < 0) return false;
    done += size_t(count);
  }
  return true;
}

// Why there is none that is believed; "": there is one now.
std::string make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), error);
  if (error) return error.message();
  if (mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) return std::strerror(errno);
  return refused(folder);
}

// Whether it is the first time that this folder fails.
bool is_news(const std::string& folder) {
  static std::mutex mutex;
  static std::set<std::string> failed;
  std::lock_guard lock(mutex);
  return failed.insert(folder).second;
}

// "": it is there now.
std::string write_file(const std::string& folder, const std::string& path, const std::string& text) {
  if (const std::string why = make_folder(folder); !why.empty()) return why;
  std::string draft = path + ".XXXXXX";
  const Fd file(mkostemp(draft.data(), O_CLOEXEC));
  if (file && write_all(file, text) && rename(draft.c_str(), path.c_str()) == 0) return "";
  const std::string why = std::strerror(errno);
  if (file) unlink(draft.c_str());
  return why;
}

}  // namespace

std::string ImageCache::path_of(const std::string& key) const { return folder_ + "/" + hex_of(key); }

std::optional<std::string> ImageCache::get(const std::string& key) const {
  if (folder_.empty() || !refused(folder_).empty()) return std::nullopt;
  const Fd file(open(path_of(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || !is_own(status)) return std::nullopt;
  const size_t header = header_of("", "").size(), bytes = size_t(status.st_size);
  if (bytes <= header || bytes > kMostBytes) return std::nullopt;
  const auto text = read_all(file, bytes);
  if (!text) return std::nullopt;
  std::string image = text->substr(header);
  if (!text->starts_with(header_of(key, image))) return std::nullopt;
  return image;
}

void ImageCache::put(const std::string& key, const std::string& image) const {
  if (folder_.empty()) return;
  const std::string why = write_file(folder_, path_of(key), header_of(key, image) + image);
  if (!why.empty() && is_news(folder_))
    log(Level::info, "kernels for GPUs cannot be kept in " + folder_ + " (" + why + "): each process compiles them");
}

// A process that is forked meanwhile has the same open file, so closing it here would not end the lock.
ImageCache::FileLock::~FileLock() {
  if (file_) flock(file_.get(), LOCK_UN);
}

ImageCache::FileLock ImageCache::wait_for_turn(const std::string& key) const {
  if (folder_.empty() || !make_folder(folder_).empty()) return FileLock(Fd());
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const std::string path = path_of(key) + "." + host + ".lock";  // in a home by NFS all hosts would wait for one
  Fd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  const auto end = std::chrono::steady_clock::now() + kLongestWait;
  while (file && flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > end) return FileLock(Fd());
    std::this_thread::sleep_for(kLook);  // flock has no wait with a deadline
  }
  return FileLock(std::move(file));
}

}  // namespace lightcc

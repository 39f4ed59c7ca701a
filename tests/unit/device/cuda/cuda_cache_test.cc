// Compiled kernels on disk (device/cuda/image_cache.h): what is wrong with a file or its folder is never believed.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/log.h"
#include "device/cuda/compile.h"
#include "unit/doubles/driver_double.h"

namespace lightcc {
namespace {

namespace fs = std::filesystem;

class CudaCache : public testing::Test {
 protected:
  CudaCache() {
    std::string name = testing::TempDir() + "lightcc-kernels-XXXXXX";
    home_ = mkdtemp(name.data());
    folder_ = home_ / "deep" / "kernels";
  }
  ~CudaCache() override {
    fs::permissions(home_, fs::perms::owner_all);
    fs::remove_all(home_);
  }
  ImageCache cache() const { return ImageCache(folder_); }
  fs::path file() const {  // the only one that is no lock
    fs::path found;
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.path().extension() != ".lock") {
        EXPECT_TRUE(found.empty()) << "a second file: " << entry.path();
        found = entry.path();
      }
    return found;
  }
  std::string text_of(const fs::path& path) const {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void write(const fs::path& path, const std::string& text) const {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  }

  fs::path home_, folder_;
};

const std::string kImage("an image\0with a zero", 20);

TEST_F(CudaCache, GivesBackWhatWasPut) {
  EXPECT_EQ(cache().get("key"), std::nullopt);
  cache().put("key", kImage);
  EXPECT_EQ(cache().get("key"), kImage);
  EXPECT_EQ(cache().get("another key"), std::nullopt);
  cache().put("key", "a newer one");
  EXPECT_EQ(cache().get("key"), "a newer one");
  struct stat status {};
  ASSERT_EQ(stat(folder_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(CudaCache, KeepsNothingWithoutAFolder) {
  const ImageCache none("");
  none.put("key", kImage);
  EXPECT_EQ(none.get("key"), std::nullopt);
  none.wait_for_turn("key");
}

TEST_F(CudaCache, DoesNotBelieveAFileThatHasChanged) {
  cache().put("key", kImage);
  const fs::path path = file();
  const std::string whole = text_of(path);
  for (size_t length = 0; length < whole.size(); ++length) {
    write(path, whole.substr(0, length));
    EXPECT_EQ(cache().get("key"), std::nullopt) << "the first " << length << " bytes";
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] ^= 1;
    write(path, changed);
    EXPECT_EQ(cache().get("key"), std::nullopt) << "byte " << at;
  }
  write(path, whole + "x");
  EXPECT_EQ(cache().get("key"), std::nullopt);
  write(path, whole);
  EXPECT_EQ(cache().get("key"), kImage);
}

// A file of another version has another name; under this name it is none of ours.
TEST_F(CudaCache, DoesNotBelieveAFileOfAnotherKey) {
  cache().put("key", kImage);
  const fs::path path = file();
  const std::string own = text_of(path);
  fs::remove(path);
  cache().put("another version", "its image");
  fs::rename(file(), path);
  EXPECT_EQ(cache().get("key"), std::nullopt);
  write(path, own);
  EXPECT_EQ(cache().get("key"), kImage);
}

TEST_F(CudaCache, DoesNotBelieveWhatOthersMayWrite) {
  cache().put("key", kImage);
  const fs::path path = file();
  for (auto writable : {fs::perms::group_write, fs::perms::others_write}) {
    for (const fs::path& which : {path, folder_}) {
      fs::permissions(which, writable, fs::perm_options::add);
      EXPECT_EQ(cache().get("key"), std::nullopt) << which;
      fs::permissions(which, writable, fs::perm_options::remove);
      EXPECT_EQ(cache().get("key"), kImage) << which;
    }
  }
  const fs::path elsewhere = home_ / "elsewhere";
  fs::rename(folder_, elsewhere);
  fs::create_directory_symlink(elsewhere, folder_);
  EXPECT_EQ(cache().get("key"), std::nullopt) << "a link may lead anywhere";
  cache().put("key", "new");
  EXPECT_EQ(text_of(elsewhere / path.filename()).find("new"), std::string::npos);
}

// Only root may give files away.
TEST_F(CudaCache, DoesNotBelieveWhatOthersOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "missing: root, who may give files away";
  cache().put("key", kImage);
  const fs::path path = file();
  for (const fs::path& which : {path, folder_}) {
    ASSERT_EQ(chown(which.c_str(), 12345, 12345), 0);
    EXPECT_EQ(cache().get("key"), std::nullopt) << which;
    ASSERT_EQ(chown(which.c_str(), 0, 0), 0);
  }
  EXPECT_EQ(cache().get("key"), kImage);
}

// A folder that nobody can make, as in a home that is read-only: even root cannot make one below a file.
TEST_F(CudaCache, WorksWithoutAFolderThatCanBeMade) {
  write(home_ / "deep", "a file");
  testing::internal::CaptureStderr();
  set_log(int(Level::info), true, 0, "h");
  for (int i = 0; i < 3; ++i) {
    const ImageCache::FileLock lock = cache().wait_for_turn("key");
    cache().put("key", kImage);
    EXPECT_EQ(cache().get("key"), std::nullopt);
  }
  set_log(int(Level::warning), false, -1, "");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("kernels for GPUs cannot be kept in " + folder_.string()), said.npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

// Processes that begin at once: one of them compiles, and all have what it has made.
TEST_F(CudaCache, ProcessesOfAHostCompileOnce) {
  constexpr int processes = 4;
  int go[2], told[2];
  ASSERT_EQ(pipe(go), 0);
  ASSERT_EQ(pipe(told), 0);
  std::vector<pid_t> children;
  for (int i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      close(go[1]);
      char byte = 0;
      while (::read(go[0], &byte, 1) > 0) {}  // until the parent has let all of them go
      bool fine = true;
      {
        test::DriverDouble driver;
        const KernelSource program = kernel_programs().front();
        const KernelTarget target = target_for(nvrtc(13000, 90), 90, 13000);
        fine = compile_once(cache(), nvrtc(13000, 90), program, target) == compile(nvrtc(13000, 90), program, target);
        byte = char(driver.calls("CompileProgram") - 1);
      }
      fine = ::write(told[1], &byte, 1) == 1 && fine;
      _exit(fine ? 0 : 1);
    }
    children.push_back(child);
  }
  close(go[0]);
  close(go[1]);
  close(told[1]);
  int compiled = 0;
  for (int i = 0; i < processes; ++i) {
    char byte = 0;
    ASSERT_EQ(::read(told[0], &byte, 1), 1);
    compiled += byte;
  }
  close(told[0]);
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(compiled, 1);
}

// The turn of a process that was forked meanwhile ends with that of its parent.
TEST_F(CudaCache, AForkedProcessHoldsNoTurn) {
  int until[2];
  ASSERT_EQ(pipe(until), 0);
  pid_t child = 0;
  {
    const ImageCache::FileLock lock = cache().wait_for_turn("key");
    child = fork();
    if (child == 0) {
      close(until[1]);
      char byte = 0;
      [[maybe_unused]] const ssize_t ended = ::read(until[0], &byte, 1);
      _exit(0);
    }
  }
  fs::path lock_file;
  for (const auto& entry : fs::directory_iterator(folder_)) lock_file = entry.path();
  const Fd file(open(lock_file.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_EQ(flock(file.get(), LOCK_EX | LOCK_NB), 0);
  close(until[0]);
  close(until[1]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
}

}  // namespace
}  // namespace lightcc

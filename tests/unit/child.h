// What runs in a process of its own that may have only so many descriptors.
#pragma once
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace lightcc {

class Child {
 public:
  // Forks, so no other thread may run meanwhile. `body` gives what the parent shall hear.
  Child(int descriptors, const std::function<std::string()>& body) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid_ = fork();
    from_ = ends[0];
    if (pid_ != 0) {
      close(ends[1]);
      return;
    }
    close(ends[0]);
    const rlimit limit{rlim_t(descriptors), rlim_t(descriptors)};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(1);
    std::string said = body();
    said.push_back('.');  // so that a child that died says nothing, and one without words does
    _exit(write(ends[1], said.data(), said.size()) == ssize_t(said.size()) ? 0 : 1);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { finish(); }
  std::string said() {  // once it has ended
    std::string all;
    char bytes[4096];
    for (ssize_t n; (n = read(from_, bytes, sizeof bytes)) > 0;) all.append(bytes, size_t(n));
    finish();
    if (all.empty()) return "the child died";
    all.pop_back();
    return all;
  }

 private:
  void finish() {
    if (pid_ <= 0) return;
    close(from_);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid_ = 0;
  int from_ = -1;
};

// Opens files until the process may have no more; closing one of them makes room for one.
inline std::vector<int> use_up_descriptors() {
  std::vector<int> all;
  for (int fd; (fd = dup(0)) >= 0;) all.push_back(fd);
  return all;
}

}  // namespace lightcc

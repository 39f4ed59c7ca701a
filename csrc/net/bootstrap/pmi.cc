#include "net/bootstrap/pmi.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

constexpr size_t kLongestLine = 64 << 10;
constexpr size_t kLongestNote = 64 << 10;
constexpr const char* kWithout = "; set LIGHTCC_STORE_ADDR=host:port on all ranks to do without it";

class Proxy {
 public:
  Proxy(int fd, uint64_t deadline_ns) : fd_(fd), deadline_ns_(deadline_ns) {}

  // Sends a command and returns the answer's fields, "name=value name=value"; the first one must be cmd=`expected`.
  std::string ask(const std::string& command, const std::string& expected) {
    tell("cmd=" + command + "\n");
    const std::string line = hear(command);
    if (field(line, "cmd") != expected) refuse(command, line);
    const std::string rc = field(line, "rc");  // some answers have none
    if (!rc.empty() && rc != "0") refuse(command, line);
    return line;
  }
  static std::string field(std::string_view line, const std::string& name) {
    for (size_t at = 0; at < line.size();) {
      const size_t end = std::min(line.find(' ', at), line.size());
      const std::string_view pair = line.substr(at, end - at);
      if (pair.starts_with(name + "=")) return std::string(pair.substr(name.size() + 1));
      at = end + 1;
    }
    return "";
  }
  int number(const std::string& line, const std::string& name) {
    const std::string text = field(line, name);
    int value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value <= 0) refuse(name, line);
    return value;
  }

 private:
  [[noreturn]] static void refuse(const std::string& asked, const std::string& answer) {
    throw Error(Code::internal, "init: mpiexec's PMI server answered '" + answer + "' to '" +
                                    asked.substr(0, asked.find(" value=")) + "'" + kWithout);
  }
  void tell(std::string_view text) {
    while (!text.empty()) {
      wait(POLLOUT, "");
      const ssize_t n = send(fd_, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n < 0)
        throw system_error("init: mpiexec's PMI server cannot be asked (PMI_FD=" + std::to_string(fd_) +
                           "; is MPI finalized already?)" + kWithout);
      text.remove_prefix(size_t(n));
    }
  }
  std::string hear(const std::string& asked) {
    size_t end;
    while ((end = heard_.find('\n')) == std::string::npos) {
      char bytes[4096];
      wait(POLLIN, asked);
      const ssize_t n = recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n <= 0 || heard_.size() > kLongestLine)
        throw Error(Code::internal, "init: mpiexec's PMI server hung up (PMI_FD=" + std::to_string(fd_) +
                                        "; is MPI finalized already?)" + kWithout);
      heard_.append(bytes, size_t(n));
    }
    std::string line = heard_.substr(0, end);
    heard_.erase(0, end + 1);
    return line;
  }
  void wait(short events, const std::string& asked) {
    for (;;) {
      const uint64_t now = now_ns();
      if (now >= deadline_ns_)
        throw Error(
            Code::timeout,
            asked == "barrier_in"
                ? "init: not all processes that mpiexec started called init before HOROVOD_START_TIMEOUT; across "
                  "hosts all must, also for a world of some of them (or set LIGHTCC_STORE_ADDR=host:port)"
                : std::string("init: mpiexec's PMI server did not answer before HOROVOD_START_TIMEOUT") + kWithout);
      pollfd one{fd_, events, 0};
      const int ready = poll(&one, 1, int(std::min<uint64_t>((deadline_ns_ - now) / 1'000'000 + 1, 1000)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) throw system_error("init: waiting for mpiexec's PMI server");
    }
  }

  const int fd_;
  const uint64_t deadline_ns_;
  std::string heard_;
};

}  // namespace

PmiNote broadcast_by_pmi(int fd, const std::string& key, const std::optional<std::string>& mine, uint64_t deadline_ns) {
  Proxy proxy(fd, deadline_ns);
  proxy.ask("init pmi_version=1 pmi_subversion=1", "response_to_init");
  const std::string maxes = proxy.ask("get_maxes", "maxes");
  const size_t piece = size_t(proxy.number(maxes, "vallen_max") - 1), longest_key = proxy.number(maxes, "keylen_max");
  PmiNote result;
  result.kvs_name = Proxy::field(proxy.ask("get_my_kvsname", "my_kvsname"), "kvsname");
  auto entry = [&](size_t i) { return "kvsname=" + result.kvs_name + " key=" + key + "." + std::to_string(i); };
  if (key.size() + 4 > longest_key)
    throw Error(Code::internal, "init: the key " + key + " is too long for mpiexec's PMI server");

  // In pieces of what the server takes as one value; the note's length stands before it.
  if (mine) {
    const std::string whole = std::to_string(mine->size()) + ":" + *mine;
    if (mine->size() > kLongestNote || mine->find_first_of(" \t\r\n") != std::string::npos)
      throw Error(Code::internal, "init: a note that mpiexec's PMI server cannot hand out: " + *mine);
    for (size_t i = 0; i * piece < whole.size(); ++i)
      proxy.ask("put " + entry(i) + " value=" + whole.substr(i * piece, piece), "put_result");
  }
  proxy.ask("barrier_in", "barrier_out");
  auto get = [&](size_t i) { return Proxy::field(proxy.ask("get " + entry(i), "get_result"), "value"); };
  std::string got = get(0);
  size_t length = 0;
  auto [colon, error] = std::from_chars(got.data(), got.data() + got.size(), length);
  if (error != std::errc() || colon == got.data() + got.size() || *colon != ':' || length > kLongestNote)
    throw Error(Code::internal, "init: mpiexec's PMI server gave '" + got + "' as rank 0's note" + kWithout);
  const size_t whole = size_t(colon + 1 - got.data()) + length;
  for (size_t i = 1; got.size() < whole; ++i) {
    const std::string more = get(i);
    if (more.empty())
      throw Error(Code::internal, std::string("init: mpiexec's PMI server lost a part of rank 0's note") + kWithout);
    got += more;
  }
  result.note = got.substr(whole - length, length);
  return result;
}

namespace {
int proxy_at_exit = -1;     // a copy, so that it stays the same socket whatever becomes of the number
pid_t process_at_exit = 0;  // a forked child is not what mpiexec started

// As a destructor of the library it runs after what others asked for with atexit(), which is where MPICH says it.
__attribute__((destructor)) void finalize_pmi() {
  constexpr std::string_view kBye = "cmd=finalize\n";
  constexpr int kPatienceMs = 1000;
  if (proxy_at_exit < 0 || getpid() != process_at_exit) return;
  if (send(proxy_at_exit, kBye.data(), kBye.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
  pollfd answer{proxy_at_exit, POLLIN, 0};
  poll(&answer, 1, kPatienceMs);
}
}  // namespace

void finalize_pmi_at_exit(int fd) {
  static std::once_flag once;
  std::call_once(once, [fd] { proxy_at_exit = fcntl(fd, F_DUPFD_CLOEXEC, 0), process_at_exit = getpid(); });
}

}  // namespace lightcc

#include "net/bootstrap/pmix.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/wire.h"

namespace lightcc {
namespace {

// What is used of the PMIx standard, chapters 3 (data structures) and 5-7; the same in its versions 2 to 5.
namespace pmix {
using Status = int;
struct Proc {
  char nspace[256];
  uint32_t rank;
};
struct Value {
  uint16_t type;
  union {
    bool flag;
    char* string;
    char room[24];  // its largest members are structs of two and three words
  } data;
};
struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};
static_assert(sizeof(Proc) == 260 && sizeof(Value) == 32 && sizeof(Info) == 552 && offsetof(Info, value) == 520);
constexpr uint16_t kBool = 1, kString = 3;
constexpr uint8_t kGlobal = 3;
}  // namespace pmix

constexpr const char* kWithoutPmix = "; set LIGHTCC_STORE_ADDR=host:port on all ranks (mpirun -x) to do without PMIx";

class Library {
 public:
  explicit Library(const std::string& path) {
    // Never closed: its threads and its handlers at exit stay.
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      throw Error(Code::internal,
                  "init: mpirun's PMIx library cannot be opened: " + std::string(dlerror()) + kWithoutPmix);
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (!function) throw Error(Code::internal, "init: " + path + " has no " + name + kWithoutPmix);
    };
    find(init, "PMIx_Init");
    find(finalize, "PMIx_Finalize");
    find(put, "PMIx_Put");
    find(commit, "PMIx_Commit");
    find(fence, "PMIx_Fence");
    find(get, "PMIx_Get");
    find(text, "PMIx_Error_string");
    find(version, "PMIx_Get_version");
  }
  pmix::Status (*init)(pmix::Proc*, pmix::Info*, size_t);
  pmix::Status (*finalize)(const pmix::Info*, size_t);
  pmix::Status (*put)(uint8_t scope, const char* key, pmix::Value*);
  pmix::Status (*commit)();
  pmix::Status (*fence)(const pmix::Proc*, size_t, const pmix::Info*, size_t);
  pmix::Status (*get)(const pmix::Proc*, const char* key, const pmix::Info*, size_t, pmix::Value**);
  const char* (*text)(pmix::Status);
  const char* (*version)();
};

struct PmixTask {
  std::string path, key;  // of mpirun's PMIx library; under which the note is kept
  std::vector<int> ranks;
  std::optional<std::string> mine;
};

// A client of mpirun for a while. Without the end mpirun would take the exit of the process for a crash.
class PmixSession {
 public:
  explicit PmixSession(const Library& library) : library_(library) {
    check(library_.init(&self_, nullptr, 0), "PMIx_Init");
  }
  ~PmixSession() { library_.finalize(nullptr, 0); }
  void check(pmix::Status status, const char* call) const {
    if (status != 0)
      throw Error(Code::internal, std::string("init: ") + call + " of mpirun's PMIx library says " +
                                      library_.text(status) + " (" + std::to_string(status) + ")" + kWithoutPmix);
  }
  pmix::Proc proc(int rank) const {
    pmix::Proc proc = self_;
    proc.rank = uint32_t(rank);
    return proc;
  }

 private:
  const Library& library_;
  pmix::Proc self_{};
};

// "OpenPMIx 4.2.2rc1 (PMIx Standard: ...": the first word that begins with a digit.
std::string version_number(const std::string& text) {
  std::istringstream words(text);
  for (std::string word; words >> word;)
    if (word[0] >= '0' && word[0] <= '9') return word.substr(0, word.find(','));
  return text;
}

PmixNote hand_out(const PmixTask& task, const Library& library, const PmixSession& user) {
  if (task.mine) {
    std::string note = *task.mine;
    pmix::Value value{};
    value.type = pmix::kString;
    value.data.string = note.data();
    user.check(library.put(pmix::kGlobal, task.key.c_str(), &value), "PMIx_Put");
    user.check(library.commit(), "PMIx_Commit");
  }
  std::vector<pmix::Proc> procs;
  for (int rank : task.ranks) procs.push_back(user.proc(rank));
  pmix::Info collect{};
  std::strcpy(collect.key, "pmix.collect");
  collect.value.type = pmix::kBool;
  collect.value.data.flag = true;
  user.check(library.fence(procs.data(), procs.size(), &collect, 1), "PMIx_Fence");

  PmixNote result;
  result.version = version_number(library.version());
  pmix::Value* value = nullptr;
  user.check(library.get(&procs[0], task.key.c_str(), nullptr, 0, &value), "PMIx_Get");
  if (!value || value->type != pmix::kString || !value->data.string)
    throw Error(Code::internal, std::string("init: mpirun's PMIx server lost rank 0's note") + kWithoutPmix);
  result.note = value->data.string;
  std::free(value->data.string);
  std::free(value);
  return result;
}

Error too_late() {
  return Error(Code::timeout,
               "init: not all ranks called init before HOROVOD_START_TIMEOUT, or mpirun's PMIx server did not answer");
}

Error forked() {
  return Error(Code::internal,
               std::string("init: this process was forked from a rank that mpirun's PMIx server knows") + kWithoutPmix);
}

// Whether MPI runs in this process.
bool is_in_use(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  auto initialized = handle ? reinterpret_cast<int (*)()>(dlsym(handle, "PMIx_Initialized")) : nullptr;
  const bool yes = initialized && initialized();
  if (handle) dlclose(handle);
  return yes;
}

// PMIx counts its users in a process, so beside MPI this is one more.
PmixNote beside_mpi(const PmixTask& task) {
  const Library library(task.path);
  const PmixSession user(library);
  return hand_out(task, library, user);
}

PmixNote until_exit(const PmixTask& task) {
  static std::mutex one_at_a_time;
  static const Library* library = nullptr;  // both are used at exit and never freed
  static const PmixSession* client = nullptr;
  static pid_t process = 0;  // a forked child is no client
  std::lock_guard lock(one_at_a_time);
  if (!client) {
    library = new Library(task.path);
    client = new PmixSession(*library);
    process = getpid();
    std::atexit([] {
      if (getpid() == process) delete client;
    });
  }
  if (getpid() != process) throw forked();
  return hand_out(task, *library, *client);
}

// PMIx's calls have no deadline of their own, so a thread makes them; one that never returns is left behind.
PmixNote in_thread(PmixNote (*call)(const PmixTask&), const PmixTask& task, uint64_t deadline_ns) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::optional<PmixNote> result;
    std::optional<std::pair<Code, std::string>> failure;  // not an Error, whose copies share their text between threads
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, call, task] {
    std::optional<PmixNote> result;
    std::optional<std::pair<Code, std::string>> failure;
    try {
      result = call(task);
    } catch (const Error& error) {
      failure = {error.code(), error.what()};
    }
    std::lock_guard lock(shared->mutex);
    shared->result = std::move(result);
    shared->failure = std::move(failure);
    shared->done = true;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  const auto patience = std::chrono::nanoseconds(deadline_ns - std::min(deadline_ns, now_ns()));
  if (!shared->changed.wait_for(lock, patience, [&] { return shared->done; })) throw too_late();
  if (shared->failure) throw Error(shared->failure->first, shared->failure->second);
  return std::move(*shared->result);
}

// A child process that is the rank to mpirun, and does what it is asked to until the connection is shut down.
class Child {
 public:
  Child() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw system_error(kAsking);
    ours_ = Fd(ends[0]);
    const Fd theirs(ends[1]);
    process_ = fork();
    if (process_ < 0) throw system_error(kAsking);
    if (process_ == 0) serve(theirs.get());
  }
  Child(const Child&) = delete;
  // Waits: mpirun takes a rank that exits before it has left PMIx for a crash.
  ~Child() {
    shutdown(ours_.get(), SHUT_RDWR);
    const uint64_t deadline_ns = now_ns() + kEndNs;
    pid_t ended = 0;
    while ((ended = waitpid(process_, nullptr, WNOHANG)) == 0 && now_ns() < deadline_ns) usleep(1000);
    if (ended != 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  PmixNote ask(const PmixTask& task, uint64_t deadline_ns) {
    WireWriter question;
    question.put(task.path).put(task.key).put(task.ranks).put(int32_t(task.mine.has_value()));
    const std::string text = question.put(task.mine.value_or("")).take();
    if (send(ours_.get(), text.data(), text.size(), MSG_NOSIGNAL) != ssize_t(text.size())) throw system_error(kAsking);
    const std::string answer = hear(ours_.get(), deadline_ns);
    if (answer.empty())
      throw Error(Code::internal, "init: " + task.path + " crashed when it asked mpirun's PMIx server" + kWithoutPmix);
    WireReader reader(answer);
    const auto code = reader.get_enum<Code>(int(Code::internal) + 1);
    PmixNote got;
    got.version = reader.text();
    got.note = reader.text();
    if (code != Code::ok) throw Error(code, got.version);
    return got;
  }

 private:
  static constexpr const char* kAsking = "init: asking mpirun's PMIx server from a child process";
  static constexpr uint64_t kEndNs = 2'000'000'000;
  static constexpr size_t kMostBytes = 128 << 10;

  static std::string hear(int fd, uint64_t deadline_ns) {  // one message; empty: the other is gone
    for (uint64_t now = now_ns(); now < deadline_ns; now = now_ns()) {
      pollfd wait{fd, POLLIN, 0};
      if (poll(&wait, 1, int(std::min<uint64_t>((deadline_ns - now) / 1'000'000 + 1, 1000))) <= 0) continue;
      std::string message(kMostBytes, '\0');
      const ssize_t n = recv(fd, message.data(), message.size(), 0);
      if (n < 0 && errno == EINTR) continue;
      message.resize(size_t(std::max<ssize_t>(n, 0)));
      return message;
    }
    throw too_late();
  }
  [[noreturn]] static void serve(int number) {
    // Nothing of the rank's shall stay open because of this process: not its ports, nor its ends of pipes.
    constexpr int fd = 3;
    if (number != fd) dup2(number, fd);
    if (syscall(SYS_close_range, unsigned(fd + 1), ~0u, 0u) != 0)  // Linux before 5.9
      for (int other = fd + 1; other < int(sysconf(_SC_OPEN_MAX)); ++other) close(other);
    signal(SIGINT, SIG_IGN);
    std::unique_ptr<Library> library;
    std::unique_ptr<PmixSession> client;
    for (;;) {
      const std::string question = hear(fd, UINT64_MAX);
      if (question.empty()) break;
      std::string answer;
      try {
        WireReader reader(question);
        PmixTask task;
        task.path = reader.text();
        task.key = reader.text();
        task.ranks = reader.values<int>();
        const bool brings = reader.get<int32_t>();
        if (brings) task.mine = reader.text();
        if (!library) library = std::make_unique<Library>(task.path);
        if (!client) client = std::make_unique<PmixSession>(*library);
        const PmixNote got = hand_out(task, *library, *client);
        answer = WireWriter().put(Code::ok).put(got.version).put(got.note).take();
      } catch (const Error& error) {
        answer = WireWriter().put(error.code()).put(std::string_view(error.what())).put(std::string_view()).take();
      }
      send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
    }
    client.reset();
    _exit(0);
  }

  Fd ours_;
  pid_t process_ = 0;
};

PmixNote through_child(const PmixTask& task, uint64_t deadline_ns) {
  static std::mutex one_at_a_time;
  static Child* child = nullptr;
  static pid_t process = 0;  // the child is not that of a forked process
  std::lock_guard lock(one_at_a_time);
  if (!child && is_in_use(task.path)) return in_thread(beside_mpi, task, deadline_ns);
  if (!child) {
    child = new Child;
    if (process == 0)
      std::atexit([] {
        if (getpid() == process) delete child;
      });
    process = getpid();
  }
  if (getpid() != process) throw forked();
  try {
    return child->ask(task, deadline_ns);
  } catch (const Error&) {
    delete std::exchange(child, nullptr);
    throw;
  }
}

}  // namespace

std::string pmix_library(pid_t from) {
  for (int generation = 0; from > 0 && generation < 10; ++generation) {
    const std::string folder = "/proc/" + std::to_string(from);
    std::ifstream maps(folder + "/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t path = line.find('/');
      if (path != line.npos && line.find("/libpmix.so") != line.npos) return line.substr(path);
    }
    std::ifstream status(folder + "/status");
    from = 0;
    for (std::string word; status >> word;)
      if (word == "PPid:") {
        status >> from;
        break;
      }
  }
  return "libpmix.so.2";
}

PmixNote broadcast_by_pmix(const std::string& library, PmixClient how, const std::string& key,
                           const std::vector<int>& ranks, const std::optional<std::string>& mine,
                           uint64_t deadline_ns) {
  const PmixTask task{library, key, ranks, mine};
  return how == PmixClient::itself ? in_thread(until_exit, task, deadline_ns) : through_child(task, deadline_ns);
}

}  // namespace lightcc

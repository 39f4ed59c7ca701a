#include "harp_plugin/tools/plugtest/peer.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>

#include "base/clock.h"
#include "harp_plugin/tools/plugtest/pair.h"

namespace harp::plugtest {

namespace {

constexpr size_t kDepth = 8;
constexpr size_t kLastBytes = 3;  // the size of no other message
constexpr uint64_t kSayEveryNs = 20'000'000;
constexpr unsigned kBusyUs = 200, kIdleUs = 50'000;  // between two looks, when nothing moves

struct Failure : std::runtime_error {
  explicit Failure(nccl::Result its_result) : std::runtime_error(last_warning()), result(its_result) {}
  nccl::Result result;
};

void done_or_throw(nccl::Result result) {
  if (result != nccl::kSuccess) throw Failure(result);
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

size_t size_of(uint64_t message, size_t most) {
  return message % 7 == 3 ? 0 : 16 + message * 2654435761u % (message % 3 ? most - 15 : 100);
}

// One communicator: messages of all sizes, 8 under way, each checked.
class Flow {
 public:
  Flow(NetPlugin& plugin, void* communicator, bool sends, size_t most)
      : plugin_(plugin), communicator_(communicator), sends_(sends), most_(most) {}
  ~Flow() { sends_ ? plugin_.close_send(communicator_) : plugin_.close_recv(communicator_); }
  Flow(const Flow&) = delete;
  bool finished() const { return last_came_ || (last_posted_ && under_way_.empty()); }
  uint64_t over() const { return over_; }

  bool step(bool go, bool stop) {
    bool moved = false;
    if (last_came_) return false;
    while (!last_posted_ && (!sends_ || go || stop) && under_way_.size() < kDepth && post(stop)) moved = true;
    return test() || moved;
  }

 private:
  struct Pending {
    Bytes memory;
    void* request = nullptr;
  };

  bool post(bool last) {
    auto pending = std::make_unique<Pending>();
    if (sends_) {
      pending->memory = pattern(last ? kLastBytes : size_of(posted_, most_), posted_);
      done_or_throw(plugin_.isend(communicator_, pending->memory.data(), pending->memory.size(), 0, nullptr,
                                  &pending->request));
      last_posted_ = last && pending->request;
    } else {
      pending->memory.resize(most_ + 16);
      void *data = pending->memory.data(), *nothing = nullptr;
      size_t bytes = pending->memory.size();
      int tag = 0;
      done_or_throw(plugin_.irecv(communicator_, 1, &data, &bytes, &tag, &nothing, &pending->request));
    }
    if (!pending->request) return false;
    under_way_.push_back(std::move(pending));
    ++posted_;
    return true;
  }

  bool test() {
    int done = 0, bytes = 0;
    if (under_way_.empty()) return false;
    Pending& first = *under_way_.front();
    done_or_throw(plugin_.test(first.request, &done, &bytes));
    if (!done) return false;
    if (!sends_) {
      const bool last = size_t(bytes) == kLastBytes;
      first.memory.resize(size_t(bytes));
      if (first.memory != pattern(last ? kLastBytes : size_of(over_, most_), over_))
        throw std::runtime_error("message " + std::to_string(over_) + " came changed");
      last_came_ = last;  // the receives that are left keep their memory until the communicator is closed
    }
    under_way_.pop_front();
    ++over_;
    return true;
  }

  NetPlugin& plugin_;
  void* const communicator_;
  const bool sends_;
  const size_t most_;
  uint64_t posted_ = 0, over_ = 0;
  bool last_posted_ = false, last_came_ = false;
  std::deque<std::unique_ptr<Pending>> under_way_;
};

// The lines that have come on standard input; "stop" where it has ended.
std::vector<std::string> commands() {
  static std::string rest;
  std::vector<std::string> lines;
  pollfd ready{STDIN_FILENO, POLLIN, 0};
  if (poll(&ready, 1, 0) <= 0) return lines;
  char bytes[256];
  const ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
  if (n <= 0) return {"stop"};
  rest.append(bytes, size_t(n));
  for (size_t end; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1))
    lines.push_back(rest.substr(0, end));
  return lines;
}

class Side {
 public:
  Side(const std::string& path, std::map<std::string, std::string> words)
      : words_(std::move(words)), plugin_(path, 0), sends_(words_.count("connect") > 0),
        count_(number("connections", 1)), most_(number("most", 300'000)) {}

  ~Side() {
    flows_.clear();
    if (listener_) plugin_.close_listen(listener_);
  }

  void run() {
    begin();
    bool go = number("idle", 0) == 0, stop = false, ready = false;
    uint64_t said = 0, said_ns = 0;
    for (;;) {
      bool moved = grow(), finished = flows_.size() == count_;
      if (finished && !ready) say("ready");
      ready |= finished;
      uint64_t over = 0;
      for (const auto& flow : flows_) {
        moved |= flow->step(go && ready, stop && ready);
        finished &= flow->finished();
        over += flow->over();
      }
      const uint64_t now_ns = lightcc::now_ns();
      if (over != said && now_ns - said_ns > kSayEveryNs) {
        say("at " + std::to_string(over));
        said = over;
        said_ns = now_ns;
      }
      if (finished) return say("done " + std::to_string(over));
      for (const std::string& line : commands()) {
        go |= line == "go";
        stop |= line == "stop";
      }
      if (!moved) usleep(go || stop ? kBusyUs : kIdleUs);
    }
  }

 private:
  uint64_t number(const std::string& key, uint64_t fallback) {
    return words_.count(key) ? std::strtoull(words_[key].c_str(), nullptr, 10) : fallback;
  }

  void begin() {
    const std::string text = words_["handle"];
    if (sends_) {
      if (text.size() != 2 * sizeof handle_) throw std::runtime_error("handle=: not a handle in hexadecimal");
      for (size_t i = 0; i < sizeof handle_; ++i)
        handle_[i] = uint8_t(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
      return;
    }
    done_or_throw(plugin_.listen(plugin_.context, 0, handle_, &listener_));
    std::string line = "handle ";
    char two[3];
    for (const uint8_t byte : handle_) line += (std::snprintf(two, sizeof two, "%02x", byte), two);
    say(line);
  }

  // A communicator more, if there shall be and it is there.
  bool grow() {
    if (flows_.size() == count_) return false;
    void* communicator = nullptr;
    done_or_throw(sends_ ? plugin_.connect(plugin_.context, 0, handle_, &communicator)
                         : plugin_.accept(listener_, &communicator));
    if (communicator) flows_.push_back(std::make_unique<Flow>(plugin_, communicator, sends_, most_));
    return communicator != nullptr;
  }

  std::map<std::string, std::string> words_;
  Started plugin_;
  const bool sends_;
  const size_t count_, most_;
  uint8_t handle_[nccl::kHandleBytes] = {};
  void* listener_ = nullptr;
  std::vector<std::unique_ptr<Flow>> flows_;
};

}  // namespace

int run_peer(const std::string& plugin, const std::vector<std::string>& words) {
  std::map<std::string, std::string> values;
  for (const std::string& word : words) {
    const size_t equals = std::min(word.find('='), word.size());
    values[word.substr(0, equals)] = word.substr(std::min(equals + 1, word.size()));
  }
  try {
    Side(plugin, values).run();
  } catch (const Failure& failure) {
    say("error " + std::to_string(failure.result) + " " + failure.what());
    return 3;
  } catch (const std::exception& wrong) {
    say(std::string("wrong ") + wrong.what());
    return 4;
  }
  return 0;
}

}  // namespace harp::plugtest

// One side of connections that a test in Python does things to (tests/multihost/test_harp_faults.py). Both sides send
// messages of all sizes, 4 at a time, and check every byte of what comes.
//
//   harp_peer listen [KEY=VALUE]...            prints "handle HEX" first
//   harp_peer connect handle=HEX [KEY=VALUE]...
//
// Keys: port, interface, timeout (ms), secret, connections, engine (0, 1: inline, 2: threads), idle (1: receives are
// posted, nothing is sent before "go"), most (bytes of a message). On its input: "go", "stop" and "stats". Lines that
// it prints: "ready" when all are connected; "at N", so many messages have come in all; "error CODE TEXT", a connection
// has failed, then it ends with 3; after "stop" on either side "stats JSON" and "done N", then it ends with 0; "wrong
// TEXT", then it ends with 4.
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"
#include "harp_plugin/harp.h"

namespace {

constexpr size_t kDepth = 4;
constexpr uint64_t kSayEveryNs = 20'000'000, kLookEveryNs = 2'000'000;
constexpr uint64_t kLastBytes = 3;  // the size of no other message

std::map<std::string, std::string> words;

std::string word(const std::string& key, const std::string& fallback) {
  return words.count(key) ? words[key] : fallback;
}
uint64_t number(const std::string& key, uint64_t fallback) {
  return std::strtoull(word(key, std::to_string(fallback)).c_str(), nullptr, 10);
}

struct Failure : std::runtime_error {
  Failure(int its_code, const std::string& text) : std::runtime_error(text), code(its_code) {}
  int code;
};
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

bool done(int code) {
  if (code != HARP_OK && code != HARP_PENDING) throw Failure(code, harp_error());
  return code == HARP_OK;
}

uint64_t mixed(uint64_t z) {  // splitmix64, of Steele, Lea and Flood
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

size_t size_of(uint64_t message, size_t most) {
  const uint64_t random = mixed(message);
  return message % 7 == 3 ? 0 : message % 3 == 0 ? 16 + random % 100 : 16 + random % (most - 15);
}

std::vector<uint8_t> content_of(uint64_t message, size_t bytes) {
  std::vector<uint8_t> content((bytes + 7) / 8 * 8);
  for (size_t at = 0; at < content.size(); at += 8) {
    const uint64_t value = mixed(message * 1'000'003 + at);
    std::memcpy(&content[at], &value, 8);
  }
  content.resize(bytes);
  return content;
}

class Link {
 public:
  Link(harp_connection* connection, size_t most) : connection_(connection), most_(most) {}
  Link(const Link&) = delete;
  ~Link() { harp_close(connection_); }

  // Whether anything was done.
  bool step(bool send, bool stop) {
    bool moved = false;
    while (!last_came_ && receives_.size() < kDepth && post_receive()) moved = true;
    while (!last_sent_ && (send || stop) && sends_.size() < kDepth && post_send(stop)) moved = true;
    connected_ = connected_ || done(harp_connected(connection_));  // later on its requests say how it ends
    return test_send() | test_receive() | moved;
  }
  bool connected() const { return connected_; }
  bool peer_stops() const { return last_came_; }
  bool finished() const { return last_came_ && last_sent_ && sends_.empty(); }
  uint64_t came() const { return came_; }

 private:
  struct Pending {
    std::vector<uint8_t> memory;
    harp_request* request = nullptr;
  };

  bool post_receive() {
    auto pending = std::make_unique<Pending>();
    pending->memory.resize(most_ + 16);
    if (!done(harp_recv(connection_, pending->memory.data(), pending->memory.size(), &pending->request))) return false;
    receives_.push_back(std::move(pending));
    return true;
  }

  bool post_send(bool last) {
    auto pending = std::make_unique<Pending>();
    pending->memory = content_of(sent_, last ? kLastBytes : size_of(sent_, most_));
    if (!done(harp_send(connection_, pending->memory.data(), pending->memory.size(), &pending->request))) return false;
    sends_.push_back(std::move(pending));
    ++sent_;
    last_sent_ = last;
    return true;
  }

  bool test_send() {
    size_t bytes = 0;
    if (sends_.empty() || !done(harp_test(sends_.front()->request, &bytes))) return false;
    if (bytes != sends_.front()->memory.size()) throw Wrong("a send of another size than asked for");
    sends_.pop_front();
    return true;
  }

  bool test_receive() {
    size_t bytes = 0;
    if (last_came_ || receives_.empty() || !done(harp_test(receives_.front()->request, &bytes))) return false;
    last_came_ = bytes == kLastBytes;
    const std::vector<uint8_t> expected = content_of(came_, last_came_ ? kLastBytes : size_of(came_, most_));
    if (bytes != expected.size() || std::memcmp(expected.data(), receives_.front()->memory.data(), bytes) != 0)
      throw Wrong("message " + std::to_string(came_) + " of " + std::to_string(expected.size()) + " bytes came with " +
                  std::to_string(bytes) + " or other ones");
    receives_.pop_front();
    ++came_;
    return true;
  }

  harp_connection* const connection_;
  const size_t most_;
  std::deque<std::unique_ptr<Pending>> sends_, receives_;
  uint64_t sent_ = 0, came_ = 0;
  bool connected_ = false, last_sent_ = false, last_came_ = false;
};

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

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

std::string stats(harp_context* context) {
  std::string json(harp_stats(context, nullptr, 0) + 4096, '\0');  // room for what has grown since
  harp_stats(context, json.data(), json.size());
  return json.c_str();
}

harp_context* open_context() {
  const std::string port = word("port", "udp"), interface = word("interface", ""), secret = word("secret", "");
  harp_options options{};
  options.size = sizeof options;
  options.port = port.c_str();
  options.interface = interface.empty() ? nullptr : interface.c_str();
  options.inline_mode = int32_t(number("engine", 0));
  options.peer_timeout_ms = uint32_t(number("timeout", 0));
  options.authenticate = secret.empty() ? 0 : 1;
  options.secret = secret.empty() ? nullptr : secret.c_str();
  harp_context* context = nullptr;
  done(harp_open(&options, &context));
  return context;
}

struct Sides {
  harp_context* const context = open_context();
  harp_listener* listener = nullptr;
  std::vector<std::unique_ptr<Link>> links;

  ~Sides() {
    links.clear();
    if (listener) harp_stop_listening(listener);
    harp_close_context(context);
  }

  void listen() {
    harp_handle handle;
    done(harp_listen(context, &handle, &listener));
    std::string text = "handle ";
    char two[3];
    for (const uint8_t byte : handle.bytes) text += (std::snprintf(two, sizeof two, "%02x", byte), two);
    say(text);
  }

  void connect(const std::string& text, size_t most) {
    harp_handle handle{};
    if (text.size() != 2 * sizeof handle.bytes) throw Wrong("handle=: not a handle in hexadecimal");
    for (size_t i = 0; i < sizeof handle.bytes; ++i)
      handle.bytes[i] = uint8_t(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
    harp_connection* connection = nullptr;
    done(harp_connect(context, &handle, HARP_MESSAGE, &connection));
    links.push_back(std::make_unique<Link>(connection, most));
  }

  void accept(size_t most) {
    harp_connection* connection = nullptr;
    if (done(harp_accept(listener, &connection))) links.push_back(std::make_unique<Link>(connection, most));
  }
};

void run() {
  const size_t count = number("connections", 1), most = number("most", 300'000);
  bool send = number("idle", 0) == 0, stop = false, ready = false;
  Sides sides;
  if (words.count("listen")) sides.listen();
  for (size_t i = 0; words.count("connect") && i < count; ++i) sides.connect(word("handle", ""), most);
  uint64_t said = 0, said_at = 0, looked_at = 0;
  for (;;) {
    harp_poll(sides.context);
    if (sides.links.size() < count) sides.accept(most);
    bool moved = false, finished = sides.links.size() == count, connected = finished;
    uint64_t came = 0;
    for (const auto& link : sides.links) {
      moved |= link->step(send && ready, stop && ready);
      stop |= link->peer_stops();
      finished &= link->finished();
      connected &= link->connected();
      came += link->came();
    }
    if (connected && !ready) say("ready");
    ready = connected;
    const uint64_t now = lightcc::now_ns();
    if (came != said && now - said_at > kSayEveryNs) {
      say("at " + std::to_string(came));
      said = came;
      said_at = now;
    }
    if (finished) {
      say("stats " + stats(sides.context));
      say("done " + std::to_string(came));
      return;
    }
    if (moved && now - looked_at < kLookEveryNs) continue;
    looked_at = now;
    for (const std::string& line : commands()) {
      send |= line == "go";
      stop |= line == "stop";
      if (line == "stats") say("stats " + stats(sides.context));
    }
    if (!moved) usleep(200);
  }
}

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    const std::string text = arguments[i];
    const size_t equals = text.find('=');
    words[text.substr(0, equals)] = equals == std::string::npos ? "" : text.substr(equals + 1);
  }
  try {
    run();
  } catch (const Failure& failure) {
    say("error " + std::to_string(failure.code) + " " + failure.what());
    return 3;
  } catch (const Wrong& wrong) {
    say(std::string("wrong ") + wrong.what());
    return 4;
  }
  return 0;
}

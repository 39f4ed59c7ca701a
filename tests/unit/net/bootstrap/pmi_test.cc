// PMI-1 by script: a server of two processes, as MPICH's proxy, which may also answer wrongly, slowly or not at all.
#include "net/bootstrap/pmi.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <barrier>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "unit/helpers.h"

namespace lightcc {
namespace {

std::string field(const std::string& line, const std::string& name) {
  const size_t at = (" " + line).find(" " + name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 1;
  return line.substr(begin, line.find(' ', begin) - begin);
}

class Server {
 public:
  explicit Server(int processes) : all_here_(processes) {
    for (int i = 0; i < processes; ++i) {
      int fds[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
      clients.emplace_back(fds[0]);
      threads_.emplace_back([this, own = Fd(fds[1])] { serve(own.get()); });
    }
  }
  ~Server() {
    clients.clear();
    for (std::thread& thread : threads_) thread.join();
  }
  std::vector<Fd> clients;  // PMI_FD of each process
  int longest_value = 40;
  std::map<std::string, std::string> scripted;  // what a command is answered instead; "": nothing, and hang up

 private:
  void serve(int fd) {
    std::string heard;
    for (char bytes[1024];;) {
      const ssize_t n = recv(fd, bytes, sizeof bytes, 0);
      if (n <= 0) return;
      heard.append(bytes, size_t(n));
      for (size_t end; (end = heard.find('\n')) != std::string::npos; heard.erase(0, end + 1)) {
        const std::string text = answer(heard.substr(0, end));
        if (text.empty()) return void(shutdown(fd, SHUT_RDWR));
        for (char one : text + "\n")  // as slowly as a stream may come
          if (send(fd, &one, 1, MSG_NOSIGNAL) != 1) return;
      }
    }
  }
  std::string answer(const std::string& line) {
    const std::string command = field(line, "cmd");
    if (const auto found = scripted.find(command); found != scripted.end()) return found->second;
    if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0";
    if (command == "get_maxes")
      return "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=" + std::to_string(longest_value);
    if (command == "get_my_kvsname") return "cmd=my_kvsname kvsname=kvs_17_0";
    if (command == "barrier_in") return all_here_.arrive_and_wait(), "cmd=barrier_out";
    EXPECT_EQ(field(line, "kvsname"), "kvs_17_0") << line;
    const std::string key = field(line, "key"), value = field(line, "value");
    std::lock_guard lock(mutex_);
    if (command == "put") {
      EXPECT_LT(int(value.size()), longest_value);
      EXPECT_TRUE(values_.emplace(key, value).second) << "twice: " << key;
      return "cmd=put_result rc=0 msg=success";
    }
    const auto found = values_.find(key);
    if (found == values_.end()) return "cmd=get_result rc=-1 msg=key_not_found";
    return "cmd=get_result rc=0 value=" + found->second;
  }

  std::barrier<> all_here_;
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::vector<std::thread> threads_;
};

std::string note_of(size_t bytes) {
  std::string note(bytes, '.');
  for (size_t i = 0; i < bytes; ++i) note[i] = char('a' + i % 26);
  return note;
}

TEST(Pmi, EveryProcessGetsTheNoteInPiecesOfWhatTheServerTakes) {
  for (size_t bytes : {0, 1, 36, 37, 38, 39, 40, 5000}) {
    Server server(2);
    PmiNote got[2];
    std::thread other([&] { got[1] = broadcast_by_pmi(server.clients[1].get(), "key", std::nullopt, in_ms(20'000)); });
    got[0] = broadcast_by_pmi(server.clients[0].get(), "key", note_of(bytes), in_ms(20'000));
    other.join();
    for (const PmiNote& one : got) {
      EXPECT_EQ(one.note, note_of(bytes));
      EXPECT_EQ(one.kvs_name, "kvs_17_0");
    }
  }
}

TEST(Pmi, ItServesOneBroadcastAfterAnother) {
  Server server(1);
  for (const char* key : {"first", "second"})
    EXPECT_EQ(broadcast_by_pmi(server.clients[0].get(), key, key, in_ms(20'000)).note, key);
}

std::string error_of(Server& server, const std::optional<std::string>& mine, Code expected, uint64_t ms = 20'000,
                     const std::string& key = "key") {
  try {
    broadcast_by_pmi(server.clients[0].get(), key, mine, in_ms(ms));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  return "nothing";
}

TEST(Pmi, AProcessThatDoesNotComeIsATimeout) {
  Server server(2);
  const std::string text = error_of(server, "note", Code::timeout, 3'000);
  EXPECT_TRUE(text.starts_with("init: not all processes that mpiexec started called init before")) << text;
  std::thread late([&] {  // lets the server's thread go
    EXPECT_EQ(broadcast_by_pmi(server.clients[1].get(), "key", std::nullopt, in_ms(20'000)).note, "note");
  });
  late.join();
}

TEST(Pmi, WhatTheServerAnsweredIsInTheError) {
  const std::pair<std::map<std::string, std::string>, std::string> rows[] = {
      {{{"init", "cmd=response_to_init rc=-1"}}, "answered 'cmd=response_to_init rc=-1' to 'init "},
      {{{"get_maxes", "what?"}}, "answered 'what?' to 'get_maxes'"},
      {{{"get_maxes", "cmd=maxes keylen_max=64 vallen_max=many"}}, "vallen_max=many' to 'vallen_max'"},
      {{{"get_maxes", "cmd=maxes keylen_max=64 vallen_max=-4"}}, "vallen_max=-4' to 'vallen_max'"},
      {{{"get_maxes", "cmd=maxes keylen_max=6 vallen_max=100"}}, "the key key is too long for"},
      {{{"put", "cmd=put_result rc=1 msg=no_room"}}, "rc=1 msg=no_room' to 'put kvsname=kvs_17_0 key=key.0'"},
      {{{"get", "cmd=get_result rc=0 value="}}, "gave '' as rank 0's note"},
      {{{"get", "cmd=get_result rc=0 value=70000:x"}}, "gave '70000:x' as rank 0's note"},
      {{{"get", "cmd=get_result rc=0 value=9x9"}}, "gave '9x9' as rank 0's note"},
      {{{"get_my_kvsname", ""}}, "hung up (PMI_FD="},
  };
  for (const auto& [scripted, expected] : rows) {
    Server server(1);
    server.scripted = scripted;
    const std::string text = error_of(server, "note", Code::internal);
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  }
}

TEST(Pmi, ANoteThatNoServerCanHandOutIsRefused) {
  const std::string too_long((64 << 10) + 1, 'x');
  for (const std::string& note : {std::string("two words"), std::string("a line\n"), too_long}) {
    Server server(1);
    EXPECT_TRUE(error_of(server, note, Code::internal).starts_with("init: a note that mpiexec's PMI server cannot"));
  }
}

TEST(Pmi, AServerThatIsSilentIsATimeout) {
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const Fd mine(fds[0]), silent(fds[1]);
  try {
    broadcast_by_pmi(mine.get(), "key", "note", in_ms(100));
    FAIL() << "it has answered";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::timeout);
    EXPECT_TRUE(std::string(error.what()).starts_with("init: mpiexec's PMI server did not answer")) << error.what();
  }
}

}  // namespace
}  // namespace lightcc

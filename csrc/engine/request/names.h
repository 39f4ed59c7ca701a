// The names of one rank's requests in flight. A name that a user gave to a request with a handle stays taken until the
// handle is given back (synchronized, polled as done, or released), or until the request is done and kHoldNs has passed
// since its submission. So a second request of the name, submitted at once, is refused whether the first is done by
// then or not; a program that drops its handles goes on. All other names are free when their request is done.
// Time is passed in; the caller locks.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

namespace lightcc {

class Names {
 public:
  static constexpr uint64_t kHoldNs = 1'000'000;

  // A request of this name is submitted at now_ns. False: the name is taken, and nothing has changed.
  bool claim(const std::string& name, bool has_handle, uint64_t now_ns,
             std::thread::id thread = std::this_thread::get_id()) {
    free_expired(now_ns);
    const auto [it, is_new] = names_.try_emplace(name);
    if (!is_new && !is_over(it->second, now_ns)) return false;
    it->second = Entry{now_ns, has_handle, false, thread};
    return true;
  }
  // It is taken: by a request that another thread has submitted?
  bool is_of_another_thread(const std::string& name, std::thread::id thread = std::this_thread::get_id()) const {
    auto it = names_.find(name);
    return it != names_.end() && it->second.thread != thread;
  }
  bool is_taken(const std::string& name, uint64_t now_ns) {
    free_expired(now_ns);
    auto it = names_.find(name);
    return it != names_.end() && !is_over(it->second, now_ns);
  }
  // Its request is done. True: the name is taken until give_back(), or until its time is over.
  bool finished(const std::string& name, uint64_t now_ns) {
    auto it = names_.find(name);
    if (it == names_.end()) return false;
    if (!it->second.has_handle || now_ns >= it->second.submitted_ns + kHoldNs) {
      names_.erase(it);
      return false;
    }
    it->second.done = true;
    held_.push_back({it->second.submitted_ns, name});
    return true;
  }
  // The handle of the request that was submitted then under this name is given back.
  void give_back(const std::string& name, uint64_t submitted_ns) {
    auto it = names_.find(name);
    if (it == names_.end() || it->second.submitted_ns != submitted_ns) return;
    if (it->second.done)
      names_.erase(it);
    else
      it->second.has_handle = false;
  }
  bool any_held() const { return !held_.empty(); }

 private:
  struct Entry {
    uint64_t submitted_ns = 0;
    bool has_handle = false, done = false;
    std::thread::id thread;
  };
  static bool is_over(const Entry& entry, uint64_t now_ns) {
    return entry.done && now_ns >= entry.submitted_ns + kHoldNs;
  }

  // Memory stays small: they are looked at in the order in which they were done, which is nearly that of their end.
  void free_expired(uint64_t now_ns) {
    while (!held_.empty() && now_ns >= held_.front().first + kHoldNs) {
      give_back(held_.front().second, held_.front().first);
      held_.pop_front();
    }
  }

  std::unordered_map<std::string, Entry> names_;
  std::deque<std::pair<uint64_t, std::string>> held_;  // those that were done early; also some given back since
};

}  // namespace lightcc

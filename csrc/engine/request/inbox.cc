#include "engine/request/inbox.h"

#include <algorithm>

#include "base/clock.h"

namespace lightcc {
namespace {

std::string flight_name(int group, const std::string& key) { return std::to_string(group) + "/" + key; }
std::string flight_name(const Request& request) { return flight_name(request.group, request.key); }

}  // namespace

int Inbox::add(const RequestPtr& request, bool has_handle) {
  std::lock_guard lock(mutex_);
  if (failure_) throw Error(failure_->code, request->title() + ": " + failure_->text);
  if (closed_) throw Error(Code::shut_down, request->title() + ": lightcc has been shut down");
  if (joining_)
    throw Error(Code::invalid_argument, request->title() + ": rank " + std::to_string(rank_) + " has called " +
                                            "join() and takes part in nothing new until it returns");
  const Kind kind = request->what.kind;
  if (request->automatic) request->key = key_of(kind, automatic_name(numbers_[{request->group, kind}]++));
  if (request->flight_name.empty()) request->flight_name = flight_name(*request);
  if (!names_.claim(request->flight_name, has_handle, request->submitted_ns))
    return names_.is_of_another_thread(request->flight_name) ? kContended : kInUse;
  joining_ = kind == Kind::join;
  requests_.push_back(request);
  full_.store(true, std::memory_order_seq_cst);
  return in_flight_.fetch_add(1) + 1;
}

bool Inbox::add_refusal(const Request& request, const std::string& why, bool contended) {
  std::lock_guard lock(mutex_);
  if (failure_ || closed_) return false;
  refusals_.push_back({requests_.size(), request.group, request.key, why, contended});
  full_.store(true, std::memory_order_seq_cst);
  return true;
}

uint64_t Inbox::draw_number(int group, Kind kind) {
  std::lock_guard lock(mutex_);
  return numbers_[{group, kind}]++;
}

bool Inbox::is_held(int group, Kind kind, const char* name) {
  if (!any_held_.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(mutex_);
  any_held_.store(names_.any_held(), std::memory_order_release);
  return names_.any_held() && names_.is_taken(flight_name(group, key_of(kind, name)), now_ns());
}

void Inbox::adopt(Request& request) {
  std::lock_guard lock(mutex_);
  request.flight_name = flight_name(request);
  names_.claim(request.flight_name, false, request.submitted_ns);
  in_flight_.fetch_add(1);
}

Inbox::Contents Inbox::take() {
  std::lock_guard lock(mutex_);
  full_.store(false, std::memory_order_seq_cst);
  return {std::exchange(requests_, {}), std::exchange(refusals_, {})};
}

bool Inbox::release_name(const Request& request) {
  std::lock_guard lock(mutex_);
  const bool held = names_.finished(request.flight_name, now_ns());
  if (held) any_held_.store(true, std::memory_order_release);
  return held;
}

void Inbox::give_back(const Request& request) {
  std::lock_guard lock(mutex_);
  names_.give_back(request.flight_name, request.submitted_ns);
}

void Inbox::skip_name(int group, const std::string& key) {
  if (!is_automatic(key)) return;
  const size_t dot = key.find('.');
  std::lock_guard lock(mutex_);
  for (int kind = 0; kind < kKinds; ++kind)
    if (key.compare(0, dot, name_of(Kind(kind))) == 0) {
      uint64_t& next = numbers_[{group, Kind(kind)}];
      next = std::max(next, automatic_number(key.substr(dot + 1)) + 1);
    }
}

void Inbox::forget_group(int group) {
  std::lock_guard lock(mutex_);
  std::erase_if(numbers_, [&](const auto& one) { return one.first.first == group; });
}

void Inbox::end_join(bool all_have_joined) {
  std::lock_guard lock(mutex_);
  joining_ = false;
  // Ranks that went on have drawn numbers that this one has not.
  const auto is_negotiated = [](const auto& one) { return !is_point_to_point(one.first.second); };  // others outlive it
  if (all_have_joined) std::erase_if(numbers_, is_negotiated);
}

void Inbox::fail(const EpochCause& cause) {
  std::lock_guard lock(mutex_);
  failure_ = cause;
}

std::string Inbox::failure() const {
  std::lock_guard lock(mutex_);
  return failure_ ? failure_->text : "";
}

bool Inbox::close() {
  std::lock_guard lock(mutex_);
  return !std::exchange(closed_, true);
}

}  // namespace lightcc

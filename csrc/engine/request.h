// One call of a framework: one tensor, or several that are one unit.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>

#include "engine/message.h"

namespace lightcc {

struct FreeDeleter { void operator()(void* p) const { std::free(p); } };

struct Output {                    // of a kind whose shape is known only when all ranks have spoken
  std::unique_ptr<void, FreeDeleter> own;  // unless the caller allocates
  void* data = nullptr;
  Shape shape;
  std::vector<int32_t> rows_from;  // alltoall: by member
};

struct Callbacks {
  void (*done)(void* context, int status, const char* text) = nullptr;
  void* (*allocate)(void* context, int index, const int64_t* shape, int ndim) = nullptr;
  void* context = nullptr;
  void (*received)(void* context, int index, const int32_t* rows, int count) = nullptr;  // alltoall, before done
};

struct Request {
  // Asked; constant after submission.
  int group = 0;
  std::string key;                 // "<kind>.<name>": how the ranks know it
  bool automatic = false;          // the name is kAutomatic and a number, drawn when the request is accepted
  Announcement what;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;      // nullptr: see Output
  Callbacks callbacks;
  uint64_t submitted_ns = 0;

  // The engine's, until finished; then the caller's.
  std::vector<Output> results;
  int new_group = -1;              // add_group
  int last_joined = -1;            // join: the world rank that joined last
  Code code = Code::pending;
  std::string text;
  uint64_t warned_ns = 0, asked_ns = 0;  // stall inspection
  std::atomic<bool> finished{false};     // released after code, text and results

  std::string title() const {
    if (what.kind == Kind::join) return "join()";
    return name_of(what.kind) + (key.empty() ? std::string(" of an unnamed tensor") : " of tensor '" + name() + "'");
  }
  std::string name() const { return key.substr(key.find('.') + 1); }
};

inline std::string key_of(Kind kind, const std::string& name) { return std::string(name_of(kind)) + "." + name; }
inline std::string flight_name(const Request& request) { return std::to_string(request.group) + "/" + request.key; }
inline std::string automatic_name(uint64_t number) { return std::string(kAutomatic) + std::to_string(number); }
inline uint64_t automatic_number(const std::string& name) { return std::stoull(name.substr(kAutomatic.size())); }

using RequestPtr = std::shared_ptr<Request>;

}  // namespace lightcc

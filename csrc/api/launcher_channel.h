// What a rank tells lightccrun or run() of an init, over a socket that it has inherited: that it begins and that the
// world has formed. The launcher sees ranks end, so it can say at once that one of those that are waited for never will
// come. Without such a socket (another launcher, a program between the launcher and the rank that closes it) nothing is
// told and nothing is heard.
#pragma once
#include <optional>
#include <string>
#include <thread>

#include "base/config.h"
#include "base/deadline.h"
#include "base/fd.h"
#include "net/bootstrap/world.h"

namespace lightcc {

// Lines, of which lightcc/launch/inits.py is the other end. To the launcher: "begin NUMBER RANKS" ("all", or launched
// ranks as "0,2"), then "formed NUMBER" or "left NUMBER". To the rank: "cancel NUMBER CAUSE".
class LauncherChannel {
 public:
  LauncherChannel(const World&, const Environment&, Cancellation&);  // which outlives it
  ~LauncherChannel();
  LauncherChannel(const LauncherChannel&) = delete;
  LauncherChannel& operator=(const LauncherChannel&) = delete;

  void formed();

 private:
  void say(const std::string& line) const;
  void listen();
  bool heed(const std::string& line);  // whether it was the end of this init

  int socket_ = -1;  // the process's own; stays open for the next init
  std::string number_;
  Cancellation& cancellation_;
  std::optional<Cancellation> over_;  // ends the thread
  std::thread thread_;
};

}  // namespace lightcc

// Every member's half of the negotiation: remembers responses by the number that the coordinator gave them, so that a
// request made again travels as that number.
#pragma once
#include <optional>
#include <string>
#include <unordered_map>

#include "engine/negotiate/control/message.h"

namespace lightcc {

class ResponseCache {
 public:
  // What to send to announce this request.
  UpMessage announce(const std::string& key, const Announcement&);
  // Takes a response; returns the whole of it, as remembered. If its number belonged to another request
  // that was announced by that number and has not run, `again` gets the key, to be announced anew.
  const Response& apply(Response, std::optional<std::string>* again);
  void forget(const std::string& key);

  // Whether it can be announced as a number; the same without what it is; and whose number that is (nullptr: nobody's).
  bool knows(const std::string& key, const Announcement&) const;
  CachedRequest repeat(const std::string& key);
  const std::string* key_of(uint32_t id) const;

 private:
  struct Cached { Response response; Announcement what; bool in_flight = false; };
  std::unordered_map<std::string, Cached> cached_;  // by key
  std::unordered_map<uint32_t, std::string> by_id_;
  Response uncached_;                               // the last one that has no number
};

}  // namespace lightcc

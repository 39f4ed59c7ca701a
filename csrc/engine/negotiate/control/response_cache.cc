#include "engine/negotiate/control/response_cache.h"

#include <utility>

namespace lightcc {

bool ResponseCache::knows(const std::string& key, const Announcement& what) const {
  auto it = cached_.find(key);
  return it != cached_.end() && it->second.what == what && it->second.response.id != kNoId;
}

CachedRequest ResponseCache::repeat(const std::string& key) {
  Cached& known = cached_.at(key);
  known.in_flight = true;
  return {known.response.id, known.response.generation};
}

const std::string* ResponseCache::key_of(uint32_t id) const {
  auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &it->second;
}

UpMessage ResponseCache::announce(const std::string& key, const Announcement& what) {
  if (knows(key, what)) return repeat(key);
  Cached& known = cached_[key];  // kept until the response comes
  if (known.response.id != kNoId) by_id_.erase(known.response.id);
  known = Cached{{}, what, false};
  return Announce{key, what};
}

const Response& ResponseCache::apply(Response response, std::optional<std::string>* again) {
  if (!response.fresh) {
    auto key = by_id_.find(response.id);
    if (key == by_id_.end()) throw Error(Code::internal, "the coordinator named a request by a number it never gave");
    Cached& known = cached_[key->second];
    known.in_flight = false;
    return known.response;
  }
  if (response.id == kNoId) {
    cached_.erase(response.key);
    uncached_ = std::move(response);
    return uncached_;
  }
  if (auto old = by_id_.find(response.id); old != by_id_.end() && old->second != response.key) {
    if (cached_[old->second].in_flight) *again = old->second;
    cached_.erase(old->second);
  }
  by_id_[response.id] = response.key;
  Cached& known = cached_[response.key];
  known.response = std::move(response);
  known.in_flight = false;
  return known.response;
}

void ResponseCache::forget(const std::string& key) {
  auto it = cached_.find(key);
  if (it == cached_.end()) return;
  if (it->second.response.id != kNoId) by_id_.erase(it->second.response.id);
  cached_.erase(it);
}

}  // namespace lightcc

// Finds two ranks that wait for each other for ever because they gave one operation to different process sets. No
// negotiation sees that, since each set has its own. Every rank shows the others on its host what it is
// blocked on; two that are blocked on the same operation, each in a set that the other belongs to and has
// not been called in, accuse each other. Both accusations together are proof; the lower rank acts on it for both.
#pragma once
#include <optional>

#include "engine/request.h"
#include "net/host.h"

namespace lightcc {

struct Dispute {
  int rank, group;  // who disagrees, and what it is blocked in
  std::string key;  // as which
};

class Disputes {
 public:
  explicit Disputes(Host& host) : host_(host) {}

  // This rank's one waiting thread has been blocked on the request for some time. absent_from(group): this rank
  // belongs to that group and has announced nothing like the request in it.
  template <class AbsentFrom>
  std::optional<Dispute> look(const Request& request, const std::vector<int>& members, AbsentFrom absent_from) {
    Blocked& own = host_.header(host_.rank()).blocked;
    own.kind = int(request.what.kind), own.name = name_hash(request);
    own.number = request.automatic ? automatic_number(request.name()) : 0;
    own.group = request.group;
    shown_ = true;
    int accused = -1;
    std::optional<Dispute> proven;
    for (int rank : members) {
      const Blocked& theirs = host_.header(rank).blocked;
      int group = theirs.group;
      if (rank == host_.rank() || group < 0 || group == request.group || theirs.kind != own.kind ||
          theirs.name != own.name || !absent_from(group))
        continue;
      accused = rank;
      std::string key = request.key;
      if (request.automatic) key = key_of(request.what.kind, automatic_name(theirs.number));
      if (theirs.accuses == host_.rank() && host_.rank() < rank) proven = {rank, group, key};
      break;
    }
    own.accuses = accused;
    return proven;
  }
  void clear() {  // this rank goes on
    if (!std::exchange(shown_, false)) return;
    Blocked& own = host_.header(host_.rank()).blocked;
    own.group = -1, own.accuses = -1;
  }

 private:
  static uint64_t name_hash(const Request& request) {  // automatic names differ between sets
    return request.automatic ? 0 : std::hash<std::string>()(request.key) | 1;
  }
  Host& host_;
  bool shown_ = false;
};

}  // namespace lightcc

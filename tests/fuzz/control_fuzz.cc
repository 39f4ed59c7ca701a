// The control stream of a group on three hosts: whatever messages its members send, the relay and the coordinator take
// them or refuse them with an Error, and a member can settle what comes of them.
//
// The input is messages one behind the other: who hears it (0 the coordinator, else the relay), from which child (7: it
// says it itself), the length in two bytes, and the message. Then the coordinator decides, and all are told.
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "engine/check.h"
#include "engine/negotiator.h"
#include "engine/relay.h"

namespace {

using namespace lightcc;

class Group {
 public:
  void hear(int who, int child, Message message) {
    now_ns_ += Relay::kHoldNs / 4;
    if (who == 0) {
      coordinate(size_t(child), std::move(message));
    } else {
      relay_.hear(child == 7 ? Relay::kSelf : child % int(leader_.children.size()), std::move(message), now_ns_);
      relay_.look(now_ns_);
      pass_up();
    }
    for (const Message& one : coordinator_.take()) tell(one);
  }

 private:
  void pass_up() {
    for (Message& one : relay_.take()) coordinate(size_t(root_.toward(2)), parse(encode(one)));
  }
  void coordinate(size_t child, Message message) {
    const bool own = child == 7;
    child %= root_.children.size();
    const int from = own ? 0 : root_.children[child];
    if (auto* said = std::get_if<Said>(&message))
      each_said(*said, own ? std::vector{0} : root_.below[child],
                [&](int member, const std::variant<Announce, Recall>& one) {
                  std::visit([&](auto& each) { take(member, each); }, one);
                });
    else if (auto* announce = std::get_if<Announce>(&message))
      take(from, *announce);
    else if (auto* recall = std::get_if<Recall>(&message))
      take(from, *recall);
    else if (auto* contest = std::get_if<Contest>(&message))
      coordinator_.contest(*contest);
    else if (auto* query = std::get_if<Query>(&message))
      tell(Missing{query->key, {}, {}, query->member}), coordinator_.missing(query->key);
    else if (auto* gone = std::get_if<Gone>(&message); gone && gone->member >= 0 && gone->member < 6)
      coordinator_.gone(gone->member, gone->why);
  }
  void take(int member, const Announce& one) { coordinator_.announce(member, one.key, one.what, one.again); }
  void take(int member, const Recall& one) { coordinator_.recall(member, one); }

  void tell(const Message& decided) {
    const Message message = parse(encode(decided));
    relay_.tell(message);
    pass_up();
    if (auto* batch = std::get_if<Batch>(&message))
      for (const Item& one : batch->items) {
        std::optional<std::string> again;
        const Item& item = ledger_.settle(one, &again);
        if (!item.absent.empty()) check_rows(item, item.what, item.absent[0], 6, true);
        if (again) ledger_.announce(*again, {});
      }
    else if (auto* failure = std::get_if<Failure>(&message))
      ledger_.forget(failure->key);
  }

  const std::vector<int> ranks_ = {0, 1, 2, 3, 4, 5};
  const Topology topology_ = Topology::by_leader({0, 0, 2, 2, 2, 5});
  const Tree root_{ranks_, topology_, 0}, leader_{ranks_, topology_, 2};
  Coordinator coordinator_{ranks_, {1 << 20, true, 2}};
  Relay relay_{leader_};
  Ledger ledger_;
  uint64_t now_ns_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    Group group;
    for (size_t at = 0; at + 4 <= size;) {
      const size_t length = size_t(data[at + 2]) | size_t(data[at + 3]) << 8;
      if (length > size - at - 4) return 0;
      const std::string_view bytes(reinterpret_cast<const char*>(data) + at + 4, length);
      group.hear(data[at] % 2, data[at + 1] % 8, parse(bytes));
      at += 4 + length;
    }
  } catch (const Error&) {
    // Refused: it ends the epoch, and nobody crashes.
  }
  return 0;
}

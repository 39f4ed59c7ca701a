// Messages of any length over a Link's records. The first record of a message is one line and holds its
// length, so a short message is one line; the rest follows in larger records. Never blocks: what
// finds no room waits in order.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/limits.h"
#include "net/link.h"

namespace lightcc {

class MessageStream {
 public:
  explicit MessageStream(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  void send(std::string message) {
    outbox_.push_back(std::move(message));
    pump();
  }
  bool pump() {  // sends what waits; true if anything moved
    bool moved = false;
    while (!outbox_.empty()) {
      const std::string& message = outbox_.front();
      size_t n = sent_ == kNothing ? kHead : std::min(link_->record_bytes(), message.size() - sent_);
      std::byte* record = link_->reserve(n);
      if (!record) return moved;
      if (sent_ == kNothing) {
        auto length = uint32_t(message.size());
        std::memcpy(record, &length, sizeof length);
        sent_ = std::min(message.size(), kHeadRoom);
        std::memcpy(record + sizeof length, message.data(), sent_);
      } else {
        std::memcpy(record, message.data() + sent_, n);
        sent_ += n;
      }
      link_->commit(n);
      moved = true;
      if (sent_ == message.size()) {
        outbox_.pop_front();
        sent_ = kNothing;
      }
    }
    return moved;
  }
  bool waiting() const { return !outbox_.empty(); }

  std::optional<std::string> receive() {
    while (length_ == kNothing || inbox_.size() < length_) {
      size_t n = length_ == kNothing ? kHead : std::min(link_->record_bytes(), length_ - inbox_.size());
      const std::byte* record = link_->peek(n);
      if (!record) return std::nullopt;
      auto* text = reinterpret_cast<const char*>(record);
      if (length_ == kNothing) {
        uint32_t length;
        std::memcpy(&length, record, sizeof length);
        if (length > kMostMessageBytes) throw Error(Code::internal, "a control message of impossible length arrived");
        length_ = length;
        inbox_.assign(text + sizeof length, std::min<size_t>(length, kHeadRoom));
      } else {
        inbox_.append(text, n);
      }
      link_->consume(n);
    }
    length_ = kNothing;
    return std::move(inbox_);
  }

 private:
  static constexpr size_t kHead = kLine, kHeadRoom = kHead - sizeof(uint32_t);
  static constexpr size_t kNothing = SIZE_MAX;
  std::unique_ptr<Link> link_;
  std::deque<std::string> outbox_;
  size_t sent_ = kNothing;    // bytes of the front message; kNothing: not even its length
  std::string inbox_;
  size_t length_ = kNothing;  // of the message being received
};

}  // namespace lightcc

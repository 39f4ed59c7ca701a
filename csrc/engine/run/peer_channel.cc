#include "engine/run/peer_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/device.h"

namespace lightcc {
namespace {

constexpr size_t kPieceBytes = 128 << 10;   // of a record: read while it is in the cache
constexpr size_t kRunBytes = 1 << 20;       // of a frame: others wait so long, and memory is posted so far ahead
constexpr size_t kStepBytes = 512 << 10;    // the bounded work of one step()
constexpr size_t kLentBytes = 64 << 10;     // less is cheaper through the link's memory

MessageTag tag_of(const Request& request) { return {request.space, request.tag}; }

std::string words_of(const PeerTensor& tensor) {
  return std::to_string(tensor.count) + (tensor.count == 1 ? " element of " : " elements of ") + name_of(tensor.dtype);
}

std::string disagreement(const std::string& sender, const PeerTensor& sent, const std::string& receiver,
                         const PeerTensor& received) {
  return "ranks disagree on it: " + sender + " sends " + words_of(sent) + ", and " + receiver + " receives " +
         words_of(received) + ". Give both sides tensors of one dtype and as many elements";
}

}  // namespace

PeerChannel::PeerChannel(std::unique_ptr<Link> link, const std::string& own_name, const std::string& peer_name,
                         Effects& effects, Tracing& tracing)
    : link_(std::move(link)),
      bulk_(link_->bulk()),
      record_bytes_(std::min(link_->record_bytes(), kPieceBytes)),
      own_name_(own_name),
      peer_name_(peer_name),
      effects_(effects),
      tracing_(tracing) {}

// ---- this rank's side

void PeerChannel::submit(const RequestPtr& request) {
  tracing_.submitted(*request);
  const bool sends = request->what.kind == Kind::send;
  const TensorSpec& tensor = request->what.tensors[0];
  const uint64_t number = sends ? sent_++ : received_++;
  Transfer& one = (sends ? sends_ : receives_)[number];
  one.request = request;
  one.number = number;
  one.tensor = {tensor.dtype, count_of(tensor.shape)};
  one.memory = static_cast<std::byte*>(sends ? const_cast<void*>(request->inputs[0]) : request->outputs[0]);
  sends ? send(one) : receive(one);
}

void PeerChannel::send(Transfer& one) {
  const size_t bytes = one.tensor.bytes();
  const std::optional<PeerTensor> theirs = own_sends_.add_ours(tag_of(*one.request), &one);
  if (theirs) match(one, *theirs);
  one.along = one.fault.empty() && bytes <= kAlongBytes && (theirs || ahead_bytes_ + bytes <= kMostAheadBytes);
  if (one.along && !theirs) ahead_bytes_ += bytes;
  announce(PeerFrame::sends, one, one.along ? bytes : 0);
  if (theirs && one.fault.empty() && !one.along) sending_.push_back(&one);
}

void PeerChannel::receive(Transfer& one) {
  announce(PeerFrame::receives, one, 0);
  const std::optional<ComingSend> theirs = own_receives_.add_ours(tag_of(*one.request), &one);
  if (theirs) match(one, *theirs);
}

void PeerChannel::announce(PeerFrame::Type type, Transfer& one, size_t bytes) {
  PeerFrame frame;
  frame.type = type;
  frame.tag = tag_of(*one.request);
  frame.number = one.number;
  frame.count = one.tensor.count;
  frame.dtype = int16_t(one.tensor.dtype);
  frame.bytes = uint32_t(bytes);
  if (bytes > 0 && bytes <= PeerFrame::kInlineBytes) std::memcpy(frame.inlined, one.memory, bytes);
  announcing_.push_back({frame, &one});
}

// ---- pairs

void PeerChannel::match(Transfer& send, const PeerTensor& theirs) {
  send.matched = true;
  if (send.tensor != theirs) send.fault = disagreement(own_name_, send.tensor, peer_name_, theirs);
  tracing_.begun(*send.request);
}

void PeerChannel::match(Transfer& receive, const ComingSend& theirs) {
  receive.matched = true;
  tracing_.begun(*receive.request);
  if (receive.tensor != theirs.tensor) {
    receive.fault = disagreement(peer_name_, theirs.tensor, own_name_, receive.tensor);
  } else if (theirs.along) {
    if (!theirs.data.empty()) stage(receive.memory, theirs.data.data(), theirs.data.size());
    receive.moved = theirs.data.size();
  } else {
    receive.theirs = theirs.number;
    if (!expected_.emplace(theirs.number, &receive).second) damaged("two sends of one number");
  }
  early_bytes_ -= theirs.data.size();
  settle(receive);
}

// It may be over, and then it is gone.
void PeerChannel::settle(Transfer& one) {
  if (!one.matched || !one.announced || (one.fault.empty() && !one.all_moved())) return;
  const bool failed = !one.fault.empty();
  effects_.push(effect::Finish{one.request, failed ? Code::mismatch : Code::ok,
                               failed ? one.request->title() + ": " + one.fault : ""});
  (one.request->what.kind == Kind::send ? sends_ : receives_).erase(one.number);
}

// What is in the link has no meaning afterwards: the epoch or the group is over, or the peer has left.
void PeerChannel::fail_all(Code code, const std::string& text) {
  if (bulk_) bulk_->release();
  for (auto* transfers : {&sends_, &receives_})
    for (auto& [number, one] : std::exchange(*transfers, {}))
      effects_.push(effect::Finish{one.request, code, one.request->title() + ": " + text});
  own_sends_.clear();
  own_receives_.clear();
  expected_.clear();
  announcing_.clear();
  sending_.clear();
  out_ = {};
  in_ = {nullptr, in_.left, in_.bytes};
  early_bytes_ = 0;
}

// The peer hears it with the next request that it has with this rank. Without room it does not use the link.
void PeerChannel::leave() {
  std::byte* const record = link_->reserve(sizeof(PeerFrame));
  if (!record) return;
  PeerFrame frame;
  frame.type = PeerFrame::leaves;
  std::memcpy(record, &frame, sizeof frame);
  link_->commit(sizeof frame);
}

const char* PeerChannel::awaited(const Transfer& one) const {
  if (one.matched) return "to go on with it";
  if (one.request->what.kind == Kind::receive) return "to send it";
  return own_receives_.any_of_theirs_waits() ? "to receive it, which sends to this rank in turn: one of the two must "
                                               "submit its recv before it waits for its send"
                                             : "to receive it";
}

// ---- records

bool PeerChannel::step() {
  bool moved = false;
  for (size_t bytes = 0; bytes < kStepBytes;) {
    const size_t before = out_.left + in_.left;
    const bool out = push_record(), in = pull_record();
    if (!out && !in) break;
    moved = true;
    const size_t after = out_.left + in_.left;  // more, where a run has begun
    bytes += std::max(kLine, before - std::min(before, after));
  }
  return moved;
}

bool PeerChannel::push_record() {
  if (out_.left > 0) return push_piece();
  if (!announcing_.empty()) return push_announcement();
  return !sending_.empty() && push_run();
}

bool PeerChannel::push_announcement() {
  std::byte* const record = link_->reserve(sizeof(PeerFrame));
  if (!record) return false;
  const auto [frame, one] = announcing_.front();
  announcing_.pop_front();
  std::memcpy(record, &frame, sizeof frame);
  link_->commit(sizeof frame);
  if (frame.bytes > PeerFrame::kInlineBytes) {
    out_ = {one, 0, frame.bytes, true};
    return true;
  }
  one->announced = true;
  settle(*one);
  return true;
}

bool PeerChannel::push_run() {
  std::byte* const record = link_->reserve(sizeof(PeerFrame));
  if (!record) return false;
  Transfer& one = *sending_.front();
  PeerFrame frame;
  frame.type = PeerFrame::data;
  frame.number = one.number;
  frame.bytes = uint32_t(std::min(kRunBytes, one.tensor.bytes() - one.moved));
  std::memcpy(record, &frame, sizeof frame);
  link_->commit(sizeof frame);
  out_ = {&one, one.moved, frame.bytes, false};
  return true;
}

bool PeerChannel::push_piece() {
  Transfer& one = *out_.transfer;
  const size_t n = std::min(out_.left, record_bytes_);
  const std::byte* const from = one.memory + out_.at;
  if (bulk_ && one.tensor.bytes() >= kLentBytes) {
    if (!bulk_->send_from(from, n)) return false;
  } else {
    std::byte* const record = link_->reserve(n);
    if (!record) return false;
    stage(record, from, n);
    link_->commit(n);
  }
  out_.at += n;
  out_.left -= n;
  if (out_.left > 0) return true;
  if (out_.announces) {
    one.announced = true;
  } else {
    one.moved = out_.at;
    sending_.pop_front();
    if (!one.all_moved()) sending_.push_back(&one);
    else if (bulk_) count_staged(bulk_->release_lent(bulk_->lent()));
  }
  settle(one);
  return true;
}

bool PeerChannel::pull_record() {
  if (in_.left > 0) return pull_piece();
  const std::byte* const record = link_->peek(sizeof(PeerFrame));
  if (!record) return false;
  PeerFrame frame;
  std::memcpy(&frame, record, sizeof frame);
  link_->consume(sizeof frame);
  take(frame);
  return true;
}

bool PeerChannel::pull_piece() {
  const size_t n = std::min(in_.left, record_bytes_);
  const std::byte* const record = link_->peek(n);
  if (!record) return false;
  if (in_.to) {
    if (in_.to != record) stage(in_.to, record, n);
    in_.to += n;
  }
  link_->consume(n);
  in_.left -= n;
  if (in_.left == 0) end_incoming();
  return true;
}

// ---- what has come

void PeerChannel::damaged(const char* how) const {
  throw Error(Code::internal, peer_name_ + " has sent " + how + " on the link of sends and receives");
}

void PeerChannel::take(const PeerFrame& frame) {
  if (frame.type > PeerFrame::leaves) damaged("a frame of no type there is");
  if (frame.type == PeerFrame::leaves) {
    has_peer_left_ = true;
    return;
  }
  if (frame.type == PeerFrame::data) return take_data(frame);
  const int64_t count = frame.count;
  if (frame.dtype < 0 || frame.dtype >= kDTypes || !is_countable({&count, 1})) damaged("a tensor that cannot be");
  if (frame.type == PeerFrame::sends) return take_send(frame);
  if (const std::optional<Transfer*> one = own_sends_.add_theirs(frame.tag, frame.tensor())) {
    Transfer& send = **one;
    if (send.along) ahead_bytes_ -= send.tensor.bytes();
    match(send, frame.tensor());
    if (send.fault.empty() && !send.all_moved()) sending_.push_back(&send);
    settle(send);
  }
}

void PeerChannel::take_send(const PeerFrame& frame) {
  const PeerTensor tensor = frame.tensor();
  const bool along = frame.bytes == tensor.bytes();
  if (!along && frame.bytes != 0) damaged("a part of a send");
  if (along && frame.bytes > kAlongBytes) damaged("a send that is too large to come along");
  const std::optional<Transfer*> one = own_receives_.take_ours(frame.tag);
  if (one && (!along || frame.bytes == 0 || (*one)->tensor != tensor)) {
    match(**one, {frame.number, tensor, along, {}});
    if (along && frame.bytes > 0) expect_data({nullptr, frame.bytes, frame.bytes}, frame.inlined);
  } else if (one) {
    (*one)->matched = true;
    tracing_.begun(*(*one)->request);
    expect_data({(*one)->memory, frame.bytes, frame.bytes, *one}, frame.inlined);
  } else if (along && frame.bytes > 0) {
    early_bytes_ += frame.bytes;
    if (early_bytes_ > kMostAheadBytes) damaged("more data ahead of receives than it may");
    early_ = {frame.number, tensor, true, std::vector<std::byte>(frame.bytes)};
    early_tag_ = frame.tag;
    expect_data({early_.data.data(), frame.bytes, frame.bytes, nullptr, true}, frame.inlined);
  } else {
    own_receives_.add_theirs(frame.tag, {frame.number, tensor, along, {}});
  }
}

void PeerChannel::take_data(const PeerFrame& frame) {
  const auto found = expected_.find(frame.number);
  if (found == expected_.end()) damaged("data of no send");
  Transfer& one = *found->second;
  if (frame.bytes == 0 || frame.bytes > one.tensor.bytes() - one.moved) damaged("more data than were announced");
  expect_data({one.memory + one.moved, frame.bytes, frame.bytes, &one}, nullptr);
}

// inlined: where they are if they are few; nullptr: they are in records, however few they are.
void PeerChannel::expect_data(const Incoming& data, const std::byte* inlined) {
  in_ = data;
  if (inlined && in_.left <= PeerFrame::kInlineBytes) {
    if (in_.to) std::memcpy(in_.to, inlined, in_.left);
    in_.left = 0;
    return end_incoming();
  }
  if (!bulk_ || !in_.to || in_.bytes < kLentBytes) return;
  for (size_t at = 0; at < in_.bytes; at += record_bytes_)
    bulk_->post(in_.to + at, std::min(record_bytes_, in_.bytes - at));
}

void PeerChannel::end_incoming() {
  const Incoming data = std::exchange(in_, {});
  if (data.is_early) {
    ComingSend coming = std::exchange(early_, {});
    // A receive may have been submitted meanwhile.
    if (const std::optional<Transfer*> one = own_receives_.take_ours(early_tag_)) match(**one, coming);
    else own_receives_.add_theirs(early_tag_, std::move(coming));
  } else if (data.transfer) {
    Transfer& one = *data.transfer;
    one.moved += data.bytes;
    const auto expected = expected_.find(one.theirs);
    if (one.all_moved() && expected != expected_.end() && expected->second == &one) expected_.erase(expected);
    settle(one);
  }
}

}  // namespace lightcc

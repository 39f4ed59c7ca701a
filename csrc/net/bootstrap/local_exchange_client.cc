#include "net/bootstrap/local_exchange_client.h"

#include <algorithm>
#include <cerrno>

#include "base/close_elsewhere.h"
#include "base/shortage.h"
#include "net/bootstrap/exchange_frames.h"

namespace lightcc {
namespace {

Error left() { return Error(Code::peer_lost, "init: rank 0 left while the ranks met"); }

}  // namespace

LocalExchangeClient::LocalExchangeClient(std::vector<std::string> names, int rank, int size)
    : names_(std::move(names)), rank_(rank), size_(size), opened_ns_(now_ns()) {}

std::vector<RankInfo> LocalExchangeClient::exchange(RankInfo mine, const Deadline& deadline) {
  if (failure_) throw *failure_;
  try {
    LocalMessage message;
    message.rank = rank_;
    message.size = size_;
    message.round = round_;
    message.info = std::move(mine);
    std::vector<RankInfo> infos;
    do {
      if (!connected_) connect(deadline);
    } while (!send(message, deadline) || !receive(infos, deadline));
    ++round_;
    return infos;
  } catch (const Error& error) {
    tell(error, deadline.cancellation);
    throw;
  }
}

void LocalExchangeClient::fail(const Error& error, const Cancellation* cancellation) {
  if (failure_) return;
  try {
    if (!connected_) connect({now_ns() + kClientFailureNoticeNs, cancellation});
  } catch (const Error&) {  // rank 0 cannot be told; it will miss this rank
  }
  tell(error, cancellation);
}

void LocalExchangeClient::tell(const Error& error, const Cancellation* cancellation) {
  failure_ = error;
  LocalMessage message;
  message.rank = rank_;
  message.size = size_;
  message.round = round_;
  message.refusal = error.code();
  message.info.note = error.what();
  const Deadline until(now_ns() + kClientFailureNoticeNs, cancellation);
  while (connected_ && send_message(fd_.get(), message) == LocalSent::later && sleep_until(until)) {
  }
  fd_ = Fd();
}

void LocalExchangeClient::connect(const Deadline& deadline) {
  std::optional<uid_t> other_user;
  bool full = false;
  for (bool in_time = !was_connected_ || sleep_until(deadline); in_time; in_time = sleep_until(deadline)) {
    bool nobody = true;
    for (const std::string& name : names_) {
      const int error = connect_local(fd_.get(), name);
      full = full || error == EAGAIN;  // its queue is: others may have filled it
      nobody = nobody && error == ECONNREFUSED;
      if (error) continue;
      if (same_user(fd_.get())) return void(connected_ = was_connected_ = true);
      other_user = user_of(fd_.get());
      close_elsewhere(std::exchange(fd_, local_socket()));
    }
    if (nobody && was_connected_) throw left();
  }
  std::string text =
      "init: rank 0 did not come before " + start_timeout(deadline.ns - std::min(deadline.ns, opened_ns_));
  if (other_user)
    text += "; a process of user " + std::to_string(*other_user) + " holds this job's name on this host";
  else if (full)
    text += "; the queue of this job's socket on this host is full: is it flooded by another process?";
  else
    text += kDidAllStart;
  throw deadline.error(Error(Code::timeout, text));
}

bool LocalExchangeClient::closed(bool counted) {
  if (counted || round_ > 0) throw left();
  fd_ = local_socket();
  connected_ = false;
  return false;
}

bool LocalExchangeClient::send(const LocalMessage& message, const Deadline& until) {
  for (;;) {
    const LocalSent sent = send_message(fd_.get(), message);
    if (sent == LocalSent::yes) return true;
    if (sent == LocalSent::never) return true;  // it has hung up; if it had a reason, that can still be read
    if (!sleep_until(until))
      throw until.error(Error(Code::timeout, "init: rank 0 did not take this rank's note before " +
                                                 start_timeout(until.ns - std::min(until.ns, opened_ns_)) +
                                                 "; stopped?"));
  }
}

bool LocalExchangeClient::receive(std::vector<RankInfo>& infos, const Deadline& deadline) {
  infos.clear();
  const Deadline until = deadline.at(std::max(deadline.ns, now_ns()) + kClientGraceNs);
  while (int(infos.size()) < size_) {
    if (!wait_for(fd_.get(), POLLIN, until, "init: waiting for rank 0"))
      throw until.error(Error(Code::timeout, "init: rank 0 did not answer before " +
                                                 start_timeout(deadline.ns - std::min(deadline.ns, opened_ns_)) +
                                                 "; stopped?"));
    LocalMessage message;
    const LocalReceived received = receive_message(fd_.get(), message);
    if (received == LocalReceived::later) continue;
    if (received == LocalReceived::nothing) return closed(!infos.empty());
    if (message.refusal != Code::ok) throw Error(message.refusal, message.info.note);
    if (message.rank != int(infos.size()) || message.round != round_ || message.size != size_)
      throw Error(Code::internal, "init: rank 0 does not speak as this rank does: do all run the same build?");
    if (!message.complete)
      throw Error(Code::internal, "init: the descriptors of rank " + std::to_string(message.rank) +
                                      " did not arrive at rank " + std::to_string(rank_) + ": " + reason_of(EMFILE));
    infos.push_back(std::move(message.info));
  }
  return true;
}

}  // namespace lightcc

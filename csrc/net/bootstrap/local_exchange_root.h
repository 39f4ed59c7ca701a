// Rank 0's side of the LocalExchange: serves the ranks of its host from within exchange().
#pragma once
#include <list>
#include <optional>

#include "net/bootstrap/local_exchange_message.h"
#include "net/unauthenticated.h"

namespace lightcc {

class LocalExchangeRoot : public LocalExchange {
 public:
  LocalExchangeRoot(std::vector<std::string> names, int size);
  ~LocalExchangeRoot() override { close_listeners(); }
  std::vector<RankInfo> exchange(RankInfo mine, const Deadline&) override;
  void fail(const Error&, const Cancellation*) override;

 private:
  struct Client {  // a connection; of this user, else it is closed at once
    Fd fd;
    int rank = -1;                 // once it has sent its info
    uint32_t round = 0;            // of its next info
    std::optional<RankInfo> info;  // of the round that is not complete yet
    int infos_sent = 0;            // how many infos of the round it has been sent
    bool told = false;             // of the failure
  };
  void listen(const Deadline&);
  void serve(const Deadline&);  // waits for something to happen and does what it asks for
  void accept_some(int listener);
  void on_readable(Client&);
  void on_message(Client&, LocalMessage);
  void send_to_all(const std::vector<LocalMessage>&, const Deadline&);
  void tell_failure(const Error&, const Cancellation*, uint64_t notice_ns);
  void drop(int fd);
  void close_listeners();
  std::vector<int> absent() const;  // ranks that have sent no info in this round
  Error missing(uint64_t deadline_ns) const;
  std::string in_time(uint64_t deadline_ns) const;

  const std::vector<std::string> names_;
  const int size_;
  const uint64_t opened_ns_;
  std::vector<Fd> listeners_;
  std::list<Client> clients_;
  PendingConnections pending_;  // clients without a rank, by descriptor
  uint32_t round_ = 0;
  uint64_t paused_until_ns_ = 0;  // no descriptor is left for another connection
  std::string shortage_;          // of what, while there is
  uint64_t unauthenticated_ = 0;  // other users' connections, and those that sent no info
  std::optional<Error> failure_;
};

}  // namespace lightcc

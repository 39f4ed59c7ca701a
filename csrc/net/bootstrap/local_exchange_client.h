// The LocalExchange of all ranks of a host but 0: a connection to rank 0, made when it is first needed.
#pragma once
#include <optional>

#include "net/bootstrap/local_exchange_message.h"

namespace lightcc {

class LocalExchangeClient : public LocalExchange {
 public:
  LocalExchangeClient(std::vector<std::string> names, int rank, int size);
  std::vector<RankInfo> exchange(RankInfo mine, const Deadline&) override;
  void fail(const Error&, const Cancellation*) override;

 private:
  void connect(const Deadline&);
  void tell(const Error&, const Cancellation*);  // rank 0, if it is still there, why this rank goes no further
  // False: rank 0 closed the connection before it had taken note of this rank, so that it may try again.
  bool send(const LocalMessage&, const Deadline&);
  bool receive(std::vector<RankInfo>&, const Deadline&);
  bool closed(bool counted);

  const std::vector<std::string> names_;
  const int rank_, size_;
  const uint64_t opened_ns_;
  Fd fd_ = local_socket();  // from the start, so that a rank that is short of descriptors can say so
  bool connected_ = false, was_connected_ = false;
  uint32_t round_ = 0;
  std::optional<Error> failure_;
};

}  // namespace lightcc

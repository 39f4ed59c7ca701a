// The BootstrapExchange of all ranks but 0: a connection to rank 0, made in the first exchange.
#pragma once
#include <vector>

#include "net/bootstrap/exchange.h"
#include "net/bootstrap/exchange_frames.h"

namespace lightcc {

class ExchangeClient : public BootstrapExchange {
 public:
  ExchangeClient(int rank, int size, const JobCredentials&, std::vector<Endpoint>);
  std::vector<std::string> exchange(const std::string& mine, const Deadline&) override;
  void fail(const Error&, const Cancellation*) override;
  Address root_address() const override { return root_; }
  Address own_address() const override { return own_; }

 private:
  void connect(const Deadline&);
  // False: rank 0 has hung up, or takes nothing. What can be sent without a wait is sent in any case.
  bool send_all(std::string_view, const Deadline&);
  Frame next_frame(const Deadline&);

  const int rank_, size_;
  const JobCredentials credentials_;
  const std::vector<Endpoint> endpoints_;
  const uint64_t opened_ns_;
  Fd fd_;
  FrameReader frames_;
  uint32_t round_ = 0;
  uint64_t lag_ns_ = 0;  // how much later than here rank 0's deadline is
  Address root_, own_;
  std::optional<Error> failure_;
};

}  // namespace lightcc

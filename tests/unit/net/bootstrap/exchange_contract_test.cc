// The exchanges that ExchangeContract holds for: over TCP and on one host.
#include "contracts/exchange_contract.h"

#include <memory>

#include "net/bootstrap/exchange.h"
#include "net/bootstrap/local_exchange.h"
#include "unit/credentials.h"
#include "unit/loopback.h"

namespace lightcc {
namespace {

class TcpSite {
 public:
  std::unique_ptr<BootstrapExchange> open(int rank, int size) {
    return open_exchange(rank, size, kCredentials, endpoints_, rank == 0 ? std::move(listener_) : Fd());
  }

 private:
  Fd listener_ = listen_on_own_loopback();
  const std::vector<Endpoint> endpoints_{{own_loopback().text(), local_address(listener_.get()).port()}};
};

// Its infos as notes.
class LocalNotes {
 public:
  explicit LocalNotes(std::unique_ptr<LocalExchange> exchange) : exchange_(std::move(exchange)) {}
  std::vector<std::string> exchange(const std::string& note, const Deadline& deadline) {
    std::vector<std::string> notes;
    for (RankInfo& info : exchange_->exchange({note, {}}, deadline)) notes.push_back(std::move(info.note));
    return notes;
  }
  void fail(const Error& error) { exchange_->fail(error); }

 private:
  const std::unique_ptr<LocalExchange> exchange_;
};

class LocalSite {
 public:
  std::unique_ptr<LocalNotes> open(int rank, int size) {
    return std::make_unique<LocalNotes>(open_local_exchange({name_}, rank, size));
  }

 private:
  const std::string name_ = random_name();
};

INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, ExchangeContract, TcpSite);
INSTANTIATE_TYPED_TEST_SUITE_P(Local, ExchangeContract, LocalSite);

}  // namespace
}  // namespace lightcc

#include "net/bootstrap/exchange.h"

#include "net/bootstrap/exchange_client.h"
#include "net/bootstrap/exchange_root.h"

namespace lightcc {

std::unique_ptr<BootstrapExchange> open_exchange(int rank, int size, const JobCredentials& credentials,
                                                 const std::vector<Endpoint>& endpoints, Fd listener) {
  if (rank == 0) return std::make_unique<ExchangeRoot>(size, credentials, std::move(listener));
  return std::make_unique<ExchangeClient>(rank, size, credentials, endpoints);
}

}  // namespace lightcc

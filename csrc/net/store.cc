#include "net/store.h"

#include "net/store_guest.h"
#include "net/store_root.h"

namespace lightcc {

std::unique_ptr<Store> open_store(int rank, int size, const Terms& terms, const std::vector<Endpoint>& places,
                                  Fd listener) {
  if (rank == 0) return std::make_unique<StoreRoot>(size, terms, std::move(listener));
  return std::make_unique<StoreGuest>(rank, size, terms, places);
}

}  // namespace lightcc

// What the handles of the C API are, and guard(), which no exception crosses.
#pragma once
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "embedding/exchange.h"
#include "embedding/owners.h"
#include "embedding/shard.h"
#include "embedding/table.h"

namespace lightcc::embedding {

void set_last_error(const char* text);

// For whom export shall have only rows that have changed; 0: it shall have all rows.
inline int readers_of(const lightcc_embedding_rows& rows) { return rows.changed & int(RowHeader::kChanged); }
inline bool wants(const lightcc_embedding_rows& rows, const RowHeader& header) {
  return !readers_of(rows) || (int(header.changed) & readers_of(rows));
}
// A row behind the others of `rows`.
void export_record(const RecordLayout&, const std::byte* record, lightcc_embedding_rows& rows);

template <class Body> int guard(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    set_last_error(error.what());
    return int(error.code());
  } catch (const std::bad_alloc&) {
    set_last_error("memory does not suffice");
    return int(Code::internal);
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return int(Code::internal);
  }
}

}  // namespace lightcc::embedding

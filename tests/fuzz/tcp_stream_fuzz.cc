// The bytes of a connection: in whatever pieces whatever comes, a TcpStream takes it as frames or throws Error.
// The first byte of the input decides how much was sent the other way before, so that acknowledgements can be right,
// and whether records go to and come from memory outside the rings.
#include <array>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "net/tcp/tcp_stream.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lightcc;
  constexpr size_t kCapacity = 4096;
  if (size < 2) return 0;
  TcpStream stream(kCapacity);
  const bool sends_bulk = data[0] & 16, posts = data[0] & 32, releases = data[0] & 64;
  std::byte lent[64] = {}, posted[64];
  for (int records = data[0] % 16; records > 0; --records) {
    if (sends_bulk && !stream.send_from(lent, sizeof lent)) break;
    if (sends_bulk) continue;
    std::byte* to = stream.reserve(64);
    if (!to) break;
    std::memset(to, records, 64);
    stream.commit(64);
  }
  bool is_posted = false;
  const size_t pieces = data[1] % 97 + 1;
  std::string_view bytes(reinterpret_cast<const char*>(data + 2), size - 2);
  try {
    while (!bytes.empty()) {
      const size_t n = std::min(pieces, bytes.size());
      stream.feed(bytes.substr(0, n));
      bytes.remove_prefix(n);
      std::array<iovec, TcpStream::kPieces> out;
      size_t sent = 0;
      for (size_t i = stream.to_send(out); i > 0; --i) sent += out[i - 1].iov_len;
      if (sent) stream.sent(sent);
      while (const std::byte* record = stream.peek(64)) {
        volatile std::byte last = record[63];
        (void)last;
        stream.consume(64);
        is_posted = false;
      }
      if (releases) {
        stream.release_lent(64);
        stream.release();
        is_posted = false;
      }
      if (posts && !is_posted) stream.post(posted, sizeof posted);
      is_posted = posts;
    }
  } catch (const Error&) {
  }
  return 0;
}

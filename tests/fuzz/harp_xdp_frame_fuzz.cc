// A frame as it comes from a network: whatever is read lies within it.
#include <cstdlib>

#include "harp_plugin/port/xdp_frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace harp;
  // To one of two ports, of which the input's own is one, so that frames get that far.
  sockaddr_in own[2] = {};
  own[0].sin_port = htons(40000);
  if (size >= kFrameHeaders) {
    std::memcpy(&own[1].sin_port, data + kAtUdpTo, sizeof own[1].sin_port);
    std::memcpy(&own[1].sin_addr, data + kAtIpTo, sizeof own[1].sin_addr);
  }
  const auto packet = read_frame({data, size}, own);
  if (!packet) return 0;
  const bool inside = packet->head == data + kFrameHeaders && packet->head_bytes == kHeaderBytes &&
                      packet->payload == packet->head + kHeaderBytes &&
                      packet->payload_bytes <= size - kFrameHeaders - kHeaderBytes;
  if (!inside || packet->local > 1) std::abort();
  return 0;
}

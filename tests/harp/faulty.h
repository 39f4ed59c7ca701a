// A port whose sending side loses, repeats, delays, reorders and damages packets, by the dice of a seed. For tests.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include "harp_plugin/port/port.h"

namespace harp {

struct Faults {
  uint64_t seed = 1;
  double loss = 0;       // probabilities, of each packet
  double duplicate = 0;
  double reorder = 0;    // it comes after packets that were sent later: by kReorderPackets at least
  double flip = 0;       // of one bit, anywhere in head, payload or tag
  uint64_t delay_ns = 0;
  uint64_t jitter_ns = 0;  // at most, on top; it reorders too
};

struct FaultCounters {
  uint64_t sent = 0, lost = 0, duplicated = 0, reordered = 0, flipped = 0;
  uint64_t overflowed = 0;  // lost because kMostHeld packets were under way
};

class FaultyPort : public Port {
 public:
  static constexpr uint32_t kReorderPackets = 3;
  static constexpr size_t kMostHeld = 65536;
  virtual const FaultCounters& counters() const = 0;
};

// `now` gives nanoseconds, of a clock that may be virtual.
std::unique_ptr<FaultyPort> open_faulty(std::unique_ptr<Port>, const Faults&, std::function<uint64_t()> now);

}  // namespace harp

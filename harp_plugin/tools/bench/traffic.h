// What goes over one connection, as parties that a thread steps in turn: a sender and a receiver of messages or
// records, and the two sides of a ping-pong. A party ends when the last message is through; nothing here waits.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "harp_plugin/tools/bench/channel.h"
#include "harp_plugin/tools/bench/pattern.h"
#include "harp_plugin/tools/bench/usage.h"

namespace harp::bench {

// Its buffers are posted until its channel is closed, so it must outlive that.
class Party {
 public:
  virtual ~Party() = default;
  virtual bool step() = 0;  // whether anything was done
  virtual bool finished() const = 0;
  virtual uint64_t counted_bytes() const { return 0; }  // of messages that came or went inside the window
  virtual const std::vector<uint32_t>& round_trips_ns() const {
    static const std::vector<uint32_t> none;
    return none;
  }
};

// Both make the party of the mode that the settings name.
std::unique_ptr<Party> make_client_party(BenchChannel&, const Workload&, Window&);
std::unique_ptr<Party> make_server_party(BenchChannel&, const Workload&, Window&);

// Steps all of them until they have finished.
void drive(const std::vector<Party*>& parties, const Workload&);

}  // namespace harp::bench

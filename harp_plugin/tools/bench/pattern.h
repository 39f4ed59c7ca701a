// What messages hold, so that a receiver can tell a message from its neighbours and from what was in its buffer before.
// A message starts with its Mark. Then, `sampled`: one word of every 16 KiB and the last one say which message it is,
// and the bytes between stay as the buffer was made. `full`: all words do.
#pragma once
#include <cstddef>
#include <cstdint>

namespace harp::bench {

enum class Phase : uint64_t { warm_up, measured, last };

struct Mark {
  uint64_t number;  // of the message on its connection
  Phase phase;
};

void stamp(uint8_t* message, size_t bytes, Mark, bool full);
// Throws Error{internal} where a word is not what message `number` holds.
Mark verify(const uint8_t* message, size_t bytes, uint64_t number, bool full);

}  // namespace harp::bench

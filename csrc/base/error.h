// The one exception type. Its code decides the Python exception, the TensorFlow status and the exit
// code (docs/errors.md); its text says what was attempted, which rank, host and tensor, and what to do.
#pragma once
#include <stdexcept>
#include <string>

namespace lightcc {

enum class Code : int32_t {  // the values are part of the C API
  ok = 0,
  pending = 1,           // not an error: the wait's time ran out before the work was done
  invalid_argument = 2,  // this rank's call is wrong; nothing was sent
  mismatch = 3,          // ranks disagree; every rank is told, the next operation works
  peer_lost = 4,         // a rank died; the epoch is over
  shut_down = 5,         // not initialised, shut down here, or a peer has left
  timeout = 6,           // a stall was ended; the epoch is over
  internal = 7           // a bug of ours or a refusal of the operating system
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// A connection that is not ours has broken (NCCL's), so a rank may have died. Which one, only our own watch can say.
class PeerSuspected : public Error {
 public:
  using Error::Error;
};

// An Error{internal} that ends in what errno says.
Error system_error(const std::string& attempted);

}  // namespace lightcc

// Closing what strangers may have had a hand in. close() of a descriptor that another process has passed may take as
// long as that process likes (a TCP socket that lingers, a file of a file system of theirs). So may close() of a socket
// that they could send to, since descriptors that nobody has received are closed with it.
#pragma once
#include <vector>

#include "base/fd.h"

namespace lightcc {

// Closes them in threads of its own; waits for nothing.
void close_elsewhere(std::vector<Fd>);
void close_elsewhere(Fd);
// Closes a listening socket; its name is free when this returns. Nobody can connect any more once this has begun, and
// those that nobody has accepted are closed elsewhere.
void close_listener(Fd);

}  // namespace lightcc

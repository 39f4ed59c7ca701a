// The job that ranks of tests say they are of.
#pragma once
#include "net/handshake.h"

namespace lightcc {

inline const JobCredentials kCredentials{"job-7", "0.2.0", "a secret", 4};

}  // namespace lightcc

// SHA-256 (FIPS 180-4) and HMAC (RFC 2104): how the processes of a job know each other.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace lightcc {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view);
Digest hmac_sha256(std::string_view key, std::string_view message);
bool equal(const Digest&, const Digest&);  // in a time that does not depend on where they differ

}  // namespace lightcc

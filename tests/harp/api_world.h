// Two contexts in one process and what connects them, through harp.h alone.
#pragma once
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "harp_plugin/harp.h"

namespace harp {

inline constexpr std::chrono::seconds kApiPatience{300};

// Calls `look` until it says something else than HARP_PENDING.
template <class F>
int until_done(F&& look) {
  const auto end = std::chrono::steady_clock::now() + kApiPatience;
  while (true) {
    const int status = look();
    if (status != HARP_PENDING) return status;
    if (std::chrono::steady_clock::now() > end) {
      ADD_FAILURE() << "still pending after " << kApiPatience.count() << " s";
      return HARP_PENDING;
    }
    sched_yield();
  }
}

struct Opening {
  std::string port = "mem";
  int inline_mode = 1;
  int engines = 1;
  uint32_t peer_timeout_ms = 0, connect_timeout_ms = 0;
  int authenticate = 2;

  harp_context* open() const {
    harp_options options{};
    options.size = sizeof options;
    options.port = port.c_str();
    options.interface = port == "udp" ? "127.0.0.1" : nullptr;
    options.engines = engines;
    options.inline_mode = inline_mode;
    options.peer_timeout_ms = peer_timeout_ms;
    options.connect_timeout_ms = connect_timeout_ms;
    options.authenticate = authenticate;
    options.secret = "a secret of this test";
    harp_context* context = nullptr;
    EXPECT_EQ(harp_open(&options, &context), HARP_OK) << harp_error();
    return context;
  }
};

struct Link {
  harp_connection *a = nullptr, *b = nullptr;
};

struct World {
  explicit World(const Opening& opening) : a(opening.open()), b(opening.open()) {
    EXPECT_EQ(harp_listen(b, &handle, &listener), HARP_OK) << harp_error();
  }
  ~World() {
    harp_close_context(a);
    harp_close_context(b);
  }
  World(const World&) = delete;

  // Both sides of one connection. In inline mode who waits has to poll for the other side too.
  Link connect(int mode = HARP_MESSAGE) {
    Link link;
    EXPECT_EQ(harp_connect(a, &handle, mode, &link.a), HARP_OK) << harp_error();
    EXPECT_EQ(until_done([&] { return harp_poll(a), harp_accept(listener, &link.b); }), HARP_OK) << harp_error();
    EXPECT_EQ(until_done([&] { return harp_poll(b), harp_connected(link.a); }), HARP_OK) << harp_error();
    return link;
  }
  int finish(harp_request* request, size_t* bytes = nullptr) {
    return until_done([&] { return harp_poll(a), harp_poll(b), harp_test(request, bytes); });
  }

  harp_context *a, *b;
  harp_handle handle;
  harp_listener* listener = nullptr;
};

inline std::vector<uint8_t> pattern(size_t bytes, uint32_t seed) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>((i * 31 + seed * 7 + i / 251) & 0xff);
  return data;
}

inline harp_request* send_to(harp_connection* to, const std::vector<uint8_t>& data) {
  harp_request* request = nullptr;
  EXPECT_EQ(harp_send(to, data.data(), data.size(), &request), HARP_OK) << harp_error();
  return request;
}
inline harp_request* receive_from(harp_connection* from, std::vector<uint8_t>& data) {
  harp_request* request = nullptr;
  EXPECT_EQ(harp_recv(from, data.data(), data.size(), &request), HARP_OK) << harp_error();
  return request;
}

}  // namespace harp

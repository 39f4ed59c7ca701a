// Sockets of the tool's own: the control connection, and the addresses that it is given.
#pragma once
#include <functional>
#include <string>

#include "base/fd.h"

namespace harp::bench {

lightcc::Fd listen_at(const std::string& where);   // [ADDRESS:]PORT; port 0 takes a free one
lightcc::Fd connect_to(const std::string& where);  // ADDRESS:PORT; tries for ten seconds
lightcc::Fd accept_from(int listener);
std::string own_address(int socket);  // ADDRESS:PORT
std::string address_of(const std::string& where);  // without the port

// Texts to and fro between client and server. While it waits for one it calls `meanwhile`.
class Control {
 public:
  explicit Control(lightcc::Fd socket) : socket_(std::move(socket)) {}
  void send(const std::string& text);
  std::string receive(const std::function<void()>& meanwhile = {});
  std::string own_address() const { return bench::own_address(socket_.get()); }

 private:
  void read(char* to, size_t bytes, const std::function<void()>& meanwhile);
  lightcc::Fd socket_;
};

}  // namespace harp::bench

// What harp_open makes: engines, and what was opened in them. Any thread may call. Every connection, listener and piece
// of memory belongs to the context until it is closed or freed.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "harp_plugin/api/config.h"
#include "harp_plugin/api/stats_page.h"
#include "harp_plugin/engine/engine.h"
#include "harp_plugin/harp.h"
#include "harp_plugin/port/region.h"

namespace harp {
class Context;
}

struct harp_listener {
  harp::Context* context;
  harp::Engine* engine;
  uint32_t forks;
  harp::Nonce nonce;
  harp::AcceptQueue waiting;
};

namespace harp {

class Context {
 public:
  explicit Context(const Config&);
  ~Context();  // closes what is still open

  harp_listener* listen(harp_handle*);
  Channel* accept(harp_listener&);  // nullptr: nobody has come yet
  void stop_listening(harp_listener*);
  Channel* connect(const harp_handle&, Mode);
  void close(Channel*);
  std::string describe(const Channel&) const;

  void* allocate(size_t bytes);
  void free(void*);
  bool poll();                     // whether there was news since the last
  bool under_way() const;
  size_t record_bytes() const;     // what a packet of all engines carries
  int descriptor();                // to sleep on, between arm() and poll()
  std::optional<uint64_t> arm();   // until when at most; nothing: there is news, or something to do
  std::string stats();
  const uint32_t forks;  // when it was opened

 private:
  using Memory = std::variant<std::shared_ptr<Region>, Mapping>;
  struct Open {
    std::map<Channel*, std::pair<std::unique_ptr<Channel>, StatsRow*>> channels;
    std::map<harp_listener*, std::unique_ptr<harp_listener>> listeners;
    std::map<void*, Memory> memory;
    size_t next_engine = 0;  // of a listener
    lightcc::Fd watched;     // an epoll of all that wakes the application, once it has asked for it
  };
  Engine& least_loaded();
  Channel* adopt(std::unique_ptr<Channel>);

  const Config config_;
  std::unique_ptr<StatsPage> page_;
  Notifier notifier_;
  std::atomic<uint64_t> polled_news_{0};
  std::vector<std::unique_ptr<Engine>> engines_;
  Guarded<Open> open_;
};

}  // namespace harp

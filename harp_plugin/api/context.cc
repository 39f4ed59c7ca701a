#include "harp_plugin/api/context.h"

#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>

#include "base/cores.h"
#include "base/json.h"
#include "harp_plugin/api/handle.h"
#include "harp_plugin/api/ports.h"
#include "harp_plugin/engine/fork.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

constexpr uint64_t kSpinNs = 10'000;
constexpr uint64_t kThreadsDelayTargetUs = 100, kInlineDelayTargetUs = 3000;
constexpr size_t kHugePage = size_t(2) << 20;

uint64_t random_bits() {
  uint64_t bits;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) throw lightcc::system_error("drawing random bits");
  return bits;
}

Options options_of(const Config& config, const Caps& caps, bool runs_inline) {
  Options options;
  options.payload = caps.payload;
  options.receive_packets = caps.receive_packets;
  options.paths = std::min(config.paths, caps.locals);
  const uint64_t delay_target_us = runs_inline ? kInlineDelayTargetUs : kThreadsDelayTargetUs;
  options.delay_target_ns = (config.delay_target_us ? config.delay_target_us : delay_target_us) * kMicrosecond;
  options.peer_timeout_ns = config.peer_timeout_ms * kMillisecond;
  options.connect_timeout_ns = config.connect_timeout_ms * kMillisecond;
  options.authenticate = config.authenticate;
  options.secret = config.secret;
  return options;
}

RegionUser* region_user(Engine& engine) { return dynamic_cast<RegionUser*>(&engine.port()); }

}  // namespace

Context::Context(const Config& config) : forks(harp::forks()), config_(config) {
  const int cores = lightcc::usable_cores();
  const bool by_cores = cores < 2 * config.engines + 2;
  const bool runs_inline = config.inline_mode == 0 ? by_cores : config.inline_mode != 2;
  const bool own_cores = !runs_inline && cores >= config.engines + 1;
  if (config.stats) page_ = make_stats_page();
  for (int i = 0; i < config.engines; ++i) {
    auto port = open_port(config);
    const Options options = options_of(config, port->caps(), runs_inline);
    engines_.push_back(std::make_unique<Engine>(
        std::move(port), options,
        Engine::Settings{.index = i,
                         .runs_inline = runs_inline,
                         .only_polled = config.inline_mode == 3,
                         .oversubscribed = by_cores,
                         .core = own_cores ? claim_core() : std::nullopt,
                         .spin_ns = own_cores ? kSpinNs : 0,
                         .name_of_peer = [kind = config.port](const Address& a) { return name_of_peer(kind, a); },
                         .random = random_bits,
                         .notifier = &notifier_}));
  }
}

Context::~Context() {
  while (auto* listener = open_.with([](Open& open) -> harp_listener* {
    return open.listeners.empty() ? nullptr : open.listeners.begin()->first;
  }))
    stop_listening(listener);
  while (auto* channel = open_.with([](Open& open) -> Channel* {
    return open.channels.empty() ? nullptr : open.channels.begin()->first;
  }))
    close(channel);
  engines_.clear();  // before the memory that their ports know
}

harp_listener* Context::listen(harp_handle* handle) {
  auto listener = std::make_unique<harp_listener>();
  const size_t index = open_.with([&](Open& open) { return open.next_engine++ % engines_.size(); });
  listener->context = this;
  listener->forks = forks;
  listener->engine = engines_[index].get();
  listener->nonce = listener->engine->listen(listener->waiting);
  *handle = write_handle({.port = config_.port,
                          .engine = static_cast<uint16_t>(index),
                          .nonce = listener->nonce,
                          .address = listener->engine->caps().address});
  return open_.with([&](Open& open) {
    harp_listener* made = listener.get();
    open.listeners[made] = std::move(listener);
    return made;
  });
}

Channel* Context::accept(harp_listener& listener) {
  const auto first = [&] {
    return listener.waiting.with([](auto& waiting) {
      std::unique_ptr<Channel> channel;
      if (waiting.empty()) return channel;
      channel = std::move(waiting.front());
      waiting.pop_front();
      return channel;
    });
  };
  auto channel = first();
  if (!channel && listener.engine->runs_inline()) {
    listener.engine->poll();
    channel = first();
  }
  return channel ? adopt(std::move(channel)) : nullptr;
}

void Context::stop_listening(harp_listener* listener) {
  listener->engine->stop_listening(listener->nonce);
  while (Channel* channel = accept(*listener)) close(channel);  // whom nobody has accepted
  open_.with([&](Open& open) { open.listeners.erase(listener); });
}

Channel* Context::connect(const harp_handle& bytes, Mode mode) {
  const Handle handle = read_handle(bytes, config_.port);
  Engine& engine = least_loaded();
  auto channel = std::make_unique<Channel>(engine, mode, engine.options().stream_frames);
  channel->peer = name_of_peer(config_.port, handle.address);
  Channel* made = adopt(std::move(channel));
  engine.connect(*made, handle.address, handle.nonce);
  return made;
}

Engine& Context::least_loaded() {
  return **std::min_element(engines_.begin(), engines_.end(),
                            [](const auto& a, const auto& b) { return a->load() < b->load(); });
}

Channel* Context::adopt(std::unique_ptr<Channel> channel) {
  Channel* made = channel.get();
  made->context = this;
  StatsRow* row = page_ ? page_->take(made->engine.index(), made->peer) : nullptr;
  if (row) made->published.store(row->counters.data(), std::memory_order_release);
  open_.with([&](Open& open) { open.channels[made] = {std::move(channel), row}; });
  return made;
}

void Context::close(Channel* channel) {
  channel->engine.close(*channel);
  auto closed = open_.with([&](Open& open) { return open.channels.extract(channel); });
  if (StatsRow* row = closed.mapped().second) page_->give_back(row);
}

std::string Context::describe(const Channel& channel) const {
  const Engine& engine = channel.engine;
  const Caps& caps = engine.caps();
  const int paths = engine.options().paths;
  return "peer " + channel.peer + ", port " + caps.name + (caps.zero_copy ? " (zero-copy), " : " (copies), ") +
         std::to_string(caps.payload) + " bytes a packet, engine " + std::to_string(engine.index()) + " of " +
         std::to_string(engines_.size()) + (engine.runs_inline() ? " (inline), " : " (a thread), ") +
         std::to_string(paths) + (paths == 1 ? " path" : " paths") +
         (engine.options().authenticate ? ", authenticated" : "");
}

void* Context::allocate(size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX / 4) return nullptr;
  const bool shared = config_.port != "mem" && region_user(*engines_.front()) != nullptr;
  Memory memory = shared ? Memory(make_region(bytes)) : Memory(Mapping::anonymous(bytes));
  uint8_t* data = shared ? std::get<0>(memory)->data() : std::get<1>(memory).data();
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // refused: pages are small
  if (shared) {
    for (const auto& engine : engines_)
      engine->run([&] { region_user(*engine)->add_region(std::get<0>(memory)); });
  }
  open_.with([&](Open& open) { open.memory.emplace(data, std::move(memory)); });
  return data;
}

void Context::free(void* data) {
  const auto entry = open_.with([&](Open& open) { return open.memory.extract(data); });
  if (entry.empty()) throw Error(Code::invalid_argument, "freeing memory that is not harp_alloc's");
  const auto* region = std::get_if<std::shared_ptr<Region>>(&entry.mapped());
  if (!region) return;
  for (const auto& engine : engines_) {
    engine->run_fenced([] {});
    engine->run([&] { region_user(*engine)->remove_region(**region); });
  }
}

bool Context::poll() {
  for (const auto& engine : engines_) engine->poll();
  const uint64_t news = notifier_.news();
  return polled_news_.exchange(news, std::memory_order_relaxed) != news;
}

bool Context::under_way() const {
  return std::any_of(engines_.begin(), engines_.end(), [](const auto& engine) { return engine->under_way(); });
}

size_t Context::record_bytes() const {
  size_t bytes = SIZE_MAX;
  for (const auto& engine : engines_) bytes = std::min<size_t>(bytes, engine->caps().payload);
  return bytes;
}

// Where the application's threads do the engines' work, packets wake them; else only what an engine has done.
int Context::descriptor() {
  return open_.with([&](Open& open) {
    if (open.watched) return open.watched.get();
    lightcc::Fd watched(epoll_create1(EPOLL_CLOEXEC));
    bool added = bool(watched);
    const auto add = [&](int descriptor) {
      epoll_event event{EPOLLIN, {}};
      if (descriptor >= 0) added = added && epoll_ctl(watched.get(), EPOLL_CTL_ADD, descriptor, &event) == 0;
    };
    add(notifier_.descriptor());
    for (const auto& engine : engines_)
      if (engine->runs_inline()) add(engine->port_descriptor());
    if (!added) throw lightcc::system_error("harp_descriptor: watching the port");
    open.watched = std::move(watched);
    return open.watched.get();
  });
}

std::optional<uint64_t> Context::arm() {
  if (!notifier_.arm()) return {};
  uint64_t until_ns = UINT64_MAX;
  for (const auto& engine : engines_) {
    if (!engine->runs_inline()) continue;
    const std::optional<uint64_t> its_ns = engine->arm();
    if (!its_ns) return {};
    until_ns = std::min(until_ns, *its_ns);
  }
  return until_ns;
}

std::string Context::stats() {
  std::map<const Engine*, std::vector<const Channel*>> channels;
  // Nobody closes a connection while its counters are read: the lock is held.
  return open_.with([&](Open& open) {
    for (const auto& [channel, owned] : open.channels) channels[&channel->engine].push_back(channel);
    std::string connections;
    Counters strays;  // packets that belong to no connection
    std::map<std::string, uint64_t> of_port;
    for (const auto& engine : engines_) {
      engine->run([&] {
        for (const auto& [name, count] : engine->port().counted()) of_port[name] += count;
        strays.malformed += engine->strays().malformed;
        strays.unauthenticated += engine->strays().unauthenticated;
        strays.out_of_window += engine->strays().out_of_window;
        for (const Channel* channel : channels[engine.get()]) {
          lightcc::JsonObject one;
          one.add("engine", engine->index()).add("peer", channel->peer);
          const auto counters = std::bit_cast<std::array<uint64_t, kCounters>>(engine->counters(*channel));
          for (size_t i = 0; i < kCounters; ++i) one.add(kCounterNames[i], counters[i]);
          connections += (connections.empty() ? "" : ",") + one.text();
        }
      });
    }
    const Caps& caps = engines_.front()->caps();
    lightcc::JsonObject all, of_strays;
    of_strays.add("malformed", strays.malformed).add("unauthenticated", strays.unauthenticated);
    of_strays.add("out_of_window", strays.out_of_window);
    all.add_json("strays", of_strays.text());
    lightcc::JsonObject packets;
    for (const auto& [name, count] : of_port) packets.add(name, count);
    if (!of_port.empty()) all.add_json("packets", packets.text());
    all.add("port", caps.name).add("payload_bytes", caps.payload).add("engines", engines_.size());
    all.add("inline", engines_.front()->runs_inline() ? 1 : 0).add_json("connections", "[" + connections + "]");
    return all.text();
  });
}

}  // namespace harp

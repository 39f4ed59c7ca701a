#include "engine/engine.h"

#include <utility>

#include "engine/engine_impl.h"

namespace lightcc {

Engine::Engine(std::unique_ptr<Peers> peers, World world, Config config)
    : Engine(std::move(peers), std::move(world), std::move(config), nullptr) {}
Engine::Engine(std::unique_ptr<Peers> peers, World world, Config config, std::unique_ptr<Timeline> timeline)
    : impl_(std::make_unique<Impl>(std::move(peers), std::move(world), std::move(config), std::move(timeline))) {}
Engine::~Engine() = default;

const World& Engine::world() const { return impl_->world(); }
const Config& Engine::config() const { return impl_->config(); }
const Counters& Engine::counters() const { return impl_->counters(); }
uint64_t Engine::sent_bytes(const std::string& transport) const { return impl_->sent_bytes(transport); }
const std::string& Engine::selector_text() const { return impl_->selector_text(); }
const std::string& Engine::network_text() const { return impl_->network_text(); }
Timeline& Engine::timeline() { return impl_->timeline(); }
const Topology& Engine::topology() const { return impl_->topology(); }
const std::shared_ptr<Arena>& Engine::arena() const { return impl_->arena(); }
const std::shared_ptr<OutputPool>& Engine::outputs() const { return impl_->outputs(); }

void Engine::submit(const RequestPtr& request, bool will_wait) { impl_->submit(request, will_wait); }
void Engine::submit_all(std::span<const RequestPtr> requests, size_t* begun) { impl_->submit_all(requests, begun); }
void Engine::fill(std::span<const Fill> fills) { impl_->fill(fills); }
bool Engine::try_fast_path(const Call& call, RequestPtr* begun) { return impl_->try_fast_path(call, begun); }
bool Engine::wait(Request& request, uint64_t deadline_ns) { return impl_->wait(request, deadline_ns); }
bool Engine::poll(Request& request) { return impl_->poll(request); }
void Engine::give_back(Request& request) { impl_->give_back(request); }

void Engine::with_peers(const std::function<void(Peers&)>& body) { impl_->with_peers(body); }
void Engine::use(Calibrated calibrated) { impl_->use(std::move(calibrated)); }
void Engine::reset_counters() { impl_->reset_counters(); }

std::shared_ptr<const Group> Engine::group(int id) const { return impl_->group(id); }
std::vector<int> Engine::group_ids() const { return impl_->group_ids(); }

std::string Engine::plans_text() { return impl_->plans_text(); }
std::string Engine::failure() const { return impl_->failure(); }
void Engine::abort(const std::string& cause) { impl_->abort(cause); }
void Engine::peer_ended(int rank) { impl_->peer_ended(rank); }
void Engine::shutdown(const std::string& reason, const Cancellation* cancellation) {
  impl_->shutdown(reason, cancellation);
}
bool Engine::pause() { return impl_->pause(); }
void Engine::resume() { impl_->resume(); }
void Engine::close_in_child(bool paused) { impl_->close_in_child(paused); }

}  // namespace lightcc

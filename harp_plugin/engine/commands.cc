// What an engine is commanded: listening, opening, closing.
#include "harp_plugin/engine/engine.h"

namespace harp {

void Engine::run(std::function<void()> command) {
  Acknowledgement done;
  mailbox_.post([&] {
    std::exception_ptr error;
    try {
      command();
    } catch (...) {
      error = std::current_exception();
    }
    done.give(error);
  });
  wake();
  done.wait(settings_.runs_inline ? [this] { poll(); } : std::function<void()>());
}

void Engine::run_fenced(std::function<void()> command) {
  Acknowledgement done;
  mailbox_.post([&] {
    try {
      command();
      fenced_.push_back({taken_ + (kept_end_ - kept_), true, nullptr, {}, &done});
    } catch (...) {
      done.give(std::current_exception());
    }
  });
  wake();
  done.wait(settings_.runs_inline ? [this] { poll(); } : std::function<void()>());
}

Nonce Engine::listen(AcceptQueue& queue) {
  Nonce nonce;
  run([&] {
    nonce = endpoint_.listen();
    listeners_[nonce] = &queue;
  });
  return nonce;
}

void Engine::stop_listening(const Nonce& nonce) {
  run([&] {
    endpoint_.stop_listening(nonce);
    listeners_.erase(nonce);
  });
}

void Engine::connect(Channel& channel, const Address& address, const Nonce& nonce) {
  load_.fetch_add(1, std::memory_order_relaxed);
  mailbox_.post([this, &channel, address, nonce] {
    const uint64_t now_ns = lightcc::now_ns();
    channel.id_ = endpoint_.connect(address, nonce, channel.mode, now_ns);
    if (channel.id_ == 0) {
      give_up(channel, Status::local_fault, "connecting: this engine has too many connections; use more engines");
    } else {
      channels_[channel.id_] = &channel;
    }
    drain(channel, now_ns);
  });
  wake();
}

void Engine::cancel(Channel& channel) {
  run_fenced([&] { end(channel); });
}

void Engine::end(Channel& channel) {
  if (channel.id_ == 0) return;
  const uint64_t now_ns = lightcc::now_ns();
  submissions(now_ns);
  give_up(channel, Status::cancelled, "closed on this side");
  endpoint_.close(channel.id_, now_ns);
  carry_out_events();
  drain(channel, now_ns);  // what the endpoint had no room for completes as cancelled now
  channels_.erase(channel.id_);
  channel.id_ = 0;
}

void Engine::close(Channel& channel) {
  run_fenced([&] {
    end(channel);
    unlist(channel);
    load_.fetch_sub(1, std::memory_order_relaxed);
  });
}

// Takes it out of the list of those with submissions. Nobody puts it back: its application's thread is in close().
void Engine::unlist(Channel& channel) {
  Channel* other = queued_.exchange(nullptr, std::memory_order_acq_rel);
  while (other) {
    Channel* next = other->next_queued_;
    other->queued_.exchange(false, std::memory_order_acq_rel);
    if (other != &channel) notice(*other);
    other = next;
  }
}

bool Engine::commands() {
  const auto commands = mailbox_.take();
  for (const auto& command : commands) command();
  return !commands.empty();
}

void Engine::notice(Channel& channel) {
  if (!channel.queued_.exchange(true, std::memory_order_acq_rel)) {
    channel.next_queued_ = queued_.load(std::memory_order_relaxed);
    while (!queued_.compare_exchange_weak(channel.next_queued_, &channel, std::memory_order_seq_cst)) {
    }
  }
  wake();
}

}  // namespace harp

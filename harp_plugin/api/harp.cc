// The C API. Each function is one guard(): nothing is thrown across it, and what went wrong is kept for harp_error().
#include "harp_plugin/harp.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "harp_plugin/api/context.h"
#include "harp_plugin/engine/fork.h"

namespace {

using harp::Channel;
using harp::Context;
using harp::Mode;
using harp::Request;
using harp::Status;
using lightcc::Code;
using lightcc::Error;

static_assert(HARP_PENDING == int(Status::pending) && HARP_TOO_LONG == int(Status::too_long) &&
              HARP_PEER_CLOSED == int(Status::peer_closed) && HARP_PEER_FAILED == int(Status::peer_failed) &&
              HARP_PEER_SILENT == int(Status::peer_silent) && HARP_CANCELLED == int(Status::cancelled) &&
              HARP_CONNECT_TIMEOUT == int(Status::connect_timeout) && HARP_LOCAL_FAULT == int(Status::local_fault) &&
              HARP_INVALID_ARGUMENT == int(Status::invalid_argument) && HARP_OK == int(Status::ok));

thread_local std::string last_error;

int failed(int status, std::string why) {
  last_error = std::move(why);
  return status;
}

// The body of each function.
template <class F>
int guard(F&& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    return failed(error.code() == Code::invalid_argument ? HARP_INVALID_ARGUMENT : HARP_LOCAL_FAULT, error.what());
  } catch (const std::exception& error) {
    return failed(HARP_LOCAL_FAULT, error.what());
  }
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(Code::invalid_argument, what);
}

// Engines stay in the process that opened them: in a child there are no threads behind them.
void same_process(uint32_t forks) {
  if (forks != harp::forks()) throw Error(Code::internal, "this process was forked: open a new context");
}

Context* context_of(harp_context* context) {
  auto* own = reinterpret_cast<Context*>(context);
  require(own, "the context is NULL");
  same_process(own->forks);
  return own;
}
Channel* channel_of(harp_connection* connection) {
  auto* own = reinterpret_cast<Channel*>(connection);
  require(own, "the connection is NULL");
  same_process(own->forks);
  return own;
}
harp_listener* checked(harp_listener* listener) {
  require(listener, "the listener is NULL");
  same_process(listener->forks);
  return listener;
}
Context* owner_of(Channel* channel) { return static_cast<Context*>(channel->context); }

// As much as there is room for; how many bytes all of it takes.
size_t copy_text(const std::string& text, char* to, size_t room) {
  if (to && room > 0) {
    const size_t fits = std::min(room - 1, text.size());
    std::memcpy(to, text.data(), fits);
    to[fits] = 0;
  }
  return text.size() + 1;
}

int post(Channel* channel, bool sends, void* data, size_t bytes, harp_request** request) {
  static uint8_t nothing;  // a message without bytes may come without an address
  require(request, "where to store the request is NULL");
  *request = nullptr;
  require(data || bytes == 0, "data is NULL and bytes are not 0");
  Request* made = channel->submit(sends, data ? static_cast<uint8_t*>(data) : &nothing, static_cast<uint32_t>(bytes));
  *request = reinterpret_cast<harp_request*>(made);
  return made ? HARP_OK : HARP_PENDING;
}

std::string reason(const Request& request) {
  const Channel& channel = *request.channel;
  const char* attempted = request.sends ? "sending to " : "receiving from ";
  if (request.status == Status::too_long)
    return attempted + ("peer " + channel.peer) + ": a message of " + std::to_string(request.bytes) +
           " bytes is longer than the buffer posted for it; post larger ones";
  if (channel.over() != Status::ok) return attempted + channel.why();
  return attempted + ("peer " + channel.peer) + ": " + harp::name_of(request.status);
}

}  // namespace

extern "C" {

const char* harp_error(void) { return last_error.c_str(); }

int harp_open(const harp_options* options, harp_context** context) {
  return guard([&]() -> int {
    require(context, "harp_open: where to store the context is NULL");
    *context = nullptr;
    *context = reinterpret_cast<harp_context*>(new Context(harp::read_config(options, harp::process_environment)));
    return HARP_OK;
  });
}

void harp_close_context(harp_context* context) {
  guard([&]() -> int {
    if (context) delete context_of(context);
    return HARP_OK;
  });
}

int harp_listen(harp_context* context, harp_handle* handle, harp_listener** listener) {
  return guard([&]() -> int {
    require(handle && listener, "harp_listen: the handle or where to store the listener is NULL");
    *listener = context_of(context)->listen(handle);
    return HARP_OK;
  });
}

int harp_accept(harp_listener* listener, harp_connection** connection) {
  return guard([&]() -> int {
    require(connection, "harp_accept: where to store the connection is NULL");
    *connection = reinterpret_cast<harp_connection*>(checked(listener)->context->accept(*listener));
    return *connection ? HARP_OK : HARP_PENDING;
  });
}

void harp_stop_listening(harp_listener* listener) {
  guard([&]() -> int {
    if (listener) checked(listener)->context->stop_listening(listener);
    return HARP_OK;
  });
}

int harp_connect(harp_context* context, const harp_handle* handle, int mode, harp_connection** connection) {
  return guard([&]() -> int {
    require(handle && connection, "harp_connect: the handle or where to store the connection is NULL");
    *connection = nullptr;
    require(mode == HARP_MESSAGE || mode == HARP_STREAM, "harp_connect: the mode is neither of message and stream");
    Channel* made = context_of(context)->connect(*handle, mode == HARP_STREAM ? Mode::stream : Mode::message);
    *connection = reinterpret_cast<harp_connection*>(made);
    return HARP_OK;
  });
}

int harp_connected(harp_connection* connection) {
  return guard([&]() -> int {
    Channel* channel = channel_of(connection);
    if (!channel->open() && channel->over() == Status::ok) channel->engine.poll_in_passing();
    if (channel->over() != Status::ok) return failed(int(channel->over()), "connection with " + channel->why());
    return channel->open() ? HARP_OK : HARP_PENDING;
  });
}

void harp_cancel(harp_connection* connection) {
  guard([&]() -> int {
    Channel* channel = channel_of(connection);
    channel->engine.cancel(*channel);
    return HARP_OK;
  });
}

size_t harp_describe(harp_connection* connection, char* text, size_t room) {
  size_t bytes = 0;
  guard([&]() -> int {
    Channel* channel = channel_of(connection);
    bytes = copy_text(owner_of(channel)->describe(*channel), text, room);
    return HARP_OK;
  });
  return bytes;
}

void harp_close(harp_connection* connection) {
  guard([&]() -> int {
    if (!connection) return HARP_OK;
    Channel* channel = channel_of(connection);
    owner_of(channel)->close(channel);
    return HARP_OK;
  });
}

int harp_send(harp_connection* connection, const void* data, size_t bytes, harp_request** request) {
  return guard([&]() -> int {
    Channel* channel = channel_of(connection);
    require(bytes <= UINT32_MAX, "harp_send: a message has less than 4 GiB");
    if (channel->mode == Mode::stream) {
      if (!channel->open() && channel->over() == Status::ok) {  // its records may not have a size yet
        require(request, "where to store the request is NULL");
        *request = nullptr;
        channel->engine.poll_in_passing();
        if (!channel->open()) return HARP_PENDING;
      }
      require(!channel->open() || bytes <= channel->record_bytes(),
              "harp_send: a record of a stream has at most harp_record_bytes()");
    }
    return post(channel, true, const_cast<void*>(data), bytes, request);
  });
}

int harp_recv(harp_connection* connection, void* data, size_t capacity, harp_request** request) {
  return guard([&]() -> int {
    Channel* channel = channel_of(connection);
    require(channel->mode == Mode::message, "harp_recv: a stream is received from with harp_recv_zc");
    return post(channel, false, data, std::min<size_t>(capacity, UINT32_MAX), request);
  });
}

int harp_test(harp_request* handle, size_t* bytes) {
  return guard([&]() -> int {
    auto* request = reinterpret_cast<Request*>(handle);
    require(request, "harp_test: the request is NULL");
    Channel* channel = request->channel;
    same_process(channel->forks);
    uint32_t state = request->state.load(std::memory_order_acquire);
    if (state == Request::posted) {
      channel->engine.poll_in_passing();
      state = request->state.load(std::memory_order_acquire);
      if (state == Request::posted) return HARP_PENDING;
    }
    require(state == Request::done, "harp_test: the request was tested as done before");
    const Status status = request->status;
    if (bytes) *bytes = request->bytes;
    if (status != Status::ok) last_error = reason(*request);
    channel->retire(*request);
    return int(status);
  });
}

int harp_poll(harp_context* context) {
  return guard([&]() -> int {
    return context_of(context)->poll() ? HARP_OK : HARP_PENDING;
  });
}

int harp_under_way(harp_context* context) {
  return guard([&]() -> int { return context_of(context)->under_way() ? HARP_OK : HARP_PENDING; });
}

int harp_descriptor(harp_context* context) {
  int descriptor = -1;
  guard([&]() -> int {
    descriptor = context_of(context)->descriptor();
    return HARP_OK;
  });
  return descriptor;
}

int harp_arm(harp_context* context, uint64_t* most_ns) {
  return guard([&]() -> int {
    require(most_ns, "harp_arm: where to store the time is NULL");
    const std::optional<uint64_t> until_ns = context_of(context)->arm();
    if (!until_ns) return HARP_PENDING;
    const uint64_t now_ns = lightcc::now_ns();
    *most_ns = *until_ns == UINT64_MAX ? UINT64_MAX : *until_ns > now_ns ? *until_ns - now_ns : 0;
    return HARP_OK;
  });
}

size_t harp_record_bytes(harp_connection* connection) {
  size_t bytes = 0;
  guard([&]() -> int {
    bytes = channel_of(connection)->record_bytes();
    return HARP_OK;
  });
  return bytes;
}

int harp_recv_zc(harp_connection* connection, const void** data, size_t* bytes) {
  return guard([&]() -> int {
    Channel* channel = channel_of(connection);
    require(data && bytes, "harp_recv_zc: where to store the record is NULL");
    require(channel->mode == Mode::stream, "harp_recv_zc: messages are received with harp_recv");
    auto record = channel->next_record();
    if (!record) {
      channel->engine.poll_in_passing();
      const Status over = channel->over();  // before the last look: what came before the end is delivered
      record = channel->next_record();
      if (!record && over != Status::ok) return failed(int(over), "receiving from " + channel->why());
    }
    if (!record) return HARP_PENDING;
    *data = record->data;
    *bytes = record->bytes;
    return HARP_OK;
  });
}

int harp_consume(harp_connection* connection, size_t records) {
  return guard([&]() -> int {
    require(channel_of(connection)->consume(records), "harp_consume: more records than have been received");
    return HARP_OK;
  });
}

size_t harp_most_record_bytes(harp_context* context) {
  size_t bytes = 0;
  guard([&]() -> int {
    bytes = context_of(context)->record_bytes();
    return HARP_OK;
  });
  return bytes;
}

void* harp_alloc(harp_context* context, size_t bytes) {
  void* memory = nullptr;
  guard([&]() -> int {
    memory = context_of(context)->allocate(bytes);
    return HARP_OK;
  });
  return memory;
}

void harp_free(harp_context* context, void* memory) {
  guard([&]() -> int {
    if (memory) context_of(context)->free(memory);
    return HARP_OK;
  });
}

size_t harp_stats(harp_context* context, char* json, size_t room) {
  size_t bytes = 0;
  guard([&]() -> int {
    bytes = copy_text(context_of(context)->stats(), json, room);
    return HARP_OK;
  });
  return bytes;
}

}  // extern "C"

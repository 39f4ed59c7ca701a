/* HARP: messages and streams between processes over a user-space network stack, one engine a core.
 *
 * Threads: a connection's harp_send, harp_recv, harp_recv_zc, harp_consume and harp_test are called by one thread at a
 * time; different connections by different threads, freely. Everything else may be called by any thread.
 * No other call may use a connection once harp_close has been called for it.
 * What waits: harp_cancel, harp_close and harp_close_context, until the engine is done with memory of the caller's;
 * harp_listen, harp_stop_listening, harp_alloc, harp_free and harp_stats, for the engine's next round; harp_open, with
 * xdp, some seconds at most for queues and for harpd. Nothing else does.
 * A function returns HARP_OK or what went wrong, HARP_INVALID_ARGUMENT for NULL and the like; what it was to store is
 * then NULL or as before. harp_error() says it in words, for the calling thread. In a forked child calls on what its
 * parent made return HARP_LOCAL_FAULT, or do nothing. */
#ifndef HARP_H
#define HARP_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum {
  HARP_OK = 0,
  HARP_PENDING = 1,           /* not yet: call again */
  HARP_INVALID_ARGUMENT = 2,
  HARP_TOO_LONG = 3,          /* the message is longer than the buffer posted for it; the connection goes on */
  HARP_PEER_CLOSED = 4,       /* the peer has closed the connection */
  HARP_PEER_FAILED = 5,       /* the peer gave up what was under way, or was started anew */
  HARP_PEER_SILENT = 6,       /* no sign of life from the peer within peer_timeout_ms, or no data gets through to it */
  HARP_CANCELLED = 7,         /* closed on this side before it was done */
  HARP_CONNECT_TIMEOUT = 8,
  HARP_LOCAL_FAULT = 9        /* the operating system refused something */
};

typedef struct harp_context harp_context;
typedef struct harp_listener harp_listener;
typedef struct harp_connection harp_connection;
typedef struct harp_request harp_request;

typedef struct harp_options {  /* zero or NULL: the default, or what the environment says (docs/harp.md) */
  uint32_t size;               /* sizeof(harp_options) */
  const char* port;            /* "udp" (default), "xdp", "shm"; "mem" within a process */
  const char* interface;       /* udp, xdp: names of interfaces as in NCCL_SOCKET_IFNAME, or an IPv4 address */
  int32_t engines;             /* threads, each with a core of its own; default 1 */
  int32_t inline_mode;         /* 1: harp_test and harp_poll do the work of the engine while called; 2: threads only;
                                  3: harp_poll alone, for who calls it often; default: 1 or 2, by cores */
  uint32_t paths;              /* UDP source ports of a connection; default 1 */
  uint32_t mtu;                /* udp, xdp, mem: largest packet, IP header included; 0 takes the interface's */
  uint32_t peer_timeout_ms;    /* default 4000 */
  uint32_t connect_timeout_ms; /* default 60000 */
  int32_t authenticate;        /* 1: each packet carries a tag under a key from `secret`; 2: not; default not */
  const char* secret;          /* the same in all processes; default HARP_SECRET */
  const char* port_range;      /* udp, xdp: the only UDP ports to use, "20000-20100" or "20000"; default any */
} harp_options;

enum { HARP_MESSAGE = 0, HARP_STREAM = 1 };
enum { HARP_HANDLE_BYTES = 128 };

/* Send it to who shall connect. Its last byte is the application's. */
typedef struct harp_handle { uint8_t bytes[HARP_HANDLE_BYTES]; } harp_handle;

const char* harp_error(void);  /* why this thread's last call that failed did; "" before the first */
int harp_open(const harp_options*, harp_context**);
void harp_close_context(harp_context*);  /* closes what is still open in it */

int harp_listen(harp_context*, harp_handle*, harp_listener**);
int harp_accept(harp_listener*, harp_connection**);  /* HARP_PENDING: nobody has come yet */
void harp_stop_listening(harp_listener*);  /* closes those that were not accepted; the others live on */
/* Usable at once: messages wait until it is connected. */
int harp_connect(harp_context*, const harp_handle*, int mode, harp_connection**);
int harp_connected(harp_connection*);  /* HARP_OK, HARP_PENDING, or why not */
/* Ends it: requests under way, and any later ones, end with HARP_CANCELLED; afterwards their memory is not touched, and
 * records of a stream that were not consumed are gone. Any thread, also while another uses the connection. It is still
 * to be closed. */
void harp_cancel(harp_connection*);
/* Afterwards no memory of its requests is touched, and their handles are gone. What the peer has not received is
 * dropped, unlike with TCP: first test what was sent. */
void harp_close(harp_connection*);
/* How it moves data, in a line of words: peer, port, copies, packets, engine, paths. Bytes as harp_stats. */
size_t harp_describe(harp_connection*, char* text, size_t room);

/* A message, to the next buffer that the peer posts: receives match sends in order. HARP_PENDING: too many requests, or
 * a stream that is not connected yet. Where the connection is over the request ends with the reason. data belongs to
 * HARP until the request is done. Behind a message its buffer keeps what it held; where a request ends with another
 * status than HARP_OK, what has come is undefined. In a stream: a record of at most harp_record_bytes(). */
int harp_send(harp_connection*, const void* data, size_t bytes, harp_request**);
int harp_recv(harp_connection*, void* data, size_t capacity, harp_request**);
/* HARP_PENDING: not done. Otherwise the request's end, which frees it; *bytes (or NULL) is what was sent or received,
 * with HARP_TOO_LONG the message's. In any order. */
int harp_test(harp_request*, size_t* bytes);
/* Does what is to do, if nobody else does; never waits. HARP_PENDING: since the last call no request was done, nothing
 * has come and nothing is over. */
int harp_poll(harp_context*);
/* HARP_OK: something waits to be sent or acknowledged, so that where polling does the work harp_poll is needed soon;
 * HARP_PENDING: nothing does. Any thread. */
int harp_under_way(harp_context*);

/* To sleep until a request is done, a record or a connection has come, or a connection is over; one thread at a time.
 * Look at all that is awaited, then harp_arm. HARP_OK: the descriptor becomes readable when there is something to do;
 * wait for that, *most_ns at most (UINT64_MAX: for ever), then harp_poll. HARP_PENDING: look again first. As
 * ucp_worker_arm. */
int harp_arm(harp_context*, uint64_t* most_ns);
int harp_descriptor(harp_context*);  /* for poll() alone, the same until the context is closed; -1: see harp_error() */

/* Streams: the next record, in the memory that the port received it in, until it is consumed. HARP_PENDING: none yet;
 * after the last one: why the connection is over. Several may be taken before they are consumed, in the same order. */
size_t harp_record_bytes(harp_connection*);       /* 0 until it is connected */
size_t harp_most_record_bytes(harp_context*);     /* of its own: a stream's is the smaller of both sides' */
int harp_recv_zc(harp_connection*, const void** data, size_t* bytes);
int harp_consume(harp_connection*, size_t records);  /* more than were taken is an error, and consumes none */

/* Memory that the port can send from without a copy (docs/harp.md, copies per port), while the context lives.
 * Page-aligned; NULL: none left. */
void* harp_alloc(harp_context*, size_t bytes);
void harp_free(harp_context*, void*);

/* What this context's connections have counted, as JSON; how many bytes it takes (then call again with more room). */
size_t harp_stats(harp_context*, char* json, size_t room);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif

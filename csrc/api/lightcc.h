/* lightcc's C API. Every framework comes through it. Nothing else is exported but a table for tests of GPUs.
 *
 * Every function may be called from any thread. None throws. A status is 0 (done), LIGHTCC_PENDING or
 * the reason for failure; after a failure lightcc_error() gives its text to the thread that saw it (release and
 * discard, which fail for an unknown handle only, set no text).
 * Shapes are in elements; times in milliseconds. Strings are UTF-8. */
#ifndef LIGHTCC_H
#define LIGHTCC_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define LIGHTCC_API __attribute__((visibility("default")))

enum lightcc_status {
  LIGHTCC_OK = 0,
  LIGHTCC_PENDING = 1,
  LIGHTCC_INVALID_ARGUMENT = 2, /* this rank's call is wrong; nothing was sent                   */
  LIGHTCC_MISMATCH = 3,         /* ranks disagree; all are told, the next operation works        */
  LIGHTCC_PEER_LOST = 4,        /* a rank died; shut down and init again, or exit                */
  LIGHTCC_SHUT_DOWN = 5,        /* not initialised, shut down, or a peer has left                */
  LIGHTCC_TIMEOUT = 6,          /* a stall was ended, or not all ranks came to init in time      */
  LIGHTCC_INTERNAL = 7
};
enum lightcc_dtype {
  LIGHTCC_UINT8, LIGHTCC_INT8, LIGHTCC_UINT16, LIGHTCC_INT16, LIGHTCC_INT32, LIGHTCC_INT64,
  LIGHTCC_FLOAT16, LIGHTCC_FLOAT32, LIGHTCC_FLOAT64, LIGHTCC_BOOL, LIGHTCC_BFLOAT16, LIGHTCC_UINT32, LIGHTCC_UINT64
};
enum lightcc_op { LIGHTCC_AVERAGE, LIGHTCC_SUM, LIGHTCC_ADASUM, LIGHTCC_MIN, LIGHTCC_MAX, LIGHTCC_PRODUCT };
enum lightcc_kind {
  LIGHTCC_ALLREDUCE, LIGHTCC_ALLGATHER, LIGHTCC_BROADCAST, LIGHTCC_ALLTOALL, LIGHTCC_REDUCESCATTER, LIGHTCC_BARRIER,
  LIGHTCC_SEND, LIGHTCC_RECV
};

/* Life. init reads the environment (docs/knobs.md), meets the other ranks and starts one engine thread and
 * one thread that watches the peers. A second init is a no-op. shutdown tells the peers, fails what is
 * pending with LIGHTCC_SHUT_DOWN and returns when both threads are gone; init may follow. */
LIGHTCC_API int lightcc_init(void);
/* The same for a world of some ranks of the job, which become its ranks 0, 1, ... in this order. Each of them calls it
 * with the same list; LIGHTCC_INVALID_ARGUMENT on a rank that is not in it. */
LIGHTCC_API int lightcc_init_ranks(const int32_t* ranks, int count);
/* The same for processes that can talk to each other by other means (a communicator of MPI). One of them, to become
 * rank 0, opens a rendezvous and sends all others where it is ("10.0.0.1:4711,..."), with a job id and a secret of its
 * own choice, the same on all ranks and used once. */
LIGHTCC_API int lightcc_open_meeting(char* where, int capacity);
LIGHTCC_API int lightcc_init_at(int rank, int size, const char* job, const char* secret, const char* where);
/* From another thread: the lightcc_init_at of this job, whether it is under way or yet to come, fails at once with
 * LIGHTCC_SHUT_DOWN and this cause, of which at most 300 bytes count. Does nothing to a world that has formed. */
LIGHTCC_API int lightcc_cancel_init(const char* job, const char* cause);
LIGHTCC_API int lightcc_shutdown(void);
/* The same; the others hear why: "rank 1 ... has left (<reason>)". At most 300 bytes of it. */
LIGHTCC_API int lightcc_shutdown_because(const char* reason);
LIGHTCC_API int lightcc_initialized(void);
/* How the user of this process calls init ("lightcc.torch.init()"), for errors; kept until the next call. */
LIGHTCC_API void lightcc_name_init(const char* call);
LIGHTCC_API const char* lightcc_version(void);
LIGHTCC_API const char* lightcc_error(void); /* the calling thread's last failure; valid until its next one */
/* Ends the epoch on every rank with LIGHTCC_SHUT_DOWN and this cause (Ctrl-C inside a wait does it). */
LIGHTCC_API int lightcc_abort(const char* cause);

/* Topology; -1 while not initialised. */
LIGHTCC_API int lightcc_rank(void);
LIGHTCC_API int lightcc_size(void);
LIGHTCC_API int lightcc_local_rank(void);
LIGHTCC_API int lightcc_local_size(void);
LIGHTCC_API int lightcc_cross_rank(void);
LIGHTCC_API int lightcc_cross_size(void);
LIGHTCC_API int lightcc_is_homogeneous(void); /* 1: every host has equally many ranks */

/* Groups (Horovod's process sets). Group 0 is the world. add and remove are collective over the world: all
 * ranks call them with the same members in the same order, and get the same id. ids are used again.
 * add returns the id, or minus a status. */
LIGHTCC_API int lightcc_add_group(const int32_t* ranks, int count);
LIGHTCC_API int lightcc_remove_group(int group);
LIGHTCC_API int lightcc_group_size(int group);              /* -1: no such group; or minus a status */
LIGHTCC_API int lightcc_group_rank(int group);              /* -1: no such group, or not in */
LIGHTCC_API int lightcc_group_ranks(int group, int32_t* ranks); /* fills group_size values  */
LIGHTCC_API int lightcc_group_ids(int32_t* ids, int capacity);  /* returns how many exist   */

/* Where the memory of a tensor is. All zero: in the host's. All tensors of a request are in one place.
 *
 * Of a GPU: the request reads after what the stream had been given when it was submitted, and the host waits for no
 * stream. What the stream is given after the caller has heard that the request is done, or after it has released the
 * handle, runs after its outputs are written (unless it is LIGHTCC_UNORDERED); what it is given before that may run
 * beside it. The caller hears of it by a call that blocked, wait, poll, finish or the callback. For another stream see
 * lightcc_order. The stream must live until then and until the request is done, may not capture a graph, and is not the
 * per-thread default stream. A prepared request keeps its stream. */
enum lightcc_device_kind { LIGHTCC_CPU, LIGHTCC_CUDA };
typedef struct lightcc_place {
  int32_t device; /* of CUDA: its number in this process */
  int32_t kind;   /* lightcc_device_kind */
  void* stream;   /* cudaStream_t: what makes the input and waits for the output; NULL: the device's default stream */
} lightcc_place;

/* A tensor of a request.
 *   input     allreduce, allgather, alltoall, reducescatter read it; it must live until the request is done.
 *             broadcast reads it on the root, and send reads it.
 *   output    allreduce and broadcast write it (may be the input), and recv writes it. NULL for the other kinds (see
 *             allocate).
 *   shape     ndim lengths, in elements. */
typedef struct lightcc_tensor {
  const void* input;
  void* output;
  const int64_t* shape;
  int32_t dtype; /* lightcc_dtype */
  int32_t ndim;
  lightcc_place place;
} lightcc_tensor;

/* flags */
#define LIGHTCC_BLOCK 1  /* drive it here for up to 100 ms: returns 0 when done (no handle is left)              */
#define LIGHTCC_PADDED 2 /* allreduce: the memory behind each tensor, up to the next address that is a multiple of
                          * 64, holds nothing and may be written. So tensors of a GPU that lie side by side can travel
                          * together without being copied. */
#define LIGHTCC_UNORDERED 4 /* of a GPU: once it has succeeded, no stream goes on behind its outputs, also not its own,
                             * but those that lightcc_order is then called for; its memory must be kept until the GPU
                             * is done. So what the program gives its stream meanwhile may run beside it. */

/* A request, of one tensor or of several that are one unit. Zero all of it, then set what the kind needs. It is read
 * during the call only, and so is what it points at, apart from the memory of the tensors.
 *
 * Later versions may add fields to the end of lightcc_request and lightcc_tensor, whose zero means what there was
 * before them. `size` and `tensor_size` say which version the caller was compiled with. The library takes every size
 * that was ever published, and larger ones, up to 4096 bytes, as long as all that it does not know is zero. Anything
 * else is LIGHTCC_INVALID_ARGUMENT, and so is what is not zero and should be.
 *
 *   name      NULL: numbered per group and kind, "allreduce.noname.7". Else "<kind>.<name>" is the key that the
 *             ranks meet by, and may be in flight once per group. With a handle it is taken until that was waited
 *             for, polled as done or released, or the request is done and a millisecond has passed since submission.
 *             Of several tensors, tensor i is called "<name>_<i+1>of<count>" in messages.
 *   op, prescale, postscale   allreduce and reducescatter. A factor of 1 changes nothing.
 *   root      broadcast: a WORLD rank. send and recv: the peer, a rank within the group (see below).
 *   splits    alltoall: rows of dimension 0 for each member of the group, group_size values a tensor. NULL: equal
 *             parts.
 *   set       allreduces with a name, such as the gradients of an optimizer, that are submitted together in each step,
 *             and before the first of them is waited for: a number > 0 of the caller's choice, the same for all of
 *             them. lightcc learns their order and may hold one until those have come that shall travel with it.
 *             Ranks need not agree on the number. Other kinds, and requests without a name, have no set.
 *   tag       send and recv: see below. Other kinds have none.
 *   space     send and recv: tags of different spaces never meet. The program's own is 0; the others are those of JAX's
 *             communicators.
 *
 * The callbacks, each NULL if it is not wanted, are called by whichever thread runs the engine, maybe before the
 * submission returns. They must not block, and of lightcc may only submit.
 *   done      takes the place of a handle. It is the last thing a request does, and is not called for one that was
 *             refused.
 *   allocate  gives the memory of output `index` once its shape is known. NULL ends the epoch: the others cannot go on
 *             without it. Without this callback lightcc allocates (see lightcc_output).
 *   received  of an alltoall, the rows that came from each member. */
typedef struct lightcc_request {
  uint32_t size;        /* sizeof(lightcc_request) */
  uint32_t tensor_size; /* sizeof(lightcc_tensor) */
  const lightcc_tensor* tensors;
  int32_t count;        /* of tensors: 0 for a barrier, 1 or more for the other kinds */
  int32_t kind;         /* lightcc_kind */
  uint32_t flags;
  int32_t group;
  const char* name;
  int32_t op;           /* lightcc_op */
  int32_t root;
  double prescale;
  double postscale;
  const int32_t* splits;
  int32_t codec;        /* of lightcc_register_codec, for sums and averages of floats with a name; 0: none */
  int32_t set;          /* see above; 0: none */
  void (*done)(void* context, int status, const char* text);
  void* (*allocate)(void* context, int index, const int64_t* shape, int ndim);
  void (*received)(void* context, int index, const int32_t* rows, int count);
  void* context;        /* for the callbacks */
  int32_t tag;          /* send and recv: any number */
  int32_t space;        /* send and recv: in which the tag counts; 0: the program's */
} lightcc_request;

/* Point-to-point. LIGHTCC_SEND and LIGHTCC_RECV have one tensor, in the host's memory, and concern this rank and
 * `root`, a rank of the group, which may be this one. The n-th send of a rank to another in a group, space and tag is
 * what the n-th recv there of that rank, group, space and tag receives; other operations need not be in any order with
 * them. A name serves messages only.
 *   A send is done when the recv has been submitted on the peer and the tensor's memory is free; a recv when all of its
 * tensor has come. Any number may be in flight in both directions. Submission never waits, so both ranks may submit
 * their sends first. But two ranks that each wait for their send before they submit the recv of the other's wait for
 * ever, which the stall check names: submit both, then wait.
 *   Of a send and a recv of another dtype or number of elements both fail with LIGHTCC_MISMATCH, and the next ones
 * match. A rank that has joined goes on with those that it submitted before. */

/* Submits a request. Returns a handle > 0; or 0 if it is done (LIGHTCC_BLOCK only) or has a callback `done`; or minus
 * a status. An output of lightcc's own makes LIGHTCC_BLOCK return the handle even when done. */
LIGHTCC_API int64_t lightcc_submit(const lightcc_request* request);

/* The same request again and again: prepare once (name required, no callbacks, not LIGHTCC_BLOCK), start many times
 * with one integer. prepare returns an id > 0 or minus a status; start a handle or minus a status. */
LIGHTCC_API int64_t lightcc_prepare(const lightcc_request* request);
LIGHTCC_API int64_t lightcc_start(int64_t prepared);
LIGHTCC_API int lightcc_discard(int64_t prepared);
/* start for several, which costs less than one by one. Fills handles, `count` of them: 0 for those that were not
 * started, if it fails. */
LIGHTCC_API int lightcc_start_all(const int64_t* prepared, int count, int64_t* handles);
/* Copies into the tensors of prepared requests, which have one each, in place, and are not on their way: sources[i] is
 * memory on the request's device with all bytes of its tensor, or NULL, which copies nothing. On a GPU the copies are
 * queued on the requests' stream, many in one launch, and are not waited for. */
LIGHTCC_API int lightcc_fill_all(const int64_t* prepared, const void* const* sources, int count);

/* This rank has no more data: until all ranks have joined, the others' collectives, in every group, go on without it.
 * It counts as present and puts in nothing: zeros into sums and averages (which are divided by all ranks), what
 * changes no result into min, max and product, no rows into allgather and alltoall; what it would receive is
 * dropped. A broadcast from it, and adding or removing a group, fail with LIGHTCC_MISMATCH. What it has submitted
 * before goes first; what it submits before the request is done is refused. Afterwards the numbering of unnamed
 * requests begins anew on all ranks. Returns a handle > 0 or minus a status.
 * last_joined: of a finished join, the rank that joined last; or minus a status. */
LIGHTCC_API int64_t lightcc_join(void);
LIGHTCC_API int lightcc_last_joined(int64_t handle);

/* Waits, driving the engine, at most timeout_ms (0: not at all). The status of a finished handle stays readable
 * until release. poll returns 1 if the request had finished when it was called, and minus a status for an
 * unknown handle; otherwise it moves the engine without waiting for anything and returns 0. */
LIGHTCC_API int lightcc_wait(int64_t handle, int timeout_ms);
LIGHTCC_API int lightcc_poll(int64_t handle);
LIGHTCC_API int lightcc_release(int64_t handle);
LIGHTCC_API int lightcc_finish(int64_t handle, int timeout_ms); /* wait, then release unless it is pending */
/* finish for many, as one: LIGHTCC_PENDING, and none released, until all are done; then releases all and returns the
 * status of the first, in the order of `handles`, that failed. An unknown handle is an error at once. */
LIGHTCC_API int lightcc_finish_all(const int64_t* handles, int count, int timeout_ms);

/* Output `index` of a finished request that had no output memory: its address passes to the caller, who must
 * lightcc_free it. ndim: in, the room in shape; out, the dimensions. */
LIGHTCC_API int lightcc_output(int64_t handle, int index, void** data, int64_t* shape, int* ndim);
/* The same for the request of a GPU. First the shape; then lightcc_output_to has the output written to memory of that
 * GPU, which the caller has allocated, as work of the stream `place.stream`. */
LIGHTCC_API int lightcc_output_shape(int64_t handle, int index, int64_t* shape, int* ndim);
LIGHTCC_API int lightcc_output_to(int64_t handle, int index, const lightcc_place* place, void* data);
/* What this stream is given from now on runs after the outputs of a finished request of a GPU are written. */
LIGHTCC_API int lightcc_order(int64_t handle, const lightcc_place* place);
/* alltoall: rows of output `index` that came from each member (group_size values). */
LIGHTCC_API int lightcc_received_splits(int64_t handle, int index, int32_t* splits);

/* Memory that the ranks of a host share: a collective on it moves no byte to or from a staging buffer.
 * 64-byte aligned, zeroed. It stays readable after shutdown, until freed. NULL on failure. */
LIGHTCC_API void* lightcc_alloc(int64_t bytes);
LIGHTCC_API void lightcc_free(void* data);

/* Memory for an output that the caller gives to a request: private to this process, not zeroed, taken from what earlier
 * outputs have left, because new pages cost more than the exchange. Outputs that lightcc allocates itself come from the
 * same pool (LIGHTCC_OUTPUT_POOL_BYTES). Page-aligned; lightcc_free returns it. NULL: use memory of your own, because
 * the output is smaller than LIGHTCC_POOLED_BYTES, the pool is turned off, or there is no epoch. */
#define LIGHTCC_POOLED_BYTES (1 << 20)
LIGHTCC_API void* lightcc_alloc_output(int64_t bytes);
/* The settings of the pool, for a framework that keeps outputs in memory of its own. */
LIGHTCC_API int lightcc_output_pool(int64_t* most_bytes, double* idle_s);

/* Compression between hosts, with error feedback (docs/compression.md). A codec says how, and keeps what is left behind
 * of the tensors that requests name it for: by group, name and index of the tensor. All ranks must give a request
 * codecs of the same kind, ratio, width and momentum. */
enum lightcc_codec_kind { LIGHTCC_CODEC_NONE, LIGHTCC_CODEC_TOPK, LIGHTCC_CODEC_INT8, LIGHTCC_CODEC_INT4 };
typedef struct lightcc_codec {
  uint32_t size;        /* sizeof(lightcc_codec) */
  int32_t kind;         /* lightcc_codec_kind */
  int32_t width;        /* lightcc_dtype in which values travel: topk float32 or float16, others int8 */
  int32_t warmup_steps; /* topk: each tensor's first exchanges send ratio^(1/5), ratio^(2/5) ... a fifth of them each */
  double ratio;         /* topk: the share of the elements that is sent, above 0 and at most 1; others: 1 */
  double momentum;      /* topk: of momentum correction, at least 0 and below 1; 0: none */
  const char* name;     /* NULL: a new codec; else the one that was registered under this name, if there is one */
} lightcc_codec;
/* register returns an id > 0 or minus a status. It needs no init, and a codec outlives shutdown. What it keeps ends
 * with release; requests in flight go on. */
LIGHTCC_API int lightcc_register_codec(const lightcc_codec* codec);
LIGHTCC_API int lightcc_release_codec(int codec);

/* JSON, for the caller to read until its next call: counts of what the codec was used for on this rank, and by tensor
 * the pieces that this rank keeps. NULL on failure.
 *   {"gradient_bytes": of all tensors that were compressed, "sent_bytes": to other hosts for them,
 *    "dense_sent_bytes": what would have been sent without compression, "sent_elements", "elements": that this rank
 *    owns, "dense": why values travel dense, or "",
 *    "tensors": [{"group", "name", "tensor", "elements", "steps", "node", "nodes", "route": what has made its last
 *                 message, "host" or "gpu", "velocity": true or false,
 *                 "pieces": [{"first", "count", "norm"}]}]} */
LIGHTCC_API const char* lightcc_codec_state(int codec);

/* A part of what is left behind of a tensor. read copies it into values: it must lie in one piece. write keeps it until
 * the tensor is next exchanged; then parts that were left behind on node j are added up on node j modulo the number of
 * nodes, by whichever rank owns them there, and what nobody here owns is dropped. So every rank may write all. */
typedef struct lightcc_residual {
  uint32_t size;        /* sizeof(lightcc_residual) */
  int32_t codec;
  int32_t group;
  int32_t tensor;       /* index in the request */
  int32_t part;         /* 0: what is left behind, 1: its velocity (momentum correction) */
  int32_t node;         /* write: where it was left behind */
  const char* name;     /* of the request */
  int64_t elements;     /* write: of the whole tensor */
  int64_t steps;        /* write: exchanges that the tensor has seen, for warmup_steps */
  int64_t first;        /* the first element, in the tensor, and how many */
  int64_t count;
  float* values;        /* read only by write */
} lightcc_residual;
LIGHTCC_API int lightcc_read_residual(const lightcc_residual* residual);
LIGHTCC_API int lightcc_write_residual(const lightcc_residual* residual);

/* The timeline (docs/timeline.md), a file for chrome://tracing. start makes or empties the file, and completes one
 * that is being written; it is refused in a process that was started without HOROVOD_TIMELINE. Without "{rank}" in
 * the path rank 0 writes and start does nothing on the others. stop completes the file, or warns on rank 0. */
LIGHTCC_API int lightcc_timeline_start(const char* path, int mark_cycles);
LIGHTCC_API int lightcc_timeline_stop(void);

/* Counters of this process since init, in the order of lightcc_counter_name; returns how many there are. */
LIGHTCC_API int lightcc_counters(int64_t* values, int capacity);
LIGHTCC_API const char* lightcc_counter_name(int index);
/* Nanoseconds that the others, ready themselves, waited for each rank alone; on rank 0, zeros elsewhere. Returns the
 * number of ranks. */
LIGHTCC_API int lightcc_waited(int64_t* values, int capacity);
/* A text of at most 8192 bytes that rank 0 is to show for this rank, in place of the one before. reported, on rank 0:
 * that of a rank, "" if there is none yet, for the caller to read until its next call; NULL on failure. */
LIGHTCC_API int lightcc_report(const char* text);
LIGHTCC_API const char* lightcc_reported(int rank);
/* A line of the log: level as HOROVOD_LOG_LEVEL's numbers. */
LIGHTCC_API void lightcc_log(int level, const char* text);
/* The selector's table, the knobs, or the fusion plans in force, as text (the caller must not free it). */
/* "selector", "network", "knobs", "world" or "fusion_plan" */
LIGHTCC_API const char* lightcc_describe(const char* what);

/* A cluster for lightcc_explain, there or not. Seconds, bytes, bytes a second. */
typedef struct lightcc_cluster {
  uint32_t size;             /* sizeof(lightcc_cluster) */
  int32_t host_count;
  const int32_t* hosts;      /* ranks of each */
  double local_latency_s;    /* of a message inside a host */
  double memory_bytes_per_s; /* of a host, read or written, by all of its ranks together */
  double latency_s;          /* of a message between hosts */
  double message_s;          /* of a rank's core, for each message */
  double nic_bytes_per_s;    /* of each NIC, each way */
  double flow_bytes_per_s;   /* most of one connection; 0: no such limit */
  double oversubscription;   /* NIC bytes of a pod's hosts for each byte of its uplink; 1: none */
  int32_t nics;              /* of a host */
  int32_t half_duplex;       /* 1: both ways share nic_bytes_per_s */
  int32_t pod_hosts;         /* hosts below one switch; 0: all are */
  int32_t simulated;         /* 1: message by message, up to 4096 ranks; 0: in closed form */
  double compressed_share;   /* a codec's bytes for each byte of the gradients; 0: there is no codec */
} lightcc_cluster;
/* What an all-reduce of so many bytes takes there, all ways, the quickest first: a JSON array of objects, for
 * lightcc-explain (docs/explain.md). Needs no init. The caller must not free it; valid until the thread's next call.
 * NULL: see lightcc_error. */
LIGHTCC_API const char* lightcc_explain(const lightcc_cluster* cluster, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif

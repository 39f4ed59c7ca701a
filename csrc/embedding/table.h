/* The C API of _lightcc_embedding.so: tables of rows that are looked up by 64-bit keys and spread over ranks.
 *
 * The style is that of api/lightcc.h. Functions return a lightcc_status (0: done) and never throw; after a failure
 * lightcc_embedding_error() gives its text to the thread that saw it. A struct begins with `size`, its sizeof in the
 * caller; what is zero means the default. Handles belong to the caller until he frees or releases them. One thread at a
 * time may call functions of a group, of its tables and of its calls; the others are free of each other.
 *
 * A row is born at its first update. A key that has no row reads as its first value, which is the same on any number of
 * ranks and in any order. A table's step is the number of updates that were applied to it, the same on all ranks. */
#ifndef LIGHTCC_EMBEDDING_TABLE_H
#define LIGHTCC_EMBEDDING_TABLE_H
#include "api/lightcc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lightcc_embedding_group lightcc_embedding_group; /* the ranks that share tables */
typedef struct lightcc_embedding_table lightcc_embedding_table; /* this rank's shard */
typedef struct lightcc_embedding_call lightcc_embedding_call;   /* a lookup or an update under way, and its results */

LIGHTCC_API const char* lightcc_embedding_error(void); /* the calling thread's last failure; valid until its next one */

/* Ranks. group: the id of lightcc_group; rank and size: this process's in it. Size 1 sends no requests and needs no
 * init. close: the memory goes when its tables are freed and its calls released, too. */
LIGHTCC_API int lightcc_embedding_open(int group, int rank, int size, lightcc_embedding_group** opened);
LIGHTCC_API int lightcc_embedding_close(lightcc_embedding_group* group);

/* Tables */

enum lightcc_embedding_init { /* of a row; a and b are the numbers of lightcc_embedding_options */
  LIGHTCC_EMBEDDING_ZEROS,
  LIGHTCC_EMBEDDING_CONSTANT, /* a                            */
  LIGHTCC_EMBEDDING_UNIFORM,  /* from a, which may occur, to b */
  LIGHTCC_EMBEDDING_NORMAL    /* mean a, deviation b          */
};
typedef struct lightcc_embedding_options {
  uint32_t size;       /* sizeof(lightcc_embedding_options) */
  int32_t dtype;       /* LIGHTCC_FLOAT32 or LIGHTCC_FLOAT64: of weights, slots, rows and gradients */
  int64_t dim;         /* weights of a row, at least 1 */
  const char* name;    /* one table of a name in a group */
  int32_t init;        /* lightcc_embedding_init */
  int32_t checked;     /* 1: keys are hashes of strings and come with 32 bits more (lightcc_embedding_hash_strings) */
  double a, b;
  uint64_t seed;
  int32_t wire;        /* rows between ranks: LIGHTCC_FLOAT16 or LIGHTCC_BFLOAT16; 0: as they are */
  int32_t reserved;
  int64_t limit_bytes; /* most memory of this shard; 0: what the system gives. An update that needs more fails whole */
  int64_t max_rows;    /* of all ranks, for the caller to keep with evict; 0: no limit. Equal on all ranks */
} lightcc_embedding_options;
LIGHTCC_API int lightcc_embedding_create(lightcc_embedding_group* group, const lightcc_embedding_options* options,
                                         lightcc_embedding_table** table);
LIGHTCC_API int lightcc_embedding_free(lightcc_embedding_table* table);

/* The optimizer, once and before there is a row. It decides a row's slots, in this order: */
enum lightcc_embedding_rule_kind {
  LIGHTCC_EMBEDDING_SGD,             /* none                                          */
  LIGHTCC_EMBEDDING_ADAGRAD,         /* v                                             */
  LIGHTCC_EMBEDDING_ROWWISE_ADAGRAD, /* v, one number a row; the others have dim numbers */
  LIGHTCC_EMBEDDING_LAZY_ADAM,       /* m, v                                          */
  LIGHTCC_EMBEDDING_SPARSE_ADAM,     /* m, v                                          */
  LIGHTCC_EMBEDDING_GROUP_ADAGRAD,   /* v, z: z is in units of lr                     */
  LIGHTCC_EMBEDDING_GROUP_ADAM       /* m, v, z                                       */
};
typedef struct lightcc_embedding_rule {
  uint32_t size;  /* sizeof(lightcc_embedding_rule) */
  int32_t kind;   /* lightcc_embedding_rule_kind */
  double initial; /* v at birth, of the Adagrads and GroupAdagrad, which wants it above 0 */
  int32_t terms;  /* SparseAdam: of the sum over steps that a row has missed; 0: all of them */
  int32_t reserved;
} lightcc_embedding_rule;
LIGHTCC_API int lightcc_embedding_attach(lightcc_embedding_table* table, const lightcc_embedding_rule* rule);
/* Widths of the slots, 0 for those that a row lacks: four values. */
LIGHTCC_API int lightcc_embedding_slots(const lightcc_embedding_table* table, int64_t* widths);

/* Admission: a key gets a row when it has occurred min_count times in lookups whose gradients were applied, over all
 * ranks. The update that brings it there makes the row, which takes its gradient; before, a key reads as `absent` in
 * each element and its gradients are dropped. min_count 1: no counting, and a key without a row reads as its first
 * value. Equal on all ranks. May be changed between updates: candidates keep their counts, but for min_count 1. */
LIGHTCC_API int lightcc_embedding_set_admission(lightcc_embedding_table* table, int64_t min_count, double absent);
/* Counts candidates in a filter of so many bytes, of all ranks together: a multiple of 4 MiB (65,536 lines of 64), at
 * most 4 TiB; 0: exactly, at 12 bytes a key. hashes: counters of a key, 1 to 32. It may count too high and never too
 * low, and min_count is at most 65,536 with it. Equal on all ranks. With another filter, or a min_count that needs
 * other counters, counting begins anew. */
LIGHTCC_API int lightcc_embedding_set_filter(lightcc_embedding_table* table, int64_t bytes, int hashes);
/* Candidates, for checkpoints: those of one of 64 parts. changed: flags as those of export (lightcc_embedding_reader),
 * 0: all. Fills at most `capacity`, of which TAKE reads what it fills; count becomes how many there are. import passes
 * over keys of other owners; count 0: the key is none any more. Of a filter a "key" is the number of 32 bits of it, of
 * bytes / 4, and its "count" these bits, if they are not zero; each bucket has as many, in their order. */
#define LIGHTCC_EMBEDDING_CANDIDATE_PARTS 64
LIGHTCC_API int lightcc_embedding_export_candidates(lightcc_embedding_table* table, int part, int changed,
                                                    int64_t capacity, int64_t* keys, uint32_t* counts, int64_t* count);
LIGHTCC_API int lightcc_embedding_import_candidates(lightcc_embedding_table* table, const int64_t* keys,
                                                    const uint32_t* counts, int64_t count);
/* What the logs below have of candidates: those whose counts have changed since the log began, with their counts then
 * (0: none), in the order of their first changes, from the one with number `first` on; count becomes how many there are
 * from there. */
LIGHTCC_API int lightcc_embedding_export_candidate_log(const lightcc_embedding_table* table, int log, int64_t first,
                                                       int64_t capacity, int64_t* keys, uint32_t* counts,
                                                       int64_t* count);

/* Eviction: at the end of each update, rows go that are no longer wanted. A row that comes back is a new one. Whether a
 * row goes depends on the step, its header, its key and its weights alone. Equal on all ranks. */
enum lightcc_embedding_eviction {
  LIGHTCC_EMBEDDING_KEEP,
  LIGHTCC_EMBEDDING_TTL,   /* not updated for a steps */
  LIGHTCC_EMBEDDING_COUNT, /* count * b^(steps since its last update) is below a; 0 < b < 1 */
  LIGHTCC_EMBEDDING_L2,    /* the norm of its weights is below a; each row is looked at every `every` steps */
  LIGHTCC_EMBEDDING_ASKED  /* the caller says, of rows that are due, each every `every` steps */
};
LIGHTCC_API int lightcc_embedding_set_eviction(lightcc_embedding_table* table, int kind, double a, double b,
                                               int64_t every);
/* ASKED: the rows that are due after an update, at most `capacity`; norms may be NULL; count becomes how many there
 * are. answer_due, before the next update: go[i] 1: row i goes; rows without an answer stay. evict: these rows go. */
LIGHTCC_API int lightcc_embedding_due(const lightcc_embedding_table* table, int64_t capacity, int64_t* keys,
                                      uint32_t* counts, uint32_t* lasts, double* norms, int64_t* count);
LIGHTCC_API int lightcc_embedding_answer_due(lightcc_embedding_table* table, const uint8_t* go, int64_t count);
LIGHTCC_API int lightcc_embedding_evict(lightcc_embedding_table* table, const int64_t* keys, int64_t count);

typedef struct lightcc_embedding_stats {
  uint32_t size;         /* sizeof(lightcc_embedding_stats) */
  int32_t slabs;         /* pieces of memory that rows are in */
  int64_t rows;          /* of this shard, as all that follows */
  int64_t steps;
  int64_t record_bytes;  /* of one row with header and slots */
  int64_t bytes;         /* reserved for rows and index */
  int64_t index_bytes;
  int64_t index_growing; /* 1: a larger index is being filled, in slices */
  int64_t candidates;    /* keys that are counted and have no row yet; of a filter about how many it has counted */
  int64_t candidate_bytes;
  int64_t admitted;      /* keys that became rows after they were counted, since the table was made */
  int64_t evicted;       /* rows that went, since the table was made */
  int64_t total_rows;    /* of all ranks, after the last update and before its evictions */
  int64_t updates;       /* that were applied here, also those that were taken back: unlike steps it never falls */
} lightcc_embedding_stats;
LIGHTCC_API int lightcc_embedding_get_stats(const lightcc_embedding_table* table, lightcc_embedding_stats* stats);

/* This shard alone, nothing is exchanged. contains: one byte a key. erase: of rows and candidates; other keys are
 * passed over. read: the values that an evaluation sees now, `count` rows of dim, keys may repeat (checks: NULL or as
 * many). first: the first values of keys, whether they have rows or not. clear: no rows, step 0. */
LIGHTCC_API int lightcc_embedding_contains(const lightcc_embedding_table* table, const int64_t* keys, int64_t count,
                                           uint8_t* found);
LIGHTCC_API int lightcc_embedding_erase(lightcc_embedding_table* table, const int64_t* keys, int64_t count);
LIGHTCC_API int lightcc_embedding_read(lightcc_embedding_table* table, const int64_t* keys, const uint32_t* checks,
                                       int64_t count, void* rows);
LIGHTCC_API int lightcc_embedding_first(const lightcc_embedding_table* table, const int64_t* keys, int64_t count,
                                        void* rows);
LIGHTCC_API int lightcc_embedding_clear(lightcc_embedding_table* table);

/* Owners: the top 16 bits of a key's hash name one of 65,536 buckets; owners[bucket] is a rank. A new table has
 * lightcc_embedding_first_owners. set_owners moves no rows: export them before, and import them where they belong. */
#define LIGHTCC_EMBEDDING_BUCKETS 65536
LIGHTCC_API int lightcc_embedding_owners(const lightcc_embedding_table* table, uint16_t* owners);
LIGHTCC_API int lightcc_embedding_set_owners(lightcc_embedding_table* table, const uint16_t* owners);
LIGHTCC_API int lightcc_embedding_owner_of(const lightcc_embedding_table* table, const int64_t* keys, int64_t count,
                                           uint16_t* ranks);
LIGHTCC_API int lightcc_embedding_first_owners(int ranks, uint16_t* owners);
/* The map for other ranks, with as few moves as can be: new_rank_of[rank], for each of `before` ranks, is its number
 * among `after` ones, or -1 if it has gone. Ranks differ by one bucket at most. NULL: rank r stays r if r < after. */
LIGHTCC_API int lightcc_embedding_move_owners(const uint16_t* owners, int before, const int32_t* new_rank_of, int after,
                                              uint16_t* moved);

/* Rows in slices, for checkpoints. Columns are the caller's, `capacity` rows each; NULL: not wanted. slots[i] is slot i
 * of the rule. export fills `count` rows from `cursor` on (0: the first), and sets cursor for the next slice; count 0:
 * there are no more. Between slices nothing may be born or erased. import puts `count` rows in, which replace those of
 * the same keys; rows of other owners are passed over; sets `taken`. keys, weights and the rule's slots are needed. */
typedef struct lightcc_embedding_rows {
  uint32_t size;   /* sizeof(lightcc_embedding_rows) */
  int32_t changed; /* export, export_log: flags; 0: all rows. See lightcc_embedding_reader */
  int64_t capacity;
  int64_t count;
  int64_t cursor;
  int64_t taken;
  int64_t* keys;
  uint32_t* checks; /* of a table whose keys are checked */
  uint32_t* counts; /* updates that the row has seen */
  uint32_t* lasts;  /* the step of its last update */
  void* weights;
  void* slots[4];
} lightcc_embedding_rows;
/* Who reads only what has changed. A flag of rows.changed: only rows that have changed since that reader has read them:
 * OF_DELTAS, since forget_changes; OF_CHECKPOINTS, since an export with TAKE. TAKE: rows that the log OF_CHECKPOINT has
 * are left out, and the others are read. Likewise of candidates. */
enum lightcc_embedding_reader {
  LIGHTCC_EMBEDDING_OF_DELTAS = 1,
  LIGHTCC_EMBEDDING_OF_CHECKPOINTS = 2,
  LIGHTCC_EMBEDDING_TAKE = 4
};
LIGHTCC_API int lightcc_embedding_export(const lightcc_embedding_table* table, lightcc_embedding_rows* rows);
LIGHTCC_API int lightcc_embedding_import(lightcc_embedding_table* table, lightcc_embedding_rows* rows);
/* Logs of what a shard's rows were. begin: this is the moment, and what the log had is forgotten. Rows that change, are
 * born or erased afterwards are noted, once each, and so are the counts of candidates; it costs a record for each row
 * that changes. go_back: all rows, candidates, the steps and the numbers are what they were when OF_COMMIT began, which
 * goes on from there; owners stay. logged: one byte a key, whether the log has it. export_log: as export, the rows that
 * have changed since as they were then. */
enum lightcc_embedding_log { LIGHTCC_EMBEDDING_OF_COMMIT, LIGHTCC_EMBEDDING_OF_CHECKPOINT };
LIGHTCC_API int lightcc_embedding_begin_log(lightcc_embedding_table* table, int log);
LIGHTCC_API int lightcc_embedding_end_log(lightcc_embedding_table* table, int log);
LIGHTCC_API int lightcc_embedding_go_back(lightcc_embedding_table* table);
LIGHTCC_API int lightcc_embedding_logged(const lightcc_embedding_table* table, int log, const int64_t* keys,
                                         int64_t count, uint8_t* found);
LIGHTCC_API int lightcc_embedding_export_log(const lightcc_embedding_table* table, int log,
                                             lightcc_embedding_rows* rows);
/* keys: that the log has, those of rows born since too. records: copies that it keeps. */
LIGHTCC_API int lightcc_embedding_log_stats(const lightcc_embedding_table* table, int log, int64_t* keys,
                                            int64_t* records, int64_t* bytes);
/* Takes the rows, steps, optimizer and logs of a table of another group, say of the world before, which is empty then:
 * name, dim, dtype, init and seed must be the same. Its owner map comes along: set another one before the next call. */
LIGHTCC_API int lightcc_embedding_adopt(lightcc_embedding_table* table, lightcc_embedding_table* from);

/* What has changed since the last call of forget_changes: rows (above), candidates (below), and keys whose rows were
 * erased or went, some of which may have rows again. gone fills at most `capacity`; count becomes how many there are,
 * or -1: not known, before the first forget_changes, or since more have gone than there are rows. forget_changes is of
 * OF_DELTAS; OF_CHECKPOINTS has forget_gone. changed: how many rows have. */
LIGHTCC_API int lightcc_embedding_forget_changes(lightcc_embedding_table* table);
LIGHTCC_API int lightcc_embedding_forget_gone(lightcc_embedding_table* table, int reader);
LIGHTCC_API int lightcc_embedding_changed(const lightcc_embedding_table* table, int reader, int64_t* count);
LIGHTCC_API int lightcc_embedding_gone(const lightcc_embedding_table* table, int reader, int64_t capacity,
                                       int64_t* keys, int64_t* count);
/* The factor lr * sqrt(1 - beta2^t) / (1 - beta1^t), or lr, of each step 1, 2, ...: SparseAdam needs those of the past.
 * alphas fills at most capacity of them from step `first` on. set_alphas makes `steps` the table's step. */
LIGHTCC_API int lightcc_embedding_alphas(const lightcc_embedding_table* table, int64_t first, int64_t capacity,
                                         double* alphas);
LIGHTCC_API int lightcc_embedding_set_alphas(lightcc_embedding_table* table, const double* alphas, int64_t steps);
/* lr, beta1, beta2, eps, l1, l2, l21 of the last update: a read under SparseAdam needs them, so a
 * checkpoint has them too. */
LIGHTCC_API int lightcc_embedding_numbers(const lightcc_embedding_table* table, double* numbers);
LIGHTCC_API int lightcc_embedding_set_numbers(lightcc_embedding_table* table, const double* numbers);

/* Calls. All ranks of a group make the same ones in the same order, each over the same tables in the same order, with
 * whatever keys; lightcc_embedding_serve takes part in what the others do.
 *
 * Each function that begins a call returns after it has done what needs no other rank; finish goes on with it for at
 * most timeout_ms: LIGHTCC_PENDING means to call it again. A call that failed has changed no row, on any rank:
 * LIGHTCC_MISMATCH is seen by all of them. release frees a call; one that is pending is finished in the background by
 * the calls that come. */
LIGHTCC_API int lightcc_embedding_finish(lightcc_embedding_call* call, int timeout_ms);
LIGHTCC_API int lightcc_embedding_release(lightcc_embedding_call* call);
/* Of a prefetched lookup that will not be trained: all ranks call it, then finish, and release the call. */
LIGHTCC_API int lightcc_embedding_drop(lightcc_embedding_call* call);

#define LIGHTCC_EMBEDDING_TRAINING 1 /* lookup: an update will follow. Without: an evaluation, which writes nothing */
#define LIGHTCC_EMBEDDING_PREFETCH 2 /* lookup: keys travel now; rows are read at finish, after the next update */
#define LIGHTCC_EMBEDDING_AVERAGE 4  /* update: sums of gradients are divided by the number of ranks */
#define LIGHTCC_EMBEDDING_HOLD 8     /* update: apply nothing before lightcc_embedding_apply */
#define LIGHTCC_EMBEDDING_SKIP 16    /* update: this rank wants no step: none is taken on any, which is no error */

/* One table of a lookup. The memory is read during the call only. */
typedef struct lightcc_embedding_wanted {
  uint32_t size;          /* sizeof(lightcc_embedding_wanted) */
  int32_t reserved;
  lightcc_embedding_table* table;
  const int64_t* keys;    /* any, in any order, repeated or not */
  const uint32_t* checks; /* of a table whose keys are checked */
  int64_t count;
} lightcc_embedding_wanted;
LIGHTCC_API int lightcc_embedding_lookup(lightcc_embedding_group* group, const lightcc_embedding_wanted* wanted,
                                         int count, uint32_t flags, lightcc_embedding_call** call);

/* What a lookup found for its table `index`, in memory of the call until that is released. keys and inverse can be read
 * once the call has begun, rows when it has finished. */
typedef struct lightcc_embedding_found {
  uint32_t size;          /* sizeof(lightcc_embedding_found) */
  int32_t plain;          /* 1: row i is that of key i as given: inverse[i] is i */
  int64_t count;          /* keys as given */
  int64_t unique;         /* different ones; a plain evaluation does not look which are equal: count */
  int64_t padded;         /* unique, rounded up to 2^k or 1.5 * 2^k: so many rows there are, zero behind `unique` */
  const int64_t* keys;    /* unique, those of one owner after those of another, each in order of first appearance */
  const int64_t* inverse; /* count: the place in keys of each key as given */
  void* rows;             /* padded x dim, of the table's dtype; the caller may write to them */
} lightcc_embedding_found;
LIGHTCC_API int lightcc_embedding_get_found(lightcc_embedding_call* call, int index, lightcc_embedding_found* found);

/* Gradients of one table, rows of dim numbers of its dtype, one for each key. They are read until the update's finish
 * is no longer pending (with HOLD: until they are applied). Either of a training lookup, one for each of its unique
 * keys, which may be released when the update has begun; or, with lookup NULL, of `count` keys, none twice. */
typedef struct lightcc_embedding_gradient {
  lightcc_embedding_call* lookup;
  int64_t index; /* of the table in that lookup */
  const int64_t* keys;
  const uint32_t* checks;
  int64_t count;
  const void* values;
} lightcc_embedding_gradient;
typedef struct lightcc_embedding_step {
  uint32_t size;  /* sizeof(lightcc_embedding_step) */
  int32_t gradient_count;
  lightcc_embedding_table* table;
  const lightcc_embedding_gradient* gradients; /* lookups of one table are summed; none: no keys here */
  double lr, beta1, beta2, eps, l1, l2, l21;   /* equal on all ranks */
} lightcc_embedding_step;
/* Gradients are summed over ranks in their order, and each row takes one step. A gradient that is not finite fails the
 * update on all ranks, with the rank, table and key in the text (LIGHTCC_INVALID_ARGUMENT). */
LIGHTCC_API int lightcc_embedding_update(lightcc_embedding_group* group, const lightcc_embedding_step* steps, int count,
                                         uint32_t flags, lightcc_embedding_call** call);
/* Of a finished update: 1 in *skipped if a rank wanted none; and in sums, for each table, the sum of squares of all
 * ranks' summed (averaged) gradients. Either may be NULL. */
LIGHTCC_API int lightcc_embedding_get_sums(lightcc_embedding_call* call, double* sums, int* skipped);
/* After a finished update with HOLD that no rank skipped: begins to apply it, times scale, or (discard 1) forgets it.
 * All ranks do the same; then finish again. */
LIGHTCC_API int lightcc_embedding_apply(lightcc_embedding_call* call, double scale, int discard);

/* This rank has no data: takes part in one call of the others, whatever it is. Finish, look what it was, release, and
 * begin the next, until it was LIGHTCC_EMBEDDING_SERVED_END: then all ranks serve. flags: PREFETCH in place of a
 * prefetched lookup, when this rank has still to end a step. */
enum lightcc_embedding_served {
  LIGHTCC_EMBEDDING_SERVED_LOOKUP,   /* for an evaluation, or the keys of a prefetched one */
  LIGHTCC_EMBEDDING_SERVED_TRAINING, /* a lookup of a step; a prefetched one when its rows are read */
  LIGHTCC_EMBEDDING_SERVED_UPDATE,   /* which was applied, skipped or awaits its apply */
  LIGHTCC_EMBEDDING_SERVED_APPLY,
  LIGHTCC_EMBEDDING_SERVED_END
};
LIGHTCC_API int lightcc_embedding_serve(lightcc_embedding_group* group, uint32_t flags, lightcc_embedding_call** call);
LIGHTCC_API int lightcc_embedding_get_served(lightcc_embedding_call* call, int* served); /* lightcc_embedding_served */

/* Kernels on the caller's memory; dtype is that of rows and gradients (LIGHTCC_FLOAT32 or _FLOAT64). They check
 * nothing but what is said. */

/* Different keys in order of first appearance (room for count), the place of each in inverse, how many in *unique. */
LIGHTCC_API int lightcc_embedding_dedup(const int64_t* keys, int64_t count, int64_t* unique_keys, int64_t* inverse,
                                        int64_t* unique);
/* out[i] = rows[inverse[i]], count x dim. */
LIGHTCC_API int lightcc_embedding_gather(int dtype, int64_t dim, const void* rows, const int64_t* inverse,
                                         int64_t count, void* out);
/* sums[inverse[i]] += gradient[i], in the order of i. sums: the caller has zeroed it. */
LIGHTCC_API int lightcc_embedding_add_by_row(int dtype, int64_t dim, const void* gradient, const int64_t* inverse,
                                             int64_t count, void* sums);
/* The same into memory that is not zeroed, of `rows` rows. */
LIGHTCC_API int lightcc_embedding_sum_by_row(int dtype, int64_t dim, const void* gradient, const int64_t* inverse,
                                             int64_t count, int64_t rows, void* sums);

enum lightcc_embedding_mode { LIGHTCC_EMBEDDING_SUM, LIGHTCC_EMBEDDING_MEAN, LIGHTCC_EMBEDDING_MAX };
/* Bags: bag b pools rows[inverse[i]] for i from offsets[b] up to offsets[b + 1]. */
typedef struct lightcc_embedding_bags {
  uint32_t size;          /* sizeof(lightcc_embedding_bags) */
  int32_t dtype;
  int64_t dim;
  int32_t mode;           /* lightcc_embedding_mode */
  int32_t reserved;
  int64_t count;          /* of ids, in inverse */
  int64_t bags;
  const int64_t* inverse;
  const int64_t* offsets; /* bags + 1 values. That they rise from 0 to count is checked: LIGHTCC_INVALID_ARGUMENT */
  const void* weights;    /* one for each id, for sum and mean; NULL: 1 */
  const void* rows;
} lightcc_embedding_bags;
/* out: bags x dim; an empty bag is zero. mean divides by the number of ids. largest, for max: bags x dim, the place in
 * rows of each largest element, the first of equals; -1 in an empty bag. */
LIGHTCC_API int lightcc_embedding_pool(const lightcc_embedding_bags* bags, void* out, int64_t* largest);
/* Adds the gradient of each row to sums (zeroed by the caller); of_weights, if not NULL, gets that of the weights. */
LIGHTCC_API int lightcc_embedding_pool_backward(const lightcc_embedding_bags* bags, const void* gradient,
                                                const int64_t* largest, void* sums, void* of_weights);

/* String i is text[offsets[i]] to text[offsets[i + 1]]: 64 bits of its hash are its key, 32 others its check. */
LIGHTCC_API int lightcc_embedding_hash_strings(const char* text, const int64_t* offsets, int64_t count, int64_t* keys,
                                               uint32_t* checks);

#ifdef __cplusplus
}
#endif
#endif

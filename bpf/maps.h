/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps that all sources share, and the helpers that every handler begins with. */
#ifndef MOESCOPE_MAPS_H
#define MOESCOPE_MAPS_H

#include "structs.h"

#ifndef LOADER_BCC
#ifdef BUFFER_PERF
/* key: CPU. value: the perf event whose mapped buffer receives the records; `doorbell` wakes the reader at every write. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__type(key, u32);
	__type(value, u32);
} events SEC(".maps"), details SEC(".maps"), doorbell SEC(".maps");
#else
/* Fixed-size records; the loader sets the sizes. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 20);
} events SEC(".maps"), details SEC(".maps");
#endif

/* key: record kind. value: records that found the ring full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_KINDS);
	__type(key, u32);
	__type(value, u64);
} lost SEC(".maps");

/* key: thread id. The threads of the target. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u32);
	__type(value, struct traced);
} threads SEC(".maps");

/* key: thread id << 8 | call. value: arguments at entry. Removed at return. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, u64);
	__type(value, struct call_args);
} calls SEC(".maps");

/* key: index. value: library name prefix. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PATTERNS);
	__type(key, u32);
	__type(value, struct pattern);
} patterns SEC(".maps");

/* key: 0. value: the path being examined. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct path_scratch);
} paths SEC(".maps");

/* key: 0. value: the loader's settings. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct settings);
} chosen SEC(".maps");

/* key: what was described to user space. value: signature of the description; with another one it is described again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct place_key);
	__type(value, u64);
} described SEC(".maps");

/* key: 0. value: the initial state of a thread. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct traced);
} blank SEC(".maps");

/* key: number of a program. value: how often it ran, on the target's threads if attached to a uprobe. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_PROGRAMS);
	__type(key, u32);
	__type(value, u64);
} runs SEC(".maps");

/* key: thread id. value: its current fault of a file mapping. Removed at its end. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, struct faulting);
} faulting SEC(".maps");

/* key: thread id. value: pages added to the page cache in its current read. Removed at its end. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u64);
} reading SEC(".maps");

/* key: device and sector. value: the target's thread that made the request. Removed when the device answers. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct request_key);
	__type(value, struct asker);
} requests SEC(".maps");

/* key: thread id. value: first index of its counters in `counters`. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_COUNTED_THREADS);
	__type(key, u32);
	__type(value, u32);
} counted SEC(".maps");

/* key: index. value: a perf event of one thread. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(max_entries, MAX_COUNTED_THREADS * MAX_PMC);
	__type(key, u32);
	__type(value, u32);
} counters SEC(".maps");

/* key: cookie of a probe on a user's function, probe number << 1 | at return. value: what to read there. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_CALL_SPECS);
	__type(key, u32);
	__type(value, struct call_spec);
} call_specs SEC(".maps");

/* key: enum driver_event. value: the offsets of its fields. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_DRIVER_EVENTS);
	__type(key, u32);
	__type(value, struct driver_layout);
} driver_layouts SEC(".maps");

/* key: lower bits of a thread id. value: the stack with which it went to sleep. The loader leaves one slot if none is wanted. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STACK_SLOTS);
	__type(key, u32);
	__type(value, struct stack_copy);
} stack_copies SEC(".maps");

/* key: CPU. value: the perf event to which stacks are sent. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__type(key, u32);
	__type(value, u32);
} stacks SEC(".maps");

/* key: first half of a ggml backend's identity. value: enum backend_id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, u64);
	__type(value, u32);
} backends SEC(".maps");
#endif

#define NO_WAKEUP 1
#define FORCE_WAKEUP 2
#define SIGNAL_STOP 19

/*
 * A count known to be in 1 .. most (a power of two), in a form whose bound the verifier sees without a branch:
 * branches in the loops below would multiply the paths that it follows.
 */
#define BOUNDED(x, most)                                                                                               \
	({                                                                                                             \
		u64 bounded_ = (x) - 1;                                                                                \
		asm volatile("" : "+r"(bounded_));                                                                     \
		(bounded_ & ((most) - 1)) + 1;                                                                         \
	})

/* Comparisons without branches, which would make too many paths in a loop for the verifier. LESS: of values below 2^63. */
#define LESS(a, b) (((u64)(a) - (u64)(b)) >> 63)
#define EQUAL(a, b)                                                                                                    \
	({                                                                                                             \
		u64 differ_ = (u64)(a) ^ (u64)(b), less_ = -differ_;                                                   \
		asm volatile("" : "+r"(less_)); /* else the compiler sees that it is a comparison */                   \
		((differ_ | less_) >> 63) ^ 1;                                                                         \
	})

/* The running thread's state if it is one of the target's, otherwise NULL. */
static INLINE struct traced *traced(void)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();

	return map_lookup(MAP(threads), &tid);
}

static INLINE void count_runs(u32 number, u32 more)
{
	u64 *count = map_lookup(MAP(runs), &number);

	if (count) /* another thread may preempt a program on a uprobe between reading and writing */
		__sync_fetch_and_add(count, more);
}

#define count_run(number) count_runs(number, 1)

/*
 * A handler on a uprobe runs only on the target's threads, with its thread in `t`; one on a tracepoint runs for all threads.
 * Programs are numbered in the order of the source, and count their runs.
 */
enum { BEFORE_FIRST_PROGRAM = __COUNTER__ };
#define UPROBE(name) NUMBERED_UPROBE(name, __COUNTER__ - BEFORE_FIRST_PROGRAM - 1, count_run)
#define UNCOUNTED_UPROBE(name) UPROBE_STUB(name, 0, (void))
#define NUMBERED_UPROBE(name, number, count)                                                                           \
	NUMBER_SYMBOL(name)                                                                                            \
	UPROBE_STUB(name, number, count)
/* The number of a program whose handler counts its runs itself. */
#define NUMBER(name)                                                                                                   \
	enum { name##_number = __COUNTER__ - BEFORE_FIRST_PROGRAM - 1 };                                               \
	NUMBER_SYMBOL(name)
#define UPROBE_STUB(name, number, count)                                                                               \
	static INLINE int name##_here(struct pt_regs *ctx, struct traced *t);                                          \
	BARE_UPROBE(name)                                                                                              \
	{                                                                                                              \
		struct traced *t = traced();                                                                           \
                                                                                                                       \
		if (!t)                                                                                                \
			return 0;                                                                                      \
		count(number);                                                                                         \
		return name##_here(ctx, t);                                                                            \
	}                                                                                                              \
	static INLINE int name##_here(struct pt_regs *ctx, struct traced *t)
#define TRACEPOINT(category, name) RECENT_TRACEPOINT(category, name, 1)
/* A tracepoint that some kernels lack: if `exists` is false, the program is empty. */
#define RECENT_TRACEPOINT(category, name, exists)                                                                      \
	NUMBERED(name, BARE_TRACEPOINT(category, name), __COUNTER__ - BEFORE_FIRST_PROGRAM - 1, exists)
/*
 * A tracepoint that fires in any interrupt: the kernel drops perf's events on a CPU that is running another program, but not
 * those of raw programs. These get the tracepoint's arguments (RAW_ARG), not its record.
 */
#define RAW_TRACEPOINT(name) NUMBERED(name, BARE_RAW_TRACEPOINT(name), __COUNTER__ - BEFORE_FIRST_PROGRAM - 1, 1)
#define PERF_EVENT(name) NUMBERED(name, BARE_PERF_EVENT(name), __COUNTER__ - BEFORE_FIRST_PROGRAM - 1, 1)
#define NUMBERED(name, declaration, number, exists)                                                                    \
	NUMBER_SYMBOL(name)                                                                                            \
	static INLINE int name##_here(void *ctx);                                                                      \
	declaration                                                                                                    \
	{                                                                                                              \
		if (!(exists))                                                                                         \
			return 0;                                                                                      \
		count_run(number);                                                                                     \
		return name##_here(ctx);                                                                               \
	}                                                                                                              \
	static INLINE int name##_here(void *ctx)

/*
 * The key's whole stack slot is written: Linux 6.18 takes one that is written in part for one that is read later, by which it tells
 * the turns of a loop apart. The number itself is as wide as the key, so that the verifier sees that the map has it.
 */
static INLINE void count_loss(u32 kind)
{
	u64 slot = 0, *count;

	asm volatile("" : : "r"(&slot) : "memory");
	*(u32 *)&slot = kind;
	count = map_lookup(MAP(lost), &slot);
	if (count)
		__sync_fetch_and_add(count, 1);
}

static INLINE void fill_header(struct header *h, u16 kind, u8 engine)
{
	u64 id = bpf_get_current_pid_tgid();

	h->ts = bpf_ktime_get_ns();
	h->pid = id >> 32;
	h->tid = (u32)id;
	h->kind = kind;
	h->cpu = bpf_get_smp_processor_id();
	h->engine = engine;
	h->pad[0] = h->pad[1] = h->pad[2] = 0;
}

#define LONGEST_TRAP 1000000000ULL
#define UNTOLD 0

/*
 * Sets the end of a span to the time given by the traced program, as the trap takes some µs before this runs. Values that are
 * not readings of this clock (another time namespace, a build that passes none) are ignored.
 */
static INLINE void ended_at(struct header *h, u64 told)
{
	if (h->ts - told < LONGEST_TRAP)
		h->ts = told;
}

/*
 * How a handler writes a record:
 *
 *	RECORD(rec_token_end, r);
 *
 *	if (!reserve(r, KIND_TOKEN_END, engine))
 *		return 0;
 *	r->seq = seq;
 *	submit(ctx, r);
 *
 * Readers drain at intervals, or when a buffer fills, so that few records cause a wake-up; the target waits on `urgent` ones.
 */
#define IS_EVENT(r) (sizeof(*(r)) <= EVENT_BYTES)

#ifdef BUFFER_PERF

/*
 * Perf buffers copy the record, which is on the stack, as wide as its slot, until it is submitted. (Not in a per-CPU map:
 * programs on uprobes can be preempted, and tracepoints fire in between.)
 */
#define RECORD(type, r)                                                                                                \
	union {                                                                                                        \
		struct type record;                                                                                    \
		char slot[sizeof(struct type) <= EVENT_BYTES ? EVENT_BYTES : DETAIL_BYTES];                            \
	} r##_slot;                                                                                                    \
	struct type *r
#define reserve(r, kind, engine)                                                                                       \
	(__builtin_memset(&r##_slot, 0, sizeof(r##_slot)), r = &r##_slot.record, fill_header(&r->h, kind, engine), true)
#define submit(ctx, r)                                                                                                 \
	output(ctx, IS_EVENT(r) ? MAP(events) : MAP(details), r, IS_EVENT(r) ? EVENT_BYTES : DETAIL_BYTES)
#define submit_urgent(ctx, r)                                                                                          \
	({                                                                                                             \
		submit(ctx, r);                                                                                        \
		bpf_perf_event_output(ctx, MAP(doorbell), BPF_F_CURRENT_CPU, &r->h.ts, sizeof(r->h.ts));                \
	})

static INLINE void output(void *ctx, void *buffer, void *record, u64 bytes)
{
	if (bpf_perf_event_output(ctx, buffer, BPF_F_CURRENT_CPU, record, bytes))
		count_loss(((struct header *)record)->kind);
}

#else

#define RECORD(type, r) struct type *r
#define reserve(r, kind, engine)                                                                                       \
	((r = reserve_in(RING(r), IS_EVENT(r) ? EVENT_BYTES : DETAIL_BYTES, kind, engine)) != 0)
#define RING(r) (IS_EVENT(r) ? MAP(events) : MAP(details))
#define submit(ctx, r) bpf_ringbuf_submit(r, wakes(RING(r), IS_EVENT(r) ? EVENT_BYTES : DETAIL_BYTES))
#define submit_urgent(ctx, r) bpf_ringbuf_submit(r, FORCE_WAKEUP)

/* Flags of a submission: a record that fills another quarter of the ring wakes the reader. */
static INLINE u64 wakes(void *ring, u64 bytes)
{
	u64 quarter = bpf_ringbuf_query(ring, BPF_RB_RING_SIZE) / 4, filled = bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA);

	return NO_WAKEUP + (LESS(quarter, filled + 1) & LESS(filled & (quarter - 1), bytes + 8)); /* or FORCE_WAKEUP */
}

static INLINE void *reserve_in(void *ring, u32 bytes, u16 kind, u8 engine)
{
	struct header *h = bpf_ringbuf_reserve(ring, bytes, 0);

	if (!h) {
		count_loss(kind);
		return 0;
	}
	fill_header(h, kind, engine);
	return h;
}

#endif

static INLINE struct settings *settings(void)
{
	u32 zero = 0;

	return map_lookup(MAP(chosen), &zero);
}

/*
 * Stops the calling process until the tracer has attached its probes and resumes it. Called before the requesting record is
 * submitted, so that an early SIGCONT cancels the stop instead of preceding it.
 */
static INLINE void stop_target(void)
{
	struct settings *s = settings();

	if (s && s->stop)
		bpf_send_signal(SIGNAL_STOP);
}

/* Whether the object at this address of this process was not described yet, or has changed since. */
static INLINE bool is_news_to(u32 tid, u64 address, u64 signature)
{
	struct place_key key = {address, bpf_get_current_pid_tgid() >> 32, tid};
	u64 *known = map_lookup(MAP(described), &key);

	if (known && *known == signature)
		return false;
	map_update(MAP(described), &key, &signature);
	return true;
}

static INLINE bool is_news(u64 address, u64 signature)
{
	return is_news_to(0, address, signature);
}

/* Some of what lies at `address` could not be read (its page was away): it counts as lost, and is described at its next sight. */
static INLINE void describe_again(u64 address, u32 kind)
{
	struct place_key key = {address, bpf_get_current_pid_tgid() >> 32, 0};

	map_delete(MAP(described), &key);
	count_loss(kind);
}

/* Whether a table of functions, or a function, is to be probed: another library may lie where one that was closed did. */
static INLINE bool is_to_be_probed(u64 address, u64 signature)
{
	struct settings *s = settings();

	return is_news(address, signature ^ (u64)(s ? s->round : 0) << 40);
}

/* `frame`: the stack behind the function's return, of calls that may be nested in another one on their thread; else 0. */
static INLINE void keep_args_of(u64 frame, u8 call, u64 a, u64 b, u64 c, u64 d)
{
	u64 key = ((bpf_get_current_pid_tgid() << 8) | call) ^ frame << 16;
	struct call_args args = {{a, b, c, d}};

	map_update(MAP(calls), &key, &args);
}

#define keep_args(call, a, b, c, d) keep_args_of(0, call, a, b, c, d)
#define take_args(call, out) take_args_of(0, call, out)

/* Copies the arguments kept at entry and removes them; false if the entry was not seen. */
static INLINE bool take_args_of(u64 frame, u8 call, struct call_args *out)
{
	u64 key = ((bpf_get_current_pid_tgid() << 8) | call) ^ frame << 16;
	struct call_args *args = map_lookup(MAP(calls), &key);

	if (!args)
		return false;
	*out = *args;
	map_delete(MAP(calls), &key);
	return true;
}

#endif

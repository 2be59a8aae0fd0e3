/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The layout of every record, defined only here. Python derives its NumPy dtypes from this header's BTF.
 *
 * Two rings carry records of one size each, so that user space finds every record boundary without walking:
 *   events   64-byte slots: an 8-byte ring header and at most  56 bytes of record
 *   details 256-byte slots: an 8-byte ring header and at most 248 bytes of record
 * A kind numbered below FIRST_DETAIL travels in `events`, the others in `details`.
 */
#ifndef MOESCOPE_RECORDS_H
#define MOESCOPE_RECORDS_H

#define EVENT_BYTES 56
#define DETAIL_BYTES 248
#define FIRST_DETAIL 64
#define MAX_KINDS 96

/* The kind of struct rec_<name> is KIND_<NAME>; Python pairs them by name. */
/* Sizes that user space needs, too. */
enum limit {
	MAX_PMC = 4,
	MAX_COUNTED_THREADS = 1024,
	MAX_PATTERNS = 32,
	MAX_CALL_SPECS = 1024,
	CALL_VALUES = 3,
	CALL_PARTS = 5,
	TABLE_SLOTS = 24,
	TABLE_PARTS = 3, /* of a QNN provider's table: 72 slots, more than core API 2.40 has */
};

/* Instead of a number: there is none. */
enum none {
	NO_PROVIDER = 0xFFFFFFFF,
	UNKNOWN_OPERATOR = 0xFFFFFFFF,
};

enum record_kind {
	KIND_TOKEN_BEGIN = 1,
	KIND_TOKEN_END = 2,
	KIND_GRAPH_BEGIN = 3,
	KIND_GRAPH_END = 4,
	KIND_OP_BEGIN = 5,
	KIND_OP_END = 6,
	KIND_EXPERT_BEGIN = 7,
	KIND_EXPERT_END = 8,
	KIND_LOAD_BEGIN = 9,
	KIND_LOAD_END = 10,
	KIND_EVICT = 11,
	KIND_OP_WAIT = 12,
	KIND_PMC = 13,
	KIND_NODE = 14,
	KIND_CACHE_HIT = 15,
	KIND_QNN_EXECUTE_BEGIN = 16,
	KIND_QNN_EXECUTE_END = 17,
	KIND_QNN_CALL_BEGIN = 18,
	KIND_QNN_CALL_END = 19,
	KIND_QNN_HARVEST = 20,
	KIND_QNN_DONE = 21,
	KIND_MISFIT = 22,
	KIND_HEXAGON_SENT = 23,
	KIND_CALL_BEGIN = 24,
	KIND_CALL_END = 25,
	KIND_HEXAGON_DONE = 26,
	KIND_HEXAGON_CALL = 27,
	KIND_HEXAGON_OP = 28,
	KIND_HEXAGON_GRAPH = 29,
	KIND_HEXAGON_BATCH = 30,
	KIND_SCHED_SWITCH = 32,
	KIND_SCHED_WAKING = 33,
	KIND_TASK_FORK = 34,
	KIND_TASK_EXIT = 35,
	KIND_SCHED_WAKEUP = 36,
	KIND_PAGE_FAULT = 40,
	KIND_BLOCK_ISSUE = 41,
	KIND_BLOCK_DONE = 42,
	KIND_READ_BEGIN = 43,
	KIND_READ_END = 44,
	KIND_HEAT = 45,
	KIND_DRIVER_EVENT = 46,
	KIND_WRITE = 47,
	KIND_POWER = 48,

	KIND_TENSOR = FIRST_DETAIL,
	KIND_ROUTE = 65,
	KIND_QNN_EVENT = 66,
	KIND_QNN_SUB_EVENTS = 67,
	KIND_QNN_OBJECT = 68,
	KIND_QNN_TABLE = 69,
	KIND_LIBRARY = 70,
	KIND_TASK_EXEC = 71,
	KIND_IO_FILE = 74,
	KIND_OP_SHARES = 75,
	KIND_CALL_TEXT = 72,
	KIND_API_TABLE = 73,
	KIND_SESSION = 76,
	KIND_QNN_CALLBACK = 77,
	KIND_QNN_LOG = 78,
	KIND_QNN_READER = 79,
	KIND_SITE = 80,
	KIND_HEXAGON_PROFILE = 81,
	KIND_HEXAGON_NODE = 82,
	KIND_BATCH_ROWS = 83,
	KIND_GENIE_PROFILE = 84,
};

/* The engine whose probe wrote a record; tracer/engines has the same numbers (key `id`). */
enum engine_id {
	ENGINE_KERNEL = 0,
	ENGINE_MOESCOPE = 1,
	ENGINE_LLAMACPP = 2,
	ENGINE_QNN = 3,
	ENGINE_ONNXRUNTIME = 4,
	ENGINE_GENIE = 5,
	ENGINE_USER = 6, /* functions declared in a user's file */
	ENGINE_HEXAGON = 7,
	ENGINE_GENAI = 8,
	ENGINE_EXECUTORCH = 9,
	ENGINE_BIGMOEONEDGE = 10,
	ENGINE_OPENVINO = 11,
};

enum phase {
	PHASE_UNKNOWN = 0,
	PHASE_PREFILL = 1,
	PHASE_DECODE = 2,
	PHASE_WARM_UP = 3, /* the engine only touches the weights */
};

enum cache_state {
	CACHE_UNKNOWN = 0,
	CACHE_HIT = 1,
	CACHE_MISS = 2,
	CACHE_PREFETCHED = 3,
};

enum load_reason {
	LOAD_STARTUP = 0,
	LOAD_DEMAND = 1,
	LOAD_PREFETCH = 2,
};

enum backend_id {
	BACKEND_UNKNOWN = 0,
	BACKEND_CPU = 1,
	BACKEND_HTP = 2,
	BACKEND_CUDA = 3, /* also its ROCm and MUSA builds */
	BACKEND_VULKAN = 4,
	BACKEND_OPENCL = 5,
	BACKEND_BLAS = 6,
	BACKEND_METAL = 7,
	BACKEND_SYCL = 8,
	BACKEND_CANN = 9,
	BACKEND_HEXAGON = 10, /* llama.cpp's own, without QNN */
	BACKEND_RPC = 11,
	BACKEND_WEBGPU = 12,
	BACKEND_META = 13, /* several devices as one */
};

/* QNN API calls other than graphExecute, numbered like the slots of QNN's function table (core API 2.x). */
enum qnn_call {
	QNN_BACKEND_CREATE = 1,
	QNN_BACKEND_FREE = 8,
	QNN_CONTEXT_CREATE = 9,
	QNN_CONTEXT_GET_BINARY = 12,
	QNN_CONTEXT_FROM_BINARY = 13,
	QNN_CONTEXT_FREE = 14,
	QNN_GRAPH_CREATE = 15,
	QNN_GRAPH_FINALIZE = 19,
	QNN_GRAPH_RETRIEVE = 20,
	QNN_GRAPH_EXECUTE_ASYNC = 22,
	QNN_PROFILE_CREATE = 28,
	QNN_PROFILE_SET_CONFIG = 29,
	QNN_PROFILE_FREE = 34,
	QNN_MEM_REGISTER = 35,
	QNN_MEM_DEREGISTER = 36,
	QNN_DEVICE_CREATE = 40,
	QNN_DEVICE_FREE = 43,
	QNN_CONTEXT_FROM_BINARY_WITH_SIGNAL = 55,
	QNN_CONTEXT_FROM_BINARY_LIST = 56,
	QNN_CONTEXT_APPLY_SECTION = 61,
	QNN_CONTEXT_WITH_CALLBACK = 68,

	/* stages of the host's side: functions of ONNX Runtime's QNN provider */
	QNN_STAGE_CONTEXT_READ = 200,
	QNN_STAGE_CONTEXT_LOAD = 201,
	QNN_STAGE_CONTEXT_CREATE = 202,
	QNN_STAGE_COMPOSE = 203,
	QNN_STAGE_FINALIZE = 204,
	QNN_STAGE_SERIALIZE = 205,
	QNN_STAGE_EXECUTE = 206,
	QNN_STAGE_HARVEST = 207,
};

/* The header of every record. 24 bytes. */
struct header {
	unsigned long long ts; /* CLOCK_MONOTONIC, ns */
	unsigned int pid;      /* process (thread group) id */
	unsigned int tid;      /* thread id */
	unsigned short kind;   /* enum record_kind */
	unsigned short cpu;
	unsigned char engine; /* enum engine_id */
	unsigned char pad[3];
};

/* One forward step of the model: a prefill of n_tokens or one decoded token. */
struct rec_token_begin {
	struct header h;
	unsigned long long seq;  /* the engine's own number of the step; 0-based, 2^64-1 if it has none */
	unsigned int phase;      /* enum phase */
	unsigned int n_tokens;   /* tokens fed in this step; 0 if unknown */
	unsigned int position;   /* context length before the step; 2^32-1 if unknown */
	unsigned int maj_flt;    /* page faults of the calling thread so far */
	unsigned int min_flt;
	unsigned int context;    /* bits 4 to 35 of the address of the step's context object; 0: unknown */
};

struct rec_token_end {
	struct header h;
	unsigned long long seq;
	long long result;      /* sampled token id, or the engine's return value */
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned long long pad;
};

#define BATCH_ROWS 16
enum batch_array {
	BATCH_POSITIONS = 1,
	BATCH_SEQUENCES = 2,
	BATCH_OUTPUTS = 4,
	BATCH_ALL = 7,
};

/* Rows first .. first+count of the batch of the thread's current step. A later record of the same rows holds instead. */
struct rec_batch_rows {
	struct header h;
	unsigned int n_rows; /* of the batch; rows without a record were not read */
	unsigned int first;
	unsigned short count;
	unsigned short given; /* enum batch_array; of others the engine's defaults hold */
	unsigned int pad;
	int position[BATCH_ROWS];
	int sequences[BATCH_ROWS]; /* if the first row belongs to several: their first ones */
	unsigned short sequence[BATCH_ROWS]; /* of each row the first */
	unsigned short n_sequences[BATCH_ROWS];
	unsigned char output[BATCH_ROWS]; /* whether the row's output is wanted */
};

/* A graph passed to a backend: a session run, a ggml graph. */
struct rec_graph_begin {
	struct header h;
	unsigned long long handle;
	unsigned int type;    /* index into the engine's declared `graphs` names */
	int layer;            /* -1 if it has none, as in every record below */
	int expert;
	unsigned int backend; /* enum backend_id */
	unsigned int n_tokens;
	unsigned int tier;    /* rows of the static shape, 0 if dynamic */
};

struct rec_graph_end {
	struct header h;
	unsigned long long handle;
	long long status;
	unsigned long long pad[2];
};

/* An operator on one thread. Its structure (names, dims, sources) is sent once, as KIND_TENSOR. */
struct rec_op_begin {
	struct header h;
	unsigned long long tensor; /* identity of the result */
	unsigned int type;         /* index into the engine's declared `operators` names */
	int layer;
	unsigned int n_tokens;
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned int pad;
};

struct rec_op_end {
	struct header h;
	unsigned long long tensor; /* 0 if unknown to the probe: it ends the thread's open operator */
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned long long pad[2];
};

/* The thread has finished its share of the operator and waits for the others. */
struct rec_op_wait {
	struct header h;
	unsigned long long pad[4];
};

/* A node of a graph and its result tensor: sent while the graph is new. */
struct rec_node {
	struct header h;
	unsigned long long tensor;
	unsigned long long graph; /* handle, as in rec_graph_begin */
	unsigned int node;        /* its index in the graph */
	unsigned int pad[3];
};

#define SHARES 17
/*
 * Consecutive nodes of a graph of which the thread has finished its share; after each it waited for the other threads.
 * This record alone defines operators: one began when the last thread had finished the previous node.
 */
struct rec_op_shares {
	struct header h; /* ts: when the first was finished */
	unsigned long long graph;
	unsigned int count;
	unsigned int pad;
	unsigned int after[SHARES];   /* when it was finished, ns after ts */
	unsigned int min_flt[SHARES]; /* page faults since the thread's previous share */
	unsigned short maj_flt[SHARES];
	unsigned short node[SHARES];
};

/*
 * Where a thread last entered the barrier before it began another operator, and which places of the caller's frame
 * (bit i: place i, as numbered in ggml.h) held the values that a later probe needs.
 */
struct rec_site {
	struct header h;
	unsigned long long address; /* return address */
	unsigned long long here;    /* places that hold the operator's index in the graph; blind: that grow */
	unsigned long long before;  /* places that hold the next operator's index; blind: that grow and hold the last index */
	unsigned long long graph;   /* places that hold the graph */
	unsigned long long last_but_one; /* blind: places that grow and hold the index before the last */
	unsigned int last;          /* 1: it was the graph's last operator */
	unsigned int blind;         /* 1: no probe saw the operator */
};

enum misfit_of {
	MISFIT_TENSOR = 1, /* the graph's tensors have none of the known layouts */
	MISFIT_LOOP = 2,   /* the learnt places of the graph loop do not yield the graph's nodes in order */
};

/* A graph does not match the assumptions of the probes on its operators. Sent once per thread. */
struct rec_misfit {
	struct header h;
	unsigned long long graph; /* handle, as in rec_graph_begin */
	unsigned int what;        /* enum misfit_of */
	unsigned int node;        /* at which it was noticed */
	unsigned int n_nodes;
	unsigned int pad[3];
};

#define NO_COUNT 0xFFFFFFFFFFFFFFFFULL
/* The thread's counters, right after the thread's operator record to which they belong. */
struct rec_pmc {
	struct header h;
	unsigned long long values[MAX_PMC]; /* NO_COUNT: the thread had no counter yet, or the PMU had no room for it */
};

/* An expert's run over n_tokens tokens; nested in an operator of the same thread. */
struct rec_expert_begin {
	struct header h;
	int layer;
	int expert;
	unsigned int n_tokens;
	unsigned int cache;   /* enum cache_state when the layer began */
	unsigned int backend; /* enum backend_id */
	unsigned int tier;
	unsigned int maj_flt;
	unsigned int min_flt;
};

struct rec_expert_end {
	struct header h;
	int layer;
	int expert;
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned long long pad[2];
};

struct rec_load_begin {
	struct header h;
	int layer;
	int expert;
	unsigned long long bytes;
	unsigned short reason; /* enum load_reason */
	unsigned short matrix; /* 1 + number of the only matrix of the expert that is read; 0: all */
	unsigned int backend;
	unsigned long long address; /* where a matrix is read to */
};

struct rec_load_end {
	struct header h;
	int layer;
	int expert;
	unsigned long long bytes;
	unsigned long long resident; /* bytes held by the expert cache after the load */
	unsigned long long pad;
};

struct rec_evict {
	struct header h;
	int layer;
	int expert;
	unsigned long long bytes;
	unsigned long long resident; /* bytes held by the expert cache after the eviction */
	unsigned long long address;  /* if layer and expert are -1: within one of the expert's matrices; 0: unknown */
};

/* An expert that a layer asked its cache for was there. */
struct rec_cache_hit {
	struct header h;
	int layer;
	int expert;
};

struct rec_qnn_execute_begin {
	struct header h;
	unsigned long long graph;
	unsigned long long profile; /* 0 if the caller passed none */
	unsigned int n_inputs;
	unsigned int n_outputs;
	unsigned long long param; /* of an asynchronous one: the parameter of its completion; else 0 */
};

struct rec_qnn_execute_end {
	struct header h;
	unsigned long long graph;
	unsigned long long profile;
	long long status;
	unsigned long long pad;
};

struct rec_qnn_call_begin {
	struct header h;
	unsigned long long handle; /* the call's first handle argument */
	unsigned long long size;    /* bytes of the context binary, else 0 */
	unsigned long long profile; /* handle that collects the call's events, 0 if it has none */
	unsigned int call;          /* enum qnn_call */
	unsigned int pad;
};

struct rec_qnn_call_end {
	struct header h;
	unsigned long long handle; /* the created object, if any */
	long long status;
	unsigned long long bytes; /* written by contextGetBinary, else 0 */
	unsigned int call;
	unsigned int pad;
};

/* An asynchronous execution notified its caller of its end, by the caller's own function. */
struct rec_qnn_done {
	struct header h;
	unsigned long long param; /* the caller's own parameter */
	long long status;
	unsigned long long pad[2];
};

/* profileGetEvents: the thread starts to read the events of `profile`. */
struct rec_qnn_harvest {
	struct header h;
	unsigned long long profile;
	unsigned long long pad[3];
};

/* A function that the user declared. Values are as wide as they were read; their types are in the manifest. */
struct rec_call_begin {
	struct header h;
	unsigned short probe;  /* number of the function in the manifest */
	unsigned short unread; /* bit i: the memory of values[i] could not be read */
	unsigned int frame;    /* low half of the caller's stack pointer: distinguishes recursive calls */
	unsigned long long values[CALL_VALUES];
};

struct rec_call_end {
	struct header h;
	unsigned short probe;
	unsigned short unread;
	unsigned int frame;
	unsigned long long values[CALL_VALUES];
};

/* A context switch from or to one of the target's threads. */
struct rec_sched_switch {
	struct header h;
	unsigned int prev_tid;
	unsigned int next_tid;
	unsigned short prev_state; /* as in the tracepoint: 1 S, 2 D, 0x10 X, 0x20 Z, ...; 0 or 0x100: still runnable */
	short prev_prio;
	short next_prio;
	unsigned char comm_of_next; /* whose name `comm` is: 1 next, 0 prev */
	unsigned char pad;
	char comm[16];
};

/* What the thread that ran where another one was woken was doing. */
enum waker {
	WAKER_UNKNOWN = 0,
	WAKER_CALLED = 1,      /* it was in a system call: it is the waker */
	WAKER_INTERRUPTED = 2, /* it was in its own code: an interrupt woke the other one */
};

struct rec_sched_waking {
	struct header h;
	unsigned int woken_tid;
	unsigned int target_cpu;
	int prio;
	unsigned int waker; /* enum waker */
	char comm[16];
};

/* The thread is in the run queue of its cpu. */
struct rec_sched_wakeup {
	struct header h;
	unsigned int woken_tid;
	unsigned int target_cpu;
	int prio;
	unsigned int pad;
	char comm[16];
};

/* The subject of a record of clocks and heat. */
enum heat_of {
	HEAT_KHZ = 0,       /* the frequency of a CPU */
	HEAT_LEAST_KHZ = 1, /* its lower and upper limit */
	HEAT_MOST_KHZ = 2,
	HEAT_ZONE = 3,    /* a thermal zone's temperature, 1/1000 degree Celsius */
	HEAT_COOLING = 4, /* a cooling device's state, 0: off */
	HEAT_UNNUMBERED = 0xFFFF,
};

/* A value that is valid from now on: from the kernel, or read from sysfs by the recorder and then of no process. */
struct rec_heat {
	struct header h;
	unsigned short what;   /* enum heat_of */
	unsigned short number; /* of the CPU (from sysfs: of the policy), zone or device; HEAT_UNNUMBERED: of the device `name` */
	int value;
	char name[24];
};

/* What a battery does, as its `status` says. */
enum supply {
	SUPPLY_NONE = 0, /* the sensor is of no battery */
	SUPPLY_DISCHARGING = 1,
	SUPPLY_CHARGING = 2,
	SUPPLY_RESTING = 3, /* full, or not charging: something else feeds the machine */
	SUPPLY_UNKNOWN = 4,
};

/* A reading of a power sensor by the recorder, begun at `ts`; units and names are in the manifest. */
struct rec_power {
	struct header h;
	unsigned long long after; /* when it had been read, ns */
	long long value;          /* of energy, charge, power or current */
	long long factor;         /* the voltage that belongs to it; of a file with a line a rail the sensor's own time, ms */
	unsigned short rail;      /* its number in the manifest */
	unsigned char supply;     /* enum supply */
	unsigned char failed;     /* the sensor gave no number */
	unsigned int pad;
};

struct rec_task_fork {
	struct header h;
	unsigned int parent_tid;
	unsigned int child_tid;
	unsigned long long pad[3];
};

struct rec_task_exit {
	struct header h;
	char comm[16];
	unsigned long long pad[2];
};

enum page_fault_flag {
	FAULT_MAJOR = 1,  /* by the kernel's count: its page was not in the page cache, or it had to be retried */
	FAULT_EXACT = 2,  /* `page` is the touched page; otherwise the first of a window or read-ahead around it */
};

/* A page fault of a file mapping, or any major one, at its end. */
struct rec_page_fault {
	struct header h;
	unsigned long long begin; /* ns; 0 if unknown */
	unsigned long long ino;   /* 0: no known file (anonymous memory) */
	unsigned int dev;         /* the kernel's dev_t: major << 20 | minor */
	unsigned int page;        /* index in the file, in pages */
	unsigned int added;       /* pages that the thread added to the page cache for it, read-ahead included */
	unsigned int flags;       /* enum page_fault_flag */
};

/* A request is sent to the device; the header's thread is the requesting one, `issued` may be another. */
struct rec_block_issue {
	struct header h;
	unsigned long long sector; /* of 512 bytes */
	unsigned int dev;
	unsigned int bytes;
	char rwbs[8]; /* R read, W write, D discard, F flush; then A read-ahead, S sync, M metadata */
	unsigned long long pad;
};

/* ... and is answered; the header's thread is the same, its cpu the one of the interrupt. */
struct rec_block_done {
	struct header h;
	unsigned long long sector;
	unsigned int dev;
	int error;
	unsigned long long pad[2];
};

enum read_call {
	CALL_READ = 0,
	CALL_PREAD64 = 1,
	CALL_READV = 2,
	CALL_PREADV = 3,
	CALL_PREADV2 = 4,
};

/* A read of a regular file or block device. */
struct rec_read_begin {
	struct header h;
	unsigned long long ino;
	unsigned long long offset; /* in the file */
	unsigned int dev;
	unsigned int bytes; /* requested; 2^32-1 if the call has a list of buffers */
	unsigned int fd;
	unsigned int call; /* enum read_call */
};

enum write_call {
	CALL_WRITE = 0,
	CALL_WRITEV = 1,
	CALL_SENDTO = 2,
};

/* A thread begins to write or send: files, pipes, terminals, sockets. */
struct rec_write {
	struct header h;
	unsigned long long bytes; /* asked for */
	unsigned int fd;
	unsigned int call; /* enum write_call */
	unsigned long long pad[2];
};

struct rec_read_end {
	struct header h;
	long long result;
	unsigned long long added; /* pages that the thread added to the page cache during the read */
	unsigned long long pad[2];
};

#define MAX_SOURCES 10
/* A tensor's kind, size and sources: once per tensor, not once per run. */
struct rec_tensor {
	struct header h;
	unsigned long long tensor;
	unsigned int type;      /* operator that computes it, as in rec_op_begin */
	unsigned int dtype;     /* the engine's number of the element type */
	long long ne[4];        /* dims, innermost first; 0 if unknown */
	unsigned long long bytes;
	unsigned int first;     /* index of sources[0]: an operator with many sources spans several records */
	unsigned int n_sources; /* in all */
	unsigned long long sources[MAX_SOURCES];
	char name[64];
};

#define ROUTE_SLOTS 32
#define ROUTE_WIDE 2
/* Part of a router's choice: entries first .. first+count of the row-major [n_tokens, k] table. */
struct rec_route {
	struct header h;
	unsigned long long tensor; /* 0, or an operator that takes the choice: its name contains the layer */
	int layer;
	unsigned int n_tokens;
	unsigned int k;
	unsigned int first;
	unsigned int count;
	unsigned int has_weights; /* 1: `weights` are; ROUTE_WIDE: `weights` hold the experts, as 32-bit numbers */
	unsigned short experts[ROUTE_SLOTS];
	float weights[ROUTE_SLOTS];
};

#define QNN_NAME_BYTES 144
struct rec_qnn_event {
	struct header h;
	unsigned long long event; /* handle */
	unsigned int type;
	unsigned int unit;
	unsigned long long value;
	unsigned long long timestamp; /* the backend's own; 0 if it has none */
	unsigned int dtype;           /* QNN scalar type of `value`; 0x64: u64 (event data, not extended) */
	unsigned int extended;
	unsigned long long frame; /* stack pointer where the reader passed it on: a sub-event's is lower; 0: the tree comes from lists */
	char name[QNN_NAME_BYTES];
};

#define MAX_SUB_EVENTS 16
/* profileGetSubEvents: `parent` is an event's handle (older recordings: a profile's too). */
struct rec_qnn_sub_events {
	struct header h;
	unsigned long long parent;
	unsigned int of_profile; /* 1: parent is a profile handle */
	unsigned int first;
	unsigned int count;
	unsigned int total;
	unsigned long long events[MAX_SUB_EVENTS];
};

/* A QNN handle is created, configured or freed. */
struct rec_qnn_object {
	struct header h;
	unsigned long long handle;
	unsigned long long owner; /* context of a graph or memory, backend of a context or profile */
	unsigned int call;        /* enum qnn_call that did it */
	unsigned int level;       /* of a profile; option set by profileSetConfig; type of registered memory */
	unsigned long long bytes; /* of registered memory; value set by profileSetConfig */
	char name[QNN_NAME_BYTES];
};

/* The function that asynchronous executions call at their end; the target is stopped until it is probed. */
struct rec_qnn_callback {
	struct header h;
	unsigned long long address;
};

/* Where the target reads a profile; it is stopped until the required probes are attached. */
struct rec_qnn_reader {
	struct header h;
	unsigned long long address; /* of the caller; 0: a function that differs from the known one of its name */
};

/* The target opens a file for QNN's serialized profile. */
struct rec_qnn_log {
	struct header h;
	char path[208];
};

/* QNN's numbers of backends */
enum qnn_backend {
	QNN_HTP = 6,
};

/* Part of a QNN provider's function table, read when QnnInterface_getProviders returns; NO_PROVIDER: it returned none. */
struct rec_qnn_table {
	struct header h;
	unsigned int backend;
	unsigned int api[3];
	unsigned short first;
	unsigned short last; /* 1: the last part of the last provider */
	unsigned int provider;
	unsigned long long slots[TABLE_SLOTS];
};

/* Part of a function table that a library returns to the program, and the version (QAIRT: interface) that the program requested. */
struct rec_api_table {
	struct header h;
	char table[16]; /* its name in the engine's probes */
	unsigned long long address;
	unsigned int version;
	unsigned short first;
	unsigned short last; /* 1: the last part */
	unsigned long long slots[TABLE_SLOTS];
};

/* A session is created (name or bytes), or runs with other counts than before. */
struct rec_session {
	struct header h;
	unsigned long long handle;
	unsigned long long bytes; /* of a model in memory; 0 for a file */
	unsigned int n_inputs;    /* 0: not in this record */
	unsigned int n_outputs;
	char name[192];           /* path of the model */
};

/* Part of the JSON that GenieProfile_getJsonData returned; the last one is shorter than `text`. */
struct rec_genie_profile {
	struct header h;
	unsigned long long profile;
	unsigned int part;
	unsigned int pad;
	char text[208];
};

/* The target opens an engine's library; it is stopped until the probes are attached. */
struct rec_library {
	struct header h;
	char path[208];
};

struct rec_task_exec {
	struct header h;
	char path[208];
};

/* A file that the process reads or maps: once per file and process, before the first record that names it. */
struct rec_io_file {
	struct header h;
	unsigned long long ino;
	unsigned int dev;
	unsigned int fd;
	char name[208]; /* without its folder */
};

/* Continues a call_begin or call_end of the same thread and time: one text and further numbers. */
struct rec_call_text {
	struct header h;
	unsigned short probe;
	unsigned short unread; /* bit i: values[i]; bit CALL_VALUES: text */
	unsigned short part;   /* from 1: this is text part-1 and the numbers from CALL_VALUES * part on */
	unsigned short at_return;
	unsigned long long values[CALL_VALUES];
	char text[192];
};

/* A batch of operators written to a queue of the Hexagon backend; at the return of the write, _sent. */
struct rec_hexagon_batch {
	struct header h;
	unsigned long long queue;
	unsigned long long seq; /* the backend's number of the batch, from 1 */
	unsigned int n_ops;
	unsigned int n_tensors;
	unsigned int bytes;     /* of the descriptions sent with it */
	unsigned short n_bufs;
	unsigned short layout;  /* version of the message; 0: unknown, and nothing else of it is read */
};

struct rec_hexagon_sent {
	struct header h;
	unsigned long long queue;
	unsigned long long seq;
	long long status;
	unsigned long long pad;
};

/* A batch's answer was read. */
struct rec_hexagon_done {
	struct header h;
	unsigned long long queue;
	unsigned long long seq;
	unsigned long long began; /* when the reader began to poll */
	unsigned int usecs;       /* duration reported by the processor; 0 if none */
	unsigned short n_ops;     /* operators with a profile */
	unsigned short status;    /* 1: good */
};

enum hexagon_call {
	HEXAGON_INVOKE = 0, /* remote_handle64_invoke: subject the handle, detail the method */
	HEXAGON_MMAP = 1,   /* fastrpc_mmap: subject the bytes, detail the file descriptor */
};

struct rec_hexagon_call {
	struct header h;
	unsigned long long began;
	unsigned long long subject;
	unsigned int what; /* enum hexagon_call */
	unsigned int detail;
	long long status;
};

/* A graph passed to the Hexagon backend; precedes its nodes. */
struct rec_hexagon_graph {
	struct header h;
	unsigned long long graph;
	unsigned int n_nodes;
	unsigned int told; /* 1: its nodes follow on this thread; 0: they are unchanged */
};

/* A node of such a graph. */
struct rec_hexagon_node {
	struct header h;
	unsigned long long graph;
	unsigned long long tensor;
	unsigned long long data; /* address of its elements */
	long long ne[4];
	unsigned int node;
	unsigned int op; /* ggml's number of the operator */
	char name[64];
};

/* An operator of the batch that the thread is about to write. */
struct rec_hexagon_op {
	struct header h;
	unsigned long long data; /* address of its result in the program; 0 if unknown */
	unsigned int ne[4];
	unsigned int seq;        /* of the batch, its lower half */
	unsigned short at;
	unsigned short opcode;   /* the backend's number, which differs between versions */
};

#define HEXAGON_PROFILES 4
struct hexagon_profile {
	unsigned int opcode;
	unsigned int usecs;
	unsigned int cycles_start; /* layout 1: the number of cycles */
	unsigned int cycles_stop;  /* layout 1: 0 */
	unsigned int pmu[8];
};

/* The processor's measurements of operators first .. first+count of a batch. */
struct rec_hexagon_profile {
	struct header h;
	unsigned long long queue;
	unsigned long long seq;
	unsigned int first;
	unsigned int count;
	struct hexagon_profile ops[HEXAGON_PROFILES];
};

/* Tracepoints of the NPU's driver, in the order of tracer/probes/driver_events.py. */
enum driver_event {
	DRIVER_FASTRPC_CONTEXT_ALLOC,
	DRIVER_FASTRPC_TRANSPORT_SEND,
	DRIVER_FASTRPC_TRANSPORT_SEND_IPCMSG,
	DRIVER_FASTRPC_TRANSPORT_RESPONSE,
	DRIVER_FASTRPC_CONTEXT_INTERRUPT,
	DRIVER_FASTRPC_CONTEXT_RESTORE,
	DRIVER_FASTRPC_CONTEXT_COMPLETE,
	DRIVER_FASTRPC_CONTEXT_FREE,
	DRIVER_FASTRPC_DMA_MAP,
	DRIVER_FASTRPC_DMA_ALLOC,
	DRIVER_FASTRPC_DSPSIGNAL,
	DRIVER_QCOM_GLINK_CMD_TX_DATA,
	DRIVER_FASTRPC_DMA_UNMAP,
	DRIVER_FASTRPC_DMA_FREE,
	DRIVER_FASTRPC_PERF_COUNTERS,
};

/* An event of the driver; that file lists which of its fields these are. */
struct rec_driver_event {
	struct header h;
	unsigned long long context;
	unsigned long long value;
	unsigned int handle;
	unsigned int scalars;
	int status;
	unsigned int event;
};

#endif

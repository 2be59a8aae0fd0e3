/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The layout of every record, written once. Python derives its NumPy dtypes from this header's BTF.
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
};

/* Which engine's probe wrote a record; the same numbers stand in tracer/engines (key `id`). */
enum engine_id {
	ENGINE_KERNEL = 0,
	ENGINE_MOESCOPE = 1,
	ENGINE_LLAMACPP = 2,
	ENGINE_QNN = 3,
	ENGINE_ONNXRUNTIME = 4,
	ENGINE_GENIE = 5,
	ENGINE_USER = 6, /* functions named in a file of the user's */
	ENGINE_HEXAGON = 7,
	ENGINE_GENAI = 8,
	ENGINE_EXECUTORCH = 9,
};

enum phase {
	PHASE_UNKNOWN = 0,
	PHASE_PREFILL = 1,
	PHASE_DECODE = 2,
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
	BACKEND_CUDA = 3, /* ROCm and MUSA builds of it, too */
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

/* What every record starts with. 24 bytes. */
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
	unsigned long long seq;  /* the engine's own number of the step; 0-based, 2^64-1 where it has none */
	unsigned int phase;      /* enum phase */
	unsigned int n_tokens;   /* tokens fed in this step; 0 where the engine does not tell */
	unsigned int position;   /* context length before the step; 2^32-1 where unknown */
	unsigned int maj_flt;    /* page faults of the calling thread so far */
	unsigned int min_flt;
	unsigned int context;    /* bits 4 to 35 of the address of what the step is taken in; 0: not told */
};

struct rec_token_end {
	struct header h;
	unsigned long long seq;
	long long result;      /* sampled token id, or the engine's return value */
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned long long pad;
};

/* One graph handed to a backend: a session run, a ggml graph. */
struct rec_graph_begin {
	struct header h;
	unsigned long long handle;
	unsigned int type;    /* index into the engine's declared `graphs` names */
	int layer;            /* -1 where it has none, as in every record below */
	int expert;
	unsigned int backend; /* enum backend_id */
	unsigned int n_tokens;
	unsigned int tier;    /* rows of the static shape, 0 where dynamic */
};

struct rec_graph_end {
	struct header h;
	unsigned long long handle;
	long long status;
	unsigned long long pad[2];
};

/* One operator on one thread. Its structure (names, dims, sources) comes once, as KIND_TENSOR. */
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
	unsigned long long tensor; /* 0 where the probe cannot know: it ends the thread's open operator */
	unsigned int maj_flt;
	unsigned int min_flt;
	unsigned long long pad[2];
};

/* The thread has done its share of the operator and waits for the others. */
struct rec_op_wait {
	struct header h;
	unsigned long long pad[4];
};

/* A node of a graph and the tensor that it makes: told while the graph is news. */
struct rec_node {
	struct header h;
	unsigned long long tensor;
	unsigned long long graph; /* handle, as in rec_graph_begin */
	unsigned int node;        /* its place in the graph */
	unsigned int pad[3];
};

#define SHARES 17
/*
 * Nodes of a graph that the thread has done its share of, one after the other; behind each it waited for the other threads.
 * This alone tells operators: one began when the last thread was done with the node before.
 */
struct rec_op_shares {
	struct header h; /* ts: when the first was done */
	unsigned long long graph;
	unsigned int count;
	unsigned int pad;
	unsigned int after[SHARES];   /* when it was done, ns after ts */
	unsigned int min_flt[SHARES]; /* page faults since the thread's share before */
	unsigned short maj_flt[SHARES];
	unsigned short node[SHARES];
};

/*
 * From where a thread last entered the barrier before it began another operator, and in which places of the caller's frame
 * (bit i: place i, as ggml.h numbers them) stood what a later probe needs.
 */
struct rec_site {
	struct header h;
	unsigned long long address; /* return address */
	unsigned long long here;    /* places that hold the operator's index in the graph; blind: that grow */
	unsigned long long before;  /* places that hold the index of the operator behind it; blind: that grow and hold the last index */
	unsigned long long graph;   /* places that hold the graph */
	unsigned long long last_but_one; /* blind: places that grow and hold the index before the last */
	unsigned int last;          /* 1: it was the graph's last operator */
	unsigned int blind;         /* 1: no probe told the operator */
};

enum misfit_of {
	MISFIT_TENSOR = 1, /* the graph's tensors have none of the known layouts */
	MISFIT_LOOP = 2,   /* what was learnt of the graph loop does not tell the graph's nodes in their order */
};

/* A graph is not what probes on its operators take it for. Told once by each thread. */
struct rec_misfit {
	struct header h;
	unsigned long long graph; /* handle, as in rec_graph_begin */
	unsigned int what;        /* enum misfit_of */
	unsigned int node;        /* that it was seen at */
	unsigned int n_nodes;
	unsigned int pad[3];
};

#define MAX_PMC 4
#define NO_COUNT 0xFFFFFFFFFFFFFFFFULL
/* The thread's counters, right behind the operator record of its thread that they belong to. */
struct rec_pmc {
	struct header h;
	unsigned long long values[MAX_PMC]; /* NO_COUNT: the thread had no counter yet, or the PMU had no room for it */
};

/* One expert's run over n_tokens tokens; nested in an operator of the same thread. */
struct rec_expert_begin {
	struct header h;
	int layer;
	int expert;
	unsigned int n_tokens;
	unsigned int cache;   /* enum cache_state, as it stood when the layer began */
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
	unsigned int reason; /* enum load_reason */
	unsigned int backend;
	unsigned long long pad;
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
	unsigned long long pad;
};

struct rec_qnn_execute_begin {
	struct header h;
	unsigned long long graph;
	unsigned long long profile; /* 0 where the caller gave none */
	unsigned int n_inputs;
	unsigned int n_outputs;
	unsigned long long param; /* of an asynchronous one: what its completion will name; else 0 */
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
	unsigned long long profile; /* handle that gathers the call's events, 0 where it has none */
	unsigned int call;          /* enum qnn_call */
	unsigned int pad;
};

struct rec_qnn_call_end {
	struct header h;
	unsigned long long handle; /* what the call made, where it makes something */
	long long status;
	unsigned long long bytes; /* written by contextGetBinary, else 0 */
	unsigned int call;
	unsigned int pad;
};

/* An asynchronous execution told its caller, through the caller's own function, that it is done. */
struct rec_qnn_done {
	struct header h;
	unsigned long long param; /* the caller's own parameter */
	long long status;
	unsigned long long pad[2];
};

/* profileGetEvents: the thread starts to read what `profile` gathered. */
struct rec_qnn_harvest {
	struct header h;
	unsigned long long profile;
	unsigned long long pad[3];
};

#define CALL_VALUES 3
#define CALL_PARTS 5
/* A function that the user named. Values are as wide as they were read: their types stand in the manifest. */
struct rec_call_begin {
	struct header h;
	unsigned short probe;  /* number of the function in the manifest */
	unsigned short unread; /* bit i: the memory of values[i] could not be read */
	unsigned int frame;    /* low half of the stack pointer of the caller: tells recursive calls apart */
	unsigned long long values[CALL_VALUES];
};

struct rec_call_end {
	struct header h;
	unsigned short probe;
	unsigned short unread;
	unsigned int frame;
	unsigned long long values[CALL_VALUES];
};

/* A context switch that one of the target's threads takes part in. */
struct rec_sched_switch {
	struct header h;
	unsigned int prev_tid;
	unsigned int next_tid;
	unsigned short prev_state; /* as the tracepoint tells it: 1 S, 2 D, 0x10 X, 0x20 Z, ...; 0 or 0x100: still runnable */
	short prev_prio;
	short next_prio;
	unsigned char comm_of_next; /* whose name `comm` is: 1 next, 0 prev */
	unsigned char pad;
	char comm[16];
};

struct rec_sched_waking {
	struct header h;
	unsigned int woken_tid;
	unsigned int target_cpu;
	int prio;
	unsigned int pad;
	char comm[16];
};

/* The thread stands in the run queue of its cpu. */
struct rec_sched_wakeup {
	struct header h;
	unsigned int woken_tid;
	unsigned int target_cpu;
	int prio;
	unsigned int pad;
	char comm[16];
};

/* What a record of clocks and heat is about. */
enum heat_of {
	HEAT_KHZ = 0,       /* the frequency that a CPU takes */
	HEAT_LEAST_KHZ = 1, /* the least and the greatest that it may take */
	HEAT_MOST_KHZ = 2,
	HEAT_ZONE = 3,    /* a thermal zone's temperature, 1/1000 degree Celsius */
	HEAT_COOLING = 4, /* a cooling device's state, 0: it does nothing */
	HEAT_UNNUMBERED = 0xFFFF,
};

/* A value that holds from here on: told by the kernel, or read from sysfs by the recorder, which then is no process's. */
struct rec_heat {
	struct header h;
	unsigned short what;   /* enum heat_of */
	unsigned short number; /* of the CPU (as read: of the policy), zone or device; HEAT_UNNUMBERED: of the device called `name` */
	int value;
	char name[24];
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
	FAULT_MAJOR = 1,  /* as the kernel counts it: its page was not in the page cache, or it had to be retried */
	FAULT_EXACT = 2,  /* `page` is the page that was touched; else the first of a window or read-ahead around it */
};

/* A page fault of a file mapping, or any major one, at its end. */
struct rec_page_fault {
	struct header h;
	unsigned long long begin; /* ns; 0 where not known */
	unsigned long long ino;   /* 0: no file is known (anonymous memory) */
	unsigned int dev;         /* the kernel's dev_t: major << 20 | minor */
	unsigned int page;        /* index in the file, in pages */
	unsigned int added;       /* pages that the thread brought into the page cache for it, read-ahead included */
	unsigned int flags;       /* enum page_fault_flag */
};

/* A request goes to the device; the header's thread is the one that asked for it, `issued` on whatever thread. */
struct rec_block_issue {
	struct header h;
	unsigned long long sector; /* of 512 bytes */
	unsigned int dev;
	unsigned int bytes;
	char rwbs[8]; /* R read, W write, D discard, F flush; then A read-ahead, S sync, M metadata */
	unsigned long long pad;
};

/* ... and is answered; the header's thread is the same, its cpu the one that took the interrupt. */
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
	unsigned int bytes; /* asked for; 2^32-1 where the call gives a list of buffers */
	unsigned int fd;
	unsigned int call; /* enum read_call */
};

struct rec_read_end {
	struct header h;
	long long result;
	unsigned long long added; /* pages that the thread brought into the page cache within */
	unsigned long long pad[2];
};

#define MAX_SOURCES 10
/* What a tensor is and what it was made from: once per tensor, not once per run. */
struct rec_tensor {
	struct header h;
	unsigned long long tensor;
	unsigned int type;      /* operator that makes it, as in rec_op_begin */
	unsigned int dtype;     /* the engine's number of the element type */
	long long ne[4];        /* dims, innermost first; 0 where not given */
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
	unsigned long long tensor; /* 0, or an operator that is given the choice: its name tells the layer */
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
	unsigned long long timestamp; /* the backend's own; 0 where it gives none */
	unsigned int dtype;           /* QNN scalar type of `value`; 0x64: u64 (event data, not extended) */
	unsigned int extended;
	unsigned long long frame; /* stack pointer where the reader handed it on: a sub-event's is lower; 0: lists tell the tree */
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

/* A QNN handle is made, configured or freed. */
struct rec_qnn_object {
	struct header h;
	unsigned long long handle;
	unsigned long long owner; /* context of a graph or memory, backend of a context or profile */
	unsigned int call;        /* enum qnn_call that did it */
	unsigned int level;       /* of a profile; option set by profileSetConfig; type of registered memory */
	unsigned long long bytes; /* of registered memory; value set by profileSetConfig */
	char name[QNN_NAME_BYTES];
};

/* The function that asynchronous executions call when they are done; the target is stopped until a probe stands there. */
struct rec_qnn_callback {
	struct header h;
	unsigned long long address;
};

/* Where the target reads a profile; it is stopped until the probes stand that this takes. */
struct rec_qnn_reader {
	struct header h;
	unsigned long long address; /* of the caller; 0: a function that is not what its name says */
};

/* The target opens a file that QNN's serialized profile goes to. */
struct rec_qnn_log {
	struct header h;
	char path[208];
};

#define TABLE_SLOTS 24
#define NO_PROVIDER 0xFFFFFFFF
/* Part of a QNN provider's function table, read when QnnInterface_getProviders returns; NO_PROVIDER: it gave none. */
struct rec_qnn_table {
	struct header h;
	unsigned int backend;
	unsigned int api[3];
	unsigned short first;
	unsigned short last; /* 1: the last part of the last provider */
	unsigned int provider;
	unsigned long long slots[TABLE_SLOTS];
};

/* Part of a table of functions that a library hands to the program, and the version that the program asked for. */
struct rec_api_table {
	struct header h;
	char table[16]; /* its name, as the engine's probes give it */
	unsigned long long address;
	unsigned int version;
	unsigned short first;
	unsigned short last; /* 1: the last part */
	unsigned long long slots[TABLE_SLOTS];
};

/* A session is made (name or bytes), or runs with other counts than before. */
struct rec_session {
	struct header h;
	unsigned long long handle;
	unsigned long long bytes; /* of a model in memory; 0 where it is a file */
	unsigned int n_inputs;    /* 0: not told by this record */
	unsigned int n_outputs;
	char name[192];           /* path of the model */
};

/* The target opens a library that an engine is declared for; the target is stopped until probes stand. */
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

/* What a call_begin or call_end of the same thread and time has no room for: one text and more numbers. */
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
	unsigned int bytes;     /* of the descriptions that go with it */
	unsigned short n_bufs;
	unsigned short layout;  /* version of the message; 0: none that is known, and nothing else of it is read */
};

struct rec_hexagon_sent {
	struct header h;
	unsigned long long queue;
	unsigned long long seq;
	long long status;
	unsigned long long pad;
};

/* A batch's answer, read. */
struct rec_hexagon_done {
	struct header h;
	unsigned long long queue;
	unsigned long long seq;
	unsigned long long began; /* when the reader began to ask for an answer */
	unsigned int usecs;       /* that the processor says it took; 0 where it does not */
	unsigned short n_ops;     /* that come with a profile */
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

/* A graph that the Hexagon backend is given, before its nodes. */
struct rec_hexagon_graph {
	struct header h;
	unsigned long long graph;
	unsigned int n_nodes;
	unsigned int told; /* 1: its nodes follow on this thread; 0: they are as they were told */
};

/* A node of it. */
struct rec_hexagon_node {
	struct header h;
	unsigned long long graph;
	unsigned long long tensor;
	unsigned long long data; /* address of its elements */
	long long ne[4];
	unsigned int node;
	unsigned int op; /* ggml's number */
	char name[64];
};

/* An operator of the batch that its thread is about to write. */
struct rec_hexagon_op {
	struct header h;
	unsigned long long data; /* address of what it makes, in the program; 0 where not known */
	unsigned int ne[4];
	unsigned int seq;        /* of the batch, its lower half */
	unsigned short at;
	unsigned short opcode;   /* the backend's number, which differs between versions */
};

#define HEXAGON_PROFILES 4
struct hexagon_profile {
	unsigned int opcode;
	unsigned int usecs;
	unsigned int cycles_start; /* layout 1: how many it took */
	unsigned int cycles_stop;  /* layout 1: 0 */
	unsigned int pmu[8];
};

/* What the processor measured of operators first .. first+count of a batch. */
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

/* One of them; which of its fields these are says that file. */
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

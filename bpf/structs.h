/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Contents and sizes of the maps, for the BPF programs and for the recorder, which fills some of them. */
#ifndef MOESCOPE_STRUCTS_H
#define MOESCOPE_STRUCTS_H

#include "stack_copy.h"

/* The arguments of a call, kept from its entry to its return. */
struct call_args {
	u64 arg[4];
};

/* A library name prefix declared by an engine. */
struct pattern {
	u32 length;
	char text[28];
};

#define MAX_PROGRAMS 256
#define PATH_BYTES 208

struct path_scratch {
	char text[256]; /* PATH_BYTES, and room for a pattern that starts at the last of them */
	u32 base;       /* offset of the file name; kept here so that the verifier merges the paths of the loop */
};

/* Where parts of the Hexagon backend's messages are, in one version of them; tracer/engines/hexagon.toml, in this order. */
struct hexagon_layout {
	u32 number;
	u32 id_bytes; /* of the batch's number, first in request and response */
	u32 tensor_bytes, data_bytes, buffer_at, ne_at;
	u32 op_bytes, dst_at;
	u32 status_at, usecs_at; /* in the response; the numbers of parts follow the status; 0: it does not tell the time */
};

#define HEXAGON_LAYOUTS 8 /* a power of two; the last stays empty */

/* The loader's settings: choices, and numbers that differ between builds of an engine. */
struct settings {
	u32 mul_mat_id; /* llama.cpp's number of GGML_OP_MUL_MAT_ID, or UNKNOWN_OPERATOR */
	u32 stop;       /* stop the target when a library or a function table appears, until probes are attached */
	u32 operators;  /* record ggml's operators */
	u32 experts;    /* record the experts passed to MUL_MAT_ID */
	u32 learn;      /* enum learning */
	u32 blind;      /* learn without a probe that sees the operator: this program is stripped */
	u32 node_at;    /* place where ggml's loop over a graph keeps the index of its node ... */
	u32 node_more;  /* ... plus this */
	u32 graph_at;   /* and place of the graph; places are numbered as in ggml.h */
	u32 everyone;   /* record the scheduler for every thread of the machine, not only the target's */
	u32 n_counters; /* performance counters read at operator boundaries; 0: none */
	u32 infer_faults; /* this kernel has no event for the begin of a fault of a file mapping */
	u32 round;      /* grows when probes are attached or removed: descriptions are then sent again */
	u32 files;  /* record reads and mappings of files, if one program sees all system calls */
	u32 steps;  /* record steps */
	u32 one_call; /* ggml's loop calls the barrier after its last node at the same place as after the others */
	u32 long_wait_us; /* stacks are recorded of threads that were away from a CPU for so long */
	u32 spared; /* QNN's own readers of events are not probed, since their callers are known to pass on what they read */
	struct hexagon_layout hexagon_layouts[HEXAGON_LAYOUTS];
};

#define NO_WAITS 0xffffffffu /* long_wait_us while stacks pause */
#define STACK_SLOTS 512 /* threads of the target whose numbers differ in the lower bits */
#define MASKED_PLACES 64 /* of a frame, a bit each in the masks of struct rec_site */

enum learning {
	LEARN_NOTHING = 0,
	LEARN_PLACES = 1, /* search for the values of node_at, node_more and graph_at */
	LEARN_ENDS = 2,   /* report where graphs end */
};

/* A finished share of a node that was not sent yet; see struct rec_op_shares. */
struct share {
	u32 after;
	u32 min_flt;
	u16 maj_flt;
	u16 node;
};

#define MARKED_NODES 4096
#define LOOP_WORDS 8 /* a power of two */

/* A thread of the target, and its state in computing ggml graphs. The fields that every hit uses come first. */
struct traced {
	u64 graph; /* that it computes */
	u64 shares_of;
	u64 first_ts;
	u32 count; /* of shares */
	u32 maj_before; /* the thread's page faults at its last share */
	u32 min_before;
	u32 leads;  /* it began the graph; the others help */
	u32 news;   /* this graph's current form has not been described */
	u32 rounds; /* number of graphs that it began */
	u32 changes; /* number of changes of these graphs */
	u32 sources_at; /* offset in the tensors of these graphs; see ggml.h */
	u32 name_at;
	u32 next_node; /* the first node that may follow */
	u32 misfit; /* it has reported a graph that does not match the assumptions */
	u32 in_step; /* a function that takes steps is running */
	u32 fills_batch; /* rows of its batch if it is not known in full yet, else 0 */
	u32 warms_up; /* its next steps are a warm-up */
	u32 is_step; /* the graph itself is a step */
	u32 user_steps; /* begun at a function that the user named */
	u64 loop[LOOP_WORDS]; /* part of the stack with the loop's variables */
	struct share shares[SHARES];
	u8 given_experts[MARKED_NODES / 8]; /* nodes that take a router's choice, a bit each */
	u64 routing; /* the routing tensor whose experts were last sent in this graph */
	/* the graph that it began last, with the frame and the address in the code: */
	u64 began;
	u64 frame;
	u64 place;
	u64 waits_for; /* the backend on which it waits; 0: none */
	/* its current copy between backends: the result, the frame, the begin */
	u64 copies;
	u64 copy_frame;
	u64 copy_ts;
	/* in a graph of BLAS, else 0: the begin of the next product; the node of the previous one, from 1 */
	u64 product_ts;
	u32 product;
	u64 scratch[32]; /* parts of the tensor or batch being examined */
	/* while learning: */
	u64 tensor;
	u64 site;
	u32 sites; /* sent so far */
	u64 here;
	u64 before;
	u64 graph_places;
	u64 last_but_one;
	u64 words[MASKED_PLACES]; /* of the frame being examined */
	u32 counted[MASKED_PLACES]; /* blind: 1 more than the value at the previous barrier; 0: there was none */
};

/* How to read one argument of a user's function: a register, then up to two reads of memory. */
struct arg_spec {
	u32 from;      /* 0-5: argument registers, 6: the return value, 7: nothing */
	u32 width[2];  /* bytes to read; 0: no read */
	s32 offset[2]; /* added to the address before each read */
};

/* The values that a probe on a user's function sends: part 0 in the event, the others in a detail each. */
struct call_spec {
	u32 parts;
	struct arg_spec numbers[CALL_PARTS][CALL_VALUES];
	struct arg_spec texts[CALL_PARTS - 1];
};

/* The position of a field in a tracepoint's record; width 0: the tracepoint has no such field. */
struct driver_field {
	u32 offset;
	u16 width;
	u16 is_text; /* the field holds the offset of the text */
};

#define DRIVER_FIELDS 5 /* context, value, handle, scalars and status of struct rec_driver_event */
struct driver_layout {
	struct driver_field fields[DRIVER_FIELDS];
};

#define MAX_DRIVER_EVENTS 16
#define DRIVER_RECORD_BYTES 1024

/* An address in a process: a tensor, a QNN provider. */
struct place_key {
	u64 address;
	u32 pid;
	u32 tid; /* 0: any thread */
};

/* A thread's current page fault or read. */
struct faulting {
	u64 begin;
	u64 ino;
	u32 dev;
	u32 page, last; /* the window that contains the touched page */
	u32 added;
	u32 flags;
	u32 pad;
};

struct request_key {
	u64 sector;
	u32 dev;
	u32 pad;
};

struct asker {
	u32 pid;
	u32 tid;
};

#endif

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the maps hold, and how large they are: for the programs in the kernel and for the collector, which fills some of them. */
#ifndef MOESCOPE_STRUCTS_H
#define MOESCOPE_STRUCTS_H

/* The arguments of a call, kept from its entry to its return. */
struct call_args {
	u64 arg[4];
};

/* A library name prefix that some engine declares. */
struct pattern {
	u32 length;
	char text[28];
};

#define MAX_PATTERNS 16
#define MAX_PROGRAMS 256
#define PATH_BYTES 208

struct path_scratch {
	char text[256]; /* PATH_BYTES, and room for a pattern that starts at the last of them */
	u32 base;       /* where the file name begins; kept here so that the verifier merges the paths of the loop */
};

/* What the loader sets before it loads: numbers that differ between builds of an engine. */
struct settings {
	u32 mul_mat_id; /* llama.cpp's number of GGML_OP_MUL_MAT_ID; 2^32-1: not known */
	u32 stop;       /* stop the target when a library or a function table appears, until probes stand */
	u32 operators;  /* record ggml's operators */
	u32 experts;    /* record what MUL_MAT_ID is given */
	u32 learn;      /* enum learning */
	u32 blind;      /* learn without a probe that tells the operator: this program is stripped */
	u32 node_at;    /* where ggml's loop over a graph keeps the index of its node ... */
	u32 node_more;  /* ... plus this */
	u32 graph_at;   /* and where the graph; places are numbered as in ggml.h */
	u32 everyone;   /* record the scheduler for every thread of the machine, not the target's alone */
	u32 n_counters; /* performance counters read at operator boundaries; 0: none */
	u32 infer_faults; /* this kernel does not tell when a fault of a file mapping begins */
	u32 round;      /* grows when probes come or go: what was told to none of them is told again */
	u32 files;  /* record reads and mappings of files, where one program sees all system calls */
	u32 steps;  /* record steps */
	u32 one_call; /* ggml's loop calls the barrier behind its last node where it does so behind every other */
	u32 spared; /* QNN's own readers of events are not probed, since those who call them are known to hand on what they read */
};

#define MASKED_PLACES 64 /* of a frame, a bit each in the masks of struct rec_site */

enum learning {
	LEARN_NOTHING = 0,
	LEARN_PLACES = 1, /* look for what node_at, node_more and graph_at tell */
	LEARN_ENDS = 2,   /* tell where graphs end */
};

/* A share of a node that is not sent yet; see struct rec_op_shares. */
struct share {
	u32 after;
	u32 min_flt;
	u16 maj_flt;
	u16 node;
};

#define MARKED_NODES 4096

/* A thread of the target, and what it is at where it computes ggml graphs. What every hit touches comes first. */
struct traced {
	u64 graph; /* that it works on */
	u64 shares_of;
	u64 first_ts;
	u32 count; /* of shares */
	u32 maj_before; /* the thread's page faults as they stood at its last share */
	u32 min_before;
	u32 leads;  /* it began the graph; the others help */
	u32 news;   /* this graph has not been described as it is now */
	u32 rounds; /* graphs that it began */
	u32 changes; /* of these graphs, against what they were before */
	u32 sources_at; /* in the tensors of these graphs; see ggml.h */
	u32 name_at;
	u32 next_node; /* the first that it may still be told of */
	u32 misfit; /* it told that a graph is not what it is taken for */
	u32 in_step; /* a function that takes steps is running */
	u32 is_step; /* the graph is a step of its own */
	struct share shares[SHARES];
	u8 given_experts[MARKED_NODES / 8]; /* nodes that are given what a router chose, a bit each */
	u64 routing; /* the routing tensor whose experts were last sent in this graph */
	/* the graph that it began last, and from which frame and place in the code: */
	u64 began;
	u64 frame;
	u64 place;
	u64 waits_for; /* the backend that it waits for; 0: none */
	/* the copy between backends that it is in: the result, from which frame, since when */
	u64 copies;
	u64 copy_frame;
	u64 copy_ts;
	/* in a graph of BLAS, else 0: since when it works on the product that comes next; the node of the one before, from 1 */
	u64 product_ts;
	u32 product;
	u64 scratch[20]; /* of a tensor that is looked at */
	/* while learning: */
	u64 tensor;
	u64 site;
	u32 sites; /* told so far */
	u64 here;
	u64 before;
	u64 graph_places;
	u64 last_but_one;
	u64 words[MASKED_PLACES]; /* of a frame that is looked at */
	u32 counted[MASKED_PLACES]; /* blind: 1 more than what stood there at the barrier before; 0: there was none */
};

/* How to read one argument of a user's function: a register, then up to two reads of memory. */
struct arg_spec {
	u32 from;      /* 0-5: argument registers, 6: the return value, 7: nothing */
	u32 width[2];  /* bytes to read; 0: no read */
	s32 offset[2]; /* added to the address before each read */
};

/* What a probe on a user's function sends: part 0 in the event, the others in a detail each. */
struct call_spec {
	u32 parts;
	struct arg_spec numbers[CALL_PARTS][CALL_VALUES];
	struct arg_spec texts[CALL_PARTS - 1];
};

#define MAX_CALL_SPECS 1024

/* Where a field of a tracepoint's record stands; a width of 0: the tracepoint has none such. */
struct driver_field {
	u32 offset;
	u16 width;
	u16 is_text; /* there stands where the text stands */
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
	u32 tid; /* 0: whichever thread */
};

/* A page fault or a read that a thread is in. */
struct faulting {
	u64 begin;
	u64 ino;
	u32 dev;
	u32 page, last; /* the window that holds the touched page */
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

#define MAX_COUNTED_THREADS 1024

#endif

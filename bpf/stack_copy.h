/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A copied stack, as a BPF program sends it and stacks.bin keeps it. */
#ifndef MOESCOPE_STACK_COPY_H
#define MOESCOPE_STACK_COPY_H

#define STACK_BYTES 32768 /* copied of a stack, at most */
#define STACK_PAGE 4096

/* Why a stack was sent; the samples of a CPU's clock have none. */
enum stack_reason {
	STACK_WAIT = 1,	 /* the thread continues after a long wait */
	STACK_WAKER = 2, /* the thread ends the long wait of another one */
	STACK_RETURNS = 3, /* what the kernel's next sample of the thread lacks: the calls whose return is probed */
};

/* A call whose return is probed: on the stack, the kernel's address stands in the place of its own. */
struct probed_call {
	u64 stack;  /* the stack pointer at the call */
	u64 address; /* to which it returns */
};

#define PROBED_CALLS 8
#define STACKS_FORMAT 2 /* of stacks.bin; another number for every change of what it holds, struct stack_copy included */

struct stack_copy {
	u64 of;		   /* process and thread whose stack it is; 0: none */
	u32 reason;	   /* enum stack_reason */
	u32 tid;	   /* of the thread that waited */
	u64 since;	   /* when it went to sleep */
	u64 bytes;	   /* of the stack */
	u64 same;	   /* in a file, how many more follow that are as in the thread's record before */
	struct probed_call calls[PROBED_CALLS]; /* innermost first; zeros behind the last */
	u64 registers[34]; /* struct pt_regs */
	u8 stack[STACK_BYTES + STACK_PAGE];
};

#endif

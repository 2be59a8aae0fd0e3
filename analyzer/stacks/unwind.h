/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the parts of moescope-unwind share: processes and their files, frames, the stack that is unwound, sets. */
#ifndef MOESCOPE_UNWIND_H
#define MOESCOPE_UNWIND_H

#include <elfutils/libdwfl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

#define MOST_FRAMES 512
#define WORD 8

enum end {
	WHOLE,	  /* the stack's outermost function was reached */
	CUT,	  /* the copy of the stack ends before */
	UNKNOWN,  /* no call frame information leads on */
	TOO_DEEP, /* more than MOST_FRAMES */
};

/* How a frame was found from the one that it called. */
enum { BY_RULES, BY_POINTER };

struct frame {
	u64 address;
	u8 is_call; /* the address is behind a call */
	u8 way;
};

struct frames {
	struct frame rows[MOST_FRAMES];
	int count;
};

struct mapping {
	u64 start, end, offset;
	char *path;
	u64 inode;	/* 0: not known */
	u8 id[20];	/* of the build */
	u8 id_bytes;	/* 0: not known */
};

struct process {
	u32 pid;
	u32 age; /* counts how often something was mapped in the place of something else */
	struct mapping *maps;
	int count, room;
	int reported; /* so many of `maps` are known to `dwfl` */
	Dwfl *dwfl;
	struct rows *rows;	/* of step.c */
	struct jit_map *jit;	/* of names.c */
};

extern bool is_arm;

/* unwind.c */
void fail(const char *what);
void *grown(void *list, int *room, size_t each);
bool read_stack(u64 address, u64 *value);
bool was_cut(void); /* whether a place behind the copied bytes was to be read */

/* processes.c */
struct process *process_of(u32 pid);
void add_mapping(struct process *process, struct mapping mapping);
void clear_mappings(struct process *process);
const struct mapping *mapping_of(const struct process *process, u64 address); /* NULL: not executable memory */
void prepare(struct process *process); /* tells libdw of the mappings */
void read_replaced(FILE *lines);
extern const char *folder; /* of the recording: the kernel's library and maps of generated code */

/* step.c */
enum end unwind_registers(struct process *process, const u64 *registers, u64 pc, struct frames *frames);
void forget_rows(struct process *process);

/* code.c */
#define IN_REGISTER (-1) /* instead of a place: still in the register itself */

struct code_way {
	s64 returns_at;	  /* where the return address is, from the stack pointer on */
	s64 restored[16]; /* where the caller's registers are, likewise, by the numbers of instructions; below it: not copied */
};

bool may_read_code(const char *path);
bool follow_code(const u8 *code, u64 bytes, u64 at, struct code_way *way); /* `at`: of the function's next instruction */

/* names.c */
bool is_python(struct process *process, u64 address); /* a function of CPython's, with `-X perf` */
json_t *described(struct process *process, u64 address, u8 way);

/* sets.c: a set of byte strings, each with the number under which it was entered */
struct set {
	struct entry *entries;
	u32 room, count;
};

u32 number_in(struct set *set, const void *key, u32 bytes, bool *is_new); /* `is_new`: it was not in the set */

#endif

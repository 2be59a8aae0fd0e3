/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Pairs the drained records to steps, which the filter, the limits and the guard of decode speed use. */
#ifndef MOESCOPE_STEPS_H
#define MOESCOPE_STEPS_H

#include "types.h"

/* `complete`: both its begin and its end were seen. `forced`: it is kept whatever its duration. */
struct step {
	u32 pid, tid, position;
	u8 engine;
	bool decode, complete, forced;
	u64 begin_ns, end_ns; /* end: 0 while it is open */
};

struct steps {
	struct step *rows;
	int count, room;
};

/* A begin, an end, or the exit of a thread. */
struct mark {
	struct step step; /* of a begin; otherwise thread and engine */
	u64 ts;
	u32 order; /* of arrival */
	u16 kind;
};

struct marks {
	struct mark *rows;
	int count, room;
};

struct step_tracker {
	struct steps finished; /* by the last batch, ordered by their ends */
	struct steps open;
	struct marks waiting; /* those newer than the last `until_ns` */
};

bool is_decode(const struct header *begin); /* a step's */

/* Adds a batch of events; records newer than `until_ns` wait, since older ones from another CPU may still arrive. */
void read_steps(struct step_tracker *tracker, const u8 *events, size_t bytes, u64 until_ns);

/* Times of experts that ran without being in the cache, kept until the steps that waited for them have ended. */
struct miss {
	u64 ts;
	u32 pid;
};

struct misses {
	struct miss *rows;
	int count, room;
};

void read_misses(struct misses *misses, const u8 *events, size_t bytes);
int misses_within(const struct misses *misses, const struct step *step); /* of its process */
void forget_misses(struct misses *misses, u64 before_ns);

#endif

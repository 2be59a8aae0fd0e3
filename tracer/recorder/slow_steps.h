/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * --only-slower-than: holds records back until their steps are known to be slow or fast; those of fast ones are counted and
 * dropped. A record belongs to the steps that its process has open at its time; a kernel record to those of every process; a
 * step's begin and end to that step only. It is kept if one of its steps lasts longer than the limit.
 */
#ifndef MOESCOPE_SLOW_STEPS_H
#define MOESCOPE_SLOW_STEPS_H

#include "steps.h"

#define STREAMS 2
#define MOST_HELD_BYTES (64ULL << 20) /* beyond which the open steps are kept, whatever their duration */

struct slots {
	u8 *rows; /* bytes */
	int count, room;
};

/* When a thread, a process or any process had a step open. */
struct span {
	u64 key, begin, end;
};

struct spans {
	struct span *rows; /* ordered by key and begin; `end` is the latest so far of its key */
	int count, room;
};

struct stream {
	struct slots held;  /* records of undecided steps */
	struct slots fresh; /* records that are too new for all earlier ones to have arrived */
	struct slots kept;  /* records to write now */
	u64 judged;	    /* the round in which `held` was judged last */
};

struct sieve {
	u64 limit_ns, most_bytes, until_ns, rounds;
	u64 fast_count, fast_ns, dropped[256]; /* the fast steps and their records, by kind */
	struct steps slow, undecided;
	struct spans slow_spans, undecided_spans;
	struct stream streams[STREAMS];
	struct step_tracker *source;
};

void begin_sieve(struct sieve *sieve, struct step_tracker *source, u64 limit_ns, u64 most_bytes);
/* Notes the steps that ended or have been open for too long. To be called each turn, before `slow_slots`; `last`: decide everything. */
void learn_steps(struct sieve *sieve, u64 until_ns, bool last);
/* The records of a stream to write now, slots of `width` bytes; valid until the stream's next turn. Sets their size. */
const u8 *slow_slots(struct sieve *sieve, int stream, size_t width, const u8 *first, size_t *bytes);
u64 held_bytes(const struct sieve *sieve);

#endif

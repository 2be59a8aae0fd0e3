/* SPDX-License-Identifier: Apache-2.0 */
/* The expert cache of decoded tokens, as its two parts see it: _slots.c holds and reads experts, _foresight.c says which come next. */
#pragma once
#include "_probes.h"
#include <linux/aio_abi.h>

enum { MOST_QUEUED = 64, STAGES = 2, BINS = 16 }; /* STAGES: times at which a layer's choice is predicted */

struct slot {
	PyObject *keeper, *run, *binding; /* keeper: what keeps memory and output alive */
	uint8_t *memory;
	const float *output;
	uint64_t handle;
	int state, prefetched, error;
	int32_t form; /* layer * experts + expert; -1: none */
	int fresh; /* read, and not run yet */
	int pending; /* pieces that are being read */
	uint64_t asked, got; /* bytes of the read that were submitted, and that arrived */
	uint64_t submitted; /* when the first was */
};

struct wish { /* a prefetch that was asked for and is not wholly submitted yet */
	int32_t form;
	double urgency; /* smaller: sooner */
};

enum counter {
	CLOCK, EVENT, HITS, MISSES, USED_AHEAD, DEMANDED, AHEAD_READ, EVICTED, LOAD_NS, STALL_NS, HOLDING, LOADED, OTHERS,
	PREDICT_NS, KNOWN, COUNTERS /* CLOCK: a double, uses or half-lives; KNOWN: forms ever used */
};
enum state { FREE, IN_FLIGHT, LANDED };

struct foresight;

struct tally { /* of predictions, by how far a score is above the border: how many there were, and how many were right */
	float seen[BINS + 1], hit[BINS + 1];
};

struct slots {
	PyObject_HEAD
	int32_t layers, experts, most, count, holding;
	uint64_t bytes, aligned, size; /* read of an expert, rounded up to pages; its bytes in memory */
	int beside; /* whether misses are read while the layer runs what it has; else each when it is to run */
	double half_life; /* of LFRU's counts, in uses of each form ever used; 0: LRU */
	double allowance;
	struct slot *slot;
	int32_t *place; /* of each form, -1: none */
	struct wish wish[MOST_QUEUED];
	Py_ssize_t wishes;
	aio_context_t ring;
	int in_flight; /* pieces */
	uint64_t busy_since;
	PyObject *take, *failed, *widen;
	Py_buffer counters, rank, held, unused, rows, loads, files; /* files: of each layer; then whether reads are direct */
	/* of the event: the forms that it runs, hits first; and which have run */
	int32_t event[MOST_CHOSEN];
	int state[MOST_CHOSEN], ran[MOST_CHOSEN];
	int chosen;
	struct foresight **foresight; /* [layers][STAGES], NULL: none */
	struct tally tally[STAGES]; /* of all layers */
	int foreseeing, foreseen; /* whether predictions are made; whether the event has made that of the next layer */
};

#define COUNTER(s, name) (((int64_t *)(s)->counters.buf)[name])
#define LAYER(s, form) ((form) / (s)->experts)
#define EXPERT_OF(s, form) ((form) % (s)->experts)

/* What _slots.c does for a prediction; the first returns -1 with an exception set, the others whether they did it. */
int read_ahead(struct slots *s);
int wish_for(struct slots *s, int32_t form, double urgency);
int forget_wish(struct slots *s, int32_t form);
int layer_waits(const struct slots *s);
void reap(struct slots *s, int wait);

/* What _foresight.c does as a layer chooses, and before one of its experts runs (-1 with an exception set). */
void judge(struct slots *s, int32_t layer);
int foresee_late(struct slots *s, int32_t layer, int place);

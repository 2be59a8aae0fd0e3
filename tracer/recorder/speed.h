/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* --min-tps: decides from the times of decode steps which level to switch off or on; carries out nothing. */
#ifndef MOESCOPE_SPEED_H
#define MOESCOPE_SPEED_H

#include "latency.h"
#include "types.h"

#define WINDOW 15 /* maximum number of steps for a median */
#define MOST_LEVELS 32

/* The latest numbers. */
struct latest {
	double rows[WINDOW];
	int count, next;
};

struct level_cost {
	const char *name;
	double ns;
};

/* One level switched off or on: when, at which decode speed, and why. `done_ns`: 0 until its probes are gone, or there again. */
struct change {
	u64 ts_ns, done_ns;
	const char *level;
	bool on;
	double tps;
	char why[96];
};

/*
 * Below `min_tps` it sheds one level after another. After `hold_ns` above it by a margin, it restores the level shed last. If
 * decode becomes too slow again within `hold_ns`, that level is shed again and `hold_ns` doubles; once a restored level has stayed
 * on for that long, `hold_ns` returns to its minimum.
 */
struct controller {
	double min_tps;
	u64 hold_ns;
	const char *off[MOST_LEVELS];
	int off_count;
	struct latest times;
	u64 good_since;	   /* 0: not good now */
	const char *trial; /* the level restored last, and when */
	u64 trial_ns;
};

void begin_controller(struct controller *controller, double min_tps);
void observe_duration(struct controller *controller, u64 duration_ns);
double speed(const struct controller *controller); /* tokens/s by the median; 0 if there are too few steps */
/* Whether a change is to be made now; `on`: the levels that may be shed, with their recent cost. */
bool decide(struct controller *controller, u64 now_ns, const struct level_cost *on, int count, struct change *change);

/* Whether the latest decode steps are slow because of context and misses, whose costs are learnt while speed is good. */
struct explanation {
	double min_tps;
	struct latency latency;
	struct latest latest; /* seconds, minus what context and misses add to a typical step */
	u64 withheld;	      /* changes that it prevented */
};

void begin_explanation(struct explanation *explanation, double min_tps);
void observe_step(struct explanation *explanation, u32 context, int missed, double seconds, bool good);
void forget_latest(struct explanation *explanation); /* measured under other conditions than the coming ones */
bool explains_speed(const struct explanation *explanation); /* a typical step would be fast enough now */

#endif

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * --max-overhead: decides when the costly levels go off and on, so that decode slows down by no more than allowed; carries out
 * nothing. Their cost is measured: steps with these levels on, or while they are switched, against steps without them.
 */
#ifndef MOESCOPE_BUDGET_H
#define MOESCOPE_BUDGET_H

#include "growing.h"
#include "types.h"

#define KEPT_WINDOWS 19

/* A period with the costly levels on, or off; the median of its decode steps, ns, or 0 if there were too few. */
struct window {
	bool on;
	double step_ns;
};

/* Number of decode steps and sum of their times, ns; older ones weigh less. */
struct weight {
	double count, time_ns;
};

struct budget {
	double allowed, besides; /* a slowdown, 0.1 for 10 %; the part of it that the rest of the recording takes */
	struct window windows[KEPT_WINDOWS];
	int window_count;
	struct numbers steps; /* of the current window, ns */
	struct weight with, without;
};

bool slowdown_while_on(const struct budget *budget, double *slowdown); /* false if it is not known yet */
bool lost_share(const struct budget *budget, double *lost);	       /* recently, switching included; false likewise */
/* Adds a decode step of the current window, in which the levels are on, or off; or one that began while they were switched. */
void observe_within(struct budget *budget, bool on, double duration_ns);
void observe_switching(struct budget *budget, double duration_ns);
/*
 * Whether the current window has lasted long enough; if so, it is kept and the next one begins. `since_ns`: when the change that
 * began it was completed.
 */
bool is_window_over(struct budget *budget, bool on, u64 since_ns, u64 now_ns);

#endif

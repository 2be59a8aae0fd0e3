// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <string.h>

#include "budget.h"

#define WINDOW_STEPS 8
#define WINDOW_NS 250000000.0	  /* minimum of a window */
#define PATIENCE_NS 5000000000.0  /* after this, a window ends without that many steps, since decode pauses */
#define LOOK_AGAIN_NS 10000000000.0 /* how long levels that cost less than allowed stay on between two checks */
#define ON_WINDOWS 4		  /* minimum time off after each time on, in windows */
#define AIM 0.85		  /* target share of the allowed slowdown: levels go off only after their cost was measured */
#define LEAST_SHARE 0.1		  /* of the allowed slowdown that is left to the costly levels, whatever the rest takes */
#define OVERDRAWN 2.0		  /* times the allowed slowdown may be lost before levels that seemed cheap go off */
#define ASSUMED 1.0		  /* slowdown while on, before any measurement */
#define REMEMBERED 0.9		  /* share kept of the time lost and not lost so far, at each check */

static double larger(double a, double b)
{
	return a > b ? a : b;
}

bool slowdown_while_on(const struct budget *budget, double *slowdown)
{
	double ratios[KEPT_WINDOWS];
	struct numbers numbers = {ratios, 0, KEPT_WINDOWS};
	const struct window *before = NULL;

	for (int i = 0; i < budget->window_count; i++) {
		const struct window *window = &budget->windows[i];

		if (!window->step_ns)
			continue;
		if (before && before->on != window->on)
			ratios[numbers.count++] = window->on ? window->step_ns / before->step_ns : before->step_ns / window->step_ns;
		before = window;
	}
	*slowdown = median(&numbers) - 1;
	return numbers.count;
}

bool lost_share(const struct budget *budget, double *lost)
{
	const struct weight *with = &budget->with, *without = &budget->without;

	if (!without->count)
		return false;
	*lost = (with->time_ns + without->time_ns) / (without->time_ns / without->count * (with->count + without->count)) - 1;
	return true;
}

static void add_weight(struct weight *weight, double duration_ns)
{
	weight->count++;
	weight->time_ns += duration_ns;
}

static void decay_weight(struct weight *weight)
{
	weight->count *= REMEMBERED;
	weight->time_ns *= REMEMBERED;
}

void observe_within(struct budget *budget, bool on, double duration_ns)
{
	add_number(&budget->steps, duration_ns);
	add_weight(on ? &budget->with : &budget->without, duration_ns);
}

void observe_switching(struct budget *budget, double duration_ns)
{
	add_weight(&budget->with, duration_ns);
}

/* The part of the allowed slowdown that is left for the costly levels. */
static double room(const struct budget *budget)
{
	return larger(AIM * budget->allowed - budget->besides, LEAST_SHARE * budget->allowed);
}

static bool is_beyond(const struct budget *budget, double share)
{
	double lost;

	return lost_share(budget, &lost) && lost > share;
}

/* Required time off per time on: time lost = room x time not lost. */
static double off_per_on(const struct budget *budget)
{
	double slowdown, left = room(budget);

	if (!slowdown_while_on(budget, &slowdown))
		slowdown = ASSUMED;
	return slowdown / (1 + slowdown) * (1 + left) / left - 1;
}

/* Until the required time off is long enough to make switching worthwhile; a single disturbed window may have shown no cost. */
static bool may_stay(const struct budget *budget, double lasted)
{
	double off = off_per_on(budget), longest = LOOK_AGAIN_NS;

	if (is_beyond(budget, OVERDRAWN * room(budget)))
		return false;
	if (off > 0 && ON_WINDOWS * WINDOW_NS / off < longest)
		longest = ON_WINDOWS * WINDOW_NS / off;
	return lasted < longest;
}

static void end_window(struct budget *budget, bool on, bool enough)
{
	struct window window = {on, enough ? median(&budget->steps) : 0};

	if (budget->window_count == KEPT_WINDOWS)
		memmove(budget->windows, budget->windows + 1, --budget->window_count * sizeof(window));
	budget->windows[budget->window_count++] = window;
	budget->steps.count = 0;
	if (!on) {
		decay_weight(&budget->with);
		decay_weight(&budget->without);
	}
}

bool is_window_over(struct budget *budget, bool on, u64 since_ns, u64 now_ns)
{
	double lasted = (s64)(now_ns - since_ns);
	bool enough = budget->steps.count >= WINDOW_STEPS && lasted >= WINDOW_NS;

	if (lasted < PATIENCE_NS && !enough)
		return false;
	if (enough && (on ? may_stay(budget, lasted) : is_beyond(budget, room(budget))))
		return false;
	end_window(budget, on, enough);
	return true;
}

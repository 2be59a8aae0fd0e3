// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "speed.h"

#define NEEDED 5    /* minimum number of steps for a median */
#define MARGIN 1.1  /* factor by which decode must exceed the target before a level is restored */
#define HOLD_NS (2 * NS_PER_S)
#define LONGEST_HOLD_NS (256 * NS_PER_S)

static void add_latest(struct latest *latest, double value)
{
	latest->rows[latest->next] = value;
	latest->next = (latest->next + 1) % WINDOW;
	latest->count += latest->count < WINDOW;
}

static double median_of(const struct latest *latest)
{
	double rows[WINDOW];
	struct numbers numbers = {rows, latest->count, WINDOW};

	memcpy(rows, latest->rows, sizeof(rows));
	return median(&numbers);
}

void begin_controller(struct controller *controller, double min_tps)
{
	*controller = (struct controller){.min_tps = min_tps, .hold_ns = HOLD_NS};
}

void observe_duration(struct controller *controller, u64 duration_ns)
{
	add_latest(&controller->times, duration_ns);
}

double speed(const struct controller *controller)
{
	double typical = median_of(&controller->times);

	return controller->times.count < NEEDED ? 0 : NS_PER_S / (typical > 1 ? typical : 1);
}

/* The order of levels before anything has been measured. */
static int rank_of(const char *level)
{
	static const char *const costly[] = {"io", "sched", "operator", "expert", "qnn", "graph"};
	int rank = 0;

	while (rank < (int)(sizeof(costly) / sizeof(*costly)) && strcmp(costly[rank], level))
		rank++;
	return rank == sizeof(costly) / sizeof(*costly) ? 0 : rank;
}

static const char *costliest(const struct level_cost *on, int count)
{
	const struct level_cost *best = &on[0];

	for (int i = 1; i < count; i++)
		if (on[i].ns > best->ns || (on[i].ns == best->ns && rank_of(on[i].name) < rank_of(best->name)))
			best = &on[i];
	return best->name;
}

static bool is_among(const char *level, const struct level_cost *on, int count)
{
	for (int i = 0; level && i < count; i++)
		if (!strcmp(on[i].name, level))
			return true;
	return false;
}

static void note_change(struct controller *controller, struct change *change)
{
	change->tps = (s64)(change->tps * 1000 + 0.5) / 1000.0;
	controller->times.count = controller->times.next = 0;
	controller->good_since = 0;
}

static void shed_one(struct controller *controller, const struct level_cost *on, int count, struct change *change)
{
	bool has_failed = is_among(controller->trial, on, count);

	change->level = has_failed ? controller->trial : costliest(on, count);
	snprintf(change->why, sizeof(change->why), has_failed ? "decode fell below %g tokens/s when it came back"
							      : "decode below %g tokens/s; costliest level", controller->min_tps);
	if (has_failed)
		controller->hold_ns = 2 * controller->hold_ns < LONGEST_HOLD_NS ? 2 * controller->hold_ns : LONGEST_HOLD_NS;
	controller->trial = NULL;
	controller->off[controller->off_count++] = change->level;
	note_change(controller, change);
}

static void restore_one(struct controller *controller, struct change *change)
{
	change->level = controller->off[--controller->off_count];
	change->on = true;
	snprintf(change->why, sizeof(change->why), "decode above %g tokens/s for %g s", controller->min_tps * MARGIN,
		 (double)controller->hold_ns / NS_PER_S);
	controller->trial = change->level;
	controller->trial_ns = change->ts_ns;
	note_change(controller, change);
}

bool decide(struct controller *controller, u64 now_ns, const struct level_cost *on, int count, struct change *change)
{
	struct controller *c = controller;
	double tps = speed(c);

	*change = (struct change){.ts_ns = now_ns, .tps = tps};
	if (!tps)
		return false;
	if (c->trial && now_ns - c->trial_ns >= c->hold_ns && tps >= c->min_tps) {
		c->trial = NULL;
		c->hold_ns = HOLD_NS;
	}
	if (tps < c->min_tps) {
		c->good_since = 0;
		if (count && c->off_count < MOST_LEVELS)
			shed_one(c, on, count, change);
		return change->level;
	}
	if (tps < c->min_tps * MARGIN)
		c->good_since = 0;
	else if (!c->good_since)
		c->good_since = now_ns;
	if (!c->off_count || !c->good_since || now_ns - c->good_since < c->hold_ns)
		return false;
	restore_one(c, change);
	return true;
}

void begin_explanation(struct explanation *explanation, double min_tps)
{
	*explanation = (struct explanation){.min_tps = min_tps};
	begin_latency(&explanation->latency);
}

void observe_step(struct explanation *explanation, u32 context, int missed, double seconds, bool good)
{
	add_latest(&explanation->latest, seconds - beyond_typical(&explanation->latency, context, missed));
	if (good)
		learn_step(&explanation->latency, context, missed, seconds);
}

void forget_latest(struct explanation *explanation)
{
	explanation->latest.count = explanation->latest.next = 0;
}

bool explains_speed(const struct explanation *explanation)
{
	bool enough = explanation->latest.count >= NEEDED && explanation->latency.steps >= WINDOW;

	return enough && median_of(&explanation->latest) <= 1 / explanation->min_tps;
}

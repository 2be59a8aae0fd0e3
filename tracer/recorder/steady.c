// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Whether clocks, temperatures and power have settled while steps run: none of their means over a sixth of --steady-for leaves a
 * band around the mean of all six. analyzer/questions/steady.py says the same of recordings.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "recorder.h"

#define WINDOWS 6
#define MOST_ZONES 256
#define CLOCKS 0
#define POWER 1
#define ZONES 2
#define MOST (ZONES + MOST_ZONES)
#define RELATIVE 0.05 /* of clocks and power */
#define MILLIDEGREES 1000.0

static struct {
	double sum, means[WINDOWS];
	u32 count;
} signals[MOST];
static const struct choice *choice;
static u64 window_began, steps_seen, last_step_ns, reached_ns;
static double joules_before;
static u32 windows;

static void add(u32 signal, double value)
{
	signals[signal].sum += value;
	signals[signal].count++;
}

static void add_heat(u16 what, u16 number, s32 value)
{
	if (what == HEAT_KHZ)
		add(CLOCKS, value);
	else if (what == HEAT_ZONE && number < MOST_ZONES)
		add(ZONES + number, value);
}

static u64 window_ns(void)
{
	return choice->steady_for_s * NS_PER_S / WINDOWS;
}

static void end_window(u64 now)
{
	double joules = joules_read(), watts = (joules - joules_before) * NS_PER_S / (now - window_began);

	if (watts > 0)
		add(POWER, watts);
	for (int i = 0; i < MOST; i++) {
		signals[i].means[windows % WINDOWS] = signals[i].count ? signals[i].sum / signals[i].count : NAN;
		signals[i].sum = signals[i].count = 0;
	}
	joules_before = joules;
	window_began = now;
	windows++;
}

/* The number of windows in which it was read; `moves`: a mean is outside the band. */
static int windows_of(int signal, bool *moves)
{
	const double *means = signals[signal].means;
	double mean = 0, band;
	int known = 0;

	for (int i = 0; i < WINDOWS; i++) {
		known += !isnan(means[i]);
		mean += isnan(means[i]) ? 0 : means[i];
	}
	mean /= known ? known : 1;
	band = signal < ZONES ? RELATIVE * mean : MILLIDEGREES;
	for (int i = 0; i < WINDOWS; i++)
		*moves |= !isnan(means[i]) && fabs(means[i] - mean) > band;
	return known;
}

/* What is read at times only has not; what is never read is not watched. */
static bool have_settled(void)
{
	bool moves = false;
	int watched = 0;

	for (int i = 0; i < MOST; i++) {
		int known = windows_of(i, &moves);

		moves |= known && known < WINDOWS;
		watched += known > 0;
	}
	return watched && !moves;
}

static void forget_windows(u64 now)
{
	windows = 0;
	window_began = now;
	joules_before = joules_read();
	for (int i = 0; i < MOST; i++)
		signals[i].sum = signals[i].count = 0;
}

void steady_begin(const struct choice *given)
{
	choice = given;
}

void steady_turn(u64 steps)
{
	u64 now = now_ns();

	if (!choice->until_steady_s || reached_ns)
		return;
	if (steps > steps_seen)
		last_step_ns = now;
	steps_seen = steps;
	if (!window_began || now - last_step_ns > choice->steady_for_s * NS_PER_S / 2) { /* a machine at rest is another state */
		forget_windows(now);
		return;
	}
	each_heat(add_heat);
	if (now - window_began < window_ns())
		return;
	end_window(now);
	if (windows >= WINDOWS && have_settled())
		reached_ns = now;
}

bool is_steady(void)
{
	return reached_ns;
}

/* null if nobody asked */
json_t *steady_found(u32 commands)
{
	return choice->until_steady_s ? json_pack("{sf sf sI si}", "limit_s", choice->until_steady_s, "for_s", choice->steady_for_s, "reached_ns",
						  (json_int_t)reached_ns, "commands", (int)commands)
				      : json_null();
}

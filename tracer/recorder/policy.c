// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdlib.h>
#include <string.h>

#include "budget.h"
#include "policy.h"
#include "slow_steps.h"
#include "switching.h"

#define WATCHFUL_NS (NS_PER_S / 4)    /* most between two turns with a policy ... */
#define SWITCHING_NS (NS_PER_S / 200) /* ... and while levels are switched */

static const struct choice *choice;
static struct controller controller;
static struct explanation explanation;
static struct budget budget;
static const char *costly[MOST_LEVELS]; /* that --max-overhead switches, sorted */
static int costly_count;
static u64 sampling_ns, looked_ns; /* when sampling began, and last looked at the cost of the rest */
static double looked_spent;
static struct level_cost spent_before[MOST_LEVELS];

static bool is_one_of(const char *level, const char *const *names)
{
	while (*names && strcmp(*names, level))
		names++;
	return *names;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

void policy_begin(const struct choice *chosen)
{
	static const char *const cheap[] = {"token", "graph", "process", "heat", NULL}; /* always on */
	size_t index;
	json_t *level;

	choice = chosen;
	begin_controller(&controller, choice->min_tps);
	begin_explanation(&explanation, choice->min_tps);
	budget.allowed = choice->max_overhead;
	json_array_foreach(json_object_get(choice->plan, "levels"), index, level) {
		if (!is_one_of(json_string_value(level), cheap) && costly_count < MOST_LEVELS)
			costly[costly_count++] = json_string_value(level);
	}
	if (choice->stacks_hz && costly_count < MOST_LEVELS)
		costly[costly_count++] = STACKS_LEVEL;
	qsort(costly, costly_count, sizeof(*costly), by_name);
}

u64 policy_due_ns(void)
{
	if (is_switching())
		return now_ns() + SWITCHING_NS;
	return choice->min_tps || choice->max_overhead || choice->only_slower_s ? now_ns() + WATCHFUL_NS : UINT64_MAX;
}

/* Calls `add` for one row of every attached program, with what it cost so far. */
static void each_program(void (*add)(json_t *row, struct spent spent, void *context), void *context)
{
	json_t *seen = json_object(), *row;

	for (int i = 0; (row = attached_row(i)); i++) {
		const char *program = text_of(row, "program");

		if (json_object_get(seen, program))
			continue;
		json_object_set_new(seen, program, json_true());
		add(row, spent_in(row), context);
	}
	json_decref(seen);
}

struct seen {
	double ns;
	json_t *hits;
};

static void add_probe(json_t *row, struct spent spent, void *context)
{
	struct seen *seen = context;

	if (!strcmp(text_of(row, "engine"), "kernel"))
		return;
	seen->ns += spent.trap + spent.inside;
	json_object_set_new(seen->hits, text_of(row, "program"), json_integer(spent.hits));
}

/* For whoever shows progress: time in probes so far, ns, hits by program, and the levels that are on. */
void add_to_progress(json_t *progress)
{
	json_t *on = json_array(), *level;
	struct seen seen = {0, json_object()};
	size_t index;

	each_program(add_probe, &seen);
	json_array_foreach(json_object_get(choice->plan, "levels"), index, level) {
		if (!is_shed(json_string_value(level)))
			json_array_append(on, level);
	}
	json_object_update_new(progress, json_pack("{sI so so}", "probe_ns", (json_int_t)seen.ns, "hits", seen.hits, "levels", on));
}

/* --min-tps */

static void add_to_level(json_t *row, struct spent spent, void *levels)
{
	for (struct level_cost *each = levels; each->name; each++)
		if (!strcmp(each->name, text_of(row, "level")))
			each->ns += spent.inside + spent.trap;
}

/* ns spent so far in the probes of each level that may be shed, ended by one without a name; the guard itself needs the others. */
static int spent_by_level(struct level_cost *levels)
{
	static const char *const kept[] = {"token", "process", NULL};
	int count = 0;
	size_t index;
	json_t *level;

	json_array_foreach(json_object_get(choice->plan, "levels"), index, level) {
		if (!is_one_of(json_string_value(level), kept) && count < MOST_LEVELS - 1)
			levels[count++] = (struct level_cost){json_string_value(level), 0};
	}
	levels[count] = (struct level_cost){NULL, 0};
	each_program(add_to_level, levels);
	return count;
}

/* The levels that are on and cost something since the last change: shedding others gains nothing. */
static int recent_costs(struct level_cost *on)
{
	struct level_cost levels[MOST_LEVELS];
	int count = spent_by_level(levels), kept = 0;

	for (int i = 0; i < count; i++) {
		levels[i].ns -= spent_before[i].ns;
		if (levels[i].ns > 0 && !is_shed(levels[i].name))
			on[kept++] = levels[i];
	}
	return kept;
}

/* Whether a decode step ran to its end between two changes. */
static bool is_settled(const struct step *step)
{
	return step->decode && step->complete && step->begin_ns >= settled_ns();
}

static int observe_speed(const struct steps *steps)
{
	bool good, has_misses = !is_shed("expert"); /* without that level, a step cannot be explained */
	u64 latest = 0;
	int count = 0;

	for (int i = 0; i < steps->count; i++)
		if (is_settled(&steps->rows[i]))
			observe_duration(&controller, steps->rows[i].end_ns - steps->rows[i].begin_ns);
	good = speed(&controller) >= controller.min_tps;
	if (!has_misses)
		forget_latest(&explanation);
	for (int i = 0; i < steps->count; i++) {
		const struct step *step = &steps->rows[i];

		if (!is_settled(step))
			continue;
		count++;
		latest = step->begin_ns > latest ? step->begin_ns : latest;
		if (has_misses)
			observe_step(&explanation, step->position, misses_within(seen_misses(), step),
				     (double)(step->end_ns - step->begin_ns) / NS_PER_S, good);
	}
	forget_misses(seen_misses(), latest);
	return count;
}

static void guard_speed(void)
{
	struct level_cost on[MOST_LEVELS];
	struct change change;
	bool is_slow;
	int count;

	if (!observe_speed(finished_steps()))
		return;
	is_slow = speed(&controller) > 0 && speed(&controller) < controller.min_tps;
	count = is_slow ? recent_costs(on) : 0;
	if (count && explains_speed(&explanation)) {
		explanation.withheld++;
		return;
	}
	if (decide(&controller, now_ns(), on, count, &change)) {
		forget_latest(&explanation);
		begin_changes(&change, 1);
	}
}

/* --max-overhead */

static void add_cheap(json_t *row, struct spent spent, void *sum)
{
	for (int i = 0; i < costly_count; i++)
		if (!strcmp(costly[i], text_of(row, "level")))
			return;
	*(double *)sum += spent.trap_cold + (strcmp(text_of(row, "engine"), "kernel") ? spent.inside : 0);
}

/*
 * What the rest of the recording cost so far, ns: probes of cheap levels on the target's threads, and our CPU time. Both count in
 * full as delay of the engine: one thread hits these probes while the others wait for it, and an engine that uses all CPUs waits
 * for the thread that we displaced.
 */
static double spent_besides(void)
{
	double sum = cpu_s() * NS_PER_S;

	each_program(add_cheap, &sum);
	return sum;
}

static void switch_costly(u64 now, bool on)
{
	double typical = budget.windows[budget.window_count - 1].step_ns;
	struct change all[MOST_LEVELS];

	for (int i = 0; i < costly_count; i++) {
		all[i] = (struct change){.ts_ns = now, .level = costly[i], .on = on};
		all[i].tps = typical ? (s64)(NS_PER_S / typical * 1000 + 0.5) / 1000.0 : 0;
		snprintf(all[i].why, sizeof(all[i].why), "slowdown of at most %.0f%%", 100 * budget.allowed);
	}
	begin_changes(all, costly_count);
}

static void observe_cost(const struct steps *steps, bool on)
{
	for (int i = 0; i < steps->count; i++) {
		const struct step *step = &steps->rows[i];

		if (!is_switching() && is_settled(step))
			observe_within(&budget, on, step->end_ns - step->begin_ns);
		else if (step->decode && step->complete)
			observe_switching(&budget, step->end_ns - step->begin_ns);
	}
}

static void limit_cost(void)
{
	u64 now = now_ns();
	bool on = !is_shed(costly[0]);
	double spent;

	if (!sampling_ns) {
		sampling_ns = looked_ns = now;
		settle_now();
		looked_spent = spent_besides();
	}
	observe_cost(finished_steps(), on);
	if (is_switching() || !is_window_over(&budget, on, settled_ns(), now))
		return;
	spent = spent_besides();
	budget.besides = (spent - looked_spent) / (now - looked_ns);
	looked_ns = now;
	looked_spent = spent;
	switch_costly(now, !on);
}

/* Both */

void policy_turn(void)
{
	if (continue_switching() && choice->min_tps)
		spent_by_level(spent_before);
	if (choice->min_tps && !is_switching())
		guard_speed();
	if (choice->max_overhead && costly_count && !awaits_learning())
		limit_cost();
}

void policy_end(void)
{
	end_switching();
}

/* With as many digits as Python would read back unchanged. */
static json_t *number(bool is_known, double value)
{
	return is_known && value == value ? json_real(value) : json_null();
}

static json_t *level_changes(void)
{
	const struct changes *changes = changes_so_far();
	json_t *answer = json_array();

	for (int i = 0; i < changes->count; i++) {
		const struct change *c = &changes->rows[i];

		json_array_append_new(answer, json_pack("{sI ss sb sf ss so}", "ts_ns", (json_int_t)c->ts_ns, "level", c->level, "on", c->on,
							"tps", c->tps, "why", c->why, "done_ns",
							c->done_ns ? json_integer(c->done_ns) : json_null()));
	}
	return answer;
}

static double shortened(double value, const char *format)
{
	char text[40];

	snprintf(text, sizeof(text), format, value);
	return atof(text);
}

static json_t *step_latency(void)
{
	const struct latency *latency = &explanation.latency;
	struct latency_error error = latency_error(latency);
	double c[TERMS];

	if (!choice->min_tps)
		return json_null();
	for (int i = 0; i < TERMS; i++)
		c[i] = shortened(latency->coefficients[i], "%.6g");
	return json_pack("{si s{sf sf sf} s{sf so so so} sI}", "steps", latency->steps, "coefficients", "seconds", c[0],
			 "seconds_per_1000_tokens", c[1], "seconds_per_miss", c[2], "error", "steps", (double)error.steps, "median",
			 number(error.steps, shortened(error.median, "%.5f")), "p90", number(error.steps, shortened(error.p90, "%.5f")),
			 "bias", number(error.steps, shortened(error.bias, "%.5f")), "withheld", (json_int_t)explanation.withheld);
}

/* The share of the time since sampling began in which the costly levels were on. */
static double share_on(void)
{
	const struct changes *changes = changes_so_far();
	u64 since = sampling_ns, on = 0, now = now_ns();
	bool is_on = true;

	for (int i = 0; sampling_ns && i < changes->count; i++) {
		const struct change *c = &changes->rows[i];

		if (strcmp(c->level, costly[0]) || !c->done_ns)
			continue;
		on += is_on ? c->done_ns - since : 0;
		since = c->done_ns;
		is_on = !is_on;
	}
	return sampling_ns ? (double)(on + (is_on ? now - since : 0)) / (now - sampling_ns) : 0;
}

static json_t *sampling(void)
{
	double slowdown, lost = 0;
	bool has_slowdown = slowdown_while_on(&budget, &slowdown), has_lost = lost_share(&budget, &lost);

	if (!choice->max_overhead)
		return json_null();
	return json_pack("{sf so so sf sf}", "allowed", budget.allowed, "slowdown", number(has_lost, lost), "slowdown_while_on",
			 number(has_slowdown, slowdown), "share_on", share_on(), "besides", budget.besides);
}

static json_t *dropped(void)
{
	const struct sieve *s = sieve();
	json_t *records = json_object(), *layout;
	const char *name;

	if (!s)
		return json_null();
	json_object_foreach(json_object_get(choice->plan, "layouts"), name, layout) {
		u64 count = s->dropped[number_of(layout, "kind") & 255];

		if (count)
			json_object_set_new(records, name, json_integer(count));
	}
	return json_pack("{sI sI sI so}", "slower_than_ns", (json_int_t)s->limit_ns, "tokens", (json_int_t)s->fast_count, "token_ns",
			 (json_int_t)s->fast_ns, "records", records);
}

json_t *policies(void)
{
	return json_pack("{so so so so}", "level_changes", level_changes(), "sampling", sampling(), "step_latency", step_latency(),
			 "dropped", dropped());
}

/* The recorder's small policies behind plain calls: tests compare them with models and with Python's. */
#include <stdlib.h>

#include "budget.h"
#include "slow_steps.h"
#include "speed.h"

struct filter {
	struct step_tracker steps;
	struct sieve sieve;
	const u8 *kept[STREAMS];
	size_t bytes[STREAMS];
};

struct filter *new_filter(u64 limit_ns, u64 most_bytes)
{
	struct filter *filter = calloc(1, sizeof(*filter));

	begin_sieve(&filter->sieve, &filter->steps, limit_ns, most_bytes);
	return filter;
}

void free_filter(struct filter *filter)
{
	struct sieve *s = &filter->sieve;

	for (int i = 0; i < STREAMS; i++) {
		free(s->streams[i].held.rows);
		free(s->streams[i].fresh.rows);
		free(s->streams[i].kept.rows);
	}
	free(s->slow.rows);
	free(s->undecided.rows);
	free(s->slow_spans.rows);
	free(s->undecided_spans.rows);
	free(filter->steps.finished.rows);
	free(filter->steps.open.rows);
	free(filter->steps.waiting.rows);
	free(filter);
}

/* A turn of the drain, as in tracer/recorder/drain.c. */
void turn_filter(struct filter *filter, const u8 *const *batches, const size_t *bytes, u64 until_ns, bool last)
{
	static const size_t widths[STREAMS] = {EVENT_SLOT, DETAIL_SLOT};

	read_steps(&filter->steps, batches[0], bytes[0], until_ns);
	learn_steps(&filter->sieve, until_ns, last);
	for (int i = 0; i < STREAMS; i++) {
		filter->bytes[i] = bytes[i];
		filter->kept[i] = slow_slots(&filter->sieve, i, widths[i], batches[i], &filter->bytes[i]);
	}
}

const u8 *kept_of(struct filter *filter, int stream, size_t *bytes)
{
	*bytes = filter->bytes[stream];
	return filter->kept[stream];
}

u64 held_in(struct filter *filter)
{
	return held_bytes(&filter->sieve);
}

u64 fast_steps(struct filter *filter)
{
	return filter->sieve.fast_count;
}

u64 dropped_of(struct filter *filter, int kind)
{
	return filter->sieve.dropped[kind];
}

int count_misses(const u8 *events, size_t bytes, u32 pid, u64 begin_ns, u64 end_ns)
{
	struct step step = {.pid = pid, .begin_ns = begin_ns, .end_ns = end_ns};
	struct misses misses = {0};
	int count;

	read_misses(&misses, events, bytes);
	count = misses_within(&misses, &step);
	free(misses.rows);
	return count;
}

struct controller *new_controller(double min_tps)
{
	struct controller *controller = malloc(sizeof(*controller));

	begin_controller(controller, min_tps);
	return controller;
}

u64 hold_of(const struct controller *controller)
{
	return controller->hold_ns;
}

struct explanation *new_explanation(double min_tps)
{
	struct explanation *explanation = malloc(sizeof(*explanation));

	begin_explanation(explanation, min_tps);
	return explanation;
}

double coefficient_of(const struct explanation *explanation, int term)
{
	return explanation->latency.coefficients[term];
}

struct latency_error error_of(const struct explanation *explanation)
{
	return latency_error(&explanation->latency);
}

struct budget *new_budget(double allowed, double besides)
{
	struct budget *budget = calloc(1, sizeof(*budget));

	budget->allowed = allowed;
	budget->besides = besides;
	return budget;
}

const struct window *windows_of(const struct budget *budget, int *count)
{
	*count = budget->window_count;
	return budget->windows;
}

void observe_all(struct budget *budget, bool switching, bool on, const double *durations_ns, int count)
{
	for (int i = 0; i < count; i++) {
		if (switching)
			observe_switching(budget, durations_ns[i]);
		else
			observe_within(budget, on, durations_ns[i]);
	}
}

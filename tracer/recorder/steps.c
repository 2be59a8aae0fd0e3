// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdlib.h>
#include <string.h>

#include "growing.h"
#include "steps.h"

#define NO_POSITION 0xFFFFFFFFu
#define MOST_MISSES 100000 /* remembered if no step ends */

bool is_decode(const struct header *begin)
{
	const struct rec_token_begin *r = (const void *)begin;

	return r->phase == PHASE_DECODE || (r->phase == PHASE_UNKNOWN && r->n_tokens <= 1);
}

static void note_mark(struct step_tracker *tracker, const struct header *h)
{
	struct mark *mark = ADD(&tracker->waiting);

	*mark = (struct mark){.ts = h->ts, .kind = h->kind, .order = tracker->waiting.count};
	mark->step = (struct step){.pid = h->pid, .tid = h->tid, .engine = h->engine, .begin_ns = h->ts};
	if (h->kind == KIND_TOKEN_BEGIN) {
		const struct rec_token_begin *r = (const void *)h;

		mark->step.position = r->position == NO_POSITION ? 0 : r->position;
		mark->step.decode = is_decode(h);
	}
}

static int by_time(const void *a, const void *b)
{
	const struct mark *first = a, *second = b;

	if (first->ts != second->ts)
		return first->ts > second->ts ? 1 : -1;
	return (first->order > second->order) - (first->order < second->order);
}

/* Ends the steps that a mark ends: its thread's of its engine, or of every engine if the thread is gone. */
static void end_steps(struct step_tracker *tracker, const struct mark *mark)
{
	struct steps *open = &tracker->open;

	for (int i = 0; i < open->count; i++) {
		struct step *step = &open->rows[i];

		if (step->tid != mark->step.tid || (mark->kind != KIND_TASK_EXIT && step->engine != mark->step.engine))
			continue;
		step->end_ns = mark->ts;
		step->complete = mark->kind == KIND_TOKEN_END;
		*ADD(&tracker->finished) = *step;
		*step = open->rows[--open->count];
		i--;
	}
}

void read_steps(struct step_tracker *tracker, const u8 *events, size_t bytes, u64 until_ns)
{
	struct marks *waiting = &tracker->waiting;
	int due = 0;

	tracker->finished.count = 0;
	for (size_t at = 0; at < bytes; at += EVENT_SLOT) {
		u16 kind = header_of(events + at)->kind;

		if (kind == KIND_TOKEN_BEGIN || kind == KIND_TOKEN_END || kind == KIND_TASK_EXIT)
			note_mark(tracker, header_of(events + at));
	}
	if (!waiting->count)
		return;
	qsort(waiting->rows, waiting->count, sizeof(*waiting->rows), by_time);
	for (; due < waiting->count && waiting->rows[due].ts <= until_ns; due++) {
		end_steps(tracker, &waiting->rows[due]);
		if (waiting->rows[due].kind == KIND_TOKEN_BEGIN)
			*ADD(&tracker->open) = waiting->rows[due].step;
	}
	waiting->count -= due;
	memmove(waiting->rows, waiting->rows + due, waiting->count * sizeof(*waiting->rows));
	for (int i = 0; i < waiting->count; i++)
		waiting->rows[i].order = i;
}

void read_misses(struct misses *misses, const u8 *events, size_t bytes)
{
	for (size_t at = 0; at < bytes; at += EVENT_SLOT) {
		const struct rec_expert_begin *r = (const void *)header_of(events + at);

		if (r->h.kind != KIND_EXPERT_BEGIN || r->cache != CACHE_MISS)
			continue;
		if (misses->count == MOST_MISSES) {
			misses->count = MOST_MISSES / 2;
			memmove(misses->rows, misses->rows + MOST_MISSES / 2, misses->count * sizeof(*misses->rows));
		}
		*ADD(misses) = (struct miss){r->h.ts, r->h.pid};
	}
}

int misses_within(const struct misses *misses, const struct step *step)
{
	int count = 0;

	for (int i = 0; i < misses->count; i++) {
		const struct miss *miss = &misses->rows[i];

		count += miss->pid == step->pid && miss->ts >= step->begin_ns && miss->ts <= step->end_ns;
	}
	return count;
}

void forget_misses(struct misses *misses, u64 before_ns)
{
	int kept = 0;

	for (int i = 0; i < misses->count; i++)
		if (misses->rows[i].ts >= before_ns)
			misses->rows[kept++] = misses->rows[i];
	misses->count = kept;
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdlib.h>
#include <string.h>

#include "growing.h"
#include "slow_steps.h"

#define MEMORY_NS NS_PER_S /* how long a slow step is remembered, for records that arrive late */
#define NEVER UINT64_MAX
#define OF_KERNEL 0ULL /* keys of spans: any process's steps, a process's, and a thread's of one engine */
#define OF_PROCESS (1ULL << 62)
#define OF_THREAD (1ULL << 63)

static const bool structural[256] = {
	[KIND_TENSOR] = true,  [KIND_NODE] = true,	[KIND_QNN_OBJECT] = true, [KIND_QNN_TABLE] = true,    [KIND_API_TABLE] = true,
	[KIND_SESSION] = true, [KIND_IO_FILE] = true,	[KIND_LIBRARY] = true,	  [KIND_TASK_FORK] = true,    [KIND_TASK_EXIT] = true,
	[KIND_HEAT] = true,    [KIND_TASK_EXEC] = true, [KIND_QNN_LOG] = true,	  [KIND_QNN_CALLBACK] = true, [KIND_QNN_READER] = true,
	[KIND_SITE] = true,
};

void begin_sieve(struct sieve *sieve, struct step_tracker *source, u64 limit_ns, u64 most_bytes)
{
	sieve->source = source;
	sieve->limit_ns = limit_ns;
	sieve->most_bytes = most_bytes;
}

static void append(struct slots *slots, const u8 *slot, size_t width)
{
	slots->rows = with_room(slots->rows, &slots->room, slots->count + width, 1);
	memmove(slots->rows + slots->count, slot, width); /* it may stand there already */
	slots->count += width;
}

static u64 thread_key(u32 tid, u8 engine)
{
	return OF_THREAD | (u64)tid << 8 | engine;
}

static int by_key(const void *a, const void *b)
{
	const struct span *first = a, *second = b;

	if (first->key != second->key)
		return first->key > second->key ? 1 : -1;
	return (first->begin > second->begin) - (first->begin < second->begin);
}

/* The record that ended an incomplete step is not the step's own. */
static void lay_out(struct spans *spans, const struct steps *steps)
{
	spans->count = 0;
	for (int i = 0; i < steps->count; i++) {
		const struct step *s = &steps->rows[i];
		u64 own_end = s->end_ns - (!s->complete && s->end_ns != NEVER);

		*ADD(spans) = (struct span){OF_KERNEL, s->begin_ns, s->end_ns};
		*ADD(spans) = (struct span){OF_PROCESS | s->pid, s->begin_ns, s->end_ns};
		*ADD(spans) = (struct span){thread_key(s->tid, s->engine), s->begin_ns, own_end};
	}
	if (spans->count)
		qsort(spans->rows, spans->count, sizeof(*spans->rows), by_key);
	for (int i = 1; i < spans->count; i++) {
		struct span *before = &spans->rows[i - 1], *span = &spans->rows[i];

		if (before->key == span->key && before->end > span->end)
			span->end = before->end;
	}
}

static bool covers(const struct spans *spans, u64 key, u64 ts)
{
	int low = 0, high = spans->count; /* the first span that begins later is in between */

	while (low < high) {
		int middle = (low + high) / 2;
		const struct span *span = &spans->rows[middle];

		if (span->key > key || (span->key == key && span->begin > ts))
			high = middle;
		else
			low = middle + 1;
	}
	return low && spans->rows[low - 1].key == key && ts <= spans->rows[low - 1].end;
}

/* The finished steps: slow or fast. */
static void judge_finished(struct sieve *sieve)
{
	const struct steps *done = &sieve->source->finished;

	for (int i = 0; i < done->count; i++) {
		const struct step *step = &done->rows[i];

		if (step->end_ns - step->begin_ns > sieve->limit_ns || step->forced) {
			*ADD(&sieve->slow) = *step;
			continue;
		}
		sieve->fast_count++;
		sieve->fast_ns += step->end_ns - step->begin_ns;
	}
}

/* Whether an open step is slow already. */
static bool is_late(const struct sieve *sieve, const struct step *step)
{
	return sieve->until_ns - step->begin_ns > sieve->limit_ns || step->forced;
}

/* The open steps: slow already, or undecided; at the end, fast. Returns whether one is slow. */
static bool judge_open(struct sieve *sieve, bool last)
{
	const struct steps *open = &sieve->source->open;
	bool is_any_late = false;

	sieve->undecided.count = 0;
	for (int i = 0; i < open->count; i++) {
		struct step step = open->rows[i];
		bool late = is_late(sieve, &step);

		step.end_ns = NEVER;
		is_any_late |= late;
		if (late)
			*ADD(&sieve->slow) = step;
		else if (last)
			sieve->fast_count++;
		else
			*ADD(&sieve->undecided) = step;
	}
	return is_any_late;
}

/* Forgets slow steps to which no record can belong any more, and those that were open, which are judged anew. */
static void forget_slow(struct sieve *sieve)
{
	const struct steps *open = &sieve->source->open;
	u64 oldest = sieve->until_ns;
	int kept = 0;

	for (int i = 0; i < open->count; i++)
		if (!is_late(sieve, &open->rows[i]) && open->rows[i].begin_ns < oldest)
			oldest = open->rows[i].begin_ns;
	for (int i = 0; i < sieve->slow.count; i++) {
		const struct step *step = &sieve->slow.rows[i];

		if (step->end_ns != NEVER && step->end_ns + MEMORY_NS >= oldest)
			sieve->slow.rows[kept++] = *step;
	}
	sieve->slow.count = kept;
}

void learn_steps(struct sieve *sieve, u64 until_ns, bool last)
{
	sieve->until_ns = until_ns;
	forget_slow(sieve);
	judge_finished(sieve);
	if (judge_open(sieve, last) || sieve->source->finished.count || last)
		sieve->rounds++;
	lay_out(&sieve->slow_spans, &sieve->slow);
	lay_out(&sieve->undecided_spans, &sieve->undecided);
}

/* Keeps a record, holds it back, or counts it. */
static void judge(struct sieve *sieve, struct stream *stream, const u8 *slot, size_t width)
{
	const struct header *h = header_of(slot);
	bool is_own = h->kind == KIND_TOKEN_BEGIN || h->kind == KIND_TOKEN_END;
	u64 key = is_own ? thread_key(h->tid, h->engine) : h->engine == ENGINE_KERNEL ? OF_KERNEL : OF_PROCESS | h->pid;

	if (structural[h->kind & 255] || covers(&sieve->slow_spans, key, h->ts))
		append(&stream->kept, slot, width);
	else if (covers(&sieve->undecided_spans, key, h->ts))
		append(&stream->held, slot, width);
	else
		sieve->dropped[h->kind & 255]++;
}

/* Judges the held records again; those still undecided stay, in place. */
static void judge_held(struct sieve *sieve, struct stream *stream, size_t width)
{
	int count = stream->held.count;

	stream->judged = sieve->rounds;
	stream->held.count = 0;
	for (int at = 0; at < count; at += width)
		judge(sieve, stream, stream->held.rows + at, width);
}

u64 held_bytes(const struct sieve *sieve)
{
	u64 sum = 0;

	for (int i = 0; i < STREAMS; i++)
		sum += sieve->streams[i].held.count;
	return sum;
}

/* Has the open steps kept. */
static void force(struct sieve *sieve)
{
	for (int i = 0; i < sieve->source->open.count; i++)
		sieve->source->open.rows[i].forced = true;
	for (int i = 0; i < sieve->undecided.count; i++)
		*ADD(&sieve->slow) = sieve->undecided.rows[i];
	sieve->undecided.count = sieve->undecided_spans.count = 0;
	lay_out(&sieve->slow_spans, &sieve->slow);
	sieve->rounds++;
}

const u8 *slow_slots(struct sieve *sieve, int number, size_t width, const u8 *first, size_t *bytes)
{
	struct stream *stream = &sieve->streams[number];
	int fresh = stream->fresh.count;

	stream->kept.count = stream->fresh.count = 0;
	if (stream->judged != sieve->rounds)
		judge_held(sieve, stream, width);
	for (int at = 0; at < fresh; at += width) {
		u8 *slot = stream->fresh.rows + at;

		if (header_of(slot)->ts <= sieve->until_ns)
			judge(sieve, stream, slot, width);
		else
			append(&stream->fresh, slot, width);
	}
	for (size_t at = 0; at < *bytes; at += width) {
		if (header_of(first + at)->ts <= sieve->until_ns)
			judge(sieve, stream, first + at, width);
		else
			append(&stream->fresh, first + at, width);
	}
	if (held_bytes(sieve) > sieve->most_bytes) {
		force(sieve);
		judge_held(sieve, stream, width);
	}
	*bytes = stream->kept.count;
	return stream->kept.rows;
}

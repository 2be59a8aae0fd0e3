// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* BigMoeOnEdge: look-ups and evictions of its expert cache, and reads of an expert's matrices by several threads. */

#define CALL_BIGMOE_READ 246
#define CALL_BIGMOE_LOOKUP 247
#define CALL_BIGMOE_EVICT 248
#define UNKNOWN_SIZE (~0ULL)

/* What a read is for, since version 0.19.0: own definition after its expert_stream_source.h. */
struct bigmoe_job {
	u64 to;
	u64 offset;
	u64 bytes;
	s32 ready_flag;
	short file;
	s32 expert;
	short layer;
	signed char matrix;
	u8 ahead; /* by a guess, before a layer asked for it */
};

/* ExpertStreamSource::read_slice(this, lane, job) */
UPROBE(bigmoe_read_begin)
{
	struct bigmoe_job job;
	RECORD(rec_load_begin, r);

	if (bpf_probe_read_user(&job, sizeof(job), (void *)ARG3(ctx)) || !job.bytes)
		return 0;
	keep_args(CALL_BIGMOE_READ, job.layer, job.expert, job.bytes, 0);
	if (!reserve(r, KIND_LOAD_BEGIN, ENGINE_BIGMOEONEDGE))
		return 0;
	r->layer = job.layer;
	r->expert = job.expert;
	r->bytes = job.bytes;
	r->reason = job.ahead ? LOAD_PREFETCH : LOAD_DEMAND;
	r->matrix = 1 + job.matrix;
	r->backend = BACKEND_CPU;
	r->address = job.to;
	submit(ctx, r);
	return 0;
}

UPROBE(bigmoe_read_end)
{
	struct call_args job;

	if (!take_args(CALL_BIGMOE_READ, &job))
		return 0;
	return cache_change(ctx, ENGINE_BIGMOEONEDGE, KIND_LOAD_END, job.arg[0], job.arg[1], job.arg[2], UNKNOWN_SIZE, 0);
}

/* ExpertStreamSource::touch_entry(this, layer, expert, bool *hit, ...): a missing expert is read at once. */
UPROBE(bigmoe_lookup_begin)
{
	keep_args(CALL_BIGMOE_LOOKUP, ARG2(ctx), ARG3(ctx), ARG4(ctx), 0);
	return 0;
}

UPROBE(bigmoe_lookup_end)
{
	struct call_args asked;
	u8 hit = 0;
	RECORD(rec_cache_hit, r);

	if (!take_args(CALL_BIGMOE_LOOKUP, &asked) || bpf_probe_read_user(&hit, sizeof(hit), (void *)asked.arg[2]) || !hit)
		return 0;
	if (!reserve(r, KIND_CACHE_HIT, ENGINE_BIGMOEONEDGE))
		return 0;
	r->layer = asked.arg[0];
	r->expert = asked.arg[1];
	submit(ctx, r);
	return 0;
}

/* ExpertStreamSource::evict_tail(this), which gives up the pages of the expert's matrices by pio::vm_evict(address, bytes) */
UPROBE(bigmoe_evict_begin)
{
	keep_args(CALL_BIGMOE_EVICT, 0, 0, 0, 0);
	return 0;
}

UPROBE(bigmoe_evict_pages)
{
	struct call_args known;

	if (take_args(CALL_BIGMOE_EVICT, &known))
		keep_args(CALL_BIGMOE_EVICT, ARG1(ctx), 0, 0, 0);
	return 0;
}

UPROBE(bigmoe_evict_end)
{
	struct call_args known;

	if (!take_args(CALL_BIGMOE_EVICT, &known))
		return 0;
	return cache_change(ctx, ENGINE_BIGMOEONEDGE, KIND_EVICT, -1, -1, UNKNOWN_SIZE, UNKNOWN_SIZE, known.arg[0]);
}

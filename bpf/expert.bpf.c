// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Experts: the router's choices, experts' runs, and the expert cache's loads and evictions. */

/* moescope:expert__begin(layer, expert, n_tokens, cache, backend, tier) */
UPROBE(moescope_expert_begin)
{
	RECORD(rec_expert_begin, r);

	if (!reserve(r, KIND_EXPERT_BEGIN, ENGINE_MOESCOPE))
		return 0;
	r->layer = ARG1(ctx);
	r->expert = ARG2(ctx);
	r->n_tokens = ARG3(ctx);
	r->cache = ARG4(ctx);
	r->backend = ARG5(ctx);
	r->tier = ARG6(ctx);
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	submit(ctx, r);
	return 0;
}

/* moescope:expert__end(layer, expert) */
UPROBE(moescope_expert_end)
{
	RECORD(rec_expert_end, r);

	if (!reserve(r, KIND_EXPERT_END, ENGINE_MOESCOPE))
		return 0;
	r->layer = ARG1(ctx);
	r->expert = ARG2(ctx);
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

/* moescope:load__begin(layer, expert, bytes, reason, backend) */
UPROBE(moescope_load_begin)
{
	RECORD(rec_load_begin, r);

	if (!reserve(r, KIND_LOAD_BEGIN, ENGINE_MOESCOPE))
		return 0;
	r->layer = ARG1(ctx);
	r->expert = ARG2(ctx);
	r->bytes = ARG3(ctx);
	r->reason = ARG4(ctx);
	r->backend = ARG5(ctx);
	r->matrix = 0;
	r->address = 0;
	submit(ctx, r);
	return 0;
}

/* The end of a load and an eviction: records with the same layout. */
static INLINE int cache_change(void *ctx, u8 engine, u16 kind, s32 layer, s32 expert, u64 bytes, u64 resident, u64 address)
{
	RECORD(rec_evict, r);

	if (!reserve(r, kind, engine))
		return 0;
	r->layer = layer;
	r->expert = expert;
	r->bytes = bytes;
	r->resident = resident;
	r->address = address;
	submit(ctx, r);
	return 0;
}

/* moescope:load__end and moescope:evict (layer, expert, bytes, resident bytes) */
UPROBE(moescope_load_end)
{
	return cache_change(ctx, ENGINE_MOESCOPE, KIND_LOAD_END, ARG1(ctx), ARG2(ctx), ARG3(ctx), ARG4(ctx), 0);
}

UPROBE(moescope_evict)
{
	return cache_change(ctx, ENGINE_MOESCOPE, KIND_EVICT, ARG1(ctx), ARG2(ctx), ARG3(ctx), ARG4(ctx), 0);
}

#define MAX_ROUTE_PARTS 128 /* 4096 choices: 512 tokens of top-8 */

static INLINE void fill_route(struct rec_route *r, u64 tensor, s32 layer, u32 n_tokens, u32 k, u32 first, u32 has_weights)
{
	u32 left = n_tokens * k - first;

	r->tensor = tensor;
	r->layer = layer;
	r->n_tokens = n_tokens;
	r->k = k;
	r->first = first;
	r->count = left < ROUTE_SLOTS ? left : ROUTE_SLOTS;
	r->has_weights = has_weights;
}

/* moescope:route(layer, n_tokens, k, u16 experts[n_tokens * k], float weights[n_tokens * k]) */
UPROBE(moescope_route)
{
	u32 n_tokens = ARG2(ctx), k = ARG3(ctx);
	u64 experts = ARG4(ctx), weights = ARG5(ctx);
	s32 layer = ARG1(ctx);

	for (u32 part = 0; part < MAX_ROUTE_PARTS; part++) {
		u32 first = part * ROUTE_SLOTS;
		RECORD(rec_route, r);
		u64 count;

		if (first >= n_tokens * k)
			return 0;
		if (!reserve(r, KIND_ROUTE, ENGINE_MOESCOPE))
			return 0;
		fill_route(r, 0, layer, n_tokens, k, first, weights != 0);
		count = BOUNDED(r->count, ROUTE_SLOTS);
		bpf_probe_read_user(r->experts, count * 2, (void *)(experts + 2ULL * first));
		bpf_probe_read_user(r->weights, count * 4, (void *)(weights + 4ULL * first));
		submit(ctx, r);
	}
	if (n_tokens * k > MAX_ROUTE_PARTS * ROUTE_SLOTS)
		count_loss(KIND_ROUTE);
	return 0;
}

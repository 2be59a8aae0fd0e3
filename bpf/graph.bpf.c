// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Graphs: the units of work that an engine passes to a backend. */

static INLINE int graph_begin_at(void *ctx, u8 engine, u64 handle, u32 type, u32 backend, u32 n_tokens, u64 began)
{
	RECORD(rec_graph_begin, r);

	if (!reserve(r, KIND_GRAPH_BEGIN, engine))
		return 0;
	if (began)
		r->h.ts = began;
	r->handle = handle;
	r->type = type;
	r->layer = r->expert = -1;
	r->backend = backend;
	r->n_tokens = n_tokens;
	r->tier = 0;
	submit(ctx, r);
	return 0;
}

static INLINE int graph_begin(void *ctx, u8 engine, u64 handle, u32 type, u32 backend, u32 n_tokens)
{
	return graph_begin_at(ctx, engine, handle, type, backend, n_tokens, 0);
}

static INLINE int graph_end_at(void *ctx, u8 engine, u64 handle, s64 status, u64 ended)
{
	RECORD(rec_graph_end, r);

	if (!reserve(r, KIND_GRAPH_END, engine))
		return 0;
	ended_at(&r->h, ended);
	r->handle = handle;
	r->status = status;
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

static INLINE int graph_end(void *ctx, u8 engine, u64 handle, s64 status)
{
	return graph_end_at(ctx, engine, handle, status, UNTOLD);
}

/* moescope:graph__begin(handle, kind, layer, expert, backend, tier << 32 | n_tokens) */
UPROBE(moescope_graph_begin)
{
	RECORD(rec_graph_begin, r);

	if (!reserve(r, KIND_GRAPH_BEGIN, ENGINE_MOESCOPE))
		return 0;
	r->handle = ARG1(ctx);
	r->type = ARG2(ctx);
	r->layer = ARG3(ctx);
	r->expert = ARG4(ctx);
	r->backend = ARG5(ctx);
	r->n_tokens = (u32)ARG6(ctx);
	r->tier = ARG6(ctx) >> 32;
	submit(ctx, r);
	return 0;
}

/* moescope:graph__end(handle, status, ended_ns) */
UPROBE(moescope_graph_end)
{
	return graph_end_at(ctx, ENGINE_MOESCOPE, ARG1(ctx), ARG2(ctx), ARG3(ctx));
}

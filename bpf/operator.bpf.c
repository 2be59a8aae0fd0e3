// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Operators: begin on every thread, the wait at the barrier, if any, and each tensor's structure once. */

static INLINE int op_begin_at(void *ctx, u8 engine, u64 tensor, u32 type, s32 layer, u32 n_tokens, u64 began)
{
	RECORD(rec_op_begin, r);
	u64 ts;

	if (!reserve(r, KIND_OP_BEGIN, engine))
		return 0;
	if (began)
		r->h.ts = began;
	r->tensor = tensor;
	r->type = type;
	r->layer = layer;
	r->n_tokens = n_tokens;
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad = 0;
	ts = r->h.ts;
	submit(ctx, r);
	send_pmc(ctx, ts);
	return 0;
}

static INLINE int op_begin(void *ctx, u8 engine, u64 tensor, u32 type, s32 layer, u32 n_tokens)
{
	return op_begin_at(ctx, engine, tensor, type, layer, n_tokens, 0);
}

#define MAX_SOURCE_PARTS 16

static INLINE void send_sources(void *ctx, u64 tensor, u32 type, u64 sources, u32 n_sources)
{
	for (u32 part = 0; part < MAX_SOURCE_PARTS; part++) {
		u32 first = part * MAX_SOURCES;
		RECORD(rec_tensor, r);

		if (first >= n_sources && part)
			break;
		if (!reserve(r, KIND_TENSOR, ENGINE_MOESCOPE))
			break;
		r->tensor = tensor;
		r->type = type;
		r->dtype = 0;
		r->ne[0] = r->ne[1] = r->ne[2] = r->ne[3] = 0;
		r->bytes = 0;
		r->first = first;
		r->n_sources = n_sources;
		r->name[0] = 0;
		for (u32 i = 0; i < MAX_SOURCES; i++) {
			r->sources[i] = 0;
			if (first + i < n_sources)
				bpf_probe_read_user(&r->sources[i], 8, (void *)(sources + 8ULL * (first + i)));
		}
		submit(ctx, r);
	}
}

#define SIGNED_SOURCES 32

/* Signature of a list of sources: its length and its first entries. */
static INLINE u64 sources_signature(u64 sources, u32 n_sources)
{
	u64 signature = n_sources;

	for (u32 i = 0; i < SIGNED_SOURCES; i++) {
		u64 source = 0;

		if (i >= n_sources)
			break;
		bpf_probe_read_user(&source, sizeof(source), (void *)(sources + 8ULL * i));
		signature = signature * 31 + source;
	}
	return signature;
}

/* moescope:op__begin(type, layer, n_tokens, result, sources, n_sources) */
UPROBE(moescope_op_begin)
{
	u64 result = ARG4(ctx), sources = ARG5(ctx);
	u32 n_sources = ARG6(ctx);

	op_begin(ctx, ENGINE_MOESCOPE, result, ARG1(ctx), ARG2(ctx), ARG3(ctx));
	if (is_news(result, sources_signature(sources, n_sources)))
		send_sources(ctx, result, ARG1(ctx), sources, n_sources);
	return 0;
}

/* moescope:op__end(result, ended_ns) */
UPROBE(moescope_op_end)
{
	RECORD(rec_op_end, r);
	u64 ts;

	if (!reserve(r, KIND_OP_END, ENGINE_MOESCOPE))
		return 0;
	ended_at(&r->h, ARG2(ctx));
	r->tensor = ARG1(ctx);
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad[0] = r->pad[1] = 0;
	ts = r->h.ts;
	submit(ctx, r);
	send_pmc(ctx, ts);
	return 0;
}

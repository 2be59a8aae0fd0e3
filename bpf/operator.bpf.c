// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Operators: begin on every thread, the wait at the barrier where there is one, and each tensor's structure once. */

static INLINE int op_begin(void *ctx, u8 engine, u64 tensor, u32 type, s32 layer, u32 n_tokens)
{
	RECORD(rec_op_begin, r);

	if (!reserve(r, KIND_OP_BEGIN, engine))
		return 0;
	r->tensor = tensor;
	r->type = type;
	r->layer = layer;
	r->n_tokens = n_tokens;
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad = 0;
	submit(ctx, r);
	send_pmc(ctx);
	return 0;
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

/* Tells one list of sources from another by its length and its first entries. */
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

	if (!traced())
		return 0;
	op_begin(ctx, ENGINE_MOESCOPE, result, ARG1(ctx), ARG2(ctx), ARG3(ctx));
	if (is_news(result, sources_signature(sources, n_sources)))
		send_sources(ctx, result, ARG1(ctx), sources, n_sources);
	return 0;
}

/* moescope:op__end(result) */
UPROBE(moescope_op_end)
{
	RECORD(rec_op_end, r);

	if (!traced())
		return 0;
	if (!reserve(r, KIND_OP_END, ENGINE_MOESCOPE))
		return 0;
	r->tensor = ARG1(ctx);
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	send_pmc(ctx);
	return 0;
}

/* Describes a tensor where that is news; returns whether it was, and its first source in `next`. */
static INLINE bool send_ggml_tensor(void *ctx, u64 tensor, u64 *next)
{
	struct ggml_tensor_view *t = (void *)tensor;
	u64 src[2] = {}, ne[2] = {};
	RECORD(rec_tensor, r);
	u32 op = 0;

	bpf_probe_read_user(&op, sizeof(op), &t->op);
	bpf_probe_read_user(ne, sizeof(ne), t->ne);
	bpf_probe_read_user(src, sizeof(src), t->src);
	*next = src[0];
	if (!is_news(tensor, op + 31 * (ne[0] + 31 * (ne[1] + 31 * (src[0] + 31 * src[1])))))
		return false;
	if (!reserve(r, KIND_TENSOR, ENGINE_LLAMACPP))
		return false;
	r->tensor = tensor;
	r->type = r->dtype = 0;
	r->bytes = 0;
	r->first = 0;
	r->n_sources = MAX_SOURCES;
	bpf_probe_read_user(&r->type, sizeof(r->type), &t->op);
	bpf_probe_read_user(&r->dtype, sizeof(r->dtype), &t->type);
	bpf_probe_read_user(r->ne, sizeof(r->ne), t->ne);
	bpf_probe_read_user(r->sources, sizeof(r->sources), t->src);
	bpf_probe_read_user(r->name, sizeof(r->name), t->name);
	submit(ctx, r);
	return true;
}

#define VIEW_DEPTH 3

/* An operator's structure, and that of its sources: weights, and views that are never executed but connect operators. */
static INLINE void send_ggml_structure(void *ctx, u64 tensor)
{
	struct ggml_tensor_view *t = (void *)tensor;
	u64 next;

	if (!send_ggml_tensor(ctx, tensor, &next))
		return;
	for (u32 i = 0; i < MAX_SOURCES; i++) {
		u64 source = 0;

		bpf_probe_read_user(&source, sizeof(source), &t->src[i]);
		for (u32 depth = 0; depth < VIEW_DEPTH; depth++) {
			if (!source || !send_ggml_tensor(ctx, source, &next))
				break;
			source = next;
		}
	}
}

/* What ggml computes for one thread: (const struct ggml_compute_params *{int ith; ...}, struct ggml_tensor *) */
UPROBE(ggml_op_begin)
{
	u64 params = ARG1(ctx), tensor = ARG2(ctx), rows = 0;
	struct ggml_tensor_view *t = (void *)tensor;
	u32 op = 0;
	s32 ith = 0;

	if (!traced())
		return 0;
	bpf_probe_read_user(&op, sizeof(op), &t->op);
	bpf_probe_read_user(&rows, sizeof(rows), &t->ne[1]);
	op_begin(ctx, ENGINE_LLAMACPP, tensor, op, -1, rows);
	bpf_probe_read_user(&ith, sizeof(ith), (void *)params);
	if (ith)
		return 0;
	send_ggml_structure(ctx, tensor);
	ggml_routes(ctx, tensor, op);
	return 0;
}

/* ggml_barrier(struct ggml_threadpool *): the thread's share is done. */
UPROBE(ggml_op_wait)
{
	RECORD(rec_op_wait, r);

	if (!traced())
		return 0;
	if (!reserve(r, KIND_OP_WAIT, ENGINE_LLAMACPP))
		return 0;
	r->pad[0] = r->pad[1] = r->pad[2] = r->pad[3] = 0;
	submit(ctx, r);
	send_pmc(ctx);
	return 0;
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Graphs: what an engine hands to a backend in one piece. */

static INLINE int graph_begin(void *ctx, u8 engine, u64 handle, u32 type, u32 backend)
{
	RECORD(rec_graph_begin, r);

	if (!reserve(r, KIND_GRAPH_BEGIN, engine))
		return 0;
	r->handle = handle;
	r->type = type;
	r->layer = r->expert = -1;
	r->backend = backend;
	r->n_tokens = r->tier = 0;
	submit(ctx, r);
	return 0;
}

static INLINE int graph_end(void *ctx, u8 engine, u64 handle, s64 status)
{
	RECORD(rec_graph_end, r);

	if (!reserve(r, KIND_GRAPH_END, engine))
		return 0;
	r->handle = handle;
	r->status = status;
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

/* moescope:graph__begin(handle, kind, layer, expert, backend, tier << 32 | n_tokens) */
UPROBE(moescope_graph_begin)
{
	RECORD(rec_graph_begin, r);

	if (!traced())
		return 0;
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

/* moescope:graph__end(handle, status) */
UPROBE(moescope_graph_end)
{
	return traced() ? graph_end(ctx, ENGINE_MOESCOPE, ARG1(ctx), ARG2(ctx)) : 0;
}

#define CALL_GGML_GRAPH 240

/*
 * A ggml graph is handed down through functions that may all be probed: a wrapper, the generic entry, the backend's own. The
 * outermost writes the record. Inner ones see the same graph, deeper in the stack or at the same frame where one jumps to the
 * next; the same place again means that a return was lost.
 */
static INLINE int ggml_begin(struct pt_regs *ctx, u64 graph, u32 backend)
{
	u64 key = (bpf_get_current_pid_tgid() << 8) | CALL_GGML_GRAPH, frame = STACK(ctx) + RETURN_ADDRESS_BYTES;
	struct call_args *outer = map_lookup(MAP(calls), &key);

	if (outer && outer->arg[0] == graph && frame <= outer->arg[1] && PLACE(ctx) != outer->arg[2])
		return 0;
	keep_args(CALL_GGML_GRAPH, graph, frame, PLACE(ctx), 0);
	return graph_begin(ctx, ENGINE_LLAMACPP, graph, 0, backend);
}

/*
 * Which backend struct ggml_backend is: it begins with a pointer to 16 bytes that are the same in every build. Unknown where
 * the program has not touched them yet; ggml compares them when it makes its backends.
 */
static INLINE u32 ggml_backend_of(u64 backend)
{
	u64 identity = 0, head = 0;
	u32 *known;

	bpf_probe_read_user(&identity, sizeof(identity), (void *)backend);
	bpf_probe_read_user(&head, sizeof(head), (void *)identity);
	known = map_lookup(MAP(backends), &head);
	return known ? *known : BACKEND_UNKNOWN;
}

/* enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t, struct ggml_cgraph *), and all others that take the two */
UPROBE(ggml_graph_begin)
{
	return traced() ? ggml_begin(ctx, ARG2(ctx), ggml_backend_of(ARG1(ctx))) : 0;
}

/* enum ggml_status ggml_graph_compute(struct ggml_cgraph *, struct ggml_cplan *): on the CPU */
UPROBE(ggml_cpu_graph_begin)
{
	return traced() ? ggml_begin(ctx, ARG1(ctx), BACKEND_CPU) : 0;
}

UPROBE(ggml_graph_end)
{
	u64 key = (bpf_get_current_pid_tgid() << 8) | CALL_GGML_GRAPH;
	struct call_args *outer = map_lookup(MAP(calls), &key);
	struct call_args args;

	if (!outer || outer->arg[1] != STACK(ctx) || !take_args(CALL_GGML_GRAPH, &args))
		return 0;
	return graph_end(ctx, ENGINE_LLAMACPP, args.arg[0], (s32)RESULT(ctx));
}

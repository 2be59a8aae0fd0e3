// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * llama.cpp's Hexagon backend, which does not use QNN: batches of operators go through a dspqueue of FastRPC. A request gives the
 * numbers of buffers, tensors and operators that its buffer describes, in this order, with room for a profile of each operator
 * (ggml/src/ggml-hexagon/htp/htp-ops.h). The structs differ between versions, which are recognized by the total size.
 */

#define CALL_HEXAGON_WRITE 230
#define CALL_HEXAGON_READ 231
#define CALL_HEXAGON_RPC 232

#define MOST_BATCH_OPS 1280      /* the backend's default maximum per batch */
#define HEXAGON_NODES_AT_ONCE 1536 /* more have too many paths for the verifier */
#define MOST_HEXAGON_NODES (2 * HEXAGON_NODES_AT_ONCE)
#define BUFFER_DESC 24
#define PROFILE_DESC 48
#define TRACE_BYTES (11 * 8)
#define MESSAGE_BYTES 24

/* struct dspqueue_buffer (dspqueue.h) */
struct dspqueue_buffer_view {
	u32 fd;
	u32 size;
	u32 offset;
	u32 flags;
	u64 data;
};

/* A request of any layout, and the sizes of its buffer's parts. */
struct batch_view {
	u64 seq;
	u64 data;
	u64 n_bufs, n_tensors, n_ops;
	u64 bytes;
	u64 layout;
	u64 tensor_bytes, op_bytes, dst_at;
	u64 newest; /* 1: layout 3, whose tensors hold addresses of 64 bits */
};

#define CHOOSE(yes, a, b) ((b) ^ (((a) ^ (b)) & -(u64)(yes)))

/* Whether this buffer's size matches its numbers of parts with these sizes, without a branch. */
static INLINE u64 holds(struct batch_view *b, u64 tensor_bytes, u64 op_bytes, u64 n_traces)
{
	u64 parts = b->n_bufs * BUFFER_DESC + b->n_tensors * tensor_bytes + b->n_ops * (op_bytes + PROFILE_DESC);

	return EQUAL(parts + n_traces * TRACE_BYTES, b->bytes);
}

/* Reads the request `message` with its buffer; `layout` is 0 if unknown. */
static INLINE void read_batch(struct batch_view *b, u64 message, u32 length, struct dspqueue_buffer_view *buffer)
{
	u32 words[MESSAGE_BYTES / 4] = {};
	struct batch_view older;
	u64 second;

	if (length != MESSAGE_BYTES)
		return;
	bpf_probe_read_user(words, sizeof(words), (void *)message);
	older.bytes = b->bytes = buffer->size;
	b->data = buffer->data;
	b->n_bufs = words[2];
	b->n_tensors = words[3];
	b->n_ops = words[4];
	b->newest = holds(b, 56, 232, words[5]);
	older.n_bufs = words[1];
	older.n_tensors = words[2];
	older.n_ops = words[3];
	second = holds(&older, 48, 224, words[4]) & (b->newest ^ 1);
	b->layout = 3 * b->newest + 2 * second + (holds(&older, 48, 88, 0) & (b->newest ^ 1) & (second ^ 1));
	b->seq = CHOOSE(b->newest, words[0] | (u64)words[1] << 32, (u64)words[0]);
	b->n_bufs = CHOOSE(b->newest, b->n_bufs, older.n_bufs);
	b->n_tensors = CHOOSE(b->newest, b->n_tensors, older.n_tensors);
	b->n_ops = CHOOSE(b->newest, b->n_ops, older.n_ops);
	b->tensor_bytes = 48 + 8 * b->newest;
	b->op_bytes = CHOOSE(b->newest, 232ULL, CHOOSE(second, 224ULL, 88ULL));
	b->dst_at = CHOOSE(b->newest | second, b->op_bytes - 12, b->op_bytes - 4);
}

/* Reads an operator of a batch: its kind, and its result, by the address in this process. */
static INLINE void read_batch_op(struct batch_view *b, u32 at, struct rec_hexagon_op *op)
{
	u64 tensors = b->data + b->n_bufs * BUFFER_DESC, desc = tensors + b->n_tensors * b->tensor_bytes + at * b->op_bytes;
	u64 tensor, base = 0, data = 0;
	u16 dst = 0, buffer = 0;

	bpf_probe_read_user(&op->opcode, sizeof(op->opcode), (void *)desc);
	bpf_probe_read_user(&dst, sizeof(dst), (void *)(desc + b->dst_at));
	tensor = tensors + dst * b->tensor_bytes;
	bpf_probe_read_user(&data, BOUNDED(4 + 4 * b->newest, 8), (void *)tensor);
	bpf_probe_read_user(&buffer, sizeof(buffer), (void *)(tensor + 14 + 6 * b->newest));
	bpf_probe_read_user(op->ne, sizeof(op->ne), (void *)(tensor + 16 + 8 * b->newest));
	bpf_probe_read_user(&base, sizeof(base), (void *)(b->data + (u64)buffer * BUFFER_DESC));
	op->data = base + data;
}

static INLINE void send_batch_ops(void *ctx, struct batch_view *b)
{
	for (u32 at = 0; at < MOST_BATCH_OPS; at++) {
		RECORD(rec_hexagon_op, r);

		if (at >= b->n_ops)
			return;
		if (!reserve(r, KIND_HEXAGON_OP, ENGINE_HEXAGON))
			return;
		r->seq = b->seq;
		r->at = at;
		r->opcode = 0;
		__builtin_memset(r->ne, 0, sizeof(r->ne));
		read_batch_op(b, at, r);
		submit(ctx, r);
	}
	count_loss(KIND_HEXAGON_OP);
}

/* AEEResult dspqueue_write(queue, flags, n_buffers, buffers, length, message, timeout_us) */
UPROBE(hexagon_write_begin)
{
	struct settings *s = settings();
	struct dspqueue_buffer_view buffer = {};
	struct batch_view b = {};
	struct place_key key = {ARG1(ctx), bpf_get_current_pid_tgid() >> 32, 0};
	u64 layout;
	RECORD(rec_hexagon_batch, r);

	if (!s || (u32)ARG3(ctx) != 1 || bpf_probe_read_user(&buffer, sizeof(buffer), (void *)ARG4(ctx)))
		return 0;
	read_batch(&b, ARG6(ctx), (u32)ARG5(ctx), &buffer);
	layout = b.layout;
	map_update(MAP(described), &key, &layout);
	keep_args(CALL_HEXAGON_WRITE, ARG1(ctx), b.seq, 0, 0);
	if (!reserve(r, KIND_HEXAGON_BATCH, ENGINE_HEXAGON))
		return 0;
	r->queue = ARG1(ctx);
	r->seq = b.seq;
	r->bytes = b.bytes;
	r->n_ops = b.n_ops;
	r->n_tensors = b.n_tensors;
	r->n_bufs = b.n_bufs;
	r->layout = b.layout;
	submit(ctx, r);
	if (s->operators && b.layout)
		send_batch_ops(ctx, &b);
	return 0;
}

UPROBE(hexagon_write_end)
{
	struct call_args args;
	RECORD(rec_hexagon_sent, r);

	if (!take_args(CALL_HEXAGON_WRITE, &args) || !reserve(r, KIND_HEXAGON_SENT, ENGINE_HEXAGON))
		return 0;
	r->queue = args.arg[0];
	r->seq = args.arg[1];
	r->status = (s32)RESULT(ctx);
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

/*
 * AEEResult dspqueue_read(queue, flags *, max_buffers, n_buffers *, buffers *, max_length, length *, message *, timeout_us): a reader that
 * polls calls again and again; its wait began with the first of these calls.
 */
UPROBE(hexagon_read_begin)
{
	u64 key = (bpf_get_current_pid_tgid() << 8) | CALL_HEXAGON_READ, message = ARG8(ctx);
	struct call_args *known = map_lookup(MAP(calls), &key);

	if (known && known->arg[0] == ARG1(ctx)) {
		known->arg[1] = ARG5(ctx);
		known->arg[2] = message;
		return 0;
	}
	keep_args(CALL_HEXAGON_READ, ARG1(ctx), ARG5(ctx), message, bpf_ktime_get_ns());
	return 0;
}

static INLINE void send_profile(void *ctx, u64 queue, u64 seq, u64 profiles, u32 n_ops)
{
	for (u32 at = 0; at < MOST_BATCH_OPS; at += HEXAGON_PROFILES) {
		RECORD(rec_hexagon_profile, r);

		if (at >= n_ops)
			return;
		if (!reserve(r, KIND_HEXAGON_PROFILE, ENGINE_HEXAGON))
			return;
		r->queue = queue;
		r->seq = seq;
		r->first = at;
		r->count = n_ops - at < HEXAGON_PROFILES ? n_ops - at : HEXAGON_PROFILES;
#pragma unroll
		for (u32 i = 0; i < HEXAGON_PROFILES; i++)
			if (at + i < n_ops)
				bpf_probe_read_user(&r->ops[i], PROFILE_DESC, (void *)(profiles + (u64)(at + i) * PROFILE_DESC));
		submit(ctx, r);
	}
	if (n_ops > MOST_BATCH_OPS)
		count_loss(KIND_HEXAGON_PROFILE);
}

/* A response of any layout: its number, status, sizes, and the time that the batch took. */
struct response_view {
	u64 seq;
	u32 status, n_bufs, n_tensors, n_ops, usecs;
};

static INLINE void read_response(struct response_view *is, u64 message, u64 layout)
{
	u32 words[11] = {};

	bpf_probe_read_user(words, sizeof(words), (void *)message);
	is->seq = layout == 3 ? words[0] | (u64)words[1] << 32 : words[0];
	is->status = layout == 3 ? words[6] : words[1];
	is->n_bufs = layout == 3 ? words[7] : words[2];
	is->n_tensors = layout == 3 ? words[8] : words[3];
	is->n_ops = layout == 3 ? words[9] : words[4];
	is->usecs = layout == 3 ? words[10] : 0;
}

UPROBE(hexagon_read_end)
{
	struct settings *s = settings();
	struct dspqueue_buffer_view buffer = {};
	struct response_view is = {};
	struct call_args args;
	struct place_key key = {};
	u64 *layout;
	RECORD(rec_hexagon_done, r);

	if (!s || (s32)RESULT(ctx) || !take_args(CALL_HEXAGON_READ, &args))
		return 0;
	key.address = args.arg[0];
	key.pid = bpf_get_current_pid_tgid() >> 32;
	layout = map_lookup(MAP(described), &key);
	if (!layout || !*layout)
		return 0;
	read_response(&is, args.arg[2], *layout);
	bpf_probe_read_user(&buffer, sizeof(buffer), (void *)args.arg[1]);
	if (!reserve(r, KIND_HEXAGON_DONE, ENGINE_HEXAGON))
		return 0;
	r->queue = args.arg[0];
	r->seq = is.seq;
	r->began = args.arg[3];
	r->usecs = is.usecs;
	r->n_ops = is.n_ops;
	r->status = is.status;
	submit(ctx, r);
	if (s->operators) {
		u64 op_bytes = *layout == 3 ? 232 : *layout == 2 ? 224 : 88, tensor_bytes = *layout == 3 ? 56 : 48;

		send_profile(ctx, args.arg[0], is.seq,
			     buffer.data + (u64)is.n_bufs * BUFFER_DESC + is.n_tensors * tensor_bytes + is.n_ops * op_bytes, is.n_ops);
	}
	return 0;
}

/* int remote_handle64_invoke(handle, scalars, args) */
UPROBE(hexagon_invoke_begin)
{
	keep_args(CALL_HEXAGON_RPC, HEXAGON_INVOKE, ARG1(ctx), (u32)ARG2(ctx) >> 24 & 0x1f, bpf_ktime_get_ns());
	return 0;
}

/* int fastrpc_mmap(domain, fd, address, offset, length, flags) */
UPROBE(hexagon_mmap_begin)
{
	keep_args(CALL_HEXAGON_RPC, HEXAGON_MMAP, ARG5(ctx), (u32)ARG2(ctx), bpf_ktime_get_ns());
	return 0;
}

UPROBE(hexagon_call_end)
{
	struct call_args args;
	RECORD(rec_hexagon_call, r);

	if (!take_args(CALL_HEXAGON_RPC, &args) || !reserve(r, KIND_HEXAGON_CALL, ENGINE_HEXAGON))
		return 0;
	r->began = args.arg[3];
	r->subject = args.arg[1];
	r->what = args.arg[0];
	r->detail = args.arg[2];
	r->status = (s32)RESULT(ctx);
	submit(ctx, r);
	return 0;
}

#define HEXAGON_NODES ~0U /* in place of a thread, in the keys of is_news_to */

/* Every version of ggml with this backend has a tensor's sources right after its flags. */
#define NAME_AT (sizeof(struct ggml_tensor_view) + NAME_BEHIND_SOURCES)

static INLINE void send_hexagon_node(void *ctx, u64 graph, u64 address, u32 node)
{
	struct ggml_tensor_view *tensor = (void *)address;
	RECORD(rec_hexagon_node, r);

	if (!reserve(r, KIND_HEXAGON_NODE, ENGINE_HEXAGON))
		return;
	r->graph = graph;
	r->tensor = address;
	r->data = r->op = 0;
	r->node = node;
	bpf_probe_read_user(&r->data, sizeof(r->data), (void *)(address + NAME_AT - DATA_BYTES));
	bpf_probe_read_user(&r->op, sizeof(r->op), &tensor->op);
	bpf_probe_read_user(r->ne, sizeof(r->ne), tensor->ne);
	bpf_probe_read_user(r->name, sizeof(r->name), (void *)(address + NAME_AT));
	submit(ctx, r);
}

/* A signature that differs for graphs of other sizes, shapes or addresses. */
static INLINE u64 hexagon_signature(struct traced *t, struct ggml_graph_view *head)
{
	u64 middle = read_u64(head->nodes + 4ULL * (u32)head->n_nodes / 8 * 8), first = read_u64(head->nodes);

	return middle + 31 * (first + 31 * (head->n_nodes + 31 * (tensor_signature(t, middle) + 31 * tensor_signature(t, first))));
}

static INLINE void send_hexagon_graph(void *ctx, u64 graph, u32 n_nodes, u32 told)
{
	RECORD(rec_hexagon_graph, r);

	if (!reserve(r, KIND_HEXAGON_GRAPH, ENGINE_HEXAGON))
		return;
	r->graph = graph;
	r->n_nodes = n_nodes;
	r->told = told;
	submit(ctx, r);
}

/* Sends nodes of a graph for this backend, with the addresses that batches use, at the entry of every backend's graph. */
static INLINE int send_hexagon_nodes(void *ctx, struct traced *t, u64 backend, u64 graph, u32 first)
{
	struct settings *s = settings();
	struct ggml_graph_view head = {};
	bool told;

	if (!s || !s->operators || ggml_backend_of(backend) != BACKEND_HEXAGON)
		return 0;
	bpf_probe_read_user(&head, sizeof(head), (void *)graph);
	if (first >= (u32)head.n_nodes)
		return 0;
	told = is_news_to(HEXAGON_NODES - first, graph, hexagon_signature(t, &head) + s->round);
	if (!first)
		send_hexagon_graph(ctx, graph, head.n_nodes, told);
	for (u32 i = 0; told && i < HEXAGON_NODES_AT_ONCE; i++) {
		if (first + i >= (u32)head.n_nodes)
			return 0;
		send_hexagon_node(ctx, graph, read_u64(head.nodes + 8ULL * (first + i)), first + i);
	}
	if (told && first + HEXAGON_NODES_AT_ONCE >= MOST_HEXAGON_NODES)
		count_loss(KIND_HEXAGON_NODE);
	return 0;
}

UPROBE(hexagon_graph)
{
	return send_hexagon_nodes(ctx, t, ARG1(ctx), ARG2(ctx), 0);
}

UPROBE(hexagon_graph_rest)
{
	return send_hexagon_nodes(ctx, t, ARG1(ctx), ARG2(ctx), HEXAGON_NODES_AT_ONCE);
}

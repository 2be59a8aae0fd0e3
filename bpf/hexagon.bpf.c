// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * llama.cpp's Hexagon backend, which does not use QNN: batches of operators go through a dspqueue of FastRPC. A request gives the
 * numbers of buffers, tensors and operators that its buffer describes, in this order, with room for a profile of each operator
 * (ggml/src/ggml-hexagon/htp/htp-ops.h). The structs differ between versions: tracer/engines/hexagon.toml has their sizes and
 * offsets, and one is recognized by the total size.
 */

#define CALL_HEXAGON_WRITE 230
#define CALL_HEXAGON_READ 231
#define CALL_HEXAGON_RPC 232

#define MOST_BATCH_OPS 1280      /* the backend's default maximum per batch */
#ifdef BUFFER_PERF /* the record on the stack makes more states for the verifier */
#define MOST_HEXAGON_NODES 1536
#else
#define MOST_HEXAGON_NODES 3072
#endif
#define BUFFER_DESC 24
#define PROFILE_DESC 48
#define TRACE_BYTES (11 * 8)
#define MESSAGE_BYTES 24
#define UNKNOWN_STATUS ~0U

/* struct dspqueue_buffer (dspqueue.h) */
struct dspqueue_buffer_view {
	u32 fd;
	u32 size;
	u32 offset;
	u32 flags;
	u64 data;
};

/* A request, and where its layout is found; kept in memory that the verifier does not follow. */
struct batch_view {
	u64 seq;
	u64 data;
	u64 n_bufs, n_tensors, n_ops;
	u64 bytes;
	u64 row; /* of the layouts, plus 1; 0: unknown */
};

/* The layout of a row, plus 1, as `described` keeps it; 0 leads to the last row, which is empty. */
static INLINE struct hexagon_layout *layout_of(struct settings *s, u64 row)
{
	return &s->hexagon_layouts[(row - 1) & (HEXAGON_LAYOUTS - 1)];
}

/* A batch's number: its low half comes first in every layout that is known. */
static INLINE u64 batch_number(struct hexagon_layout *is, u32 low, u32 high)
{
	return low | (is->id_bytes == 8 ? (u64)high << 32 : 0);
}

/* Whether the parts of this size fill the buffer of a request. */
static INLINE bool fills(struct batch_view *b, struct hexagon_layout *is, u32 n_traces)
{
	u64 parts = b->n_bufs * BUFFER_DESC + b->n_tensors * is->tensor_bytes + b->n_ops * ((u64)is->op_bytes + PROFILE_DESC);

	return is->tensor_bytes && parts + (u64)n_traces * TRACE_BYTES == b->bytes;
}

/* Reads the request `message`, whose buffer `b` has the size of. */
CHECKED_ONCE(read_batch, u64 message)
{
	struct traced *t = traced();
	struct settings *s = settings();
	u32 words[MESSAGE_BYTES / 4] = {};
	struct batch_view *b;

	if (!t || !s)
		return false;
	b = (void *)t->scratch;
	bpf_probe_read_user(words, sizeof(words), (void *)message);
	b->seq = words[0];
#pragma unroll
	for (u32 i = 0; i < HEXAGON_LAYOUTS - 1; i++) {
		struct hexagon_layout *is = &s->hexagon_layouts[i];
		bool wide = is->id_bytes == 8;

		if (b->row)
			continue;
		b->n_bufs = wide ? words[2] : words[1];
		b->n_tensors = wide ? words[3] : words[2];
		b->n_ops = wide ? words[4] : words[3];
		if (fills(b, is, wide ? words[5] : words[4])) {
			b->row = i + 1;
			b->seq = batch_number(is, words[0], words[1]);
		}
	}
	if (!b->row)
		b->n_bufs = b->n_tensors = b->n_ops = 0;
	return true;
}

/* Reads an operator of a batch: its kind, and its result, by the address in this process. */
static INLINE void read_batch_op(struct batch_view *b, struct hexagon_layout *is, u32 at, struct rec_hexagon_op *op)
{
	u64 tensors = b->data + b->n_bufs * BUFFER_DESC;
	u64 desc = tensors + b->n_tensors * is->tensor_bytes + (u64)at * is->op_bytes;
	u64 tensor, base = 0, data = 0;
	u16 dst = 0, buffer = 0;

	bpf_probe_read_user(&op->opcode, sizeof(op->opcode), (void *)desc);
	bpf_probe_read_user(&dst, sizeof(dst), (void *)(desc + is->dst_at));
	tensor = tensors + (u64)dst * is->tensor_bytes;
	bpf_probe_read_user(&data, BOUNDED(is->data_bytes, 8), (void *)tensor);
	bpf_probe_read_user(&buffer, sizeof(buffer), (void *)(tensor + is->buffer_at));
	bpf_probe_read_user(op->ne, sizeof(op->ne), (void *)(tensor + is->ne_at));
	bpf_probe_read_user(&base, sizeof(base), (void *)(b->data + (u64)buffer * BUFFER_DESC));
	op->data = base + data;
}

static INLINE struct batch_view *batch_view_of(struct traced *t)
{
	_Static_assert(sizeof(struct batch_view) <= sizeof(t->scratch), "a batch has room");
	return (void *)t->scratch;
}

CHECKED_ONCE(send_batch_op, u32 at)
{
	struct traced *t = traced();
	struct settings *s = settings();
	struct hexagon_layout *is;
	struct batch_view *b;
	RECORD(rec_hexagon_op, r);

	if (!t || !s)
		return false;
	b = batch_view_of(t);
	is = layout_of(s, b->row);
	if (!reserve(r, KIND_HEXAGON_OP, ENGINE_HEXAGON))
		return false;
	r->seq = b->seq;
	r->at = at;
	r->opcode = 0;
	__builtin_memset(r->ne, 0, sizeof(r->ne));
	read_batch_op(b, is, at, r);
	submit(ctx, r);
	return true;
}

static INLINE void send_batch_ops(void *ctx, struct batch_view *b)
{
	for (u32 at = 0; at < MOST_BATCH_OPS; at++) {
		if (at >= b->n_ops || !CALL_CHECKED(send_batch_op, at))
			return;
	}
	count_loss(KIND_HEXAGON_OP);
}

/* AEEResult dspqueue_write(queue, flags, n_buffers, buffers, length, message, timeout_us) */
UPROBE(hexagon_write_begin)
{
	struct settings *s = settings();
	struct dspqueue_buffer_view buffer = {};
	struct batch_view *b = batch_view_of(t);
	struct place_key key = {ARG1(ctx), bpf_get_current_pid_tgid() >> 32, 0};
	struct hexagon_layout *is;
	u64 row;
	RECORD(rec_hexagon_batch, r);

	if (!s || (u32)ARG3(ctx) != 1 || bpf_probe_read_user(&buffer, sizeof(buffer), (void *)ARG4(ctx)))
		return 0;
	__builtin_memset(b, 0, sizeof(*b));
	b->bytes = buffer.size;
	b->data = buffer.data;
	if ((u32)ARG5(ctx) == MESSAGE_BYTES)
		CALL_CHECKED(read_batch, ARG6(ctx));
	row = b->row;
	is = layout_of(s, row);
	map_update(MAP(described), &key, &row);
	keep_args(CALL_HEXAGON_WRITE, ARG1(ctx), b->seq, 0, 0);
	if (!reserve(r, KIND_HEXAGON_BATCH, ENGINE_HEXAGON))
		return 0;
	r->queue = ARG1(ctx);
	r->seq = b->seq;
	r->bytes = b->bytes;
	r->n_ops = b->n_ops;
	r->n_tensors = b->n_tensors;
	r->n_bufs = b->n_bufs;
	r->layout = is->number;
	submit(ctx, r);
	if (s->operators)
		send_batch_ops(ctx, b);
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

CHECKED_ONCE(send_profiles, u64 queue, u64 seq, u64 profiles, u32 n_ops, u32 at)
{
	RECORD(rec_hexagon_profile, r);

	if (!reserve(r, KIND_HEXAGON_PROFILE, ENGINE_HEXAGON))
		return false;
	r->queue = queue;
	r->seq = seq;
	r->first = at;
	r->count = n_ops - at < HEXAGON_PROFILES ? n_ops - at : HEXAGON_PROFILES;
#pragma unroll
	for (u32 i = 0; i < HEXAGON_PROFILES; i++)
		if (at + i < n_ops)
			bpf_probe_read_user(&r->ops[i], PROFILE_DESC, (void *)(profiles + (u64)(at + i) * PROFILE_DESC));
	submit(ctx, r);
	return true;
}

static INLINE void send_profile(void *ctx, u64 queue, u64 seq, u64 profiles, u32 n_ops)
{
	for (u32 at = 0; at < MOST_BATCH_OPS; at += HEXAGON_PROFILES) {
		if (at >= n_ops || !CALL_CHECKED(send_profiles, queue, seq, profiles, n_ops, at))
			return;
	}
	if (n_ops > MOST_BATCH_OPS)
		count_loss(KIND_HEXAGON_PROFILE);
}

/* A response: what its layout tells; of an unknown one, the number alone. */
struct response_view {
	u64 seq;
	u32 status, n_bufs, n_tensors, n_ops, usecs;
};

static INLINE u32 response_word(u64 message, u32 at)
{
	u32 word = 0;

	bpf_probe_read_user(&word, sizeof(word), (void *)(message + at));
	return word;
}

static INLINE void read_response(struct response_view *is, u64 message, struct hexagon_layout *layout)
{
	is->seq = batch_number(layout, response_word(message, 0), response_word(message, 4));
	if (!layout->number)
		return;
	is->status = response_word(message, layout->status_at);
	is->n_bufs = response_word(message, layout->status_at + 4);
	is->n_tensors = response_word(message, layout->status_at + 8);
	is->n_ops = response_word(message, layout->status_at + 12);
	is->usecs = layout->usecs_at ? response_word(message, layout->usecs_at) : 0;
}

UPROBE(hexagon_read_end)
{
	struct settings *s = settings();
	struct dspqueue_buffer_view buffer = {};
	struct hexagon_layout *layout;
	struct response_view is = {.status = UNKNOWN_STATUS};
	struct call_args args;
	struct place_key key = {};
	u64 *row;
	RECORD(rec_hexagon_done, r);

	if (!s || (s32)RESULT(ctx) || !take_args(CALL_HEXAGON_READ, &args))
		return 0;
	key.address = args.arg[0];
	key.pid = bpf_get_current_pid_tgid() >> 32;
	row = map_lookup(MAP(described), &key);
	if (!row)
		return 0;
	layout = layout_of(s, *row);
	read_response(&is, args.arg[2], layout);
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
	if (s->operators && is.n_ops)
		send_profile(ctx, args.arg[0], is.seq,
			     buffer.data + (u64)is.n_bufs * BUFFER_DESC + (u64)is.n_tensors * layout->tensor_bytes +
				     (u64)is.n_ops * layout->op_bytes,
			     is.n_ops);
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

CHECKED_ONCE(send_hexagon_node, u64 graph, u64 address, u32 node)
{
	struct ggml_tensor_view *tensor = (void *)address;
	RECORD(rec_hexagon_node, r);

	if (!reserve(r, KIND_HEXAGON_NODE, ENGINE_HEXAGON))
		return false;
	r->graph = graph;
	r->tensor = address;
	r->data = r->op = 0;
	r->node = node;
	bpf_probe_read_user(&r->data, sizeof(r->data), (void *)(address + NAME_AT - DATA_BYTES));
	bpf_probe_read_user(&r->op, sizeof(r->op), &tensor->op);
	bpf_probe_read_user(r->ne, sizeof(r->ne), tensor->ne);
	bpf_probe_read_user(r->name, sizeof(r->name), (void *)(address + NAME_AT));
	submit(ctx, r);
	return true;
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

/* Sends the nodes of a graph for this backend, with the addresses that batches use, at the entry of every backend's graph. */
UPROBE(hexagon_graph)
{
	u64 graph = ARG2(ctx);
	struct settings *s = settings();
	struct ggml_graph_view head = {};
	bool told;

	if (!s || !s->operators || ggml_backend_of(ARG1(ctx)) != BACKEND_HEXAGON)
		return 0;
	bpf_probe_read_user(&head, sizeof(head), (void *)graph);
	if (!head.n_nodes)
		return 0;
	told = is_news_to(HEXAGON_NODES, graph, hexagon_signature(t, &head) + s->round);
	send_hexagon_graph(ctx, graph, head.n_nodes, told);
	for (u32 i = 0; told && i < MOST_HEXAGON_NODES; i++) {
		if (i >= (u32)head.n_nodes)
			return 0;
		CALL_CHECKED(send_hexagon_node, graph, read_u64(head.nodes + 8ULL * i), i);
	}
	if (told)
		count_loss(KIND_HEXAGON_NODE);
	return 0;
}

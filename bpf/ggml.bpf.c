// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * llama.cpp's ggml: graphs, operators on every thread, tensors, and the experts passed to MUL_MAT_ID.
 *
 * Each operator costs one probe hit: at the graph loop's call of the barrier after every node, where the loop keeps the
 * node's index and the graph in registers or on its stack. The places differ between builds and are learnt in the first
 * graph, from a probe on a function that every operator passes (which gets the tensor) and one on the barrier.
 */

static INLINE u64 read_u64(u64 address)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

/* The signature of a tensor, by one read, since every read costs more than its bytes. */
static INLINE u64 tensor_signature(struct traced *t, u64 tensor)
{
	struct ggml_tensor_core *is = (void *)t->scratch;

	_Static_assert(sizeof(*is) <= sizeof(t->scratch), "what is looked at has room");
	if (bpf_probe_read_user(is, sizeof(*is), ((struct ggml_tensor_view *)tensor)->ne))
		return 0;
	return is->op + 31 * (is->ne[0] + 31 * (is->ne[1] + 31 * (is->ne[2] + 31 * (is->ne[3] + 31 * (is->src[0] + 31 * (is->src[1] + 31 * is->src[2]))))));
}

static INLINE u64 source_of(struct traced *t, u64 tensor, u32 number)
{
	return read_u64(tensor + t->sources_at + 8 * number);
}

/* Sends a tensor's description if it is new; returns whether it was. */
static INLINE bool send_ggml_tensor(void *ctx, struct traced *thread, u64 tensor, u64 signature)
{
	struct ggml_tensor_view *t = (void *)tensor;
	RECORD(rec_tensor, r);
	bool failed;

	if (!is_news(tensor, signature))
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
	bpf_probe_read_user(r->sources, sizeof(r->sources), (void *)(tensor + thread->sources_at));
	failed = bpf_probe_read_user(r->name, sizeof(r->name), (void *)(tensor + thread->name_at));
	submit(ctx, r);
	if (failed)
		describe_again(tensor, KIND_TENSOR);
	return true;
}

#define VIEW_DEPTH 3

/*
 * Sends an operator's structure, and that of its sources: weights, and views that are never executed but connect operators.
 * The sources' signatures count as part of its own: a view of the cache grows while the operators that use it keep their shape.
 */
static INLINE void send_ggml_structure(void *ctx, struct traced *thread, u64 tensor)
{
	u64 sources[MAX_SOURCES] = {}, signature = tensor_signature(thread, tensor);

	bpf_probe_read_user(sources, sizeof(sources), (void *)(tensor + thread->sources_at));
	for (u32 i = 0; i < MAX_SOURCES; i++)
		signature = signature * 31 + tensor_signature(thread, sources[i]);
	if (!send_ggml_tensor(ctx, thread, tensor, signature))
		return;
	for (u32 i = 0; i < MAX_SOURCES; i++) {
		u64 source = sources[i];

		for (u32 depth = 0; depth < VIEW_DEPTH; depth++) {
			if (!source || !send_ggml_tensor(ctx, thread, source, tensor_signature(thread, source)))
				break;
			source = source_of(thread, source, 0);
		}
	}
}

#define MAX_ROUTE_ROWS 1024
#ifdef BUFFER_PERF /* inlined, with the record on the stack, which has no room for another loop's variables */
#define ROWS_AT_ONCE 1
#else
#define ROWS_AT_ONCE 32
#endif

/* The experts of ROWS_AT_ONCE rows from `first` on, or of those that are left: `k` numbers of 32 bits each; `shape` is n_tokens << 32 | k. */
CHECKED_ONCE(send_some_routes, u64 tensor, u64 data, u64 stride, u64 shape, u32 first)
{
	u32 k = shape, n_tokens = shape >> 32;
	u64 bytes = BOUNDED(4 * k, 4 * ROUTE_SLOTS);

	for (u32 i = 0; i < ROWS_AT_ONCE; i++) {
		u32 row = first + i;
		RECORD(rec_route, r);

		if (row >= n_tokens)
			return false;
		if (!reserve(r, KIND_ROUTE, ENGINE_LLAMACPP))
			return false;
		fill_route(r, tensor, -1, n_tokens, k, row * k, ROUTE_WIDE);
		r->count = bytes / 4;
		bpf_probe_read_user(r->weights, bytes, (void *)(data + row * stride));
		submit(ctx, r);
	}
	return true;
}

/* ggml's MUL_MAT_ID(experts, input, ids): ids is an I32 tensor [k, n_tokens] whose rows may be strided. One record per row. */
static INLINE void send_ggml_routes(void *ctx, struct traced *thread, u64 tensor, u64 ids)
{
	struct ggml_tensor_view *t = (void *)ids;
	u64 ne[2] = {}, nb[2] = {}, data = 0;
	u32 k, n_tokens;

	bpf_probe_read_user(ne, sizeof(ne), t->ne);
	bpf_probe_read_user(nb, sizeof(nb), t->nb);
	data = read_u64(ids + thread->name_at - DATA_BYTES);
	k = ne[0];
	n_tokens = ne[1];
	if (!k || !data)
		return;
	for (u32 first = 0; first < MAX_ROUTE_ROWS; first += ROWS_AT_ONCE) {
		if (!CALL_CHECKED(send_some_routes, tensor, data, nb[1], (u64)n_tokens << 32 | k, first))
			break;
	}
	if (k > ROUTE_SLOTS || n_tokens > MAX_ROUTE_ROWS) /* behind the loop, which the verifier would else walk for each branch */
		count_loss(KIND_ROUTE);
}

/* gate, up and down of a layer share their routing tensor, which is sent once per graph. */
static INLINE void ggml_routes(void *ctx, struct traced *t, u64 tensor)
{
	u64 ids = source_of(t, tensor, 2);

	if (t->routing == ids)
		return;
	t->routing = ids;
	send_ggml_routes(ctx, t, tensor, ids);
}

/*
 * Sends what the leading thread reports of an operator: its structure, if new, and the chosen experts. Returns true if the
 * operator takes such a choice.
 */
static INLINE bool describe_operator(void *ctx, struct traced *t, struct settings *s, u64 tensor)
{
	u32 op = 0;

	if (t->news)
		send_ggml_structure(ctx, t, tensor);
	bpf_probe_read_user(&op, sizeof(op), &((struct ggml_tensor_view *)tensor)->op);
	if (op != s->mul_mat_id)
		return false;
	if (s->experts)
		ggml_routes(ctx, t, tensor);
	return true;
}

#define SAMPLED_NODES 32
#define SAMPLE_ROUNDS 4

/* The signature of a graph's size and of a sample of its nodes, that of round `at`. */
static INLINE u64 sample_signature(struct traced *t, struct ggml_graph_view *head, u64 round, u32 at)
{
	u64 signature = round + head->nodes + 31ULL * head->n_nodes;

/* Kernels before 6.7 refuse the backward jump of a loop here (`bpf: fix control-flow graph checking`). */
#pragma unroll
	for (u32 i = 0; i < SAMPLED_NODES; i++) {
		u32 spread = (at + SAMPLE_ROUNDS * i) * 0x9E3779B1U;
		u64 node = read_u64(head->nodes + 8 * (((u64)spread * (u32)head->n_nodes) >> 32));

		signature = signature * 31 + node + tensor_signature(t, node);
		asm volatile("" : "+r"(signature)); /* compute it now, not after all reads, for which the stack has no room */
	}
	return signature;
}

/*
 * Whether a graph may have changed since it was last seen, by its size and the shapes of a sample of its nodes. Samples differ
 * from round to round, so that one finds what another misses; after a change every operator's own signature is compared. The
 * description of a changed graph holds for all samples, or the next rounds would consider their own new. If another graph has
 * changed since, this one is described again, as the two may share tensors. This is decided per leading thread, each of which
 * keeps its own marks of the nodes that take experts.
 */
static INLINE u32 graph_is_news(struct traced *t, u64 graph, struct ggml_graph_view *head, u64 round)
{
	u32 at = t->rounds++ % SAMPLE_ROUNDS, tid = (u32)bpf_get_current_pid_tgid();

	if (!is_news_to(tid, graph + at, sample_signature(t, head, round, at)))
		return is_news_to(tid, graph + SAMPLE_ROUNDS, t->changes);
	for (u32 i = 0; i < SAMPLE_ROUNDS; i++)
		is_news_to(tid, graph + i, sample_signature(t, head, round, i));
	is_news_to(tid, graph + SAMPLE_ROUNDS, ++t->changes);
	return 1;
}

#define FIRST_NODES 8

/* 1 if eight bytes may be the beginning of a name: ASCII without DEL, which occurs in addresses of mappings. */
static INLINE u64 is_text(u64 word)
{
	u64 del = word ^ 0x7f7f7f7f7f7f7f7fULL;
	u64 others = (word | ((del - 0x0101010101010101ULL) & ~del)) & 0x8080808080808080ULL;

	return EQUAL(others, 0) & ~EQUAL(word & 0xff, 0);
}

/*
 * Whether the first nodes of a graph, and their sources, look like tensors with sources and name at these offsets.
 * Without branches, which would make too many paths for the verifier.
 */
static INLINE u64 are_tensors(struct ggml_graph_view *head, u32 sources_at, u32 name_at)
{
	u64 others = 0, made = 0;

	for (u32 i = 0; i < FIRST_NODES; i++) {
		u64 present = LESS(i, (u32)head->n_nodes), node = read_u64(head->nodes + 8 * i) & -present;
		u64 source = read_u64(node + sources_at), name = read_u64(source + name_at);
		u64 op = (u32)read_u64((u64)&((struct ggml_tensor_view *)node)->op);

		made |= source;
		others |= present & ~(is_text(read_u64(node + name_at)) & LESS(op, MOST_OPERATORS));
		others |= 1 & ~(EQUAL(name, 0) | is_text(name));
	}
	return 1 & ~EQUAL(made, 0) & EQUAL(others, 0);
}

/* Reports a graph that does not match the assumed layout, once per thread. */
static INLINE void tell_misfit(void *ctx, struct traced *t, u64 graph, u32 what, u32 node, u32 n_nodes)
{
	RECORD(rec_misfit, r);

	if (t->misfit || !reserve(r, KIND_MISFIT, ENGINE_LLAMACPP))
		return;
	t->misfit = what;
	r->graph = graph;
	r->what = what;
	r->node = node;
	r->n_nodes = n_nodes;
	r->pad[0] = r->pad[1] = r->pad[2] = 0;
	submit_urgent(ctx, r);
}

/* Determines the offsets of sources and names in the graph's tensors, which hardly ever differ between a thread's graphs. */
static INLINE bool knows_tensors(void *ctx, struct traced *t, u64 graph, struct ggml_graph_view *head)
{
	u32 plain = sizeof(struct ggml_tensor_view), gradient = plain + GRADIENT_BYTES;
	u32 with_gradient = gradient + NAME_BEHIND_SOURCES, with_counters = with_gradient + COUNTERS_BYTES;
	u64 is_plain = 1 & ~EQUAL(read_u64(read_u64(head->nodes) + plain), 0);

	if (t->name_at && is_plain == (t->sources_at == plain))
		return true;
	t->sources_at = plain;
	t->name_at = plain + NAME_BEHIND_SOURCES;
	if (are_tensors(head, plain, plain + NAME_BEHIND_SOURCES))
		return true;
	t->sources_at = gradient;
	t->name_at = with_gradient * are_tensors(head, gradient, with_gradient);
	if (!t->name_at)
		t->name_at = with_counters * are_tensors(head, gradient, with_counters);
	if (t->name_at)
		return true;
	tell_misfit(ctx, t, graph, MISFIT_TENSOR, 0, head->n_nodes);
	return false;
}

#define INP_TOKE 0x656b6f745f706e69ULL
#define NS 0x736eULL
#define EMBD 0x64626d65ULL
#define TOKEN_EM 0x6d655f6e656b6f74ULL
#define BD_WEIGH 0x68676965772e6462ULL

/* The parts of a node that show whether it looks up tokens. */
struct looked_up {
	u64 sources[2]; /* the vectors, and the indices of the taken ones */
	u64 name[2], table[2];
	u32 type;
};

/* 1 if tokens are looked up: the indices are named "inp_tokens", in whisper.cpp "embd", or the table is the token embedding. */
static INLINE u64 are_tokens(struct traced *t, struct looked_up *is)
{
	u64 ids = is->sources[1];

	is->type = is->name[0] = is->name[1] = is->table[0] = is->table[1] = 0;
	bpf_probe_read_user(&is->type, sizeof(is->type), &((struct ggml_tensor_view *)ids)->type);
	bpf_probe_read_user(is->name, sizeof(is->name), (void *)(ids + t->name_at));
	bpf_probe_read_user(is->table, sizeof(is->table), (void *)(is->sources[0] + t->name_at));
	return EQUAL(is->type, TYPE_I32) &
	       ((EQUAL(is->name[0], INP_TOKE) & EQUAL(is->name[1] & 0xFFFFFF, NS)) | EQUAL(is->name[0] & 0xFFFFFFFFFF, EMBD) |
		(EQUAL(is->table[0], TOKEN_EM) & EQUAL(is->table[1], BD_WEIGH)));
}

/* Number of tokens that a graph looks up in the embedding, by one of its first nodes; 0: none. */
static INLINE u32 tokens_looked_up(struct traced *t, struct ggml_graph_view *head)
{
	struct looked_up *is = (void *)t->scratch; /* the stack is full */

	_Static_assert(sizeof(*is) <= sizeof(t->scratch), "what is looked at has room");
#pragma unroll
	for (u32 i = 0; i < FIRST_NODES; i++) { /* models with a state prepare it in the first nodes */
		u64 node = read_u64(head->nodes + 8 * i);

		is->sources[0] = is->sources[1] = 0;
		bpf_probe_read_user(is->sources, sizeof(is->sources), (void *)(node + t->sources_at));
		if (LESS(i, (u32)head->n_nodes) & are_tokens(t, is))
			return read_u64((u64)((struct ggml_tensor_view *)is->sources[1])->ne);
	}
	return 0;
}

#define MOST_SITES 2048 /* enough to learn from; user space examines each */

/* Sends where the thread last entered the barrier, and the places found there. Without a barrier, no end of a graph is sent. */
static INLINE void send_site(void *ctx, struct traced *t, u32 last)
{
	RECORD(rec_site, r);

	if (!(t->site || last) || !reserve(r, KIND_SITE, ENGINE_LLAMACPP))
		return;
	t->sites++;
	r->address = t->site;
	r->here = t->here;
	r->before = t->before;
	r->graph = t->graph_places;
	r->last = last;
	r->last_but_one = t->last_but_one;
	r->blind = !t->tensor;
	submit(ctx, r);
	t->site = 0;
}

/*
 * A ggml graph is passed through functions that may all be probed: a wrapper, the generic entry, the backend's own. The
 * outermost writes the record. Inner ones see the same graph, deeper in the stack, or at the same frame if one jumps to the
 * next; the same place again means that a return was lost.
 */
static INLINE int ggml_begin(struct pt_regs *ctx, struct traced *t, u64 graph, u32 backend)
{
	u64 frame = STACK(ctx) + RETURN_ADDRESS_BYTES;
	struct settings *s = settings();
	struct ggml_graph_view head = {};
	u32 n_tokens = 0;

	if (!s || (t->leads && t->began == graph && frame <= t->frame && PLACE(ctx) != t->place))
		return 0;
	bpf_probe_read_user(&head, sizeof(head), (void *)graph);
	t->graph = t->began = graph;
	t->frame = frame;
	t->place = PLACE(ctx);
	t->leads = 1;
	t->routing = 0;
	t->tensor = t->site = 0;
	t->next_node = t->news = t->is_step = 0;
	for (u32 i = 0; s->blind && i < FRAME_PLACES; i++)
		t->counted[i] = 0;
	if (head.n_nodes && knows_tensors(ctx, t, graph, &head)) {
		t->news = (s->operators || s->experts) && graph_is_news(t, graph, &head, s->round);
		n_tokens = tokens_looked_up(t, &head);
	}
	if (n_tokens && s->steps && !t->in_step) {
		t->is_step = 1;
		token_begin(ctx, ENGINE_LLAMACPP, ~0ULL, PHASE_UNKNOWN, n_tokens, ~0U, 0);
	}
	graph_begin(ctx, ENGINE_LLAMACPP, graph, 0, backend, n_tokens);
	t->product_ts = backend == BACKEND_BLAS ? bpf_ktime_get_ns() : 0;
	t->product = 0;
	return 0;
}

/*
 * The backend of a struct ggml_backend: it begins with a pointer to 16 bytes that are the same in every build. Unknown if
 * the program has not touched them yet; ggml compares them when it creates its backends.
 */
static INLINE u32 ggml_backend_of(u64 backend)
{
	u64 head = read_u64(read_u64(backend));
	u32 *known = map_lookup(MAP(backends), &head);

	return known ? *known : BACKEND_UNKNOWN;
}

/* enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t, struct ggml_cgraph *), and all others with these arguments */
UPROBE(ggml_graph_begin)
{
	return ggml_begin(ctx, t, ARG2(ctx), ggml_backend_of(ARG1(ctx)));
}

/* enum ggml_status ggml_graph_compute(struct ggml_cgraph *, struct ggml_cplan *): on the CPU */
UPROBE(ggml_cpu_graph_begin)
{
	return ggml_begin(ctx, t, ARG1(ctx), BACKEND_CPU);
}

UPROBE(ggml_graph_end)
{
	struct settings *s = settings();

	if (!s || !t->leads || t->frame != STACK(ctx))
		return 0;
	if (s->learn != LEARN_NOTHING)
		send_site(ctx, t, 1);
	t->leads = 0;
	graph_end(ctx, ENGINE_LLAMACPP, t->began, (s32)RESULT(ctx));
	if (t->is_step)
		token_end(ctx, ENGINE_LLAMACPP, ~0ULL, (s32)RESULT(ctx));
	t->is_step = 0;
	return 0;
}

static INLINE int ggml_operator_begins(void *ctx, struct traced *t, u64 tensor)
{
	struct settings *s = settings();
	u64 rows = 0;
	u32 op = 0;

	if (!s || t->misfit)
		return 0;
	if (s->operators) {
		bpf_probe_read_user(&op, sizeof(op), &((struct ggml_tensor_view *)tensor)->op);
		bpf_probe_read_user(&rows, sizeof(rows), &((struct ggml_tensor_view *)tensor)->ne[1]);
		op_begin(ctx, ENGINE_LLAMACPP, tensor, op, -1, rows);
	}
	if (!t->leads)
		return 0;
	if (s->learn == LEARN_PLACES && t->sites < MOST_SITES)
		send_site(ctx, t, 0);
	t->tensor = tensor;
	describe_operator(ctx, t, s, tensor);
	return 0;
}

/* ggml's computation of one thread: (const struct ggml_compute_params *, struct ggml_tensor *) */
UPROBE(ggml_op_begin)
{
	return ggml_operator_begins(ctx, t, ARG2(ctx));
}

/* Two fused operators, recorded as the second (const struct ggml_compute_params *, struct ggml_tensor *, struct ggml_tensor *) */
UPROBE(ggml_fused_begin)
{
	return ggml_operator_begins(ctx, t, ARG3(ctx));
}

/* Copies the contents of the caller's frame places. */
static INLINE void look_at_frame(struct pt_regs *ctx, struct traced *t)
{
#pragma unroll
	for (u32 i = 0; i < FRAME_REGISTERS; i++)
		t->words[i] = preserved_register(ctx, i);
	bpf_probe_read_user(t->words + FRAME_REGISTERS, 8 * FRAME_WORDS, (void *)CALLER_STACK(ctx));
}

/* Notes which places of the frame that entered the barrier hold the operator's index and the graph. */
static INLINE void note_places(struct pt_regs *ctx, struct traced *t)
{
	struct ggml_graph_view head = {};
	u64 here = 0, before = 0, graph = 0;

	bpf_probe_read_user(&head, sizeof(head), (void *)t->graph);
	look_at_frame(ctx, t);
	for (u32 i = 0; i < FRAME_PLACES; i++) {
		u64 value = t->words[i];
		u64 at = head.nodes + 8ULL * (u32)value;

		here |= EQUAL(read_u64(at), t->tensor) << i;
		before |= EQUAL(read_u64(at - 8), t->tensor) << i;
		graph |= EQUAL(value, t->graph) << i;
	}
	t->here = here;
	t->before = before;
	t->graph_places = graph;
}

/*
 * The same if no probe sees the operator: the index is the value that grows from barrier to barrier, up to the last but one,
 * as the loop has no barrier after the last. Barriers within operators are recognized by a frame without the graph.
 */
static INLINE bool note_growing_places(struct pt_regs *ctx, struct traced *t)
{
	struct ggml_graph_view head = {};
	u64 graph = 0, grows = 0, last = 0, last_but_one = 0;

	bpf_probe_read_user(&head, sizeof(head), (void *)t->graph);
	look_at_frame(ctx, t);
	for (u32 i = 0; i < FRAME_PLACES; i++)
		graph |= EQUAL(t->words[i], t->graph) << i;
	if (!graph)
		return false;
	if (t->sites < MOST_SITES)
		send_site(ctx, t, 0);
	for (u32 i = 0; i < FRAME_PLACES; i++) {
		u64 count = (u64)(u32)t->words[i] + 1, nodes = (u32)head.n_nodes;
		u64 grown = LESS(t->counted[i], count) & LESS(count, nodes + 1);

		grows |= grown << i;
		last |= (grown & EQUAL(count, nodes)) << i;
		last_but_one |= (grown & EQUAL(count + 1, nodes)) << i;
		t->counted[i] = count;
	}
	t->here = grows;
	t->before = last;
	t->last_but_one = last_but_one;
	t->graph_places = graph;
	return true;
}

/* ggml_barrier(struct ggml_threadpool *): the thread's share is done. */
UPROBE(ggml_op_wait)
{
	struct settings *s = settings();
	RECORD(rec_op_wait, r);
	u64 ts;

	if (!s || t->misfit)
		return 0;
	if (s->operators && reserve(r, KIND_OP_WAIT, ENGINE_LLAMACPP)) { /* first, as examining the frame takes longer than the record */
		r->pad[0] = r->pad[1] = r->pad[2] = r->pad[3] = 0;
		ts = r->h.ts;
		submit(ctx, r);
		send_pmc(ctx, ts);
	}
	if (s->learn == LEARN_NOTHING || !t->leads || !(t->tensor || s->blind))
		return 0;
	if (s->blind && s->learn == LEARN_PLACES) {
		if (!note_growing_places(ctx, t))
			return 0;
	} else if (s->learn == LEARN_PLACES && t->sites < MOST_SITES) {
		note_places(ctx, t);
	}
	t->site = RETURN_ADDRESS(ctx);
	return 0;
}

/* The value of a place of the caller's frame: a preserved register, or a word of its stack. */
static INLINE u64 place(struct pt_regs *ctx, u32 at)
{
	if (at < FRAME_REGISTERS)
		return preserved_register(ctx, at);
	return read_u64(STACK(ctx) + 8ULL * (at - FRAME_REGISTERS));
}

/* Reads the two variables of the loop over a graph: with one read if they lie close together on the stack. */
static INLINE void read_loop(struct pt_regs *ctx, struct traced *t, struct settings *s, u64 *graph, u32 *node)
{
	u32 first = s->graph_at < s->node_at ? s->graph_at : s->node_at;
	u32 graph_word = s->graph_at - first, node_word = s->node_at - first;

	if (first >= FRAME_REGISTERS && graph_word < LOOP_WORDS && node_word < LOOP_WORDS) {
		bpf_probe_read_user(t->loop, sizeof(t->loop), (void *)(STACK(ctx) + 8ULL * (first - FRAME_REGISTERS)));
		*graph = t->loop[READ_NOW(graph_word) & (LOOP_WORDS - 1)];
		*node = t->loop[READ_NOW(node_word) & (LOOP_WORDS - 1)];
	} else {
		*graph = place(ctx, s->graph_at);
		*node = place(ctx, s->node_at);
	}
	*node -= s->node_more;
}

NUMBER(ggml_op_done)

static INLINE void send_shares(void *ctx, struct traced *t)
{
	RECORD(rec_op_shares, r);

	if (t->count && reserve(r, KIND_OP_SHARES, ENGINE_LLAMACPP)) {
		r->h.ts = t->first_ts;
		r->graph = t->shares_of;
		r->count = t->count;
		r->pad = 0;
		for (u32 i = 0; i < SHARES; i++) {
			r->after[i] = t->shares[i].after;
			r->min_flt[i] = t->shares[i].min_flt;
			r->maj_flt[i] = t->shares[i].maj_flt;
			r->node[i] = t->shares[i].node;
		}
		submit(ctx, r);
	}
	count_runs(ggml_op_done_number, t->count);
	t->count = 0;
}

/* Notes that the thread has finished its share of a node; the record is sent when it is full or the graph ends. */
static INLINE void note_share(void *ctx, struct traced *t, struct settings *s, u32 node)
{
	u64 now = bpf_ktime_get_ns();
	u32 maj = task_counter(maj_flt), min = task_counter(min_flt), at;
	struct share *share;

	if (t->count && (t->shares_of != t->graph || now - t->first_ts > ~0U))
		send_shares(ctx, t);
	at = t->count;
	if (at >= SHARES)
		return;
	if (!at) {
		t->first_ts = now;
		t->shares_of = t->graph;
	}
	share = &t->shares[at];
	share->after = now - t->first_ts;
	share->min_flt = t->min_before ? min - t->min_before : 0;
	share->maj_flt = t->min_before ? maj - t->maj_before : 0;
	share->node = node;
	t->maj_before = maj;
	t->min_before = min;
	t->count = at + 1;
	if (at + 1 == SHARES)
		send_shares(ctx, t);
	if (s->n_counters)
		send_pmc(ctx, now);
}

static INLINE void tell_node(void *ctx, struct traced *t, u64 tensor, u32 node)
{
	RECORD(rec_node, r);

	if (!reserve(r, KIND_NODE, ENGINE_LLAMACPP))
		return;
	r->tensor = tensor;
	r->graph = t->graph;
	r->node = node;
	r->pad[0] = r->pad[1] = r->pad[2] = 0;
	submit(ctx, r);
}

/* Whether a node belongs to its graph and was not done before, so that wrongly learnt places are not recorded. */
static INLINE bool fits(void *ctx, struct traced *t, u32 node, struct ggml_graph_view *head)
{
	bool in_order = t->graph != t->began || node >= t->next_node;

	if (in_order && node < (u32)head->n_nodes)
		return true;
	tell_misfit(ctx, t, t->graph, MISFIT_LOOP, node, head->n_nodes);
	return false;
}

static INLINE int share_done(void *ctx, struct traced *t, struct settings *s, u32 node)
{
	struct ggml_graph_view *head = (void *)t->scratch; /* the stack is full */
	u64 tensor;

	if (t->misfit)
		return 0;
	if (t->leads && t->news) {
		if (bpf_probe_read_user(head, sizeof(*head), (void *)t->graph) || !fits(ctx, t, node, head))
			return 0;
		t->next_node = node + 1;
	}
	if (s->operators)
		note_share(ctx, t, s, node);
	if (!t->leads || !(t->news || (t->given_experts[node / 8 % sizeof(t->given_experts)] >> node % 8 & 1)))
		return 0;
	tensor = read_u64(read_u64((u64)&((struct ggml_graph_view *)t->graph)->nodes) + 8ULL * node);
	if (t->news)
		tell_node(ctx, t, tensor, node);
	if (describe_operator(ctx, t, s, tensor))
		t->given_experts[node / 8 % sizeof(t->given_experts)] |= 1 << node % 8;
	return 0;
}

/* The graph loop's call of the barrier after a node. */
UNCOUNTED_UPROBE(ggml_op_done)
{
	struct settings *s = settings();
	u32 node;

	if (!s)
		return 0;
	read_loop(ctx, t, s, &t->graph, &node);
	share_done(ctx, t, s, node);
	if (s->one_call && node + 1 == (u32)read_u64((u64)&((struct ggml_graph_view *)t->graph)->n_nodes))
		send_shares(ctx, t);
	return 0;
}

/* The call of the barrier after the loop: the thread's share of the last node is done. */
UPROBE(ggml_graph_done)
{
	struct settings *s = settings();
	struct ggml_graph_view *head = (void *)t->scratch; /* the stack is full */

	if (!s || !t->graph || bpf_probe_read_user(head, sizeof(*head), (void *)t->graph))
		return 0;
	share_done(ctx, t, s, head->n_nodes - 1);
	send_shares(ctx, t);
	return 0;
}

/* Kinds of graphs, as tracer/engines/llamacpp.toml names them. */
enum { GGML_GRAPH, GGML_COPY, GGML_WAIT };
#define GGML_OP_DUP 1 /* in all versions; the table of names is found by its first three */

/* An operator that a thread submits to another device's backend, which computes it later; `began`: 0 for now. */
static INLINE int submit_operator(void *ctx, struct traced *t, u64 tensor, u64 began)
{
	struct settings *s = settings();
	u64 rows = 0;
	u32 op = 0;

	if (!s || !s->operators || !t->leads || t->misfit)
		return 0;
	bpf_probe_read_user(&op, sizeof(op), &((struct ggml_tensor_view *)tensor)->op);
	bpf_probe_read_user(&rows, sizeof(rows), &((struct ggml_tensor_view *)tensor)->ne[1]);
	op_begin_at(ctx, ENGINE_LLAMACPP, tensor, op, -1, rows, began);
	if (t->news)
		send_ggml_structure(ctx, t, tensor);
	return 0;
}

/* (backend or its context, struct ggml_tensor *) */
UPROBE(ggml_submit_tensor)
{
	return submit_operator(ctx, t, ARG2(ctx), 0);
}

/* (context, struct ggml_cgraph *, int node, ...) */
UPROBE(ggml_submit_node)
{
	u64 nodes = read_u64((u64)&((struct ggml_graph_view *)ARG2(ctx))->nodes);

	return submit_operator(ctx, t, read_u64(nodes + 8ULL * (u32)ARG3(ctx)), 0);
}

#define PRODUCT_NODES 8 /* a product's node, and views that may precede the next product's */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define RESULT_ON_STACK 2 /* words before cblas_sgemm's result: b and ldb; the other arguments are in registers */
#else
#define RESULT_ON_STACK 4
#endif

/* The node, from 1, whose result contains an address: the previous product's node, or the first one after it; 0: none. */
static INLINE u32 node_of_product(struct traced *t, struct ggml_graph_view *head, u64 address)
{
	u32 first = t->product - (t->product > 0);

#pragma unroll
	for (u32 i = 0; i < PRODUCT_NODES; i++) {
		struct ggml_tensor_view *node = (void *)read_u64(head->nodes + 8ULL * (first + i));
		u64 bytes = read_u64((u64)&node->ne[3]) * read_u64((u64)&node->nb[3]);

		if (first + i >= (u32)head->n_nodes)
			return 0;
		if (address - read_u64((u64)node + t->name_at - DATA_BYTES) < bytes)
			return first + i + 1;
	}
	return 0;
}

/*
 * void cblas_sgemm(order, transpose a, transpose b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), which ggml's BLAS backend
 * calls for each plane of an operator's result. The operator began when the previous one ended, since its weights are
 * converted first.
 */
UPROBE(ggml_product_begin)
{
	u64 result = read_u64(STACK(ctx) + RETURN_ADDRESS_BYTES + 8 * RESULT_ON_STACK);
	struct ggml_graph_view *head = (void *)t->scratch; /* the stack is full */
	u32 node;

	if (!t->leads || !t->product_ts || !t->name_at || bpf_probe_read_user(head, sizeof(*head), (void *)t->began))
		return 0;
	node = node_of_product(t, head, result);
	if (!node || node == t->product)
		return 0;
	t->product = node;
	return submit_operator(ctx, t, read_u64(head->nodes + 8ULL * (node - 1)), t->product_ts);
}

UPROBE(ggml_product_end)
{
	if (t->product_ts)
		t->product_ts = bpf_ktime_get_ns();
	return 0;
}

/* void ggml_backend_synchronize(ggml_backend_t): CPU and BLAS backends need no wait */
UPROBE(ggml_wait_begin)
{
	u64 handle = ARG1(ctx);
	u32 backend = ggml_backend_of(handle);

	if (backend == BACKEND_CPU || backend == BACKEND_BLAS)
		return 0;
	t->waits_for = handle;
	return graph_begin(ctx, ENGINE_LLAMACPP, handle, GGML_WAIT, backend, 0);
}

UPROBE(ggml_wait_end)
{
	u64 handle = t->waits_for;

	t->waits_for = 0;
	return handle ? graph_end(ctx, ENGINE_LLAMACPP, handle, 0) : 0;
}

/* Copy functions call each other: the outermost is recorded, at its end, when it is known whether it copied. */
static INLINE int ggml_copies(struct pt_regs *ctx, struct traced *t, u64 result)
{
	u64 frame = STACK(ctx) + RETURN_ADDRESS_BYTES;

	if (t->copies && frame < t->copy_frame)
		return 0;
	t->copies = result;
	t->copy_frame = frame;
	t->copy_ts = bpf_ktime_get_ns();
	return 0;
}

static INLINE int ggml_copied(struct pt_regs *ctx, struct traced *t, bool done)
{
	struct settings *s = settings();
	u64 result = t->copies, rows = 0;

	if (!s || !result || t->copy_frame != STACK(ctx))
		return 0;
	t->copies = 0;
	if (!done)
		return 0;
	graph_begin_at(ctx, ENGINE_LLAMACPP, result, GGML_COPY, BACKEND_UNKNOWN, 0, t->copy_ts);
	if (s->operators) {
		bpf_probe_read_user(&rows, sizeof(rows), &((struct ggml_tensor_view *)result)->ne[1]);
		op_begin_at(ctx, ENGINE_LLAMACPP, result, GGML_OP_DUP, -1, rows, t->copy_ts);
		if (t->name_at)
			send_ggml_tensor(ctx, t, result, tensor_signature(t, result));
	}
	return graph_end(ctx, ENGINE_LLAMACPP, result, 0);
}

/* void ggml_backend_tensor_copy(const struct ggml_tensor *, struct ggml_tensor *) */
UPROBE(ggml_copy_begin)
{
	return ggml_copies(ctx, t, ARG2(ctx));
}

UPROBE(ggml_copy_end)
{
	return ggml_copied(ctx, t, true);
}

/* bool ggml_backend_..._cpy_tensor_async(from, to, const struct ggml_tensor *, struct ggml_tensor *): false if it cannot */
UPROBE(ggml_copy_async_begin)
{
	return ggml_copies(ctx, t, ARG4(ctx));
}

UPROBE(ggml_copy_async_end)
{
	return ggml_copied(ctx, t, RESULT(ctx) & 1);
}

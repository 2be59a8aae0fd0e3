// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* llama.cpp's batches: the position, the sequences and the output flag of each row that a step is fed. */

#define CALL_LLAMA_BATCH 245

/* struct llama_batch, which llama_decode takes by value. */
struct llama_batch_view {
	s32 n_tokens;
	u32 pad;
	u64 token;
	u64 embd;
	u64 pos;
	u64 n_seq_id;
	u64 seq_id;
	u64 logits;
};

#ifdef BUFFER_PERF /* the record on the stack makes more states for the verifier */
#define MAX_BATCH_ROWS 1024
#else
#define MAX_BATCH_ROWS 2048 /* llama.cpp's default most */
#endif
#define BATCH_WORDS (BATCH_ROWS + BATCH_ROWS / 2) /* of the scratch memory: the arrays of a part; the batch follows */

static INLINE struct llama_batch_view *batch_of(struct traced *t)
{
	_Static_assert(sizeof(t->scratch) >= 8 * BATCH_WORDS + sizeof(struct llama_batch_view), "a batch has room");
	return (void *)(t->scratch + BATCH_WORDS); /* the stack is full */
}

/* min(left, BATCH_ROWS), of 1 and more, in a form whose bound the verifier sees. */
#define ROWS_HERE(left) BOUNDED(BATCH_ROWS - (BATCH_ROWS - (left)) * LESS(left, BATCH_ROWS), BATCH_ROWS)

/* Part of a batch, from row `first` on; arrays in one read each, as every read costs more than its bytes. */
CHECKED_ONCE(send_batch_rows, u32 first)
{
	struct traced *t = traced();
	struct llama_batch_view *batch;
	u64 *sequences, one, rows;
	u32 *counts;
	RECORD(rec_batch_rows, r);

	if (!t)
		return false;
	batch = batch_of(t);
	sequences = t->scratch;
	counts = (u32 *)(t->scratch + BATCH_ROWS);
	one = read_u64(batch->seq_id + 8ULL * first);
	rows = ROWS_HERE((u64)(u32)batch->n_tokens - first);
	if (!reserve(r, KIND_BATCH_ROWS, ENGINE_LLAMACPP))
		return false;
	r->n_rows = batch->n_tokens;
	r->first = first;
	r->count = rows;
	r->given = BATCH_ALL - BATCH_POSITIONS * EQUAL(batch->pos, 0) - BATCH_SEQUENCES * EQUAL(batch->seq_id, 0) -
		   BATCH_OUTPUTS * EQUAL(batch->logits, 0);
	r->pad = 0;
	/* what cannot be read becomes 0 */
	bpf_probe_read_user(r->position, 4 * rows, (void *)(batch->pos + 4ULL * first));
	bpf_probe_read_user(r->output, rows, (void *)(batch->logits + first));
	bpf_probe_read_user(counts, 4 * rows, (void *)(batch->n_seq_id + 4ULL * first));
	for (u32 i = 0; i < BATCH_ROWS; i++) /* where there is no row, the first one is read again: branches make too many paths */
		sequences[i] = one;
	bpf_probe_read_user(sequences, 8 * rows, (void *)(batch->seq_id + 8ULL * first));
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < BATCH_ROWS; i++) {
		r->n_sequences[i] = counts[i];
		bpf_probe_read_user(&r->sequence[i], sizeof(r->sequence[i]), (void *)sequences[i]); /* the number's lower half */
	}
	r->sequences[0] = 0;
	if (counts[0] > 1)
		bpf_probe_read_user(r->sequences, 4 * ROWS_HERE((u64)counts[0]), (void *)sequences[0]);
	submit(ctx, r);
	return true;
}

static INLINE void send_batch(void *ctx, struct llama_batch_view *batch)
{
	if (!batch->pos && !batch->seq_id && !batch->logits) /* the engine's defaults hold for all */
		return;
	for (u32 first = 0; first < MAX_BATCH_ROWS; first += BATCH_ROWS) {
		if ((s32)first >= batch->n_tokens || !CALL_CHECKED(send_batch_rows, first))
			return;
	}
}

/* A step with the batch that follows a call's return address, or on arm64 the one that its second argument points to. */
static INLINE int llama_batch_begin(struct pt_regs *ctx, struct traced *t, u32 phase)
{
	struct llama_batch_view *batch = batch_of(t);
	u32 position = ~0U;

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	bpf_probe_read_user(batch, sizeof(*batch), (void *)ARG2(ctx)); /* large aggregates are passed by reference */
#else
	bpf_probe_read_user(batch, sizeof(*batch), (void *)(STACK(ctx) + 8));
#endif
	if (batch->pos)
		bpf_probe_read_user(&position, sizeof(position), (void *)batch->pos);
	t->in_step = 1;
	t->fills_batch = batch->pos && batch->seq_id && batch->n_seq_id && batch->logits ? 0 : batch->n_tokens;
	token_begin(ctx, ENGINE_LLAMACPP, ~0ULL, t->warms_up ? PHASE_WARM_UP : phase, batch->n_tokens, position, ARG1(ctx));
	send_batch(ctx, batch);
	return 0;
}

/* int llama_decode(struct llama_context *, struct llama_batch) */
UPROBE(llama_decode_begin)
{
	return llama_batch_begin(ctx, t, PHASE_UNKNOWN);
}

/* int32_t llama_encode(struct llama_context *, struct llama_batch): encodes a prompt */
UPROBE(llama_encode_begin)
{
	return llama_batch_begin(ctx, t, PHASE_PREFILL);
}

#define LLAMA_PROCESS_TYPE_ENCODE 0
#define ANY_ROWS 0xFFFFFFFF

/* int32_t llama_process(struct llama_context *, enum llama_process_type, struct llama_batch_ext *): the batch is opaque */
UPROBE(llama_process_begin)
{
	u32 phase = (u32)ARG2(ctx) == LLAMA_PROCESS_TYPE_ENCODE ? PHASE_PREFILL : PHASE_UNKNOWN;

	t->in_step = 1;
	t->fills_batch = ANY_ROWS;
	return token_begin(ctx, ENGINE_LLAMACPP, ~0ULL, t->warms_up ? PHASE_WARM_UP : phase, 0, ~0U, ARG1(ctx));
}

UPROBE(llama_decode_end)
{
	t->in_step = t->fills_batch = 0;
	return token_end(ctx, ENGINE_LLAMACPP, ~0ULL, (s32)RESULT(ctx));
}

/* void llama_set_warmup(struct llama_context *, bool): the thread's next steps only touch the model's weights */
UPROBE(llama_warm_up)
{
	t->warms_up = ARG2(ctx) & 0xff;
	return 0;
}

/*
 * bool llama_batch_allocr::init(...): makes a plain batch, its first member, of the one that was passed: opaque, or with defaults
 * (positions continue, sequence 0, an output for the last row).
 */
UPROBE(llama_batch_fill)
{
	if (t->fills_batch)
		keep_args(CALL_LLAMA_BATCH, ARG1(ctx), 0, 0, 0);
	return 0;
}

UPROBE(llama_batch_filled)
{
	struct llama_batch_view *batch = batch_of(t);
	u32 rows = t->fills_batch;
	struct call_args args;

	if (!rows || !take_args(CALL_LLAMA_BATCH, &args))
		return 0;
	t->fills_batch = 0;
	if (bpf_probe_read_user(batch, sizeof(*batch), (void *)args.arg[0]) || !batch->pos || !batch->seq_id)
		return 0;
	if (rows == ANY_ROWS || rows == (u32)batch->n_tokens) /* else its members are in another order */
		send_batch(ctx, batch);
	return 0;
}

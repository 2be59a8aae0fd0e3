// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Tokens: forward steps of the model, for all engines. */

static INLINE int token_begin(void *ctx, u8 engine, u64 seq, u32 phase, u32 n_tokens, u32 position, u64 context)
{
	RECORD(rec_token_begin, r);

	if (!reserve(r, KIND_TOKEN_BEGIN, engine))
		return 0;
	r->seq = seq;
	r->phase = phase;
	r->n_tokens = n_tokens;
	r->position = position;
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->context = context >> 4;
	submit(ctx, r);
	return 0;
}

static INLINE int token_end_at(void *ctx, u8 engine, u64 seq, s64 result, u64 ended)
{
	RECORD(rec_token_end, r);

	if (!reserve(r, KIND_TOKEN_END, engine))
		return 0;
	ended_at(&r->h, ended);
	r->seq = seq;
	r->result = result;
	r->maj_flt = task_counter(maj_flt);
	r->min_flt = task_counter(min_flt);
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

static INLINE int token_end(void *ctx, u8 engine, u64 seq, s64 result)
{
	return token_end_at(ctx, engine, seq, result, UNTOLD);
}

/* moescope:token__begin(seq, phase, n_tokens, position) */
UPROBE(moescope_token_begin)
{
	return token_begin(ctx, ENGINE_MOESCOPE, ARG1(ctx), ARG2(ctx), ARG3(ctx), ARG4(ctx), 0);
}

/* moescope:token__end(seq, sampled token, ended_ns) */
UPROBE(moescope_token_end)
{
	return token_end_at(ctx, ENGINE_MOESCOPE, ARG1(ctx), ARG2(ctx), ARG3(ctx));
}

/* The head of struct llama_batch, which llama_decode takes by value. */
struct llama_batch_head {
	s32 n_tokens;
	u32 pad;
	u64 token;
	u64 embd;
	u64 pos;
};

/* A step with the batch that follows a call's return address, or on arm64 the one that its second argument points to. */
static INLINE int llama_batch_begin(struct pt_regs *ctx, struct traced *t, u32 phase)
{
	struct llama_batch_head batch = {};
	u32 position = ~0U;

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	bpf_probe_read_user(&batch, sizeof(batch), (void *)ARG2(ctx)); /* large aggregates are passed by reference */
#else
	bpf_probe_read_user(&batch, sizeof(batch), (void *)(STACK(ctx) + 8));
#endif
	if (batch.pos)
		bpf_probe_read_user(&position, sizeof(position), (void *)batch.pos);
	t->in_step = 1;
	return token_begin(ctx, ENGINE_LLAMACPP, ~0ULL, phase, batch.n_tokens, position, ARG1(ctx));
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

/*
 * int32_t llama_process(struct llama_context *, enum llama_process_type, struct llama_batch_ext *): the batch is opaque; its
 * graphs show how many tokens they look up.
 */
UPROBE(llama_process_begin)
{
	u32 phase = (u32)ARG2(ctx) == LLAMA_PROCESS_TYPE_ENCODE ? PHASE_PREFILL : PHASE_UNKNOWN;

	t->in_step = 1;
	return token_begin(ctx, ENGINE_LLAMACPP, ~0ULL, phase, 0, ~0U, ARG1(ctx));
}

UPROBE(llama_decode_end)
{
	t->in_step = 0;
	return token_end(ctx, ENGINE_LLAMACPP, ~0ULL, (s32)RESULT(ctx));
}

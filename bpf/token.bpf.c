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

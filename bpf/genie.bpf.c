// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Genie: the dialog calls that libGenie.so exports; signatures are those of the public C API, handles are opaque numbers. */

#define CALL_GENIE_QUERY 220
#define CALL_GENIE_CREATE 221
#define CALL_GENIE_OTHER 222

/* Indices into the engine's `graphs` names. */
enum genie_graph {
	GENIE_CREATE,
	GENIE_FREE,
	GENIE_RESET,
};

/* GenieDialog_query(dialog, text, sentence code, callback, user data): a prompt and its whole answer, tokens unknown */
UPROBE(genie_query_begin)
{
	keep_args(CALL_GENIE_QUERY, ARG1(ctx), 0, 0, 0);
	return token_begin(ctx, ENGINE_GENIE, ~0ULL, PHASE_UNKNOWN, 0, ~0U, ARG1(ctx));
}

/* GenieDialog_tokenQuery(dialog, tokens, n_tokens, sentence code, callback, user data) */
UPROBE(genie_token_query_begin)
{
	keep_args(CALL_GENIE_QUERY, ARG1(ctx), 0, 0, 0);
	return token_begin(ctx, ENGINE_GENIE, ~0ULL, PHASE_UNKNOWN, ARG3(ctx), ~0U, ARG1(ctx));
}

UPROBE(genie_query_end)
{
	struct call_args args;

	return take_args(CALL_GENIE_QUERY, &args) ? token_end(ctx, ENGINE_GENIE, ~0ULL, (s32)RESULT(ctx)) : 0;
}

/* GenieDialog_create(config, out) */
UPROBE(genie_create_begin)
{
	keep_args(CALL_GENIE_CREATE, ARG2(ctx), 0, 0, 0);
	return graph_begin(ctx, ENGINE_GENIE, 0, GENIE_CREATE, BACKEND_UNKNOWN, 0);
}

UPROBE(genie_create_end)
{
	struct call_args args;
	u64 dialog = 0;

	if (!take_args(CALL_GENIE_CREATE, &args))
		return 0;
	if (!(s32)RESULT(ctx))
		bpf_probe_read_user(&dialog, sizeof(dialog), (void *)args.arg[0]);
	return graph_end(ctx, ENGINE_GENIE, dialog, (s32)RESULT(ctx));
}

static INLINE int genie_call_begin(struct pt_regs *ctx, u32 type)
{
	keep_args(CALL_GENIE_OTHER, ARG1(ctx), 0, 0, 0);
	return graph_begin(ctx, ENGINE_GENIE, ARG1(ctx), type, BACKEND_UNKNOWN, 0);
}

/* GenieDialog_free(dialog) */
UPROBE(genie_free_begin)
{
	return genie_call_begin(ctx, GENIE_FREE);
}

/* GenieDialog_reset(dialog) */
UPROBE(genie_reset_begin)
{
	return genie_call_begin(ctx, GENIE_RESET);
}

UPROBE(genie_call_end)
{
	struct call_args args;

	return take_args(CALL_GENIE_OTHER, &args) ? graph_end(ctx, ENGINE_GENIE, args.arg[0], (s32)RESULT(ctx)) : 0;
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Genie: calls that libGenie.so exports; signatures are those of the public C API, handles are opaque numbers. */

#define CALL_GENIE_QUERY 220
#define CALL_GENIE_CREATE 221
#define CALL_GENIE_OTHER 222
#define CALL_GENIE_PROFILE 223

/* Indices into the engine's `graphs` names. */
enum genie_graph {
	GENIE_CREATE,
	GENIE_FREE,
	GENIE_RESET,
	GENIE_APPLY_LORA,
	GENIE_SET_DATA,
	GENIE_GET_DATA,
	GENIE_EXECUTE_NODE,
};

/* GenieDialog_query(dialog, ...), GeniePipeline_execute(pipeline, ...): a prompt and its whole answer, tokens unknown */
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

/* GenieDialog_create(config, out), and those of pipelines, nodes and embeddings */
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

/* A call with a handle first: its name in the TOML file, and its kind. */
#define GENIE_CALL(name, kind)                                                                                         \
	UPROBE(genie_##name##_begin)                                                                                   \
	{                                                                                                              \
		return genie_call_begin(ctx, kind);                                                                    \
	}

GENIE_CALL(free, GENIE_FREE)
GENIE_CALL(reset, GENIE_RESET)
GENIE_CALL(apply_lora, GENIE_APPLY_LORA)
GENIE_CALL(set_data, GENIE_SET_DATA)
GENIE_CALL(get_data, GENIE_GET_DATA)
GENIE_CALL(execute_node, GENIE_EXECUTE_NODE)

UPROBE(genie_call_end)
{
	struct call_args args;

	return take_args(CALL_GENIE_OTHER, &args) ? graph_end(ctx, ENGINE_GENIE, args.arg[0], (s32)RESULT(ctx)) : 0;
}

/* GenieProfile_getJsonData(profile, allocate, out text) */
UPROBE(genie_profile_begin)
{
	keep_args(CALL_GENIE_PROFILE, ARG1(ctx), ARG3(ctx), 0, 0);
	return 0;
}

/* Whether text follows the part. */
CHECKED_ONCE(send_genie_profile, u64 profile, u64 text, u32 part, u64 call_ts)
{
	RECORD(rec_genie_profile, r);
	long bytes;

	if (!reserve(r, KIND_GENIE_PROFILE, ENGINE_GENIE))
		return false;
	r->h.ts = call_ts; /* joins the parts */
	r->profile = profile;
	r->part = part;
	r->text[0] = 0;
	bytes = bpf_probe_read_user_str(r->text, sizeof(r->text), (void *)(text + (sizeof(r->text) - 1) * (u64)part));
	submit(ctx, r);
	return bytes == sizeof(r->text);
}

#define MAX_PROFILE_PARTS 512 /* 104 KiB */
UPROBE(genie_profile_end)
{
	u64 text = 0, now = bpf_ktime_get_ns();
	struct call_args args;

	if (!take_args(CALL_GENIE_PROFILE, &args) || (s32)RESULT(ctx))
		return 0;
	bpf_probe_read_user(&text, sizeof(text), (void *)args.arg[1]);
	for (u32 part = 0; part < MAX_PROFILE_PARTS; part++) {
		if (!text || !CALL_CHECKED(send_genie_profile, args.arg[0], text, part, now))
			return 0;
	}
	count_loss(KIND_GENIE_PROFILE);
	return 0;
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* onnxruntime-genai: the calls of its public C API (ort_genai_c.h), which its Python package uses too. */

#define CALL_GENAI_STEP 240
#define CALL_GENAI_MODEL 241

/* Indices into the engine's `graphs` names. */
enum genai_graph {
	GENAI_CREATE_MODEL,
};

static INLINE int genai_step_begin(void *ctx, u64 generator, u32 phase, u32 n_tokens)
{
	keep_args(CALL_GENAI_STEP, generator, 0, 0, 0);
	return token_begin(ctx, ENGINE_GENAI, ~0ULL, phase, n_tokens, ~0U, generator);
}

/* OgaGenerator_AppendTokens(generator, tokens, n_tokens) */
UPROBE(genai_append_begin)
{
	return genai_step_begin(ctx, ARG1(ctx), PHASE_PREFILL, ARG3(ctx));
}

/* OgaGenerator_AppendTokenSequences(generator, sequences): opaque */
UPROBE(genai_append_sequences_begin)
{
	return genai_step_begin(ctx, ARG1(ctx), PHASE_PREFILL, 0);
}

/* OgaGenerator_GenerateNextToken(generator) */
UPROBE(genai_next_begin)
{
	return genai_step_begin(ctx, ARG1(ctx), PHASE_DECODE, 1);
}

/* OgaResult *: null: good; otherwise opaque. */
UPROBE(genai_step_end)
{
	struct call_args args;

	return take_args(CALL_GENAI_STEP, &args) ? token_end(ctx, ENGINE_GENAI, ~0ULL, RESULT(ctx) ? -1 : 0) : 0;
}

/* OgaCreateModel(path, out), OgaCreateModelFromConfig(config, out), OgaCreateModelWithRuntimeSettings(path, settings, out) */
UPROBE(genai_model_begin)
{
	keep_args(CALL_GENAI_MODEL, 0, 0, 0, 0);
	return graph_begin(ctx, ENGINE_GENAI, 0, GENAI_CREATE_MODEL, BACKEND_UNKNOWN, 0);
}

UPROBE(genai_model_end)
{
	struct call_args args;

	return take_args(CALL_GENAI_MODEL, &args) ? graph_end(ctx, ENGINE_GENAI, 0, RESULT(ctx) ? -1 : 0) : 0;
}

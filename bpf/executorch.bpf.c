// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* ExecuTorch: a run of a method, of whose phase and tokens nothing is told outside. */

#define CALL_EXECUTORCH 242

/* Indices into the engine's `graphs` names. */
enum executorch_graph {
	EXECUTORCH_RUN,
};

/* executorch::runtime::Method::execute(), by which every runner takes a step */
UPROBE(executorch_execute_begin)
{
	keep_args(CALL_EXECUTORCH, ARG1(ctx), 0, 0, 0);
	token_begin(ctx, ENGINE_EXECUTORCH, ~0ULL, PHASE_UNKNOWN, 0, ~0U, ARG1(ctx));
	return graph_begin(ctx, ENGINE_EXECUTORCH, ARG1(ctx), EXECUTORCH_RUN, BACKEND_UNKNOWN, 0);
}

/* What it returns: executorch::runtime::Error, 0 good */
UPROBE(executorch_execute_end)
{
	struct call_args args;

	if (!take_args(CALL_EXECUTORCH, &args))
		return 0;
	graph_end(ctx, ENGINE_EXECUTORCH, args.arg[0], (s32)RESULT(ctx));
	return token_end(ctx, ENGINE_EXECUTORCH, ~0ULL, (s32)RESULT(ctx));
}

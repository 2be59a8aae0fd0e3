// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* ExecuTorch: runs of methods, whose phase and tokens are not visible from outside. */

#define CALL_EXECUTORCH 242

/* Indices into the engine's `graphs` names. */
enum executorch_graph {
	EXECUTORCH_RUN,
};

/* executorch::runtime::Method::execute(), which every runner calls for a step */
UPROBE(executorch_execute_begin)
{
	keep_args(CALL_EXECUTORCH, ARG1(ctx), 0, 0, 0);
	token_begin(ctx, ENGINE_EXECUTORCH, ~0ULL, PHASE_UNKNOWN, 0, ~0U, ARG1(ctx));
	return graph_begin(ctx, ENGINE_EXECUTORCH, ARG1(ctx), EXECUTORCH_RUN, BACKEND_UNKNOWN, 0);
}

/* It returns executorch::runtime::Error, 0: good */
UPROBE(executorch_execute_end)
{
	struct call_args args;

	if (!take_args(CALL_EXECUTORCH, &args))
		return 0;
	graph_end(ctx, ENGINE_EXECUTORCH, args.arg[0], (s32)RESULT(ctx));
	return token_end(ctx, ENGINE_EXECUTORCH, ~0ULL, (s32)RESULT(ctx));
}

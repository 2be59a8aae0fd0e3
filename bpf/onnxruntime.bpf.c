// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * ONNX Runtime: the calls of its public C API, whose functions a program gets only by tables: OrtGetApiBase() returns a table
 * with GetApi, which returns the table of all other functions. Each table is sent when a program gets it.
 * Signatures are those of the public onnxruntime_c_api.h. The Python module has no such table: its calls go to the C++ function
 * that is behind all ways to run a model.
 */

#define CALL_ORT_GET_API 230
#define CALL_ORT_CREATE 231
#define CALL_ORT_RUN 232
#define CALL_ORT_RUN_ASYNC 233
#define CALL_ORT_RELEASE 234
#define CALL_ORT_SESSION_RUN 235

#define ORT_API_PARTS 11 /* 264 slots: up to RunAsync and beyond */

/* Indices into the engine's `graphs` names. */
enum ort_graph {
	ORT_RUN,
	ORT_RUN_WITH_BINDING,
	ORT_RUN_ASYNC,
	ORT_CREATE_SESSION,
	ORT_RELEASE_SESSION,
};

#define SIGNAL_CONTINUE 18

/* Without room for the record nobody would resume the target, so it is resumed at once, without these probes. */
static INLINE bool send_api_table(void *ctx, const char *name, u64 table, u32 version, u32 first, bool last)
{
	RECORD(rec_api_table, r);

	if (!reserve(r, KIND_API_TABLE, ENGINE_ONNXRUNTIME)) {
		bpf_send_signal(SIGNAL_CONTINUE);
		return false;
	}
	__builtin_memcpy(r->table, name, sizeof(r->table));
	r->address = table;
	r->version = version;
	r->first = first;
	r->last = last;
	bpf_probe_read_user(r->slots, sizeof(r->slots), (void *)(table + 8ULL * first));
	submit_urgent(ctx, r);
	return true;
}

/* const OrtApiBase *OrtGetApiBase(void): {GetApi, GetVersionString} */
UPROBE(ort_get_api_base_end)
{
	const char name[16] = "OrtApiBase";
	u64 table = RESULT(ctx);

	if (!table || !is_to_be_probed(table, 1))
		return 0;
	stop_target();
	send_api_table(ctx, name, table, 0, 0, true);
	return 0;
}

/* const OrtApi *GetApi(uint32_t version); null if the library does not have the version */
UPROBE(ort_get_api_begin)
{
	keep_args(CALL_ORT_GET_API, ARG1(ctx), 0, 0, 0);
	return 0;
}

UPROBE(ort_get_api_end)
{
	const char name[16] = "OrtApi";
	u64 table = RESULT(ctx);
	struct call_args args;

	if (!take_args(CALL_ORT_GET_API, &args) || !table || !is_to_be_probed(table, args.arg[0]))
		return 0;
	stop_target();
	for (u32 part = 0; part < ORT_API_PARTS; part++) {
		if (!send_api_table(ctx, name, table, args.arg[0], part * TABLE_SLOTS, part + 1 == ORT_API_PARTS))
			return 0;
	}
	return 0;
}

/* OrtStatus *: null: good; otherwise it begins with the error code. */
static INLINE s64 ort_status(u64 status)
{
	u32 code = 0;

	if (status && bpf_probe_read_user(&code, sizeof(code), (void *)status))
		return -1;
	return code;
}

static INLINE void send_session(void *ctx, u64 handle, u64 path, u64 bytes, u32 n_inputs, u32 n_outputs)
{
	RECORD(rec_session, r);

	if (!reserve(r, KIND_SESSION, ENGINE_ONNXRUNTIME))
		return;
	r->handle = handle;
	r->bytes = bytes;
	r->n_inputs = n_inputs;
	r->n_outputs = n_outputs;
	r->name[0] = 0;
	if (path)
		bpf_probe_read_user_str(r->name, sizeof(r->name), (void *)path);
	submit(ctx, r);
}

static INLINE int ort_create_begin(void *ctx, u64 path, u64 bytes, u64 out)
{
	keep_args(CALL_ORT_CREATE, path, bytes, out, 0);
	return graph_begin(ctx, ENGINE_ONNXRUNTIME, 0, ORT_CREATE_SESSION, BACKEND_UNKNOWN, 0);
}

/* CreateSession(env, path, options, out) */
UPROBE(ort_create_session_begin)
{
	return ort_create_begin(ctx, ARG2(ctx), 0, ARG4(ctx));
}

/* CreateSessionFromArray(env, model, bytes, options, out) */
UPROBE(ort_create_from_array_begin)
{
	return ort_create_begin(ctx, 0, ARG3(ctx), ARG5(ctx));
}

/* CreateSessionWithPrepackedWeightsContainer(env, path, options, container, out) */
UPROBE(ort_create_prepacked_begin)
{
	return ort_create_begin(ctx, ARG2(ctx), 0, ARG5(ctx));
}

/* CreateSessionFromArrayWithPrepackedWeightsContainer(env, model, bytes, options, container, out) */
UPROBE(ort_create_prepacked_from_array_begin)
{
	return ort_create_begin(ctx, 0, ARG3(ctx), ARG6(ctx));
}

UPROBE(ort_create_session_end)
{
	s64 status = ort_status(RESULT(ctx));
	struct call_args args;
	u64 session = 0;

	if (!take_args(CALL_ORT_CREATE, &args))
		return 0;
	if (!status)
		bpf_probe_read_user(&session, sizeof(session), (void *)args.arg[2]);
	graph_end(ctx, ENGINE_ONNXRUNTIME, session, status);
	if (session) {
		is_news(session, ~0ULL); /* a reused address is another session, whose counts are new */
		send_session(ctx, session, args.arg[0], args.arg[1], 0, 0);
	}
	return 0;
}

/* An operator of the program's own may run another session within a run. */
static INLINE int session_begin(struct pt_regs *ctx, u8 call, u32 type, u64 session)
{
	keep_args_of(STACK(ctx) + RETURN_ADDRESS_BYTES, call, session, 0, 0, 0);
	return graph_begin(ctx, ENGINE_ONNXRUNTIME, session, type, BACKEND_UNKNOWN, 0);
}

static INLINE int session_end(struct pt_regs *ctx, u8 call, u64 status)
{
	struct call_args args;

	return take_args_of(STACK(ctx), call, &args) ? graph_end(ctx, ENGINE_ONNXRUNTIME, args.arg[0], ort_status(status)) : 0;
}

static INLINE void ort_counts(void *ctx, u64 session, u32 n_inputs, u32 n_outputs)
{
	if (is_news(session, (u64)n_inputs << 32 | n_outputs))
		send_session(ctx, session, 0, 0, n_inputs, n_outputs);
}

/* Run(session, options, input names, inputs, n_inputs, output names, n_outputs, outputs) */
UPROBE(ort_run_begin)
{
	session_begin(ctx, CALL_ORT_RUN, ORT_RUN, ARG1(ctx));
	ort_counts(ctx, ARG1(ctx), ARG5(ctx), arg7(ctx));
	return 0;
}

UPROBE(ort_run_end)
{
	return session_end(ctx, CALL_ORT_RUN, RESULT(ctx));
}

/* RunWithBinding(session, options, binding) */
UPROBE(ort_run_with_binding_begin)
{
	return session_begin(ctx, CALL_ORT_RUN, ORT_RUN_WITH_BINDING, ARG1(ctx));
}

/* RunAsync: as Run, with a callback; it returns when the work has been passed to a thread. */
UPROBE(ort_run_async_begin)
{
	session_begin(ctx, CALL_ORT_RUN_ASYNC, ORT_RUN_ASYNC, ARG1(ctx));
	ort_counts(ctx, ARG1(ctx), ARG5(ctx), arg7(ctx));
	return 0;
}

UPROBE(ort_run_async_end)
{
	return session_end(ctx, CALL_ORT_RUN_ASYNC, RESULT(ctx));
}

/* void ReleaseSession(session) */
UPROBE(ort_release_session_begin)
{
	return session_begin(ctx, CALL_ORT_RELEASE, ORT_RELEASE_SESSION, ARG1(ctx));
}

UPROBE(ort_release_session_end)
{
	return session_end(ctx, CALL_ORT_RELEASE, 0);
}

/* Status InferenceSession::Run(options, names, ...): on x86-64 the result's address is the first argument, on arm64 none. */
UPROBE(ort_session_run_begin)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	u64 session = ARG1(ctx), status = REG(ctx, unused, 8);
#else
	u64 session = ARG2(ctx), status = ARG1(ctx);
#endif

	keep_args_of(STACK(ctx) + RETURN_ADDRESS_BYTES, CALL_ORT_SESSION_RUN, session, status, 0, 0);
	return graph_begin(ctx, ENGINE_ONNXRUNTIME, session, ORT_RUN, BACKEND_UNKNOWN, 0);
}

/* A Status is one pointer: null: good; otherwise to {category, error code, ...}. */
UPROBE(ort_session_run_end)
{
	struct { u32 category, code; } state = {0};
	struct call_args args;
	u64 pointer = 0;

	if (!take_args_of(STACK(ctx), CALL_ORT_SESSION_RUN, &args))
		return 0;
	if (bpf_probe_read_user(&pointer, sizeof(pointer), (void *)args.arg[1]) ||
	    (pointer && bpf_probe_read_user(&state, sizeof(state), (void *)pointer)))
		state.code = ~0U;
	return graph_end(ctx, ENGINE_ONNXRUNTIME, args.arg[0], (s32)state.code);
}

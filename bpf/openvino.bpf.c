// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * OpenVINO: infer requests, of the program and of plugins that pass parts of a model on, by exported C++ functions of
 * libopenvino; signatures are those of its public headers. Ends are probed at the functions' `ret`: these functions throw,
 * and a return probe would keep the exception from its handler.
 */

#define CALL_OV_TENSOR 250

/* Indices into the engine's `graphs` names. */
enum openvino_graph {
	OV_INFER,
	OV_START_ASYNC,
	OV_WAIT_ASYNC,
	OV_COMPILE,
	OV_IMPORT,
	OV_LOOK_UP_CACHE,
	OV_WRITE_CACHE,
};

/* What a value in `openvino` says of the object at its address. */
enum openvino_fact {
	OV_DEVICE,     /* of a plugin, compiled model or request: its name, up to 8 characters */
	OV_MODEL,      /* of a request: its compiled model */
	OV_TOKENS,     /* of a request: the tensor that holds the step's tokens, | 1 if embedded; */
	OV_MASK,       /* the one of its mask, [sequences, context and step]; */
	OV_PAST,       /* and, with paged attention, the one of its sequences' context lengths */
	OV_STARTED_BY, /* of a request: thread << 1 | whether it is a step, while it runs asynchronously */
	OV_STEP_OF,    /* of a thread: the request of its last step that began asynchronously */
	/* of the stack pointer of a call that has not returned: its request */
	OV_INFERS,
	OV_STEPS, /* the same, but as a step */
	OV_STARTS,
	OV_WAITS,
	OV_LOADS, /* 1 */
};

#ifndef LOADER_BCC
/* key: address, process, enum openvino_fact. value: see there. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct place_key);
	__type(value, u64);
} openvino SEC(".maps");
#endif

static INLINE struct place_key openvino_key(u64 address, u32 fact)
{
	return (struct place_key){address, bpf_get_current_pid_tgid() >> 32, fact};
}

static INLINE u64 openvino_fact(u64 address, u32 fact)
{
	struct place_key key = openvino_key(address, fact);
	u64 *value = map_lookup(MAP(openvino), &key);

	return value ? *value : 0;
}

static INLINE void set_openvino_fact(u64 address, u32 fact, u64 value)
{
	struct place_key key = openvino_key(address, fact);

	if (value)
		map_update(MAP(openvino), &key, &value);
	else
		map_delete(MAP(openvino), &key);
}

/* At the begin and the `ret` of a function the stack pointer is the same, and no other open call has it. */
static INLINE void enter_openvino(struct pt_regs *ctx, u32 call, u64 value)
{
	set_openvino_fact(STACK(ctx), call, value);
}

/* What was kept at the call's begin; 0: the begin was not seen. */
static INLINE u64 leave_openvino(struct pt_regs *ctx, u32 call)
{
	u64 value = openvino_fact(STACK(ctx), call);

	if (value)
		set_openvino_fact(STACK(ctx), call, 0);
	return value;
}

static INLINE u64 user_word(u64 address)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

/* A std::string of libstdc++, in both of its layouts: the first word points to the text. Its first 8 characters, zero-filled. */
static INLINE u64 string_begin(u64 string)
{
	union {
		char text[16];
		u64 begin;
	} read = {0};

	bpf_probe_read_user_str(read.text, 9, (void *)user_word(string));
	return read.begin;
}

#define OV_CPU 0x555043ULL /* "CPU" */

/* ov::IPlugin::set_device_name(const std::string &) */
UPROBE(openvino_device)
{
	set_openvino_fact(ARG1(ctx), OV_DEVICE, string_begin(ARG2(ctx)));
	return 0;
}

/* ov::ICompiledModel(model, const std::shared_ptr<const ov::IPlugin> &, ...) */
UPROBE(openvino_compiled)
{
	u64 device = openvino_fact(user_word(ARG3(ctx)), OV_DEVICE);
	const char on[16] = "model on ";
	RECORD(rec_session, r);

	set_openvino_fact(ARG1(ctx), OV_DEVICE, device);
	if (!reserve(r, KIND_SESSION, ENGINE_OPENVINO))
		return 0;
	r->handle = ARG1(ctx);
	r->bytes = 0;
	r->n_inputs = r->n_outputs = 0;
	__builtin_memset(r->name, 0, sizeof(r->name));
	__builtin_memcpy(r->name, on, sizeof(on));
	__builtin_memcpy(r->name + 9, &device, sizeof(device));
	submit(ctx, r);
	return 0;
}

/* ov::ISyncInferRequest(const std::shared_ptr<const ov::ICompiledModel> &) */
UPROBE(openvino_sync_request)
{
	set_openvino_fact(ARG1(ctx), OV_MODEL, user_word(ARG2(ctx)));
	return 0;
}

/* ov::IAsyncInferRequest(const std::shared_ptr<ov::IInferRequest> &, ...): a reused address is another request. */
UPROBE(openvino_request)
{
	u64 model = openvino_fact(user_word(ARG2(ctx)), OV_MODEL);

	set_openvino_fact(ARG1(ctx), OV_MODEL, model);
	set_openvino_fact(ARG1(ctx), OV_DEVICE, openvino_fact(model, OV_DEVICE));
	for (u32 fact = OV_TOKENS; fact <= OV_STARTED_BY; fact++)
		set_openvino_fact(ARG1(ctx), fact, 0);
	return 0;
}

/* Inputs by the first 8 characters of the names that exported language models give them. */
static INLINE u32 input_named(u64 string, u64 *embedded)
{
	*embedded = 0;
	switch (string_begin(string)) {
	case 0x655f737475706e69ULL: /* "inputs_e": inputs_embeds */
		*embedded = 1;
		return OV_TOKENS;
	case 0x64695f7475706e69ULL: /* "input_id": input_ids */
		return OV_TOKENS;
	case 0x6f69746e65747461ULL: /* "attentio": attention_mask */
		return OV_MASK;
	case 0x6e656c5f74736170ULL: /* "past_len": past_lens */
		return OV_PAST;
	}
	return 0;
}

/* ov::InferRequest::set_tensor(const std::string &, const ov::Tensor &); request and tensor begin with their object's address. */
UPROBE(openvino_set_tensor)
{
	u64 embedded;
	u32 input = input_named(ARG2(ctx), &embedded);

	if (input)
		set_openvino_fact(user_word(ARG1(ctx)), input, user_word(ARG3(ctx)) | embedded);
	return 0;
}

/* The object that a C++ function returns by address, and its arguments after that. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define RETURNED_OBJECT(ctx) REG(ctx, unused, 8)
#define RETURNING_ARG1(ctx) ARG1(ctx)
#define RETURNING_ARG2(ctx) ARG2(ctx)
#else
#define RETURNED_OBJECT(ctx) ARG1(ctx)
#define RETURNING_ARG1(ctx) ARG2(ctx)
#define RETURNING_ARG2(ctx) ARG3(ctx)
#endif

/* ov::Tensor ov::InferRequest::get_tensor(const std::string &): it throws if there is no such input. */
UPROBE(openvino_get_tensor)
{
	u64 embedded;
	u32 input = input_named(RETURNING_ARG2(ctx), &embedded);

	if (input)
		keep_args(CALL_OV_TENSOR, RETURNED_OBJECT(ctx), user_word(RETURNING_ARG1(ctx)), input, embedded);
	return 0;
}

/* ov::Tensor(const std::shared_ptr<ov::ITensor> &, const std::shared_ptr<void> &): how get_tensor makes what it returns */
UPROBE(openvino_tensor)
{
	struct call_args args;

	if (take_args(CALL_OV_TENSOR, &args) && args.arg[0] == ARG1(ctx))
		set_openvino_fact(args.arg[1], args.arg[2], user_word(ARG2(ctx)) | args.arg[3]);
	return 0;
}

struct openvino_shape {
	u64 n, dims[3];
};

/* The first 8 characters of the names of OpenVINO's tensors that hold their shape where the first of them does. */
static INLINE bool is_plain_tensor(u64 tensor)
{
	u64 type = user_word(user_word(tensor) - 8);

	switch (user_word(user_word(type + 8))) {
	case 0x6c413531766f324eULL: /* N2ov15Al: ov::AllocatedTensor */
	case 0x69563031766f324eULL: /* N2ov10Vi: ov::ViewTensor */
	case 0x74533731766f324eULL: /* N2ov17St: ov::StridedViewTensor */
	case 0x65523831766f324eULL: /* N2ov18Re: ov::ReadOnlyViewTensor */
		return true;
	}
	return false;
}

/* A tensor's shape, a std::vector {begin, end, ...} behind its base class and element type; n is 0 if it is unknown. */
static INLINE struct openvino_shape openvino_shape(u64 tensor)
{
	struct openvino_shape shape = {0};
	u64 ends[2] = {0}, bytes;

	if (!tensor || !is_plain_tensor(tensor))
		return shape;
	bpf_probe_read_user(ends, sizeof(ends), (void *)(tensor + 32));
	bytes = ends[1] - ends[0];
	if (bytes < 8 || bytes > sizeof(shape.dims) || bytes % 8)
		return shape;
	if (!bpf_probe_read_user(shape.dims, sizeof(shape.dims), (void *)ends[0]))
		shape.n = bytes / 8;
	return shape;
}

/* What a step is fed; rows: tokens of all its sequences, 0 if unknown. */
struct openvino_step {
	u32 rows, phase, position;
};

/* Tokens as [sequences, each's tokens] or, with paged attention, one after the other. */
static INLINE struct openvino_step openvino_step(u64 request, u64 tokens)
{
	struct openvino_shape fed = openvino_shape(tokens & ~1ULL), mask = openvino_shape(openvino_fact(request, OV_MASK));
	struct openvino_step step = {0, PHASE_UNKNOWN, ~0U};
	u64 sequences = fed.dims[0], each = fed.dims[1];

	fed.n -= fed.n && (tokens & 1); /* without the embeddings' own dimension */
	if (fed.n == 1) {
		struct openvino_shape past = openvino_shape(openvino_fact(request, OV_PAST));

		step.rows = fed.dims[0];
		if (past.n == 1)
			step.phase = step.rows > past.dims[0] ? PHASE_PREFILL : PHASE_DECODE;
	} else if (fed.n == 2) {
		step.rows = sequences * each;
		if (mask.n == 2 && mask.dims[1] >= each)
			step.position = mask.dims[1] - each;
		step.phase = each > 1 || !step.position ? PHASE_PREFILL : PHASE_DECODE;
	}
	return step;
}

/* The begin of a request's run; whether it is a step: a run of a language model, if `tokens` are known. */
static INLINE bool openvino_run_begin(void *ctx, u64 request, u64 tokens, u32 kind)
{
	u32 backend = openvino_fact(request, OV_DEVICE) == OV_CPU ? BACKEND_CPU : BACKEND_UNKNOWN;
	struct openvino_step step = {0};

	if (tokens) {
		step = openvino_step(request, tokens);
		token_begin(ctx, ENGINE_OPENVINO, ~0ULL, step.phase, step.rows, step.position, request);
	}
	graph_begin(ctx, ENGINE_OPENVINO, openvino_fact(request, OV_MODEL), kind, backend, step.rows);
	return tokens;
}

static INLINE int openvino_run_end(void *ctx, u64 request)
{
	return request ? graph_end(ctx, ENGINE_OPENVINO, openvino_fact(request, OV_MODEL), 0) : 0;
}

/* void ov::IAsyncInferRequest::infer() */
UPROBE(openvino_infer_begin)
{
	bool is_step = openvino_run_begin(ctx, ARG1(ctx), openvino_fact(ARG1(ctx), OV_TOKENS), OV_INFER);

	enter_openvino(ctx, is_step ? OV_STEPS : OV_INFERS, ARG1(ctx));
	return 0;
}

UPROBE(openvino_infer_end)
{
	u64 step = leave_openvino(ctx, OV_STEPS);

	openvino_run_end(ctx, step ? step : leave_openvino(ctx, OV_INFERS));
	return step ? token_end(ctx, ENGINE_OPENVINO, ~0ULL, 0) : 0;
}

/*
 * void ov::IAsyncInferRequest::start_async(): its step ends when the same thread has waited for it. Of several requests that
 * a thread has in flight, the first alone is a step: steps of a thread do not overlap.
 */
UPROBE(openvino_start_begin)
{
	u64 request = ARG1(ctx), tokens = openvino_fact(request, OV_TOKENS), tid = (u32)bpf_get_current_pid_tgid();
	u64 before = openvino_fact(tid, OV_STEP_OF);
	bool overlaps = before && before != request && openvino_fact(before, OV_STARTED_BY) == (tid << 1 | 1);
	u64 is_step = openvino_run_begin(ctx, request, overlaps ? 0 : tokens, OV_START_ASYNC);

	if (is_step)
		set_openvino_fact(tid, OV_STEP_OF, request);
	set_openvino_fact(request, OV_STARTED_BY, tid << 1 | is_step);
	enter_openvino(ctx, OV_STARTS, request);
	return 0;
}

UPROBE(openvino_start_end)
{
	return openvino_run_end(ctx, leave_openvino(ctx, OV_STARTS));
}

/* void ov::IAsyncInferRequest::wait(), bool wait_for(const std::chrono::milliseconds &): true when it is done */
UPROBE(openvino_wait_begin)
{
	u64 request = ARG1(ctx);

	if (!openvino_fact(request, OV_STARTED_BY))
		return 0;
	enter_openvino(ctx, OV_WAITS, request);
	return graph_begin(ctx, ENGINE_OPENVINO, openvino_fact(request, OV_MODEL), OV_WAIT_ASYNC, BACKEND_UNKNOWN, 0);
}

static INLINE int openvino_waited(struct pt_regs *ctx, bool is_done)
{
	u64 request = leave_openvino(ctx, OV_WAITS), started = openvino_fact(request, OV_STARTED_BY);

	openvino_run_end(ctx, request);
	if (!request || !is_done)
		return 0;
	set_openvino_fact(request, OV_STARTED_BY, 0);
	return started == ((u64)(u32)bpf_get_current_pid_tgid() << 1 | 1) ? token_end(ctx, ENGINE_OPENVINO, ~0ULL, 0) : 0;
}

UPROBE(openvino_wait_end)
{
	return openvino_waited(ctx, true);
}

UPROBE(openvino_wait_for_end)
{
	return openvino_waited(ctx, RESULT(ctx) & 1);
}

static INLINE int openvino_load_begin(struct pt_regs *ctx, u32 kind)
{
	enter_openvino(ctx, OV_LOADS, 1);
	return graph_begin(ctx, ENGINE_OPENVINO, 0, kind, BACKEND_UNKNOWN, 0);
}

/* ov::Core::compile_model(...) */
UPROBE(openvino_compile_begin)
{
	return openvino_load_begin(ctx, OV_COMPILE);
}

/* ov::Core::import_model(...) */
UPROBE(openvino_import_begin)
{
	return openvino_load_begin(ctx, OV_IMPORT);
}

/* ov::ModelCache::compute_hash(...): the name under which to look in the cache */
UPROBE(openvino_look_up_begin)
{
	return openvino_load_begin(ctx, OV_LOOK_UP_CACHE);
}

/* ov::pass::StreamSerialize::run_on_model(...): the compiled model is written to the cache, or exported */
UPROBE(openvino_write_begin)
{
	return openvino_load_begin(ctx, OV_WRITE_CACHE);
}

UPROBE(openvino_load_end)
{
	return leave_openvino(ctx, OV_LOADS) ? graph_end(ctx, ENGINE_OPENVINO, 0, 0) : 0;
}

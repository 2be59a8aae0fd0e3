// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * QNN: the calls of its function table and the profile events that the program reads.
 * Signatures are those of the public C API; handles are opaque numbers.
 */

#define CALL_GET_PROVIDERS 250
#define CALL_GET_INTERFACE 251
#define CALL_EXECUTE 21
#define CALL_GET_EVENTS 30
#define CALL_GET_SUB_EVENTS 31
#define CALL_EVENT_DATA 32
#define CALL_EXTENDED_EVENT_DATA 33

#define MAX_PROVIDERS 4
#define PROFILE_OPTION_MAX_EVENTS 1
#define PROVIDER_API 16   /* uint32 core API major, minor, patch */
#define PROVIDER_TABLE 40 /* the first function pointer */

/* QnnInterface_getProviders(const QnnInterface_t ***list, uint32_t *count) */
UPROBE(qnn_providers_begin)
{
	keep_args(CALL_GET_PROVIDERS, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

#define SIGNAL_CONTINUE 18

/* Without room for the record nobody would resume the target, so it is resumed at once, without these probes. */
static INLINE bool send_table(void *ctx, u64 provider, u32 index, bool last)
{
	for (u32 part = 0; part < TABLE_PARTS; part++) {
		RECORD(rec_qnn_table, r);

		if (!reserve(r, KIND_QNN_TABLE, ENGINE_QNN)) {
			bpf_send_signal(SIGNAL_CONTINUE);
			return false;
		}
		r->backend = 0;
		r->provider = index;
		r->last = last && part + 1 == TABLE_PARTS;
		r->first = part * TABLE_SLOTS;
		bpf_probe_read_user(&r->backend, sizeof(r->backend), (void *)provider);
		bpf_probe_read_user(r->api, sizeof(r->api), (void *)(provider + PROVIDER_API));
		bpf_probe_read_user(r->slots, sizeof(r->slots), (void *)(provider + PROVIDER_TABLE + 8ULL * r->first));
		submit_urgent(ctx, r);
	}
	return true;
}

/* Reports that the library returned no table, so that there is nothing to probe. */
static INLINE int send_no_table(void *ctx)
{
	RECORD(rec_qnn_table, r);

	if (!reserve(r, KIND_QNN_TABLE, ENGINE_QNN))
		return 0;
	r->backend = r->api[0] = r->api[1] = r->api[2] = r->first = r->last = 0;
	r->provider = NO_PROVIDER;
	__builtin_memset(r->slots, 0, sizeof(r->slots));
	submit(ctx, r);
	return 0;
}

static INLINE u64 provider_at(u64 list, u32 index)
{
	u64 provider = 0;

	bpf_probe_read_user(&provider, sizeof(provider), (void *)(list + 8ULL * index));
	return provider;
}

UPROBE(qnn_providers_end)
{
	u32 count = 0, given = MAX_PROVIDERS;
	struct call_args args;
	u64 list = 0;

	if (!take_args(CALL_GET_PROVIDERS, &args))
		return 0;
	bpf_probe_read_user(&list, sizeof(list), (void *)args.arg[0]);
	bpf_probe_read_user(&count, sizeof(count), (void *)args.arg[1]);
	for (u32 i = 0; i < MAX_PROVIDERS; i++) {
		if (i < count && list && !RESULT(ctx) && provider_at(list, i))
			given = i;
	}
	if (!is_to_be_probed(list, (u64)given << 32 | count))
		return 0;
	if (given == MAX_PROVIDERS)
		return send_no_table(ctx);
	stop_target();
	for (u32 i = 0; i < MAX_PROVIDERS; i++) {
		u64 provider = provider_at(list, i);

		if (i <= given && provider && !send_table(ctx, provider, i, i == given))
			return 0;
	}
	return 0;
}

static INLINE int execute_begin(struct pt_regs *ctx, u8 call, u64 param)
{
	RECORD(rec_qnn_execute_begin, r);

	keep_args(call, ARG1(ctx), ARG6(ctx), 0, 0);
	if (!reserve(r, KIND_QNN_EXECUTE_BEGIN, ENGINE_QNN))
		return 0;
	r->graph = ARG1(ctx);
	r->profile = ARG6(ctx);
	r->n_inputs = ARG3(ctx);
	r->n_outputs = ARG5(ctx);
	r->param = param;
	submit(ctx, r);
	return 0;
}

static INLINE int execute_end(struct pt_regs *ctx, u8 call)
{
	RECORD(rec_qnn_execute_end, r);
	struct call_args args;

	if (!take_args(call, &args))
		return 0;
	if (!reserve(r, KIND_QNN_EXECUTE_END, ENGINE_QNN))
		return 0;
	r->graph = args.arg[0];
	r->profile = args.arg[1];
	r->status = RESULT(ctx);
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

/* graphExecute(graph, inputs, n_inputs, outputs, n_outputs, profile, signal) */
UPROBE(qnn_execute_begin)
{
	return execute_begin(ctx, CALL_EXECUTE, 0);
}

UPROBE(qnn_execute_end)
{
	return execute_end(ctx, CALL_EXECUTE);
}

/* The number-th argument, from the seventh on: after the return address on x86-64; two registers, then the stack on arm64. */
static INLINE u64 stacked_arg(struct pt_regs *ctx, u32 number)
{
	u64 value = 0;
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	if (number <= 8)
		return number == 8 ? REG(ctx, unused, 7) : REG(ctx, unused, 6);
	bpf_probe_read_user(&value, sizeof(value), (void *)(STACK(ctx) + 8 * (number - 9)));
#else
	bpf_probe_read_user(&value, sizeof(value), (void *)(STACK(ctx) + 8 * (number - 6)));
#endif
	return value;
}

static INLINE u64 arg7(struct pt_regs *ctx)
{
	return stacked_arg(ctx, 7);
}

/* A notify function's parameter as it is recorded: never 0, which marks synchronous executions. */
static INLINE u64 notice_param(u64 param)
{
	return param ? param : ~0ULL;
}

/*
 * graphExecuteAsync(graph, inputs, n_inputs, outputs, n_outputs, profile, signal, notify, parameter): notify is called with
 * the parameter at the end, on any thread. A notify function that was not seen before is reported, to be probed.
 */
UPROBE(qnn_execute_async_begin)
{
	u64 notify = stacked_arg(ctx, 8), param = stacked_arg(ctx, 9);
	RECORD(rec_qnn_callback, r);

	execute_begin(ctx, QNN_GRAPH_EXECUTE_ASYNC, notice_param(param));
	if (!notify || !is_to_be_probed(notify, QNN_GRAPH_EXECUTE_ASYNC))
		return 0;
	if (!reserve(r, KIND_QNN_CALLBACK, ENGINE_QNN))
		return 0;
	r->address = notify;
	stop_target();
	submit_urgent(ctx, r);
	return 0;
}

UPROBE(qnn_execute_async_end)
{
	return execute_end(ctx, QNN_GRAPH_EXECUTE_ASYNC);
}

/* notify(parameter, status) */
UPROBE(qnn_async_done)
{
	RECORD(rec_qnn_done, r);

	if (!reserve(r, KIND_QNN_DONE, ENGINE_QNN))
		return 0;
	r->param = notice_param(ARG1(ctx));
	r->status = ARG2(ctx);
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

/* owner: the handle that the call works in; out: address of the new handle; name: text or 0; level: of a profile */
static INLINE int call_begin(void *ctx, u8 call, u64 owner, u64 size, u64 out, u64 name, u64 level, u64 profile)
{
	RECORD(rec_qnn_call_begin, r);

	keep_args(call, owner, out, name, level);
	if (!reserve(r, KIND_QNN_CALL_BEGIN, ENGINE_QNN))
		return 0;
	r->handle = owner;
	r->size = size;
	r->profile = profile;
	r->call = call;
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

static INLINE void send_object(void *ctx, u8 call, u64 handle, struct call_args *args)
{
	RECORD(rec_qnn_object, r);

	if (!reserve(r, KIND_QNN_OBJECT, ENGINE_QNN))
		return;
	r->handle = handle;
	r->owner = args->arg[0];
	r->call = call;
	r->level = args->arg[3];
	r->bytes = 0;
	r->name[0] = 0;
	if (args->arg[2])
		bpf_probe_read_user_str(r->name, sizeof(r->name), (void *)args->arg[2]);
	submit(ctx, r);
}

static INLINE int call_end(void *ctx, u8 call, s64 status)
{
	RECORD(rec_qnn_call_end, r);
	struct call_args args;
	u64 made = 0;

	if (!take_args(call, &args))
		return 0;
	if (args.arg[1])
		bpf_probe_read_user(&made, sizeof(made), (void *)args.arg[1]);
	if (reserve(r, KIND_QNN_CALL_END, ENGINE_QNN)) {
		r->handle = args.arg[1] ? made : args.arg[0];
		r->status = status;
		r->call = call;
		r->bytes = 0;
		r->pad = 0;
		submit(ctx, r);
	}
	if (args.arg[1] && !status)
		send_object(ctx, call, made, &args);
	return 0;
}

/* An entry and a return stub per call; the body is shared. */
#define QNN_CALL(name, number, owner, size, out, text, level, profile)                                                          \
	UPROBE(qnn_##name##_begin)                                                                                     \
	{                                                                                                              \
		return call_begin(ctx, number, owner, size, out, text, level, profile);                      \
	}                                                                                                              \
	UPROBE(qnn_##name##_end)                                                                                       \
	{                                                                                                              \
		return call_end(ctx, number, RESULT(ctx));                                                                  \
	}

/* contextCreate(backend, device, config, out) */
QNN_CALL(context_create, QNN_CONTEXT_CREATE, ARG1(ctx), 0, ARG4(ctx), 0, 0, 0)
/* contextCreateFromBinary(backend, device, config, buffer, size, out, profile) */
QNN_CALL(context_from_binary, QNN_CONTEXT_FROM_BINARY, ARG1(ctx), ARG5(ctx), ARG6(ctx), 0, 0, arg7(ctx))
/* contextFree(context, profile) */
QNN_CALL(context_free, QNN_CONTEXT_FREE, ARG1(ctx), 0, 0, 0, 0, ARG2(ctx))
/* graphCreate(context, name, config, out) */
QNN_CALL(graph_create, QNN_GRAPH_CREATE, ARG1(ctx), 0, ARG4(ctx), ARG2(ctx), 0, 0)
/* graphFinalize(graph, profile, signal) */
QNN_CALL(graph_finalize, QNN_GRAPH_FINALIZE, ARG1(ctx), 0, 0, 0, 0, ARG2(ctx))
/* graphRetrieve(context, name, out) */
QNN_CALL(graph_retrieve, QNN_GRAPH_RETRIEVE, ARG1(ctx), 0, ARG3(ctx), ARG2(ctx), 0, 0)
/* profileCreate(backend, level, out) */
QNN_CALL(profile_create, QNN_PROFILE_CREATE, ARG1(ctx), 0, ARG3(ctx), 0, ARG2(ctx), 0)
/* backendCreate(logger, config, out), deviceCreate(logger, config, out) */
QNN_CALL(backend_create, QNN_BACKEND_CREATE, 0, 0, ARG3(ctx), 0, 0, 0)
QNN_CALL(device_create, QNN_DEVICE_CREATE, 0, 0, ARG3(ctx), 0, 0, 0)
/* contextCreateFromBinaryWithSignal: as contextCreateFromBinary, and a signal */
QNN_CALL(context_with_signal, QNN_CONTEXT_FROM_BINARY_WITH_SIGNAL, ARG1(ctx), ARG5(ctx), ARG6(ctx), 0, 0, arg7(ctx))

/* contextCreateFromBinaryWithCallback(backend, device, config, callback, buffer, size, out, profile, signal) */
QNN_CALL(with_callback, QNN_CONTEXT_WITH_CALLBACK, ARG1(ctx), ARG6(ctx), arg7(ctx), 0, 0, stacked_arg(ctx, 8))
/* contextApplyBinarySection(context, graph, section, buffer, profile, signal): as when a LoRA adapter is switched */
QNN_CALL(apply_section, QNN_CONTEXT_APPLY_SECTION, ARG1(ctx), 0, 0, 0, 0, ARG5(ctx))
/* QAIRT's createFromBinary(backend, device, config, signal, profile, buffer, out): the buffer is a handle, of unknown size */
QNN_CALL(qairt_from_binary, QNN_CONTEXT_FROM_BINARY, ARG1(ctx), 0, arg7(ctx), 0, 0, ARG5(ctx))

/* An object is configured or freed: one record at the call's entry, no span. */
static INLINE void send_life(void *ctx, u32 call, u64 handle, u64 owner, u32 level, u64 bytes)
{
	RECORD(rec_qnn_object, r);

	if (!reserve(r, KIND_QNN_OBJECT, ENGINE_QNN))
		return;
	r->handle = handle;
	r->owner = owner;
	r->call = call;
	r->level = level;
	r->bytes = bytes;
	r->name[0] = 0;
	submit(ctx, r);
}

/* backendFree(backend) */
UPROBE(qnn_backend_free)
{
	send_life(ctx, QNN_BACKEND_FREE, ARG1(ctx), 0, 0, 0);
	return 0;
}

/* deviceFree(device) */
UPROBE(qnn_device_free)
{
	send_life(ctx, QNN_DEVICE_FREE, ARG1(ctx), 0, 0, 0);
	return 0;
}

/* profileFree(profile) */
UPROBE(qnn_profile_free)
{
	send_life(ctx, QNN_PROFILE_FREE, ARG1(ctx), 0, 0, 0);
	return 0;
}

#define MAX_CONFIGS 4
/* profileSetConfig(profile, config): a list of pointers, ended by null, to {u32 option, value} */
UPROBE(qnn_profile_set_config)
{
	for (u32 i = 0; i < MAX_CONFIGS; i++) {
		u64 config = provider_at(ARG2(ctx), i), value = 0;
		u32 option = 0;

		if (!config)
			return 0;
		bpf_probe_read_user(&option, sizeof(option), (void *)config);
		bpf_probe_read_user(&value, sizeof(value), (void *)(config + 8));
		if (option != PROFILE_OPTION_MAX_EVENTS)
			value &= 0xFF; /* a flag, of one byte */
		send_life(ctx, QNN_PROFILE_SET_CONFIG, ARG1(ctx), 0, option, value);
	}
	return 0;
}

#define MAX_MEMORIES 8
/* memDeRegister(handles, n) */
UPROBE(qnn_mem_deregister)
{
	for (u32 i = 0; i < MAX_MEMORIES; i++) {
		if (i < (u32)ARG2(ctx))
			send_life(ctx, QNN_MEM_DEREGISTER, provider_at(ARG1(ctx), i), 0, 0, 0);
	}
	return 0;
}

/* memRegister(context, descriptors, n, handles) */
UPROBE(qnn_mem_register_begin)
{
	call_begin(ctx, QNN_MEM_REGISTER, ARG1(ctx), 0, 0, 0, 0, 0);
	keep_args(QNN_MEM_REGISTER, ARG1(ctx), ARG2(ctx), ARG3(ctx), ARG4(ctx));
	return 0;
}

/* Qnn_MemDescriptor_t */
struct memory_descriptor {
	u32 n_dims;
	u32 pad;
	u64 dims;
	u64 shape_config;
	u32 dtype;
	u32 type;
	u64 info[2];
};

#define MAX_DIMS 8
/* Bytes of the tensor of a descriptor; a data type's last two hexadecimal digits spell its bits: 0x232 has 32. */
static INLINE u64 described_bytes(struct memory_descriptor *d)
{
	u64 elements = 1, bits = (d->dtype >> 4 & 15) * 10 + (d->dtype & 15);

	for (u32 i = 0; i < MAX_DIMS; i++) {
		u32 dim = 1;

		if (i < d->n_dims)
			bpf_probe_read_user(&dim, sizeof(dim), (void *)(d->dims + 4ULL * i));
		elements *= dim;
	}
	return elements * bits / 8;
}

UPROBE(qnn_mem_register_end)
{
	RECORD(rec_qnn_call_end, r);
	struct call_args args;

	if (!take_args(QNN_MEM_REGISTER, &args))
		return 0;
	if (reserve(r, KIND_QNN_CALL_END, ENGINE_QNN)) {
		r->handle = args.arg[0];
		r->status = RESULT(ctx);
		r->bytes = r->pad = 0;
		r->call = QNN_MEM_REGISTER;
		submit(ctx, r);
	}
	for (u32 i = 0; i < MAX_MEMORIES; i++) {
		struct memory_descriptor d = {};

		if (i >= (u32)args.arg[2] || RESULT(ctx))
			return 0;
		bpf_probe_read_user(&d, sizeof(d), (void *)(args.arg[1] + sizeof(d) * i));
		send_life(ctx, QNN_MEM_REGISTER, provider_at(args.arg[3], i), args.arg[0], d.type, described_bytes(&d));
	}
	return 0;
}

/* contextGetBinary(context, buffer, size, out written) */
UPROBE(qnn_context_get_binary_begin)
{
	call_begin(ctx, QNN_CONTEXT_GET_BINARY, ARG1(ctx), ARG3(ctx), 0, 0, 0, 0);
	keep_args(QNN_CONTEXT_GET_BINARY, ARG1(ctx), ARG4(ctx), 0, 0);
	return 0;
}

UPROBE(qnn_context_get_binary_end)
{
	RECORD(rec_qnn_call_end, r);
	struct call_args args;

	if (!take_args(QNN_CONTEXT_GET_BINARY, &args))
		return 0;
	if (!reserve(r, KIND_QNN_CALL_END, ENGINE_QNN))
		return 0;
	r->handle = args.arg[0];
	r->status = RESULT(ctx);
	r->bytes = 0;
	bpf_probe_read_user(&r->bytes, sizeof(r->bytes), (void *)args.arg[1]);
	r->call = QNN_CONTEXT_GET_BINARY;
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

/* QAIRT's getBinary(context, buffer's handle, out written) */
UPROBE(qnn_qairt_get_binary_begin)
{
	call_begin(ctx, QNN_CONTEXT_GET_BINARY, ARG1(ctx), 0, 0, 0, 0, 0);
	keep_args(QNN_CONTEXT_GET_BINARY, ARG1(ctx), ARG3(ctx), 0, 0);
	return 0;
}

/* QairtInterface_getInterface(number, out) */
UPROBE(qairt_get_interface_begin)
{
	keep_args(CALL_GET_INTERFACE, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

UPROBE(qairt_get_interface_end)
{
	RECORD(rec_api_table, r);
	struct call_args args;
	u64 table, bytes;

	if (!take_args(CALL_GET_INTERFACE, &args) || RESULT(ctx))
		return 0;
	table = provider_at(args.arg[1], 0);
	if (!table || !is_to_be_probed(table, args.arg[0]) || !reserve(r, KIND_API_TABLE, ENGINE_QNN))
		return 0;
	__builtin_memset(r->table, 0, sizeof(r->table));
	__builtin_memcpy(r->table, "qairt", 5);
	r->address = table;
	r->version = args.arg[0];
	r->first = 0;
	r->last = 1;
	bytes = provider_at(table, 0);
	asm volatile("" : "+r"(bytes)); /* the verifier shall see its bound */
	if (bytes > sizeof(r->slots))
		bytes = sizeof(r->slots);
	__builtin_memset(r->slots, 0, sizeof(r->slots));
	bpf_probe_read_user(r->slots, bytes, (void *)table);
	stop_target();
	submit_urgent(ctx, r);
	return 0;
}

#define MAX_BINARIES 16
#define PARAMS_SIZE 24 /* in QnnContext_Params_t: the size of its binary */
/* contextCreateFromBinaryListAsync(backend, device, params, config, signal): it returns before the contexts are made */
UPROBE(qnn_context_list_begin)
{
	u64 bytes = 0;

	for (u32 i = 0; i < MAX_BINARIES; i++) {
		u64 params = provider_at(ARG3(ctx), i), size = 0;

		if (!params)
			break;
		bpf_probe_read_user(&size, sizeof(size), (void *)(params + PARAMS_SIZE));
		bytes += size;
	}
	return call_begin(ctx, QNN_CONTEXT_FROM_BINARY_LIST, ARG1(ctx), bytes, 0, 0, 0, 0);
}

UPROBE(qnn_context_list_end)
{
	return call_end(ctx, QNN_CONTEXT_FROM_BINARY_LIST, RESULT(ctx));
}

/* A stage of ONNX Runtime's QNN provider: only its time is recorded, as its arguments and results are C++ objects. */
#define QNN_STAGE(name, number)                                                                                        \
	UPROBE(qnn_stage_##name##_begin)                                                                               \
	{                                                                                                              \
		return call_begin(ctx, number, 0, 0, 0, 0, 0, 0);                                                      \
	}                                                                                                              \
	UPROBE(qnn_stage_##name##_end)                                                                                 \
	{                                                                                                              \
		return call_end(ctx, number, 0);                                                                       \
	}

QNN_STAGE(read, QNN_STAGE_CONTEXT_READ)
QNN_STAGE(load, QNN_STAGE_CONTEXT_LOAD)
QNN_STAGE(create, QNN_STAGE_CONTEXT_CREATE)
QNN_STAGE(compose, QNN_STAGE_COMPOSE)
QNN_STAGE(finalize, QNN_STAGE_FINALIZE)
QNN_STAGE(serialize, QNN_STAGE_SERIALIZE)
QNN_STAGE(execute, QNN_STAGE_EXECUTE)
QNN_STAGE(harvest, QNN_STAGE_HARVEST)

/* Reports code that reads profiles, once; if the tracer does not know it, it attaches the spared probes. */
static INLINE void tell_reader(void *ctx, u64 address)
{
	RECORD(rec_qnn_reader, r);
	struct settings *s = settings();

	if (!s || !s->spared || !is_news(address, CALL_GET_EVENTS))
		return;
	if (!reserve(r, KIND_QNN_READER, ENGINE_QNN))
		return;
	r->address = address;
	stop_target();
	submit_urgent(ctx, r);
}

/* profileGetEvents(profile, out ids, out count) */
UPROBE(qnn_get_events)
{
	RECORD(rec_qnn_harvest, r);

	tell_reader(ctx, RETURN_ADDRESS(ctx));
	if (!reserve(r, KIND_QNN_HARVEST, ENGINE_QNN))
		return 0;
	r->profile = ARG1(ctx);
	r->pad[0] = r->pad[1] = r->pad[2] = 0;
	submit(ctx, r);
	return 0;
}

/* profileGetSubEvents(event, out ids, out count) */
UPROBE(qnn_get_sub_events_begin)
{
	keep_args(CALL_GET_SUB_EVENTS, ARG1(ctx), ARG2(ctx), ARG3(ctx), 0);
	return 0;
}

CHECKED_ONCE(send_sub_events, u64 parent, u64 ids, u32 total, u32 first)
{
	RECORD(rec_qnn_sub_events, r);
	u64 count;

	if (!reserve(r, KIND_QNN_SUB_EVENTS, ENGINE_QNN))
		return false;
	r->parent = parent;
	r->of_profile = 0;
	r->first = first;
	r->count = total - first < MAX_SUB_EVENTS ? total - first : MAX_SUB_EVENTS;
	r->total = total;
	count = BOUNDED(r->count, MAX_SUB_EVENTS);
	bpf_probe_read_user(r->events, count * 8, (void *)(ids + 8ULL * first));
	submit(ctx, r);
	return true;
}

UPROBE(qnn_get_sub_events_end)
{
	struct call_args args;
	u64 ids = 0;
	u32 total = 0;

	if (!take_args(CALL_GET_SUB_EVENTS, &args))
		return 0;
	bpf_probe_read_user(&ids, sizeof(ids), (void *)args.arg[1]);
	bpf_probe_read_user(&total, sizeof(total), (void *)args.arg[2]);
	for (u32 part = 0; part < 512; part++) {
		u32 first = part * MAX_SUB_EVENTS;

		if (first >= total || !CALL_CHECKED(send_sub_events, args.arg[0], ids, total, first))
			return 0;
	}
	count_loss(KIND_QNN_SUB_EVENTS);
	return 0;
}

/* QnnProfile_EventData_t */
struct event_data {
	u32 type;
	u32 unit;
	u64 value;
	u64 identifier;
};

/* QnnProfile_ExtendedEventData_t, version 1 */
struct extended_event_data {
	u32 version;
	u32 pad0;
	u32 type;
	u32 unit;
	u32 dtype;
	u32 pad1;
	u64 value;
	u64 union_pad;
	u64 timestamp;
	u64 identifier;
};

static INLINE void send_qnn_event(void *ctx, u64 event, struct extended_event_data *d, u32 extended, u64 frame)
{
	RECORD(rec_qnn_event, r);

	if (!reserve(r, KIND_QNN_EVENT, ENGINE_QNN))
		return;
	r->event = event;
	r->type = d->type;
	r->unit = d->unit;
	r->value = d->value;
	r->timestamp = d->timestamp;
	r->dtype = d->dtype;
	r->extended = extended;
	r->frame = frame;
	r->name[0] = 0;
	if (d->identifier)
		bpf_probe_read_user_str(r->name, sizeof(r->name), (void *)d->identifier);
	submit(ctx, r);
}

static INLINE void send_plain_event(void *ctx, u64 event, u64 at, u64 frame)
{
	struct extended_event_data wide = {};
	struct event_data data = {};

	bpf_probe_read_user(&data, sizeof(data), (void *)at);
	wide.type = data.type;
	wide.unit = data.unit;
	wide.value = data.value;
	wide.dtype = 0x64;
	wide.identifier = data.identifier;
	send_qnn_event(ctx, event, &wide, 0, frame);
}

static INLINE void send_extended_event(void *ctx, u64 event, u64 at, u64 frame)
{
	struct extended_event_data data = {};

	bpf_probe_read_user(&data, sizeof(data), (void *)at);
	send_qnn_event(ctx, event, &data, 1, frame);
}

/* profileGetEventData(event, out) */
UPROBE(qnn_event_data_begin)
{
	keep_args(CALL_EVENT_DATA, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

UPROBE(qnn_event_data_end)
{
	struct call_args args;

	if (take_args(CALL_EVENT_DATA, &args) && !RESULT(ctx))
		send_plain_event(ctx, args.arg[0], args.arg[1], 0);
	return 0;
}

/* profileGetExtendedEventData(event, out) */
UPROBE(qnn_extended_event_data_begin)
{
	keep_args(CALL_EXTENDED_EVENT_DATA, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

UPROBE(qnn_extended_event_data_end)
{
	struct call_args args;

	if (take_args(CALL_EXTENDED_EVENT_DATA, &args) && !RESULT(ctx))
		send_extended_event(ctx, args.arg[0], args.arg[1], 0);
	return 0;
}

/*
 * ONNX Runtime's QNN provider passes each event that it has read to Process(this, event, level, data), which returns an object:
 * one probe there sees what four see around QNN's own functions. The provider reads sub-events recursively, so the stack
 * pointer shows their depth. `level` is a std::string; if it is not one of the two known words, the function is not the
 * known one, and QNN's functions are probed instead.
 */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define PROCESS_EVENT(ctx) ARG2(ctx) /* the address of the result is in a separate register */
#define PROCESS_LEVEL(ctx) ARG3(ctx)
#define PROCESS_DATA(ctx) ARG4(ctx)
#else
#define PROCESS_EVENT(ctx) ARG3(ctx)
#define PROCESS_LEVEL(ctx) ARG4(ctx)
#define PROCESS_DATA(ctx) ARG5(ctx)
#endif
#define LEVEL_ROOT 0x544f4f52 /* "ROOT" */
#define LEVEL_SUB 0x2d425553  /* "SUB-" of "SUB-EVENT" */

static INLINE bool is_known_process(void *ctx, u64 level)
{
	u64 text = 0;
	u32 word = 0;

	bpf_probe_read_user(&text, sizeof(text), (void *)level);
	bpf_probe_read_user(&word, sizeof(word), (void *)text);
	if (word == LEVEL_ROOT || word == LEVEL_SUB)
		return true;
	count_loss(KIND_QNN_EVENT);
	tell_reader(ctx, 0);
	return false;
}

UPROBE(qnn_process_event)
{
	if (is_known_process(ctx, PROCESS_LEVEL(ctx)))
		send_plain_event(ctx, PROCESS_EVENT(ctx), PROCESS_DATA(ctx), STACK(ctx));
	return 0;
}

UPROBE(qnn_process_extended_event)
{
	if (is_known_process(ctx, PROCESS_LEVEL(ctx)))
		send_extended_event(ctx, PROCESS_EVENT(ctx), PROCESS_DATA(ctx), STACK(ctx));
	return 0;
}

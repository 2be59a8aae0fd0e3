// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * QNN: the calls of its function table and the profile events that the program reads.
 * Signatures are those of the public C API; handles are opaque numbers.
 */

#define CALL_GET_PROVIDERS 250
#define CALL_EXECUTE 21
#define CALL_GET_EVENTS 30
#define CALL_GET_SUB_EVENTS 31
#define CALL_EVENT_DATA 32
#define CALL_EXTENDED_EVENT_DATA 33

#define MAX_PROVIDERS 4
#define TABLE_PARTS 3 /* 72 slots: more than core API 2.40 has */
#define PROVIDER_API 16   /* uint32 core API major, minor, patch */
#define PROVIDER_TABLE 40 /* the first function pointer */

/* QnnInterface_getProviders(const QnnInterface_t ***list, uint32_t *count) */
UPROBE(qnn_providers_begin)
{
	keep_args(CALL_GET_PROVIDERS, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

static INLINE void send_table(void *ctx, u64 provider, u32 index, u32 count)
{
	for (u32 part = 0; part < TABLE_PARTS; part++) {
		RECORD(rec_qnn_table, r);

		if (!reserve(r, KIND_QNN_TABLE, ENGINE_QNN))
			return;
		r->backend = 0;
		r->provider = index;
		r->last = index + 1 == count && part + 1 == TABLE_PARTS;
		r->first = part * TABLE_SLOTS;
		bpf_probe_read_user(&r->backend, sizeof(r->backend), (void *)provider);
		bpf_probe_read_user(r->api, sizeof(r->api), (void *)(provider + PROVIDER_API));
		bpf_probe_read_user(r->slots, sizeof(r->slots), (void *)(provider + PROVIDER_TABLE + 8ULL * r->first));
		submit_urgent(ctx, r);
	}
}

UPROBE(qnn_providers_end)
{
	struct call_args args;
	u64 list = 0, provider = 0;
	u32 count = 0;

	if (!take_args(CALL_GET_PROVIDERS, &args) || RESULT(ctx))
		return 0;
	bpf_probe_read_user(&list, sizeof(list), (void *)args.arg[0]);
	bpf_probe_read_user(&count, sizeof(count), (void *)args.arg[1]);
	if (!is_news(list, count))
		return 0;
	stop_target();
	for (u32 i = 0; i < MAX_PROVIDERS; i++) {
		if (i >= count)
			break;
		provider = 0;
		bpf_probe_read_user(&provider, sizeof(provider), (void *)(list + 8ULL * i));
		if (provider)
			send_table(ctx, provider, i, count);
	}
	return 0;
}

/* graphExecute(graph, inputs, n_inputs, outputs, n_outputs, profile, signal) */
UPROBE(qnn_execute_begin)
{
	RECORD(rec_qnn_execute_begin, r);

	keep_args(CALL_EXECUTE, ARG1(ctx), ARG6(ctx), 0, 0);
	if (!reserve(r, KIND_QNN_EXECUTE_BEGIN, ENGINE_QNN))
		return 0;
	r->graph = ARG1(ctx);
	r->profile = ARG6(ctx);
	r->n_inputs = ARG3(ctx);
	r->n_outputs = ARG5(ctx);
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

UPROBE(qnn_execute_end)
{
	RECORD(rec_qnn_execute_end, r);
	struct call_args args;

	if (!take_args(CALL_EXECUTE, &args))
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

/* The seventh argument: behind the return address on x86-64, a register on arm64. */
static INLINE u64 arg7(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	return REG(ctx, unused, 6);
#else
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)(STACK(ctx) + 8));
	return value;
#endif
}

/* owner: the handle the call works in; out: where it writes a new handle; name: text or 0; level: of a profile */
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
		r->pad[0] = r->pad[1] = r->pad[2] = 0;
		submit(ctx, r);
	}
	if (args.arg[1] && !status)
		send_object(ctx, call, made, &args);
	return 0;
}

/* One entry and one return stub for each call; the body is shared. */
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
/* profileFree(profile) */
QNN_CALL(profile_free, QNN_PROFILE_FREE, ARG1(ctx), 0, 0, 0, 0, 0)

/* profileGetEvents(profile, out ids, out count) and profileGetSubEvents(event, out ids, out count) */
static INLINE int list_end(void *ctx, u8 call)
{
	struct call_args args;
	u64 ids = 0;
	u32 total = 0;

	if (!take_args(call, &args))
		return 0;
	bpf_probe_read_user(&ids, sizeof(ids), (void *)args.arg[1]);
	bpf_probe_read_user(&total, sizeof(total), (void *)args.arg[2]);
	for (u32 part = 0; part < 512; part++) {
		u32 first = part * MAX_SUB_EVENTS;
		RECORD(rec_qnn_sub_events, r);
		u64 count;

		if (first >= total)
			return 0;
		if (!reserve(r, KIND_QNN_SUB_EVENTS, ENGINE_QNN))
			return 0;
		r->parent = args.arg[0];
		r->of_profile = call == CALL_GET_EVENTS;
		r->first = first;
		r->count = total - first < MAX_SUB_EVENTS ? total - first : MAX_SUB_EVENTS;
		r->total = total;
		count = BOUNDED(r->count, MAX_SUB_EVENTS);
		bpf_probe_read_user(r->events, count * 8, (void *)(ids + 8ULL * first));
		submit(ctx, r);
	}
	count_loss(KIND_QNN_SUB_EVENTS);
	return 0;
}

UPROBE(qnn_get_events_begin)
{
	RECORD(rec_qnn_harvest, r);

	keep_args(CALL_GET_EVENTS, ARG1(ctx), ARG2(ctx), ARG3(ctx), 0);
	if (!reserve(r, KIND_QNN_HARVEST, ENGINE_QNN))
		return 0;
	r->profile = ARG1(ctx);
	r->pad[0] = r->pad[1] = r->pad[2] = 0;
	submit(ctx, r);
	return 0;
}

UPROBE(qnn_get_events_end)
{
	return list_end(ctx, CALL_GET_EVENTS);
}

UPROBE(qnn_get_sub_events_begin)
{
	keep_args(CALL_GET_SUB_EVENTS, ARG1(ctx), ARG2(ctx), ARG3(ctx), 0);
	return 0;
}

UPROBE(qnn_get_sub_events_end)
{
	return list_end(ctx, CALL_GET_SUB_EVENTS);
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

static INLINE void send_qnn_event(void *ctx, u64 event, struct extended_event_data *d, u32 extended)
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
	r->name[0] = 0;
	if (d->identifier)
		bpf_probe_read_user_str(r->name, sizeof(r->name), (void *)d->identifier);
	submit(ctx, r);
}

/* profileGetEventData(event, out) */
UPROBE(qnn_event_data_begin)
{
	keep_args(CALL_EVENT_DATA, ARG1(ctx), ARG2(ctx), 0, 0);
	return 0;
}

UPROBE(qnn_event_data_end)
{
	struct extended_event_data wide = {};
	struct event_data data = {};
	struct call_args args;

	if (!take_args(CALL_EVENT_DATA, &args) || RESULT(ctx))
		return 0;
	bpf_probe_read_user(&data, sizeof(data), (void *)args.arg[1]);
	wide.type = data.type;
	wide.unit = data.unit;
	wide.value = data.value;
	wide.dtype = 0x64;
	wide.identifier = data.identifier;
	send_qnn_event(ctx, args.arg[0], &wide, 0);
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
	struct extended_event_data data = {};
	struct call_args args;

	if (!take_args(CALL_EXTENDED_EVENT_DATA, &args) || RESULT(ctx))
		return 0;
	bpf_probe_read_user(&data, sizeof(data), (void *)args.arg[1]);
	send_qnn_event(ctx, args.arg[0], &data, 1);
	return 0;
}

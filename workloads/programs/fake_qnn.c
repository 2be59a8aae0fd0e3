/*
 * A QNN backend that computes nothing: a function table whose every answer is known, for what the emulator cannot show.
 * FAKE_QNN chooses what QnnInterface_getProviders gives: `none`, `null`, `error`, or a core API version such as `2.16`.
 * Events carry time stamps of a device clock of 19.2 MHz that runs 100 ppm fast.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;

struct provider {
	u32 backend;
	const char *name;
	u32 api[6];
	void *slots[72];
};

struct event {
	u32 type, unit;
	u64 value;
	const char *name;
	u64 first, count; /* sub-events, by number */
	u64 stamp;
};

static u64 clock_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static u64 ticks(u64 ns)
{
	return (u64)(ns * 0.0192 * 1.0001);
}

/* EXECUTE ⊃ {queue wait, preprocess, device ⊃ {host RPC, HTP RPC, accelerator}, postprocess}; cycles ⊃ nodes */
static struct event events[] = {
	{400, 1, 1000, "execute", 2, 4, 0},    {3003, 3, 6000, "cycles", 9, 3, 0},
	{405, 1, 50, "queue", 0, 0, 0},        {406, 1, 100, "preprocess", 0, 0, 0},
	{407, 1, 700, "device", 6, 3, 0},      {408, 1, 100, "postprocess", 0, 0, 0},
	{3001, 1, 650, "host rpc", 0, 0, 0},   {3002, 1, 600, "htp rpc", 0, 0, 0},
	{3004, 1, 500, "accelerator", 0, 0, 0}, {404, 3, 1000, "a:OpId_1 (cycles)", 0, 0, 0},
	{404, 3, 2000, "b:OpId_2 (cycles)", 0, 0, 0}, {404, 3, 3000, "c:OpId_3 (cycles)", 0, 0, 0},
};
static u64 ids[64];
static u64 last_execute, made[64], profiles;

static u64 make(u64 *out)
{
	for (u64 i = 1; i < 64; i++) {
		if (!__sync_val_compare_and_swap(&made[i], 0, 1)) {
			*out = i;
			return 0;
		}
	}
	return 1;
}

static u64 unmake(u64 handle)
{
	made[handle & 63] = 0;
	return 0;
}

/* A function for each slot: two slots of one function could not be told apart. */
#define OK(name) static u64 name(void) { return 0; }
#define MAKE3(name) static u64 name(void *a, void *b, u64 *out) { (void)a, (void)b; return make(out); }
#define MAKE4(name) static u64 name(void *a, void *b, void *c, u64 *out) { (void)a, (void)b, (void)c; return make(out); }
#define UNMAKE(name) static u64 name(u64 handle) { return unmake(handle); }
#define LOAD(name)                                                                                                     \
	static u64 name(void *a, void *b, void *c, void *d, u64 size, u64 *out)                                        \
	{                                                                                                              \
		(void)a, (void)b, (void)c, (void)d, (void)size;                                                        \
		usleep(2000);                                                                                          \
		return make(out);                                                                                      \
	}
MAKE3(backend_create) MAKE3(device_create) MAKE3(graph_retrieve) MAKE4(context_create) MAKE4(graph_create)
UNMAKE(backend_free) UNMAKE(device_free) UNMAKE(context_free) LOAD(from_binary) LOAD(with_signal)
OK(add_node) OK(finalize) OK(create_tensor) OK(set_config) OK(profile_free) OK(mem_deregister) OK(from_list)
OK(apply_section)

static u64 with_callback(void *a, void *b, void *c, void *d, void *e, u64 size, u64 *out)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)size;
	return make(out);
}
static u64 binary_size(u64 context, u64 *size) { (void)context; *size = 4096; return 0; }
static u64 get_binary(u64 context, void *buffer, u64 size, u64 *written)
{
	(void)context, (void)buffer, (void)size;
	*written = 4000;
	return 0;
}
static void compute(void)
{
	usleep(1500);
	last_execute = clock_ns();
}

static u64 execute(void)
{
	compute();
	return 0;
}

struct order {
	void (*notify)(void *, u64);
	void *param;
};

static void *later(void *given)
{
	struct order *order = given;

	usleep(20000); /* the caller returns meanwhile, however busy the machine */
	compute();
	order->notify(order->param, 0);
	free(order);
	return 0;
}

static u64 execute_async(void *graph, void *in, u32 n, void *out, u32 m, void *profile, void *signal, void (*notify)(void *, u64),
			 void *param)
{
	struct order *order = malloc(sizeof(*order));
	pthread_t thread;

	(void)graph, (void)in, (void)n, (void)out, (void)m, (void)profile, (void)signal;
	*order = (struct order){notify, param};
	pthread_create(&thread, 0, later, order);
	return pthread_detach(thread);
}

static volatile int done;
void fake_notify(void *param, u64 status) { (void)param, (void)status; __sync_fetch_and_add(&done, 1); }
int fake_done(void) { return done; }

static u64 create_profile(u64 backend, u32 level, u64 *out)
{
	(void)backend, (void)level;
	*out = 1000 + __sync_add_and_fetch(&profiles, 1);
	return 0;
}

static u64 get_events(u64 profile, u64 **list, u32 *count)
{
	(void)profile;
	for (u64 i = 0; i < 64; i++)
		ids[i] = i + 1;
	*list = ids;
	*count = last_execute ? 2 : 0;
	return 0;
}
static u64 get_sub_events(u64 event, u64 **list, u32 *count)
{
	*list = ids + events[event - 1].first;
	*count = events[event - 1].count;
	return 0;
}
static u64 event_data(u64 event, struct event *out)
{
	memcpy(out, &events[event - 1], 24);
	return 0;
}
static u64 extended_event_data(u64 event, u64 *out)
{
	struct event *e = &events[event - 1];

	((u32 *)out)[2] = e->type;
	((u32 *)out)[3] = e->unit;
	((u32 *)out)[4] = 0x164;
	out[3] = e->value;
	out[5] = ticks(last_execute - 1000000);
	out[6] = (u64)e->name;
	return 0;
}
static u64 mem_register(u64 context, void *descriptors, u32 n, u64 *handles)
{
	(void)context, (void)descriptors;
	for (u32 i = 0; i < n; i++)
		make(&handles[i]);
	return 0;
}

static struct provider the_provider = {
	.backend = 6,
	.name = "FAKE",
	.api = {2, 40, 0, 1, 0, 0},
	.slots = {
		[1] = backend_create, [8] = backend_free, [9] = context_create, [11] = binary_size, [12] = get_binary,
		[13] = from_binary, [14] = context_free, [15] = graph_create, [18] = add_node, [19] = finalize,
		[20] = graph_retrieve, [21] = execute, [22] = execute_async, [24] = create_tensor, [28] = create_profile,
		[29] = set_config, [30] = get_events, [31] = get_sub_events, [32] = event_data, [33] = extended_event_data,
		[34] = profile_free, [35] = mem_register, [36] = mem_deregister, [40] = device_create, [43] = device_free,
		[55] = with_signal, [56] = from_list, [61] = apply_section, [68] = with_callback,
	},
};
/* Tables of 2.7 lack these slots, and the others stand before where they stand today. */
static void take_out_newer(void **slots)
{
	static const int newer[] = {33, 29, 16, 2};

	for (int i = 0; i < 4; i++)
		memmove(slots + newer[i], slots + newer[i] + 1, (71 - newer[i]) * sizeof(*slots));
}

static struct provider *list[2] = {&the_provider, 0};

u64 QnnInterface_getProviders(struct provider ***providers, u32 *count)
{
	const char *chosen = getenv("FAKE_QNN");

	*providers = list;
	*count = 1;
	if (!chosen)
		return 0;
	if (!strcmp(chosen, "none"))
		*count = 0;
	else if (!strcmp(chosen, "null"))
		list[0] = 0;
	else if (strcmp(chosen, "error"))
		sscanf(chosen, "%u.%u", &the_provider.api[0], &the_provider.api[1]);
	if (!strcmp(chosen, "2.7"))
		take_out_newer(the_provider.slots);
	return !strcmp(chosen, "error") ? 1000 : 0;
}

/*
 * A QAIRT backend that computes nothing, by the tables of Qualcomm's public document 80-63442-10: what it cannot show is what a
 * device does. FAKE_QAIRT: `short` and `long` give the graph's table another size, `v2` the graph's functions by another number.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;

static u64 handles = 100, executes;

static u64 make(u64 *out)
{
	*out = __sync_add_and_fetch(&handles, 1);
	return 0;
}

/* A function for each slot: two slots of one function could not be told apart. */
#define OK(name) static u64 name(void) { return 0; }
#define MAKE3(name) static u64 name(void *a, void *b, u64 *out) { (void)a, (void)b; return make(out); }
#define MAKE4(name) static u64 name(void *a, void *b, void *c, u64 *out) { (void)a, (void)b, (void)c; return make(out); }
OK(graph_free) OK(subgraph) OK(graph_config) OK(add_node) OK(finalize) OK(graph_tensor) OK(update_tensors)
OK(context_free) OK(context_config) OK(binary_size) OK(validate) OK(context_finalize) OK(register_mem) OK(context_tensor)
OK(update_context) OK(section_size) OK(get_section) OK(backend_free) OK(backend_config) OK(register_package) OK(operations)
OK(validate_op) OK(profile_free) OK(profile_config) OK(n_events) OK(event_at) OK(n_sub_events) OK(sub_event_at) OK(newer)
MAKE4(context_create) MAKE4(graph_create) MAKE3(graph_retrieve) MAKE3(backend_create) MAKE3(profile_create)

static u64 from_binary(void *a, void *b, void *c, void *d, void *e, void *f, u64 *out)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
	return make(out);
}

static u64 get_binary(u64 context, void *buffer, u64 *written)
{
	(void)context, (void)buffer;
	*written = 4000;
	return 0;
}

static u64 apply_section(u64 context, u64 graph)
{
	usleep(500);
	return graph ? 0 : 5000 + context % 1;
}

static u64 execute(void)
{
	usleep(1500);
	return __sync_add_and_fetch(&executes, 1) % 5 ? 0 : 6031;
}

#define DEPTH 64 /* executions that the queue holds */
static struct order {
	void (*notify)(void *, u64);
	void *param;
} queue[DEPTH];
static unsigned first, last;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* One after the other, 3 ms each. */
static void *serve(void *none)
{
	while (1) {
		struct order order;

		usleep(3000);
		order = queue[first % DEPTH];
		order.notify(order.param, 0);
		pthread_mutex_lock(&lock);
		none = ++first == last ? queue : NULL;
		pthread_mutex_unlock(&lock);
		if (none)
			return 0;
	}
}

static u64 execute_async(void *graph, void *in, u32 n, void *out, u32 m, void *profile, void *signal, void (*notify)(void *, u64),
			 void *param)
{
	pthread_t thread;
	u64 status = 0;

	(void)graph, (void)in, (void)n, (void)out, (void)m, (void)profile, (void)signal;
	pthread_mutex_lock(&lock);
	if (last - first == DEPTH)
		status = 6025;
	else
		queue[last++ % DEPTH] = (struct order){notify, param};
	if (!status && last - first == 1) {
		pthread_create(&thread, 0, serve, 0);
		pthread_detach(thread);
	}
	pthread_mutex_unlock(&lock);
	return status;
}

static volatile int done;
u64 fake_ends[1024]; /* when each was notified, by its parameter */
void fake_notify(void *param, u64 status)
{
	struct timespec t;

	(void)status;
	clock_gettime(CLOCK_MONOTONIC, &t);
	fake_ends[(u64)param & 1023] = t.tv_sec * 1000000000ULL + t.tv_nsec;
	__sync_fetch_and_add(&done, 1);
}
int fake_done(void) { return done; }

u64 QairtInterface_getInterface(u64 id, void **out);

static void *graph[] = {(void *)88, QairtInterface_getInterface, graph_free, subgraph, graph_config, add_node, finalize, graph_tensor,
			update_tensors, execute, execute_async, newer};
static void *context[] = {(void *)144, QairtInterface_getInterface, context_create, context_free, context_config, binary_size,
			  get_binary, validate, from_binary, context_finalize, graph_create, graph_retrieve, register_mem,
			  context_tensor, update_context, section_size, get_section, apply_section};
static void *backend[] = {(void *)72, QairtInterface_getInterface, backend_create, backend_free, backend_config, register_package,
			  operations, validate_op, profile_create};
static void *profile[] = {(void *)64, QairtInterface_getInterface, profile_free, profile_config, n_events, event_at, n_sub_events,
			  sub_event_at};

u64 QairtInterface_getInterface(u64 id, void **out)
{
	const char *chosen = getenv("FAKE_QAIRT") ? getenv("FAKE_QAIRT") : "";

	graph[0] = (void *)(u64)(!strcmp(chosen, "short") ? 80 : !strcmp(chosen, "long") ? 96 : 88);
	*out = id == (!strcmp(chosen, "v2") ? 6001 : 6000) ? graph : id == 5000 ? context : id == 4000 ? backend : id == 12000 ? profile : 0;
	return *out ? 0 : 15000;
}

/*
 * A stand-in for libcdsprpc.so where there is no Hexagon processor: rpcmem is memory, a thread is the processor behind each queue, and an
 * operator takes STANDIN_OP_US microseconds (10) and computes nothing, so that a model's answers mean nothing. What it did stands in
 * STANDIN_LOG, a line each, times of CLOCK_MONOTONIC in ns:
 *   batch SEQ N_OPS TAKEN BEGUN ENDED ANSWERED
 *   read SEQ ASKED RETURNED
 *   op SEQ INDEX OPCODE ADDRESS USECS CYCLES
 *   call METHOD BEGUN ENDED
 * STANDIN_QUEUE_US lets every batch wait before it is taken, STANDIN_WAKE_US every answer before it is told, and STANDIN_HOG_US keeps
 * the CPU of the thread that waits for an answer from the moment it is told, by a thread of higher priority (needs root).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fastrpc.h"
#include "messages.h"

#define DEPTH 64
#define MAX_BLOCKS 4096
#define NS_PER_CYCLE 2

struct packet {
	struct dspqueue_buffer buffer;
	uint32_t length;
	uint8_t message[sizeof(struct response) + sizeof(struct request)];
};

struct ring {
	struct packet packets[DEPTH];
	uint64_t written, read;
};

struct dspqueue {
	struct ring requests, responses;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	pthread_t processor;
	bool closing;
	int reader_cpu; /* of the thread that waits for an answer, with STANDIN_HOG_US */
};

static struct {
	void *base;
	size_t size;
	int fd;
} blocks[MAX_BLOCKS];

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static int profiling;

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static long setting(const char *name, long otherwise)
{
	const char *value = getenv(name);

	return value ? atol(value) : otherwise;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static FILE *file;
	va_list values;

	pthread_mutex_lock(&lock);
	if (!file)
		file = fopen(getenv("STANDIN_LOG") ? getenv("STANDIN_LOG") : "/dev/null", "a");
	if (file) {
		va_start(values, format);
		vfprintf(file, format, values);
		va_end(values);
		fflush(file);
	}
	pthread_mutex_unlock(&lock);
}

static void rest(long microseconds)
{
	if (microseconds)
		usleep(microseconds);
}

static uint32_t cycles_at(uint64_t ns)
{
	return ns / NS_PER_CYCLE;
}

/* rpcmem */

static int block_of(void *base)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (base && blocks[i].base == base)
			return i;
	return -1;
}

void *rpcmem_alloc2(int heap, uint32_t flags, size_t size)
{
	int fd = memfd_create("rpcmem", 0), at = 0;
	void *base = MAP_FAILED;

	if (fd < 0 || ftruncate(fd, size) || (base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
		return NULL;
	pthread_mutex_lock(&blocks_lock);
	while (at < MAX_BLOCKS - 1 && blocks[at].base)
		at++;
	blocks[at].base = base;
	blocks[at].size = size;
	blocks[at].fd = fd;
	pthread_mutex_unlock(&blocks_lock);
	return base;
}

void *rpcmem_alloc(int heap, uint32_t flags, int size)
{
	return rpcmem_alloc2(heap, flags, size);
}

void rpcmem_free(void *base)
{
	int at;

	pthread_mutex_lock(&blocks_lock);
	at = block_of(base);
	if (at >= 0) {
		munmap(base, blocks[at].size);
		close(blocks[at].fd);
		blocks[at].base = NULL;
	}
	pthread_mutex_unlock(&blocks_lock);
}

int rpcmem_to_fd(void *base)
{
	int at;

	pthread_mutex_lock(&blocks_lock);
	at = block_of(base);
	pthread_mutex_unlock(&blocks_lock);
	return at < 0 ? -1 : blocks[at].fd;
}

int fastrpc_mmap(int domain, int fd, void *addr, int offset, size_t length, enum fastrpc_map_flags flags)
{
	return AEE_SUCCESS;
}

int fastrpc_munmap(int domain, int fd, void *addr, size_t length)
{
	return AEE_SUCCESS;
}

/* Remote calls: those of ggml's htp_iface, as htp_iface.c packs them. */

enum { PROFILER_METHOD = 6, HWINFO_METHOD = 8 };

int remote_handle64_open(const char *name, remote_handle64 *handle)
{
	*handle = 0x51;
	return AEE_SUCCESS;
}

int remote_handle64_invoke(remote_handle64 handle, uint32_t scalars, remote_arg *args)
{
	uint32_t method = REMOTE_SCALARS_METHOD(scalars);
	uint64_t begun = now();

	if (method == PROFILER_METHOD)
		profiling = *(uint32_t *)args[0].buf.pv;
	if (method == HWINFO_METHOD) {
		uint64_t *info = args[0].buf.pv;

		info[0] = 6;
		info[1] = 4;
		info[2] = 1;
		info[3] = 8 << 20;
	}
	note("call %u %lu %lu\n", method, begun, now());
	return AEE_SUCCESS;
}

int remote_handle64_close(remote_handle64 handle)
{
	return AEE_SUCCESS;
}

int remote_handle_control(uint32_t request, void *data, uint32_t length)
{
	if (request == DSPRPC_GET_DSP_INFO)
		((remote_dsp_capability *)data)->capability = 0x75;
	return AEE_SUCCESS;
}

int remote_handle64_control(remote_handle64 handle, uint32_t request, void *data, uint32_t length)
{
	return AEE_SUCCESS;
}

int remote_session_control(uint32_t request, void *data, uint32_t length)
{
	if (request == FASTRPC_GET_URI) {
		struct remote_rpc_get_uri *get = data;

		snprintf(get->uri, get->uri_len, "%s&_dom=cdsp", get->module_uri);
		return AEE_SUCCESS;
	}
	return request == DSPRPC_CONTROL_UNSIGNED_MODULE ? AEE_SUCCESS : AEE_EUNSUPPORTEDAPI;
}

/* Queues */

static struct op_profile run_op(const struct request *request, const struct op_desc *op, const struct tensor_desc *tensors,
				const struct buffer_desc *buffers, uint32_t index)
{
	struct op_profile profile = {.opcode = op->opcode};
	uint64_t begun = now(), ended, until = begun + 1000 * setting("STANDIN_OP_US", 10);
	uint16_t dst = FIRST_DST(op);
	uint64_t address = dst < request->n_tensors ? buffers[tensors[dst].bi].base + tensors[dst].data : 0;

	while ((ended = now()) < until)
		;
	profile.usecs = (ended - begun) / 1000;
#if LAYOUT == 1
	profile.cycles = cycles_at(ended) - cycles_at(begun);
#else
	profile.cycles_start = cycles_at(begun);
	profile.cycles_stop = cycles_at(ended);
#endif
	for (uint32_t i = 0; profiling == 2 && i < 8; i++)
		profile.pmu[i] = 100 * index + i;
	note("op %lu %u %u %#lx %u %u\n", (unsigned long)request->seq, index, op->opcode, (unsigned long)address, profile.usecs,
	     cycles_at(ended) - cycles_at(begun));
	return profile;
}

static void run_batch(struct packet *packet, struct packet *answer)
{
	struct request *request = (void *)packet->message;
	struct response response = {.seq = request->seq, .status = STATUS_OK};
	struct buffer_desc *buffers = packet->buffer.ptr;
	struct tensor_desc *tensors = (void *)(buffers + request->n_bufs);
	struct op_desc *ops = (void *)(tensors + request->n_tensors);
	struct op_profile *profiles = (void *)(ops + request->n_ops);

	response.n_bufs = request->n_bufs;
	response.n_tensors = request->n_tensors;
	response.n_ops = profiling ? request->n_ops : 0;
#if LAYOUT >= 3
	response.cycles_start = now() / NS_PER_CYCLE;
#endif
	for (uint32_t i = 0; i < request->n_ops; i++) {
		struct op_profile profile = run_op(request, &ops[i], tensors, buffers, i);

		if (profiling)
			profiles[i] = profile;
	}
#if LAYOUT >= 3
	response.cycles_stop = now() / NS_PER_CYCLE;
	response.usecs = (response.cycles_stop - response.cycles_start) * NS_PER_CYCLE / 1000;
#endif
	answer->buffer = packet->buffer;
	answer->length = sizeof(response);
	memcpy(answer->message, &response, sizeof(response));
}

static void stay_on(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
}

/* Lets nobody else run on that CPU. */
static void take(int cpu)
{
	struct sched_param urgent = {.sched_priority = 1};

	stay_on(cpu);
	sched_setscheduler(0, SCHED_FIFO, &urgent);
}

static void give_back(const cpu_set_t *before)
{
	struct sched_param ordinary = {.sched_priority = 0};

	sched_setscheduler(0, SCHED_OTHER, &ordinary);
	sched_setaffinity(0, sizeof(*before), before);
}

/* Tells that an answer is there, and when. */
static uint64_t tell(struct dspqueue *queue, const struct packet *answer)
{
	long hog_us = setting("STANDIN_HOG_US", 0);
	uint64_t told;
	cpu_set_t before;

	sched_getaffinity(0, sizeof(before), &before);
	if (hog_us)
		take(queue->reader_cpu);
	pthread_mutex_lock(&queue->lock);
	queue->requests.read++;
	queue->responses.packets[queue->responses.written++ % DEPTH] = *answer;
	told = now();
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
	while (hog_us && now() < told + 1000 * hog_us)
		;
	if (hog_us)
		give_back(&before);
	return told;
}

static void *process(void *context)
{
	struct dspqueue *queue = context;

	pthread_setname_np(pthread_self(), "cdsp standin");
	for (;;) {
		struct packet request, answer;
		uint64_t taken, begun, ended;

		pthread_mutex_lock(&queue->lock);
		while (!queue->closing && queue->requests.read == queue->requests.written)
			pthread_cond_wait(&queue->changed, &queue->lock);
		if (queue->closing) {
			pthread_mutex_unlock(&queue->lock);
			return NULL;
		}
		request = queue->requests.packets[queue->requests.read % DEPTH];
		pthread_mutex_unlock(&queue->lock);
		taken = now();
		rest(setting("STANDIN_QUEUE_US", 0));
		begun = now();
		run_batch(&request, &answer);
		ended = now();
		rest(setting("STANDIN_WAKE_US", 0));
		note("batch %lu %u %lu %lu %lu %lu\n", (unsigned long)((struct request *)request.message)->seq,
		     ((struct request *)request.message)->n_ops, taken, begun, ended, tell(queue, &answer));
	}
}

AEEResult dspqueue_create(int domain, uint32_t flags, uint32_t request_bytes, uint32_t response_bytes, dspqueue_callback_t packet,
			  dspqueue_callback_t error, void *context, dspqueue_t *out)
{
	struct dspqueue *queue = calloc(1, sizeof(*queue));
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_mutex_init(&queue->lock, NULL);
	pthread_cond_init(&queue->changed, &attributes);
	pthread_create(&queue->processor, NULL, process, queue);
	*out = queue;
	return AEE_SUCCESS;
}

AEEResult dspqueue_close(dspqueue_t queue)
{
	pthread_mutex_lock(&queue->lock);
	queue->closing = true;
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
	pthread_join(queue->processor, NULL);
	free(queue);
	return AEE_SUCCESS;
}

AEEResult dspqueue_export(dspqueue_t queue, uint64_t *id)
{
	*id = (uintptr_t)queue;
	return AEE_SUCCESS;
}

AEEResult dspqueue_write(dspqueue_t queue, uint32_t flags, uint32_t n_buffers, struct dspqueue_buffer *buffers, uint32_t length,
			 const uint8_t *message, uint32_t timeout_us)
{
	struct packet *packet;

	if (n_buffers != 1 || length != sizeof(struct request))
		return AEE_EBADPARM;
	pthread_mutex_lock(&queue->lock);
	while (queue->requests.written - queue->requests.read == DEPTH)
		pthread_cond_wait(&queue->changed, &queue->lock);
	packet = &queue->requests.packets[queue->requests.written++ % DEPTH];
	packet->buffer = *buffers;
	packet->length = length;
	memcpy(packet->message, message, length);
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
	return AEE_SUCCESS;
}

AEEResult dspqueue_read(dspqueue_t queue, uint32_t *flags, uint32_t max_buffers, uint32_t *n_buffers, struct dspqueue_buffer *buffers,
			uint32_t max_length, uint32_t *length, uint8_t *message, uint32_t timeout_us)
{
	uint64_t asked = now();
	struct timespec until;
	struct packet *packet;
	cpu_set_t before;
	int expired = 0;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += timeout_us % 1000000 * 1000;
	until.tv_sec += timeout_us / 1000000 + until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	pthread_mutex_lock(&queue->lock);
	sched_getaffinity(0, sizeof(before), &before);
	queue->reader_cpu = sched_getcpu();
	if (setting("STANDIN_HOG_US", 0))
		stay_on(queue->reader_cpu);
	while (queue->responses.read == queue->responses.written && timeout_us && expired != ETIMEDOUT)
		expired = pthread_cond_timedwait(&queue->changed, &queue->lock, &until);
	sched_setaffinity(0, sizeof(before), &before);
	if (queue->responses.read == queue->responses.written) {
		pthread_mutex_unlock(&queue->lock);
		return timeout_us ? AEE_EEXPIRED : AEE_EWOULDBLOCK;
	}
	packet = &queue->responses.packets[queue->responses.read++ % DEPTH];
	*flags = 3;
	*n_buffers = 1;
	*buffers = packet->buffer;
	*length = packet->length;
	memcpy(message, packet->message, packet->length);
	pthread_mutex_unlock(&queue->lock);
	note("read %lu %lu %lu\n", (unsigned long)((struct response *)message)->seq, asked, now());
	return AEE_SUCCESS;
}

AEEResult dspqueue_read_noblock(dspqueue_t queue, uint32_t *flags, uint32_t max_buffers, uint32_t *n_buffers,
				struct dspqueue_buffer *buffers, uint32_t max_length, uint32_t *length, uint8_t *message)
{
	return dspqueue_read(queue, flags, max_buffers, n_buffers, buffers, max_length, length, message, 0);
}

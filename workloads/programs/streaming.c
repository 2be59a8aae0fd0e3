// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * An engine that nobody declared: LOADERS threads `loader` read a layer's weights (O_DIRECT) and dequantize them into a ring of
 * buffers, and its main thread multiplies them.
 *
 *	streaming WEIGHTS STEPS DEQUANTIZE COMPUTE STALL_EVERY LOADERS [quiet] > tokens
 *
 * DEQUANTIZE and COMPUTE: turns over a layer. In each STALL_EVERY-th step (0: none) a layer is dequantized eight times as long.
 * A token is printed after each step, unless `quiet`. The last line is JSON, CLOCK_MONOTONIC in ns: [begin, end] of `steps`, of the
 * main thread's `waits` for a layer, of the loaders' `reads` and of their `work` on them.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LAYERS 8
#define LAYER_BYTES (256 * 1024)
#define RING 4
#define MOST_LOADERS 8
#define MOST 100000

struct times {
	const char *name;
	int count;
	unsigned long at[MOST][2];
};

static struct times steps = {.name = "steps"}, waits = {.name = "waits"}, reads = {.name = "reads"}, work = {.name = "work"};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER, emptied = PTHREAD_COND_INITIALIZER;
static int filled_by[RING], n_used, n_steps, n_loaders, dequantize_turns, compute_turns, stall_every, file;
static float *ring[RING], sum;

static unsigned long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

static void note(struct times *times, unsigned long begin)
{
	int row = __atomic_fetch_add(&times->count, 1, __ATOMIC_RELAXED);

	if (row >= MOST)
		abort();
	times->at[row][0] = begin;
	times->at[row][1] = now();
}

__attribute__((noipa)) void dequantize(float *out, const signed char *in, int turns)
{
	for (int turn = 0; turn < turns; turn++)
		for (int i = 0; i < LAYER_BYTES / 4; i++)
			out[i] = out[i] * 0.5f + in[i] * 0.01f;
}

__attribute__((noipa)) float multiply(const float *weights, int turns)
{
	float answer = 0;

	for (int turn = 0; turn < turns; turn++)
		for (int i = 0; i < LAYER_BYTES / 4; i++)
			answer += weights[i] * (i & 7);
	return answer;
}

__attribute__((noipa)) void wait_for_space(int layer)
{
	pthread_mutex_lock(&lock);
	while (layer >= n_used + RING)
		pthread_cond_wait(&emptied, &lock);
	pthread_mutex_unlock(&lock);
}

static void *load(void *first)
{
	signed char *raw = aligned_alloc(4096, LAYER_BYTES);

	pthread_setname_np(pthread_self(), "loader");
	for (int i = (long)first; i < n_steps * LAYERS; i += n_loaders) {
		int stalls = stall_every && i / LAYERS % stall_every == stall_every - 1 && i % LAYERS == LAYERS / 2;
		unsigned long begin;

		wait_for_space(i);
		begin = now();
		if (pread(file, raw, LAYER_BYTES, (long)(i % LAYERS) * LAYER_BYTES) != LAYER_BYTES)
			abort();
		note(&reads, begin);
		begin = now();
		dequantize(ring[i % RING], raw, dequantize_turns * (stalls ? 8 : 1));
		note(&work, begin);
		pthread_mutex_lock(&lock);
		filled_by[i % RING] = i + 1;
		pthread_cond_signal(&filled);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

__attribute__((noipa)) void wait_for_layer(int layer)
{
	unsigned long begin = now();

	pthread_mutex_lock(&lock);
	while (filled_by[layer % RING] != layer + 1)
		pthread_cond_wait(&filled, &lock);
	pthread_mutex_unlock(&lock);
	note(&waits, begin);
}

__attribute__((noipa)) void run_step(int step)
{
	for (int layer = step * LAYERS; layer < (step + 1) * LAYERS; layer++) {
		wait_for_layer(layer);
		sum += multiply(ring[layer % RING], compute_turns);
		pthread_mutex_lock(&lock);
		n_used++;
		pthread_cond_broadcast(&emptied);
		pthread_mutex_unlock(&lock);
	}
}

static void print_times(const struct times *times, const char *before)
{
	printf("%s\"%s\": [", before, times->name);
	for (int i = 0; i < times->count; i++)
		printf("%s[%lu, %lu]", i ? ", " : "", times->at[i][0], times->at[i][1]);
	printf("]");
}

int main(int argc, char **argv)
{
	int quiet = argc > 7 && !strcmp(argv[7], "quiet");
	pthread_t loaders[MOST_LOADERS];

	if (argc < 7)
		return 2;
	n_steps = atoi(argv[2]);
	dequantize_turns = atoi(argv[3]);
	compute_turns = atoi(argv[4]);
	stall_every = atoi(argv[5]);
	n_loaders = atoi(argv[6]);
	if (n_loaders < 1 || n_loaders > MOST_LOADERS)
		return 2;
	file = open(argv[1], O_RDONLY | O_DIRECT);
	if (file < 0)
		file = open(argv[1], O_RDONLY);
	for (int i = 0; i < RING; i++)
		ring[i] = calloc(LAYER_BYTES / 4, sizeof(float));
	for (long i = 0; i < n_loaders; i++)
		pthread_create(&loaders[i], NULL, load, (void *)i);
	for (int step = 0; step < n_steps; step++) {
		unsigned long begin = now();

		run_step(step);
		if (!quiet) {
			printf("token%d ", step);
			fflush(stdout);
		}
		note(&steps, begin);
	}
	for (int i = 0; i < n_loaders; i++)
		pthread_join(loaders[i], NULL);
	print_times(&steps, "\n{");
	print_times(&waits, ", ");
	print_times(&reads, ", ");
	print_times(&work, ", ");
	printf("}\n");
	return sum == 1.5f;
}

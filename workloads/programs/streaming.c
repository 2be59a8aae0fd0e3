// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * An engine that nobody declared: its thread `loader` reads a layer's weights (O_DIRECT), dequantizes them into a ring of buffers,
 * and its main thread multiplies them.
 *
 *	streaming WEIGHTS STEPS DEQUANTIZE COMPUTE STALL_EVERY [quiet] > tokens
 *
 * DEQUANTIZE and COMPUTE: turns over a layer. In each STALL_EVERY-th step (0: none) a layer is dequantized eight times as long.
 * A token is printed after each step, unless `quiet`. The last line is JSON, CLOCK_MONOTONIC in ns: [begin, end] of `steps`, of the
 * main thread's `waits` for a layer, of the loader's `reads` and of its `work` on them.
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
#define RING 2
#define MOST 100000

struct times {
	const char *name;
	int count;
	unsigned long at[MOST][2];
};

static struct times steps = {.name = "steps"}, waits = {.name = "waits"}, reads = {.name = "reads"}, work = {.name = "work"};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER, emptied = PTHREAD_COND_INITIALIZER;
static int n_filled, n_steps, dequantize_turns, compute_turns, stall_every, file;
static float *ring[RING], sum;
static signed char *raw;

static unsigned long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

static void note(struct times *times, unsigned long begin)
{
	if (times->count < MOST) {
		times->at[times->count][0] = begin;
		times->at[times->count++][1] = now();
	}
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

__attribute__((noipa)) void wait_for_space(void)
{
	pthread_mutex_lock(&lock);
	while (n_filled == RING)
		pthread_cond_wait(&emptied, &lock);
	pthread_mutex_unlock(&lock);
}

static void *load(void *unused)
{
	(void)unused;
	pthread_setname_np(pthread_self(), "loader");
	for (int i = 0; i < n_steps * LAYERS; i++) {
		int stalls = stall_every && i / LAYERS % stall_every == stall_every - 1 && i % LAYERS == LAYERS / 2;
		unsigned long begin;

		wait_for_space();
		begin = now();
		if (pread(file, raw, LAYER_BYTES, (long)(i % LAYERS) * LAYER_BYTES) != LAYER_BYTES)
			abort();
		note(&reads, begin);
		begin = now();
		dequantize(ring[i % RING], raw, dequantize_turns * (stalls ? 8 : 1));
		note(&work, begin);
		pthread_mutex_lock(&lock);
		n_filled++;
		pthread_cond_signal(&filled);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

__attribute__((noipa)) void wait_for_layer(void)
{
	unsigned long begin = now();

	pthread_mutex_lock(&lock);
	while (!n_filled)
		pthread_cond_wait(&filled, &lock);
	pthread_mutex_unlock(&lock);
	note(&waits, begin);
}

__attribute__((noipa)) void run_step(int step)
{
	for (int layer = 0; layer < LAYERS; layer++) {
		wait_for_layer();
		sum += multiply(ring[(step * LAYERS + layer) % RING], compute_turns);
		pthread_mutex_lock(&lock);
		n_filled--;
		pthread_cond_signal(&emptied);
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
	int quiet = argc > 6 && !strcmp(argv[6], "quiet");
	pthread_t loader;

	if (argc < 6)
		return 2;
	n_steps = atoi(argv[2]);
	dequantize_turns = atoi(argv[3]);
	compute_turns = atoi(argv[4]);
	stall_every = atoi(argv[5]);
	file = open(argv[1], O_RDONLY | O_DIRECT);
	if (file < 0)
		file = open(argv[1], O_RDONLY);
	raw = aligned_alloc(4096, LAYER_BYTES);
	for (int i = 0; i < RING; i++)
		ring[i] = calloc(LAYER_BYTES / 4, sizeof(float));
	pthread_create(&loader, NULL, load, NULL);
	for (int step = 0; step < n_steps; step++) {
		unsigned long begin = now();

		run_step(step);
		if (!quiet) {
			printf("token%d ", step);
			fflush(stdout);
		}
		note(&steps, begin);
	}
	pthread_join(loader, NULL);
	print_times(&steps, "\n{");
	print_times(&waits, ", ");
	print_times(&reads, ", ");
	print_times(&work, ", ");
	printf("}\n");
	return sum == 1.5f;
}

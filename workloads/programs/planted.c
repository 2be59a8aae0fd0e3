/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Poses as MoEScope's runtime in several variants, by turns: planted ROUNDS STEPS VARIANT... prints "pid variant" for every run.
 *
 * Each run is a process of its own: one prefill, then STEPS decode steps of three layers, whose work is counted loops, not time.
 *   base       nothing planted                 slowN      attention of layer 1 takes N % more
 *   cold       expert 5 of layer 2 is loaded whenever it runs
 *   displaced  another thread takes the CPU for a tenth of a millisecond or more, every millisecond
 *   split      combine is two operators        halved     the expert cache holds 3 experts of a layer, not 6
 */
#define _GNU_SOURCE
#include "sites.h"
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <pthread.h>

#define LAYERS 3
#define EXPERTS 8
#define TOP_K 2
#define MICROSECOND 120 /* turns of the loop: about that long */

enum { ATTENTION = 1, ROUTER, DISPATCH, EXPERT, COMBINE };

static struct {
	int used[EXPERTS], clock, capacity;
} cache[LAYERS];
static int cold, split, slow;
static volatile int displacing;
static uint64_t result;

static void turns(long count)
{
	for (long i = 0; i < count; i++)
		__asm__ volatile("imul $3, %%eax, %%eax\n\timul $5, %%eax, %%eax" : : : "eax");
}

static void work(int microseconds)
{
	turns((long)microseconds * MICROSECOND);
}

static void op_begin(int type, int layer)
{
	uint64_t source = result++;

	moescope_op__begin(type, layer, 1, result, &source, 1);
}

static void op(int type, int layer, int microseconds, int percent_more)
{
	op_begin(type, layer);
	turns((long)microseconds * MICROSECOND * (100 + percent_more) / 100);
	moescope_op__end(result, 0);
}

/* 1: the expert is in the layer's cache; else the least recently used one leaves it. */
static int look_up(int layer, int expert)
{
	int held = 0, oldest = -1, hit = cache[layer].used[expert] > 0;

	for (int e = 0; e < EXPERTS; e++) {
		held += cache[layer].used[e] > 0;
		if (cache[layer].used[e] > 0 && e != expert && (oldest < 0 || cache[layer].used[e] < cache[layer].used[oldest]))
			oldest = e;
	}
	if (!hit && held >= cache[layer].capacity)
		cache[layer].used[oldest] = 0;
	cache[layer].used[expert] = ++cache[layer].clock;
	return hit;
}

static void load(int layer, int expert, int microseconds)
{
	moescope_load__begin(layer, expert, 4096, 1, 1);
	work(microseconds);
	moescope_load__end(layer, expert, 4096, 4096);
}

static void experts(int layer, int step)
{
	for (int k = 0; k < TOP_K; k++) {
		int expert = k ? (step * 5 + layer) % EXPERTS : (step / 3 + layer) % EXPERTS, planted = cold && layer == 2 && expert == 5;
		int hit = look_up(layer, expert) && !planted;

		op_begin(EXPERT, layer);
		if (!hit)
			load(layer, expert, planted ? 200 : 25);
		moescope_expert__begin(layer, expert, 1, hit ? 1 : 2, 1, 0);
		work(60);
		moescope_expert__end(layer, expert);
		moescope_op__end(result, 0);
	}
}

static void step(int number)
{
	for (int layer = 0; layer < LAYERS; layer++) {
		op(ATTENTION, layer, 150, layer == 1 ? slow : 0);
		op(ROUTER, layer, 30, 0);
		experts(layer, number);
		if (split)
			op(DISPATCH, layer, 25, 0);
		op(COMBINE, layer, split ? 25 : 40, 0);
	}
}

static void on_one_cpu(int cpu, int priority)
{
	struct sched_param urgent = {.sched_priority = priority};
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
	sched_setscheduler(0, SCHED_FIFO, &urgent); /* neighbours on the machine are no part of the experiment */
}

static void *displace(void *cpu)
{
	struct timespec pause = {0, 1000000};

	on_one_cpu((int)(long)cpu, 2);
	displacing = 1;
	for (;;) {
		work(300);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static void run(const char *variant, int steps)
{
	long cpu = sched_getcpu();
	pthread_t other;

	on_one_cpu(cpu, 1);
	cold = !strcmp(variant, "cold");
	split = !strcmp(variant, "split");
	slow = strncmp(variant, "slow", 4) ? 0 : atoi(variant + 4);
	for (int layer = 0; layer < LAYERS; layer++)
		cache[layer].capacity = !strcmp(variant, "halved") ? 3 : 6;
	if (!strcmp(variant, "displaced")) {
		pthread_create(&other, NULL, displace, (void *)cpu);
		while (!displacing)
			usleep(100);
	}
	for (int number = 0; number <= steps; number++) {
		moescope_token__begin(number, number ? 2 : 1, number ? 1 : 4, number ? number + 3 : 0);
		result = 0x7000;
		step(number);
		moescope_token__end(number, 7, 0);
	}
	_exit(0);
}

int main(int count, char **arguments)
{
	for (int round = 0; round < atoi(arguments[1]); round++)
		for (int i = 3; i < count; i++) {
			int variant = round % 2 ? count + 2 - i : i;
			int pid = fork(), status;

			if (!pid)
				run(arguments[variant], atoi(arguments[2]));
			waitpid(pid, &status, 0);
			printf("%d %s\n", pid, arguments[variant]);
			fflush(stdout);
		}
	return 0;
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A call tree and waits that are known: stack_tree ROUNDS. Prints JSON: the CPU time of each branch in ns and the turns of its loop,
 * and for each wait on the lock its begin and end (CLOCK_MONOTONIC, ns), as the program saw them.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define WAITS 20
#if defined(__clang__)
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noipa))
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile unsigned long sink;
static volatile int held;
static unsigned long all_turns, spent[3], turned[3], waited[WAITS][2];

static unsigned long now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

APART static void burn(long turns)
{
	for (long i = 0; i < turns; i++)
		sink += i * i;
	all_turns += turns;
}

/* Recursion: each level is a frame. */
APART static void deeper(int levels, long turns)
{
	if (levels)
		deeper(levels - 1, turns);
	else
		burn(turns);
	sink++;
}

APART void branch_long(void) { burn(500000); sink++; }
APART void branch_deep(void) { deeper(40, 300000); sink++; }
APART void branch_short(void) { burn(200000); sink++; }

static void timed(int branch, void (*work)(void))
{
	unsigned long before = all_turns, begin = now(CLOCK_THREAD_CPUTIME_ID);

	work();
	spent[branch] += now(CLOCK_THREAD_CPUTIME_ID) - begin;
	turned[branch] += all_turns - before;
}

APART void release_lock(void) { pthread_mutex_unlock(&lock); sink++; }

static void *hold(void *unused)
{
	(void)unused;
	for (int i = 0; i < WAITS; i++) {
		pthread_mutex_lock(&lock);
		held = 1;
		usleep(5000);
		release_lock();
		while (held)
			usleep(100);
	}
	return NULL;
}

APART void wait_for_lock(int i)
{
	waited[i][0] = now(CLOCK_MONOTONIC);
	pthread_mutex_lock(&lock);
	waited[i][1] = now(CLOCK_MONOTONIC);
	pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv)
{
	void (*const branches[])(void) = {branch_long, branch_deep, branch_short};
	int rounds = argc > 1 ? atoi(argv[1]) : 500;
	pthread_t holder;

	for (int i = 0; i < rounds; i++)
		for (int branch = 0; branch < 3; branch++)
			timed(branch, branches[branch]);
	pthread_create(&holder, NULL, hold, NULL);
	for (int i = 0; i < WAITS; i++) {
		while (!held)
			usleep(100);
		wait_for_lock(i);
		held = 0;
	}
	pthread_join(holder, NULL);
	printf("{\"spent\": [%lu, %lu, %lu], \"turned\": [%lu, %lu, %lu], \"waits\": [", spent[0], spent[1], spent[2], turned[0],
	       turned[1], turned[2]);
	for (int i = 0; i < WAITS; i++)
		printf("%s[%lu, %lu]", i ? ", " : "", waited[i][0], waited[i][1]);
	printf("]}\n");
	return 0;
}

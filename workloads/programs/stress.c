/* SPDX-License-Identifier: Apache-2.0 */
/* Hits one cheap site, one record each, as fast as it can, each thread at least 256 times: stress SECONDS THREADS. Prints the hits. */
#include "truth.h"
#include "sites.h"
#include <pthread.h>

#define MAX_THREADS 256
#define BURST 256

static u64 deadline;

static void *run(void *argument)
{
	u64 *hits = argument;

	do {
		for (int i = 0; i < BURST; i++)
			moescope_evict(0, i, *hits + i, 0);
		*hits += BURST;
	} while (now() < deadline);
	return NULL;
}

int main(int count, char **arguments)
{
	int n_threads = count > 2 ? atoi(arguments[2]) : 0;
	static u64 hits[MAX_THREADS][8]; /* a cache line each */
	pthread_t threads[MAX_THREADS];
	u64 total = 0, begin;

	if (n_threads < 1 || n_threads > MAX_THREADS)
		return 2;
	begin = now();
	deadline = begin + (u64)(atof(arguments[1]) * 1e9);
	for (int i = 0; i < n_threads; i++)
		pthread_create(&threads[i], NULL, run, hits[i]);
	for (int i = 0; i < n_threads; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < n_threads; i++)
		total += hits[i][0];
	printf("{\"hits\": %llu, \"ns\": %llu}\n", (unsigned long long)total, (unsigned long long)(now() - begin));
	return 0;
}

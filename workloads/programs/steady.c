/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Does the same work over and over, through every site of the runtime, and checks its own result each time: steady.
 * Ends on SIGTERM and prints how many rounds it did, how many came out wrong, and the longest time between two.
 */
#include "truth.h"
#include "sites.h"
#include <signal.h>

#define WORK 64

static volatile sig_atomic_t ended;

static void end(int number)
{
	(void)number;
	ended = 1;
}

/* Many values live across the calls: a site that spoilt a register, a flag or the stack would change the result. */
__attribute__((noinline)) static u64 work(int with_sites)
{
	u64 a = 1, b = 2, c = 3, d = 5, sources[2] = {7, 11};
	double x = 1.5, y = 0.25;
	uint16_t experts[4] = {1, 2, 3, 4};
	float weights[4] = {0.5f, 0.25f, 0.125f, 0.125f};

	for (int i = 0; i < WORK; i++) {
		if (with_sites) {
			moescope_token__begin(i, 2, 1, i);
			moescope_graph__begin(i, 4, 0, -1, 1, 1);
			moescope_op__begin(4, 0, 1, 7, sources, 2);
			moescope_expert__begin(0, 1, 1, 1, 1, 0);
			moescope_route(0, 2, 2, experts, weights);
			moescope_load__begin(0, 1, a, 1, 1);
			moescope_load__end(0, 1, a, b);
			moescope_evict(0, 1, c, d);
			moescope_expert__end(0, 1);
			moescope_op__end(7, 0);
			moescope_graph__end(i, 0, 0);
			moescope_token__end(i, i, 0);
		}
		a = a * 6364136223846793005ULL + b;
		b ^= a >> 17;
		c += b * d;
		d = (d << 13) | (d >> 51);
		x = x * 1.0000001 + y;
		y = y * 0.9999999 + 1e-9;
	}
	return a ^ b ^ c ^ d ^ (u64)(x * 1e6) ^ (u64)(y * 1e9);
}

int main(void)
{
	u64 expected = work(0), rounds = 0, wrong = 0, longest = 0, last = now();

	signal(SIGTERM, end);
	while (!ended) {
		u64 t;

		wrong += work(1) != expected;
		rounds++;
		t = now();
		if (t - last > longest)
			longest = t - last;
		last = t;
		usleep(1000);
	}
	printf("{\"rounds\": %llu, \"wrong\": %llu, \"longest_ns\": %llu}\n", (unsigned long long)rounds,
	       (unsigned long long)wrong, (unsigned long long)longest);
	return wrong != 0;
}

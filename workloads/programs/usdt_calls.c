/* SPDX-License-Identifier: Apache-2.0 */
/* Calls each of the runtime's twelve USDT sites as often as it is told: usdt_calls COUNT. */
#include <stdlib.h>
#include "sites.h"

int main(int count, char **arguments)
{
	uint16_t experts[2] = {1, 5};
	float weights[2] = {0.75f, 0.25f};
	uint64_t sources[1] = {7};

	for (int i = 0, calls = count > 1 ? atoi(arguments[1]) : 0; i < calls; i++) {
		moescope_token__begin(i, 2, 1, i);
		moescope_graph__begin(1, 4, 0, -1, 1, 1);
		moescope_op__begin(4, 0, 1, 8, sources, 1);
		moescope_route(0, 1, 2, experts, weights);
		moescope_load__begin(0, 1, 4096, 1, 1);
		moescope_load__end(0, 1, 4096, 4096);
		moescope_expert__begin(0, 1, 1, 1, 1, 0);
		moescope_expert__end(0, 1);
		moescope_evict(0, 1, 4096, 0);
		moescope_op__end(8, 0);
		moescope_graph__end(1, 0, 0);
		moescope_token__end(i, i + 7, 0);
	}
	return 0;
}

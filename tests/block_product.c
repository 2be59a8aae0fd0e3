/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products by one instruction set, for processors that are emulated: block_product SET < cases > results
 *
 * A case: seven 64-bit numbers (bits, block, m, k, n, whether zero points follow, whether rows are gated), rows, values, scales, zero points. Exit status 3:
 * this processor lacks the set.
 */
#include <stdio.h>

#include "product.h"

bool moescope_choose(const char *name);

static void *take(size_t size)
{
	void *data = malloc(size + !size);

	if (!data || fread(data, 1, size, stdin) != size)
		exit(2);
	return data;
}

static void compute(const uint64_t *sizes)
{
	struct product p = { .bits = sizes[0], .block = sizes[1], .m = sizes[2], .k = sizes[3], .n = sizes[4], .gated = sizes[6] };

	if (!product_sizes(&p))
		exit(2);
	void *rows = take(p.m * p.k * (1 + p.gated) * sizeof(float)), *values = take(p.n * p.row_bytes), *scales = take(p.n * p.blocks * sizeof(*p.scales));
	void *zeros = sizes[5] ? take(p.n * p.zero_bytes) : NULL, *room = product_room(&p);
	p.rows = rows;
	p.values = values;
	p.scales = scales;
	p.zeros = zeros;
	p.out = malloc(p.m * p.n * sizeof(float));
	if (!room || !p.out)
		exit(2);
	for (size_t group = 0; group < product_row_groups(&p); group++)
		product_quantize(&p, group);
	for (size_t i = 0; i < product_pieces(&p); i++)
		product_piece(&p, i);
	fwrite(p.out, sizeof(float), p.m * p.n, stdout);
	free(rows);
	free(values);
	free(scales);
	free(zeros);
	free(room);
	free(p.out);
}

int main(int count, char **arguments)
{
	uint64_t sizes[7];

	if (count != 2 || !moescope_choose(arguments[1]))
		return 3;
	while (fread(sizes, sizeof(sizes), 1, stdin) == 1)
		compute(sizes);
	return 0;
}

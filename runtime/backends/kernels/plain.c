/* SPDX-License-Identifier: Apache-2.0 */
/* The product in plain C: the reference for every other kernel, and the fallback for processors without their instructions. */
#include "product.h"

static int32_t block_dot(const struct product *p, const uint8_t *packed, const int8_t *x)
{
	const size_t half = CHUNK / 2;
	int32_t sum = 0;

	if (p->bits == 8) {
		for (size_t i = 0; i < p->block_bytes; i++)
			sum += packed[i] * x[i];
		return sum;
	}
	for (size_t part = 0; part < p->block_bytes; part += half, packed += half, x += CHUNK) {
		const size_t bytes = p->block_bytes < half ? p->block_bytes : half;
		for (size_t i = 0; i < bytes; i++)
			sum += (packed[i] & 15) * x[i] + (packed[i] >> 4) * x[half + i];
	}
	return sum;
}

static float result(const struct product *p, size_t row, size_t column)
{
	const int8_t *codes = p->codes + row * p->stride;
	const uint8_t *values = p->values + column * p->row_bytes;
	float lanes[GROUP] = { 0 };

	for (size_t b = 0; b < p->blocks; b++) {
		size_t entry = row * p->groups * GROUP + b, byte = b * p->block_bytes;
		int32_t dot = block_dot(p, values + byte, codes + code_offset(p->bits, byte));
		dot -= zero_point(p, p->bits, column, b) * p->sums[entry];
		lanes[b % GROUP] = fmaf((float)dot, p->row_scales[entry] * from_half(p->scales[column * p->blocks + b]), lanes[b % GROUP]);
	}
	return fold(lanes, 1);
}

static void columns(const struct product *p, size_t first, size_t end)
{
	for (size_t column = first; column < end; column++)
		for (size_t row = 0; row < p->m; row++)
			p->out[row * p->n + column] = result(p, row, column);
}

static void quantize(struct product *p, size_t row)
{
	quantize_row(p, row, PLAIN_ROWS);
}

static bool available(void)
{
	return true;
}

const struct instruction_set set_plain = { "plain", available, quantize, columns, 1, 0 };

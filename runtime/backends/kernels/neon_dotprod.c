/* SPDX-License-Identifier: Apache-2.0 */
/* The product on arm64 with the dot product instructions: a tile's vector has four columns, and meets four codes of a row. */
#include "product.h"
#if defined(__aarch64__)
#include <sys/auxv.h>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define WIDTH 4
#define VECTORS 2	/* of four columns */

#include "neon.h"

/* Four codes of each row, at a place of `codes`, with those of a panel's columns from w on. */
#define FOUR_CODES(place)                                                                                     \
	do {                                                                                                  \
		const int8x16_t left = vld1q_s8(w + (place) * halves * WIDTH * PANEL);                        \
		const int8x16_t right = vld1q_s8(w + (place) * halves * WIDTH * PANEL + 16);                  \
		for (size_t r = 0; r < TILE_ROWS; r++) {                                                      \
			dots[r][0] = vdotq_laneq_s32(dots[r][0], left, rows[r], place);                       \
			dots[r][1] = vdotq_laneq_s32(dots[r][1], right, rows[r], place);                      \
		}                                                                                             \
	} while (0)

/* Dot products of a block: TILE_ROWS rows from `x` on with the columns of a panel. */
INLINE void tile_block(size_t bits, size_t block_bytes, const uint8_t *codes, const int8_t *x, size_t stride, size_t block,
		       int32x4_t (*dots)[VECTORS])
{
	const size_t halves = bits == 4 ? 2 : 1, run = block_bytes < LOAD ? block_bytes : LOAD;

	for (size_t begin = block * block_bytes, end = begin + block_bytes; begin < end; begin += run)
		for (size_t half = 0; half < halves; half++) {
			const int8_t *w = (const int8_t *)codes + (begin * halves + half * WIDTH) * PANEL;
			int8x16_t rows[TILE_ROWS];
			for (size_t r = 0; r < TILE_ROWS; r++)
				rows[r] = row_codes(x + r * stride + code_offset(bits, begin) + half * (CHUNK / 2), run);
			FOUR_CODES(0);
			FOUR_CODES(1);
			if (run < LOAD)
				continue;
			FOUR_CODES(2);
			FOUR_CODES(3);
		}
}

/* Adds what a block brings to a lane [TILE_ROWS, VECTORS]. */
INLINE void add_block(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row, size_t b,
		      float32x4_t (*lane)[VECTORS])
{
	int32x4_t dots[TILE_ROWS][VECTORS];

	for (size_t r = 0; r < TILE_ROWS; r++)
		dots[r][0] = dots[r][1] = vdupq_n_s32(0);
	tile_block(bits, block_bytes, panel->codes, p->codes + row * p->stride, p->stride, b, dots);
	for (size_t r = 0; r < TILE_ROWS; r++) {
		const size_t entry = (row + r) * p->groups * GROUP + b;
		for (size_t v = 0; v < VECTORS; v++) {
			const int32x4_t zeros = vld1q_s32(panel->zeros + b * PANEL + 4 * v);
			const int32x4_t exact = bits == 8 ? vmlsq_n_s32(dots[r][v], zeros, p->sums[entry]) : dots[r][v];
			const float32x4_t scales = vmulq_n_f32(vld1q_f32(panel->scales + b * PANEL + 4 * v), p->row_scales[entry]);
			lane[r][v] = vfmaq_f32(lane[r][v], vcvtq_f32_s32(exact), scales);
		}
	}
}

/* Lane by lane, whose sums then stay in registers. */
INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row)
{
	float32x4_t lanes[GROUP][TILE_ROWS][VECTORS];
	float results[GROUP][PANEL];

	for (size_t i = 0; i < GROUP; i++) {
		float32x4_t lane[TILE_ROWS][VECTORS];
		for (size_t r = 0; r < TILE_ROWS; r++)
			lane[r][0] = lane[r][1] = vdupq_n_f32(0);
		for (size_t b = i; b < p->blocks; b += GROUP)
			add_block(p, bits, block_bytes, panel, row, b, lane);
		for (size_t r = 0; r < TILE_ROWS * VECTORS; r++)
			lanes[i][r / VECTORS][r % VECTORS] = lane[r / VECTORS][r % VECTORS];
	}
	for (size_t r = 0; r < TILE_ROWS && row + r < p->m; r++) {
		for (size_t i = 0; i < GROUP * VECTORS; i++)
			vst1q_f32(results[i / VECTORS] + i % VECTORS * 4, lanes[i / VECTORS][r][i % VECTORS]);
		store_row(p, panel, row + r, results);
	}
}

static bool available(void)
{
	return getauxval(AT_HWCAP) & 1 << 20;
}

const struct instruction_set set_neon_dotprod = { "neon_dotprod", available, quantize, columns };
#endif

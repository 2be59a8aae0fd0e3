/* SPDX-License-Identifier: Apache-2.0 */
/* The product on arm64 with the dot product instructions: a tile's vector has four columns, and meets four codes of a row. */
#include "product.h"
#if defined(__aarch64__)
#include <sys/auxv.h>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define WIDTH 4
#define VECTORS 2	/* of four columns */

#include "neon.h"

/* Dot products of a block: TILE_ROWS rows from `x` on with the columns of a panel. */
INLINE void tile_block(size_t bits, size_t block_bytes, const uint8_t *codes, const int8_t *x, size_t stride, size_t block,
		       int32x4_t (*dots)[VECTORS])
{
	const size_t halves = bits == 4 ? 2 : 1, run = block_bytes < LOAD ? block_bytes : LOAD;

	for (size_t begin = block * block_bytes, end = begin + block_bytes; begin < end; begin += run)
#pragma GCC unroll 8
		for (size_t i = 0; i < run / 4 * halves; i++) {
			const int8_t *w = (const int8_t *)codes + (begin * halves + i * WIDTH) * PANEL;
			const int8_t *row_codes = x + code_offset(bits, begin) + i / halves * 4 + i % halves * (CHUNK / 2);
			const int8x16_t left = vld1q_s8(w), right = vld1q_s8(w + 16);
			for (size_t r = 0; r < TILE_ROWS; r++) {
				const int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32((const void *)(row_codes + r * stride)));
				dots[r][0] = vdotq_s32(dots[r][0], left, four);
				dots[r][1] = vdotq_s32(dots[r][1], right, four);
			}
		}
}

INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row)
{
	float32x4_t lanes[GROUP][TILE_ROWS][VECTORS];
	float results[GROUP][PANEL];

	memset(lanes, 0, sizeof(lanes));
	for (size_t b = 0; b < p->blocks; b++) {
		int32x4_t dots[TILE_ROWS][VECTORS];
		for (size_t r = 0; r < TILE_ROWS; r++)
			dots[r][0] = dots[r][1] = vdupq_n_s32(0);
		tile_block(bits, block_bytes, panel->codes, p->codes + row * p->stride, p->stride, b, dots);
		for (size_t r = 0; r < TILE_ROWS; r++) {
			const size_t entry = (row + r) * p->groups * GROUP + b;
			for (size_t v = 0; v < VECTORS; v++) {
				const int32x4_t zeros = vld1q_s32(panel->zeros + b * PANEL + 4 * v);
				const float32x4_t scales = vld1q_f32(panel->scales + b * PANEL + 4 * v);
				const float32x4_t exact = vcvtq_f32_s32(vmlsq_n_s32(dots[r][v], zeros, p->sums[entry]));
				float32x4_t *lane = &lanes[b % GROUP][r][v];
				*lane = vfmaq_f32(*lane, exact, vmulq_n_f32(scales, p->row_scales[entry]));
			}
		}
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

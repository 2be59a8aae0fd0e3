/* SPDX-License-Identifier: Apache-2.0 */
/* The product on arm64 with the matrix instructions: a tile's vector has two rows times two columns, and meets eight codes. */
#include "product.h"
#if defined(__aarch64__)
#include <sys/auxv.h>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define WIDTH 8
#define PAIRS (PANEL / 2)	/* of columns */

#include "neon.h"

/* Dot products of a block: two pairs of rows from `x` on with the pairs of a panel's columns. */
INLINE void tile_block(size_t bits, size_t block_bytes, const uint8_t *codes, const int8_t *x, size_t stride, size_t block,
		       int32x4_t (*dots)[PAIRS])
{
	const size_t halves = bits == 4 ? 2 : 1, run = block_bytes < LOAD ? block_bytes : LOAD;

	for (size_t begin = block * block_bytes, end = begin + block_bytes; begin < end; begin += run)
#pragma GCC unroll 4
		for (size_t i = 0; i < run / WIDTH * halves; i++) {
			const int8_t *w = (const int8_t *)codes + (begin * halves + i * WIDTH) * PANEL;
			const int8_t *row_codes = x + code_offset(bits, begin) + i / halves * WIDTH + i % halves * (CHUNK / 2);
			for (size_t r = 0; r < TILE_ROWS; r += 2) {
				const int8x16_t rows = vcombine_s8(vld1_s8(row_codes + r * stride), vld1_s8(row_codes + (r + 1) * stride));
				for (size_t c = 0; c < PAIRS; c++)
					dots[r / 2][c] = vmmlaq_s32(dots[r / 2][c], rows, vld1q_s8(w + c * 16));
			}
		}
}

/* Both of two, each twice: what two columns bring to a vector. */
INLINE float32x4_t twice(const float *two)
{
	return vcombine_f32(vld1_f32(two), vld1_f32(two));
}

/* Two, each twice in a row: what two rows bring to a vector. */
INLINE float32x4_t each_twice(const float *of, size_t pitch)
{
	return vcombine_f32(vdup_n_f32(of[0]), vdup_n_f32(of[pitch]));
}

INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row)
{
	const size_t pitch = p->groups * GROUP;
	float32x4_t lanes[GROUP][TILE_ROWS / 2][PAIRS];
	float results[GROUP][PANEL];

	memset(lanes, 0, sizeof(lanes));
	for (size_t b = 0; b < p->blocks; b++) {
		int32x4_t dots[TILE_ROWS / 2][PAIRS];
		for (size_t i = 0; i < TILE_ROWS / 2 * PAIRS; i++)
			dots[i / PAIRS][i % PAIRS] = vdupq_n_s32(0);
		tile_block(bits, block_bytes, panel->codes, p->codes + row * p->stride, p->stride, b, dots);
		for (size_t r = 0; r < TILE_ROWS; r += 2) {
			const size_t entry = (row + r) * pitch + b;
			const int32x4_t sums = vcombine_s32(vdup_n_s32(p->sums[entry]), vdup_n_s32(p->sums[entry + pitch]));
			const float32x4_t row_scales = each_twice(p->row_scales + entry, pitch);
			for (size_t c = 0; c < PAIRS; c++) {
				const int32x2_t zeros = vld1_s32(panel->zeros + b * PANEL + 2 * c);
				const int32x4_t exact = vmlsq_s32(dots[r / 2][c], vcombine_s32(zeros, zeros), sums);
				const float32x4_t scales = vmulq_f32(row_scales, twice(panel->scales + b * PANEL + 2 * c));
				float32x4_t *lane = &lanes[b % GROUP][r / 2][c];
				*lane = vfmaq_f32(*lane, vcvtq_f32_s32(exact), scales);
			}
		}
	}
	for (size_t r = 0; r < TILE_ROWS && row + r < p->m; r++) {
		for (size_t i = 0; i < GROUP * PAIRS; i++) {
			const float32x4_t both = lanes[i / PAIRS][r / 2][i % PAIRS];
			vst1_f32(results[i / PAIRS] + i % PAIRS * 2, r % 2 ? vget_high_f32(both) : vget_low_f32(both));
		}
		store_row(p, panel, row + r, results);
	}
}

static bool available(void)
{
	return getauxval(AT_HWCAP) & 1 << 20 && getauxval(AT_HWCAP2) & 1 << 13;
}

const struct instruction_set set_neon_i8mm = { "neon_i8mm", available, quantize, columns };
#endif

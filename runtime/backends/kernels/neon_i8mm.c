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
		for (size_t half = 0; half < halves; half++) {
			const int8_t *w = (const int8_t *)codes + (begin * halves + half * WIDTH) * PANEL;
			const int8_t *first = x + code_offset(bits, begin) + half * (CHUNK / 2);
			int8x16_t rows[TILE_ROWS / 2][2]; /* eight codes of two rows, and the next eight */
			for (size_t r = 0; r < TILE_ROWS / 2; r++) {
				const int64x2_t one = vreinterpretq_s64_s8(row_codes(first + 2 * r * stride, run));
				const int64x2_t two = vreinterpretq_s64_s8(row_codes(first + (2 * r + 1) * stride, run));
				rows[r][0] = vreinterpretq_s8_s64(vzip1q_s64(one, two));
				rows[r][1] = vreinterpretq_s8_s64(vzip2q_s64(one, two));
			}
			for (size_t piece = 0; piece < run / WIDTH; piece++)
				for (size_t c = 0; c < PAIRS; c++) {
					const int8x16_t columns = vld1q_s8(w + piece * halves * WIDTH * PANEL + c * 16);
					for (size_t r = 0; r < TILE_ROWS / 2; r++)
						dots[r][c] = vmmlaq_s32(dots[r][c], rows[r][piece], columns);
				}
		}
}

/* Both of two, each twice: what two columns bring to a vector. */
INLINE float32x4_t twice(const float *two)
{
	return vreinterpretq_f32_f64(vld1q_dup_f64((const void *)two));
}

/* Two, each twice in a row: what two rows bring to a vector. */
INLINE float32x4_t each_twice(const float *of, size_t pitch)
{
	return vcombine_f32(vdup_n_f32(of[0]), vdup_n_f32(of[pitch]));
}

/* Adds what a block brings to a lane [pairs of rows, PAIRS]. */
INLINE void add_block(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row, size_t b,
		      float32x4_t (*lane)[PAIRS])
{
	const size_t pitch = p->groups * GROUP;
	int32x4_t dots[TILE_ROWS / 2][PAIRS];

	for (size_t i = 0; i < TILE_ROWS / 2 * PAIRS; i++)
		dots[i / PAIRS][i % PAIRS] = vdupq_n_s32(0);
	tile_block(bits, block_bytes, panel->codes, p->codes + row * p->stride, p->stride, b, dots);
	for (size_t r = 0; r < TILE_ROWS / 2; r++) {
		const size_t entry = (row + 2 * r) * pitch + b;
		const int32x4_t sums = vcombine_s32(vdup_n_s32(p->sums[entry]), vdup_n_s32(p->sums[entry + pitch]));
		const float32x4_t row_scales = each_twice(p->row_scales + entry, pitch);
		for (size_t c = 0; c < PAIRS; c++) {
			const int32x2_t zeros = vld1_s32(panel->zeros + b * PANEL + 2 * c);
			const int32x4_t exact = bits == 8 ? vmlsq_s32(dots[r][c], vcombine_s32(zeros, zeros), sums) : dots[r][c];
			const float32x4_t scales = vmulq_f32(row_scales, twice(panel->scales + b * PANEL + 2 * c));
			lane[r][c] = vfmaq_f32(lane[r][c], vcvtq_f32_s32(exact), scales);
		}
	}
}

/* Lane by lane, whose sums then stay in registers. */
INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row)
{
	float32x4_t lanes[GROUP][TILE_ROWS / 2][PAIRS];
	float results[GROUP][PANEL];

	for (size_t i = 0; i < GROUP; i++) {
		float32x4_t lane[TILE_ROWS / 2][PAIRS];
		for (size_t v = 0; v < TILE_ROWS / 2 * PAIRS; v++)
			lane[v / PAIRS][v % PAIRS] = vdupq_n_f32(0);
		for (size_t b = i; b < p->blocks; b += GROUP)
			add_block(p, bits, block_bytes, panel, row, b, lane);
		for (size_t v = 0; v < TILE_ROWS / 2 * PAIRS; v++)
			lanes[i][v / PAIRS][v % PAIRS] = lane[v / PAIRS][v % PAIRS];
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

/* SPDX-License-Identifier: Apache-2.0 */
/* The product on arm64 with the dot product instructions: a tile's vector has four rows, and meets four codes of a column. */
#include "product.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define SIDE 4
#define PIECE 4
#define COPIES 1
#define MIN_TILED 3
#define BYTE_SHIFT 128	/* sdot wants signs */
#define dot_bytes(sums, codes, row) vdotq_s32(sums, vreinterpretq_s8_u8(codes), row)

typedef float column_floats;
typedef int32_t column_ints;

#include "neon.h"

/* Four codes of each column meet those of the rows. */
#define FOUR_CODES(place)                                                                                     \
	do {                                                                                                  \
		UNROLLED                                                                                      \
		for (size_t s = 0; s < tile->sides; s++) {                                                    \
			const int8x16_t of_rows = vld1q_s8(rows[s] + half * (CHUNK / 2) * SIDE + 16 * (place));    \
			UNROLLED                                                                              \
			for (size_t c = 0; c < COLUMNS; c++)                                                  \
				dots[s][c] = vdotq_laneq_s32(dots[s][c], of_rows, codes[half][c], place);        \
		}                                                                                             \
	} while (0)

INLINE void add_run(const struct tile *tile, size_t run, size_t byte, size_t code, int32x4_t (*dots)[VECTORS])
{
	const size_t bits = tile->kind.bits, halves = bits == 4 ? 2 : 1;
	const int8_t *rows[TILE_ROWS / SIDE];
	int8x16_t codes[2][COLUMNS];

	UNROLLED
	for (size_t c = 0; c < COLUMNS; c++) {
		const uint8_t *values = tile->values[c] + byte;
		const uint8x16_t packed = run < LOAD ? vcombine_u8(vld1_u8(values), vdup_n_u8(0)) : vld1q_u8(values);
		codes[0][c] = vreinterpretq_s8_u8(bits == 4 ? low_codes(packed) : byte_codes(packed));
		codes[1][c] = vreinterpretq_s8_u8(high_codes(packed));
	}
	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		rows[s] = tile->codes[s] + code;
		__asm__("" : "+r"(rows[s]));
	}
	UNROLLED
	for (size_t half = 0; half < halves; half++) {
		FOUR_CODES(0);
		FOUR_CODES(1);
		if (run < LOAD)
			continue;
		FOUR_CODES(2);
		FOUR_CODES(3);
	}
}

INLINE column_floats column_scales(const struct tile *tile, size_t vector, size_t b)
{
	return tile->scales[vector][b];
}

INLINE column_ints column_zeros(const struct tile *tile, size_t vector, size_t b)
{
	return tile_zero(tile, vector, b);
}

INLINE float32x4_t times_floats(float32x4_t rows, column_floats columns)
{
	return vmulq_n_f32(rows, columns);
}

INLINE int32x4_t add_times_ints(int32x4_t to, int32x4_t rows, column_ints columns)
{
	return vmlaq_n_s32(to, rows, columns);
}

INLINE void by_rows(const float32x4_t *vectors, float (*rows)[COLUMNS])
{
	vst4q_f32(rows[0], (float32x4x4_t){ { vectors[0], vectors[1], vectors[2], vectors[3] } });
}

static bool available(void)
{
	return getauxval(AT_HWCAP) & 1 << 20;
}

const struct instruction_set set_neon_dotprod = { "neon_dotprod", available, quantize, columns, COPIES, COLUMNS };
#endif

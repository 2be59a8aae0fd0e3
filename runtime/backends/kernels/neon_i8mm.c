/* SPDX-License-Identifier: Apache-2.0 */
/* The product on arm64 with the matrix instructions: a tile's vector has two columns times two rows, and meets eight codes. */
#include "product.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define SIDE 2
#define PIECE 8
#define COPIES 2	/* for both columns */
#define MIN_TILED 2
#define BYTE_SHIFT 0	/* there are products of unsigned with signed bytes */
#define dot_bytes vusdotq_s32

typedef float32x4_t column_floats;
typedef int32x4_t column_ints;

#include "neon.h"

INLINE uint8x16_t both(uint8x8_t a, uint8x8_t b)
{
	return vcombine_u8(a, b);
}

INLINE void add_run(const struct tile *tile, size_t run, size_t byte, size_t code, int32x4_t (*dots)[VECTORS])
{
	const int8_t *of_rows[TILE_ROWS / SIDE];
	const size_t bits = tile->kind.bits, halves = bits == 4 ? 2 : 1;
	uint8x16_t codes[VECTORS][2][2]; /* of two columns, eight codes: by half, by piece */

	UNROLLED
	for (size_t v = 0; v < VECTORS; v++) {
		const uint8_t *one = tile->values[2 * v] + byte, *two = tile->values[2 * v + 1] + byte;
		uint8x16_t packed[2];
		if (run < LOAD) {
			packed[0] = packed[1] = both(vld1_u8(one), vld1_u8(two));
		} else {
			const uint64x2_t first = vreinterpretq_u64_u8(vld1q_u8(one)), second = vreinterpretq_u64_u8(vld1q_u8(two));
			packed[0] = vreinterpretq_u8_u64(vzip1q_u64(first, second));
			packed[1] = vreinterpretq_u8_u64(vzip2q_u64(first, second));
		}
		UNROLLED
		for (size_t piece = 0; piece < 2; piece++) {
			codes[v][0][piece] = bits == 4 ? low_codes(packed[piece]) : packed[piece];
			codes[v][1][piece] = high_codes(packed[piece]);
		}
	}
	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		of_rows[s] = tile->codes[s] + code;
		__asm__("" : "+r"(of_rows[s]));
	}
	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		UNROLLED
		for (size_t i = 0; i < halves * (run / PIECE); i++) {
			const size_t half = i / (run / PIECE), piece = i % (run / PIECE);
			const int8x16_t rows = vld1q_s8(of_rows[s] + (half * (CHUNK / 2) + piece * PIECE) * SIDE);
			UNROLLED
			for (size_t v = 0; v < VECTORS; v++)
				dots[s][v] = vusmmlaq_s32(dots[s][v], codes[v][half][piece], rows);
		}
	}
}

INLINE column_floats column_scales(const struct tile *tile, size_t vector, size_t b)
{
	const int32x4_t both = vzip1q_s32(first_lane(tile->scales[2 * vector] + b), first_lane(tile->scales[2 * vector + 1] + b));

	return vreinterpretq_f32_s32(vzip1q_s32(both, both));
}

INLINE column_ints column_zeros(const struct tile *tile, size_t vector, size_t b)
{
	const int32x4_t both = { tile_zero(tile, 2 * vector, b), tile_zero(tile, 2 * vector + 1, b) };

	return vzip1q_s32(both, both);
}

INLINE float32x4_t times_floats(float32x4_t rows, column_floats columns)
{
	return vmulq_f32(rows, columns);
}

INLINE int32x4_t add_times_ints(int32x4_t to, int32x4_t rows, column_ints columns)
{
	return vmlaq_s32(to, rows, columns);
}

INLINE void by_rows(const float32x4_t *vectors, float (*rows)[COLUMNS])
{
	vst1q_f32(rows[0], vuzp1q_f32(vectors[0], vectors[1]));
	vst1q_f32(rows[1], vuzp2q_f32(vectors[0], vectors[1]));
}

static bool available(void)
{
	return getauxval(AT_HWCAP) & 1 << 20 && getauxval(AT_HWCAP2) & 1 << 13;
}

const struct instruction_set set_neon_i8mm = { "neon_i8mm", available, quantize, columns, COPIES, COLUMNS };
#endif

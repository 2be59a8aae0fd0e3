/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A product of rows of floats with a matrix of 4- or 8-bit codes, and what an instruction set must define to compute it.
 *
 * Rows are given, or computed first: gated rows are gate * sigmoid(gate) * up (SwiGLU) of two halves. They are rounded to 8 bits,
 * with a scale per block. A result is the sum over blocks of
 *
 *     (sum of code * row's code - zero point * sum of the row's codes) * (row's scale * scale)
 *
 * where the bracket is an exact integer below 2^24. Block b is added to the accumulator b % 8 by one fused multiply-add; the
 * accumulators are summed as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). Every kernel uses this order, so that a result
 * depends neither on the instruction set nor on the number of rows or threads. A bias, then a residual are added at the end.
 */
#ifndef MOESCOPE_PRODUCT_H
#define MOESCOPE_PRODUCT_H

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GROUP 8		/* blocks that are summed in parallel */
#define CHUNK 64	/* codes whose even and odd ones are stored separately */
#define ROW_MULTIPLE 4	/* rows of a tile; memory is allocated for whole tiles */
#define MAX_BLOCK 256
#define TASK_COLUMNS 64	/* of one task */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

struct product {
	const float *rows;	/* [m, k]; gated: [m, 2 * k], gate before up */
	const uint8_t *values;	/* [n, row_bytes], codes low bits first */
	const uint8_t *zeros;	/* [n, zero_bytes], packed likewise; NULL: all are the middle code */
	const uint16_t *scales;	/* [n, blocks], half precision */
	const float *bias;	/* [n] or NULL */
	const float *residual;	/* [m, n] or NULL */
	float *out;		/* [m, n] */
	size_t m, k, n, bits, block, blocks;
	bool gated;
	size_t row_bytes, block_bytes, zero_bytes, groups;
	/* Of the rows: codes [m, stride] (at 4 bits, a chunk has its even codes first, as a packed byte has an even and an odd
	 * code), and per block the sum of codes and the scale [m, groups * GROUP], or in the order of a row_layout. Entries beyond
	 * k or m are zero. */
	size_t stride;
	int8_t *codes;
	int32_t *sums;
	float *row_scales;
	float *column_scales; /* [pieces, blocks, widened columns]: room for a set that widens the scales of so many at once */
};

/*
 * How a set wants rounded rows: `side` rows side by side, which take turns with `piece` codes each. Their sums and scales lie by
 * block, then by row, `copies` times over; what stands for a sum is sum * times + plus.
 */
struct row_layout {
	size_t side, piece, copies;
	int32_t times, plus;
};

struct instruction_set {
	const char *name;
	bool (*available)(void);
	void (*quantize)(struct product *p, size_t row);
	void (*columns)(const struct product *p, size_t first, size_t end);
	size_t copies; /* the most of its row_layouts */
	size_t widened; /* columns whose scales it wants room for */
};

extern const struct instruction_set set_plain, set_avx2, set_avxvnni, set_avx512vnni, set_neon_dotprod, set_neon_i8mm;

/* Computes the sizes that follow from m, k, n, bits and block; false if no kernel supports the block. */
bool product_sizes(struct product *p);
/* Allocates memory for the rounded rows; free it with free(). */
void *product_room(struct product *p);
size_t product_pieces(const struct product *p);
void product_piece(const struct product *p, size_t index);
/* Waits until `rounded` is set and meanwhile brings the piece's weights into the cache. */
void product_await(const struct product *p, size_t index, const atomic_bool *rounded);
/* Rounds ROW_MULTIPLE rows, of which there are product_row_groups(). */
void product_quantize(struct product *p, size_t group);
size_t product_row_groups(const struct product *p);

/* Offset of the row's code for a byte of a matrix's row: at 4 bits of its even code; the odd one's is 32 further on. */
ALWAYS_INLINE size_t code_offset(size_t bits, size_t byte)
{
	return bits == 4 ? byte / (CHUNK / 2) * CHUNK + byte % (CHUNK / 2) : byte;
}

ALWAYS_INLINE int middle_code(size_t bits)
{
	return 1 << (bits - 1);
}

ALWAYS_INLINE int zero_point(const struct product *p, size_t bits, size_t column, size_t block)
{
	if (!p->zeros)
		return middle_code(bits);
	const uint8_t *zeros = p->zeros + column * p->zero_bytes;

	return bits == 8 ? zeros[block] : zeros[block / 2] >> block % 2 * 4 & 15;
}

/* A finite number in half precision. */
ALWAYS_INLINE float from_half(uint16_t number)
{
	uint32_t bits = (uint32_t)(number & 0x7fff) << 13;
	float magnitude;

	memcpy(&magnitude, &bits, sizeof(magnitude));
	magnitude *= 0x1p112f; /* the biases of both exponents differ by 112 */
	return number >> 15 ? -magnitude : magnitude;
}

ALWAYS_INLINE float fold(const float *lanes, size_t pitch)
{
	return ((lanes[0] + lanes[4 * pitch]) + (lanes[2 * pitch] + lanes[6 * pitch])) +
	       ((lanes[pitch] + lanes[5 * pitch]) + (lanes[3 * pitch] + lanes[7 * pitch]));
}

/* `bytes` bytes from `offset` on, of `total`: copied if they would reach beyond. Bytes beyond are multiplied by zeros. */
ALWAYS_INLINE const uint8_t *readable(const void *base, size_t offset, size_t bytes, size_t total, uint8_t *copy)
{
	const uint8_t *place = (const uint8_t *)base + offset;

	if (offset + bytes <= total)
		return place;
	memset(copy, 0, bytes);
	if (offset < total)
		memcpy(copy, place, total - offset);
	return copy;
}

/* Rounds a block to codes of -127..127; returns the scale. */
ALWAYS_INLINE float quantize_block(const float *x, size_t count, int8_t *codes, int32_t *sum)
{
	uint32_t largest = 0, bits;
	int32_t total = 0, whole;
	float magnitude, scale, inverse;

	for (size_t i = 0; i < count; i++) {
		memcpy(&bits, &x[i], sizeof(bits));
		bits &= 0x7fffffff;
		largest = bits > largest ? bits : largest;
	}
	memcpy(&magnitude, &largest, sizeof(magnitude));
	scale = magnitude / 127;
	inverse = scale > 0 ? 1 / scale : 0;
	for (size_t i = 0; i < count; i++) {
		/* Adding 1.5 * 2^23 rounds to the nearest integer. */
		float code = x[i] * inverse + 12582912.0f;
		memcpy(&whole, &code, sizeof(whole));
		codes[i] = (int8_t)(whole - 0x4b400000);
		total += codes[i];
	}
	*sum = total;
	return scale;
}

/*
 * e^x for |x| <= LARGEST_EXPONENT, with a relative error below 2e-7: 2^n * e^r with |r| <= ln(2) / 2, e^r by its Taylor series.
 * Only operations that every set rounds alike, since the compiler must not contract them.
 */
#define LARGEST_EXPONENT 87.0f
ALWAYS_INLINE float exponential(float x)
{
	const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f; /* n * ln2_high is exact */
	const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f, r = (x - n * ln2_high) - n * ln2_low;
	float series = 1 / 5040.0f, power;
	uint32_t bits;

	series = series * r + 1 / 720.0f;
	series = series * r + 1 / 120.0f;
	series = series * r + 1 / 24.0f;
	series = series * r + 1 / 6.0f;
	series = series * r + 0.5f;
	series = series * r + 1;
	series = series * r + 1;
	memcpy(&bits, &shifted, sizeof(bits));
	bits = (bits - 0x4b400000 + 127) << 23;
	memcpy(&power, &bits, sizeof(power));
	return series * power;
}

/* gate * sigmoid(gate) * up; a gate below -LARGEST_EXPONENT counts as that, 0 to 35 digits. */
ALWAYS_INLINE void gate_block(const float *gate, const float *up, size_t count, float *out)
{
	for (size_t i = 0; i < count; i++) {
		const float low = gate[i] < -LARGEST_EXPONENT ? -LARGEST_EXPONENT : gate[i];
		const float exponent = low > LARGEST_EXPONENT ? -LARGEST_EXPONENT : -low;
		out[i] = low / (1 + exponential(exponent)) * up[i];
	}
}

/* Codes of a block in the order of a row: at 4 bits the even ones of a chunk before the odd ones. */
ALWAYS_INLINE void put_in_order(const struct product *p, const int8_t *plain, int8_t *to)
{
	const size_t pairs = (p->block < CHUNK ? p->block : CHUNK) / 2;

	if (p->bits == 8)
		memcpy(to, plain, p->block);
	for (size_t part = 0; p->bits == 4 && part < p->block; part += CHUNK)
		for (size_t i = 0; i < pairs; i++) {
			to[part + i] = plain[part + 2 * i];
			to[part + CHUNK / 2 + i] = plain[part + 2 * i + 1];
		}
}

/* Codes of a block, in order, go to their place `offset` of a row that takes turns with others. */
ALWAYS_INLINE void put_by_turns(const struct product *p, size_t row, size_t offset, const int8_t *ordered, struct row_layout layout)
{
	const bool apart = p->bits == 4 && p->block < CHUNK;
	const size_t half = CHUNK / 2, used = apart ? p->block / 2 : half, end = apart ? half + used : p->block;
	int8_t *to = p->codes + row / layout.side * layout.side * p->stride + row % layout.side * layout.piece;

	for (size_t i = 0; i < end; i += layout.piece)
		if (i % half < used)
			memcpy(to + (offset + i) * layout.side, ordered + i, layout.piece);
}

/* Compiled separately for each instruction set. */
ALWAYS_INLINE void quantize_row(struct product *p, size_t row, struct row_layout layout)
{
	const size_t beside = layout.side * layout.copies;
	const float *x = p->rows + row * p->k * (p->gated ? 2 : 1);
	int8_t plain[MAX_BLOCK], ordered[MAX_BLOCK];
	float gated[MAX_BLOCK];
	int32_t sum;

	for (size_t b = 0; b < p->blocks; b++) {
		const size_t first = b * p->block, count = p->k - first < p->block ? p->k - first : p->block;
		const size_t offset = code_offset(p->bits, b * p->block_bytes);
		const size_t entry = (row / layout.side * p->groups * GROUP + b) * beside + row % layout.side;
		if (p->gated)
			gate_block(x + first, x + p->k + first, count, gated);
		const float scale = quantize_block(p->gated ? gated : x + first, count, plain, &sum);
		memset(plain + count, 0, p->block - count);
		put_in_order(p, plain, layout.side == 1 ? p->codes + row * p->stride + offset : ordered);
		if (layout.side > 1)
			put_by_turns(p, row, offset, ordered, layout);
		for (size_t copy = entry; copy < entry + beside; copy += layout.side) {
			p->row_scales[copy] = scale;
			p->sums[copy] = sum * layout.times + layout.plus;
		}
	}
}

/* Rows one after another, sums as they are. */
#define PLAIN_ROWS ((struct row_layout){ 1, 1, 1, 1, 0 })

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product on arm64, included once for each instruction set, which before defines
 *
 *     TARGET           the attribute that lets a function use the set
 *     SIDE, PIECE      rows of a tile's vector, and how many codes each of them has in turn
 *     COPIES           how often a tile wants sums and scales of rows
 *     MIN_TILED        rows from which a tile pays
 *     BYTE_SHIFT       what an 8-bit code is worth less in a product
 *     dot_bytes        adds four sums of four 8-bit codes times codes of a row
 *
 * and after it the parts of a tile.
 *
 * A matrix is read as it lies. Few rows: of a column eight blocks at once, whose dot products end up in two vectors. Many rows: it
 * is the rows that were put side by side when they were rounded, so that a tile's vectors meet codes of a column without moving them.
 *
 * A dot product does not begin at zero but at the bits of 1.5 * 2^23, less the zero point's part. As it stays within 2^22, it ends
 * as the bits of a float that is too large by just that: subtracting takes one operation where converting takes two.
 */
#include <arm_neon.h>

#define INLINE TARGET static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
/* A tile's loop needs all registers in the order in which it is written. */
#define TILE_TARGET TARGET __attribute__((optimize("no-schedule-insns")))
#define LOAD 16			/* bytes of a matrix's row at once */
#define START 12582912.0f
#define START_BITS 0x4b400000

/* What a function is compiled for. */
struct kind {
	size_t bits, block_bytes;
	bool zeros; /* there are zero points */
};

/* Whether no dot product leaves 2^22. */
INLINE bool begins_high(struct kind kind)
{
	return kind.bits == 4 || kind.block_bytes < MAX_BLOCK || !kind.zeros;
}

INLINE float32x4_t as_floats(struct kind kind, int32x4_t dots)
{
	if (begins_high(kind))
		return vsubq_f32(vreinterpretq_f32_s32(dots), vdupq_n_f32(START));
	return vcvtq_f32_s32(dots);
}

/* A number in the first lane, zeros in the others: compilers make three instructions of what is one. */
INLINE int32x4_t first_lane(const void *number)
{
	int32x4_t lanes;

	__asm__("ldr %s0, %1" : "=w"(lanes) : "m"(*(const int32_t *)number));
	return lanes;
}

INLINE uint8x16_t low_codes(uint8x16_t packed)
{
	return vandq_u8(packed, vdupq_n_u8(15));
}

INLINE uint8x16_t high_codes(uint8x16_t packed)
{
	return vshrq_n_u8(packed, 4);
}

INLINE uint8x16_t byte_codes(uint8x16_t codes)
{
	return BYTE_SHIFT ? veorq_u8(codes, vdupq_n_u8(BYTE_SHIFT)) : codes;
}

INLINE float32x4_t four_scales(const uint16_t *scales)
{
	return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales)));
}

/* --- few rows --- */

#define MOST 2	/* results at once: of two columns, or of two rows */

/* What results are of, and where the group lies that comes next: by column, by row. */
struct few {
	struct kind kind;
	size_t rows, columns; /* one of them is one */
	const uint8_t *values[MOST], *zeros[MOST];
	const uint16_t *scales[MOST];
	const int8_t *codes[MOST];
	const int32_t *sums[MOST]; /* by result */
	const float *row_scales[MOST];
};

struct parts {
	int32x4_t of[MOST];
};

/* Where the dot products of a load's blocks begin: sums stand for zero points, too, where those are alike. */
INLINE int32x4_t begin(struct kind kind, const int32_t *sums)
{
	const int32_t start = begins_high(kind) ? START_BITS : 0;

	if (kind.block_bytes < LOAD) {
		const uint32x2_t two = kind.zeros ? vdup_n_u32((uint32_t)start) : vld1_u32((const uint32_t *)sums);
		return vreinterpretq_s32_u64(vmovl_u32(two));
	}
	return kind.zeros ? (int32x4_t){ start, 0, 0, 0 } : first_lane(sums);
}

/* Partial sums of the matrix's bytes byte .. byte + max(block_bytes, 16) of a group. */
INLINE struct parts part(const struct few *few, size_t byte)
{
	const struct kind kind = few->kind;
	const size_t run = kind.block_bytes > LOAD ? kind.block_bytes : LOAD;
	struct parts sums;

	UNROLLED
	for (size_t i = 0; i < few->rows * few->columns; i++)
		sums.of[i] = begin(kind, few->sums[i] + byte / kind.block_bytes);
	for (size_t end = byte + run; byte < end; byte += LOAD)
		UNROLLED
		for (size_t i = 0; i < few->rows * few->columns; i++) {
			const uint8x16_t packed = vld1q_u8(few->values[i / few->rows] + byte);
			const int8_t *codes = few->codes[i / few->columns] + code_offset(kind.bits, byte);
			if (kind.bits == 8) {
				sums.of[i] = dot_bytes(sums.of[i], byte_codes(packed), vld1q_s8(codes));
				continue;
			}
			sums.of[i] = vdotq_s32(sums.of[i], vreinterpretq_s8_u8(low_codes(packed)), vld1q_s8(codes));
			sums.of[i] = vdotq_s32(sums.of[i], vreinterpretq_s8_u8(high_codes(packed)), vld1q_s8(codes + CHUNK / 2));
		}
	return sums;
}

INLINE struct parts pairs(const struct few *few, struct parts a, struct parts b)
{
	UNROLLED
	for (size_t i = 0; i < few->rows * few->columns; i++)
		a.of[i] = vpaddq_s32(a.of[i], b.of[i]);
	return a;
}

/* The dot products of four blocks, from `byte` of a group on. */
INLINE struct parts four_blocks(const struct few *few, size_t byte)
{
#define PART(i) part(few, byte + (i) * (few->kind.block_bytes > LOAD ? few->kind.block_bytes : LOAD))
	if (few->kind.block_bytes < LOAD)
		return pairs(few, PART(0), PART(1));
	return pairs(few, pairs(few, PART(0), PART(1)), pairs(few, PART(2), PART(3)));
#undef PART
}

/* Zero points of a group, less BYTE_SHIFT at 8 bits. */
INLINE int32x4x2_t group_zeros(size_t bits, const uint8_t *zeros)
{
	uint16x8_t wide;

	if (bits == 8) {
		wide = vsubq_u16(vmovl_u8(vld1_u8(zeros)), vdupq_n_u16(BYTE_SHIFT));
	} else {
		const uint8x8_t packed = vreinterpret_u8_s32(vget_low_s32(first_lane(zeros)));
		wide = vmovl_u8(vzip1_u8(vand_u8(packed, vdup_n_u8(15)), vshr_n_u8(packed, 4)));
	}
	const int16x8_t zeros_of = vreinterpretq_s16_u16(wide);
	return (int32x4x2_t){ { vmovl_s16(vget_low_s16(zeros_of)), vmovl_high_s16(zeros_of) } };
}

/* Adds a group to the lanes of each result. */
INLINE void add_group(const struct few *few, float32x4_t (*lanes)[2])
{
	const struct kind kind = few->kind;
	const struct parts dots[2] = { four_blocks(few, 0), four_blocks(few, 4 * kind.block_bytes) };

	UNROLLED
	for (size_t i = 0; i < few->rows * few->columns; i++) {
		const uint16_t *scales = few->scales[i / few->rows];
		const float *row_scales = few->row_scales[i / few->columns];
		int32x4x2_t zeros;
		if (kind.zeros)
			zeros = group_zeros(kind.bits, few->zeros[i / few->rows]);
		UNROLLED
		for (size_t part = 0; part < 2; part++) {
			int32x4_t exact = dots[part].of[i];
			if (kind.zeros)
				exact = vmlaq_s32(exact, zeros.val[part], vld1q_s32(few->sums[i] + 4 * part));
			const float32x4_t product = vmulq_f32(vld1q_f32(row_scales + 4 * part), four_scales(scales + 4 * part));
			lanes[i][part] = vfmaq_f32(lanes[i][part], as_floats(kind, exact), product);
		}
	}
}

INLINE void next_group(struct few *few)
{
	UNROLLED
	for (size_t i = 0; i < MOST; i++) {
		few->values[i] += GROUP * few->kind.block_bytes;
		few->zeros[i] += few->kind.bits;
		few->scales[i] += GROUP;
		few->codes[i] += GROUP * few->kind.block_bytes * 8 / few->kind.bits;
		few->sums[i] += GROUP;
		few->row_scales[i] += GROUP;
	}
}

INLINE struct few few_at(const struct product *p, struct kind kind, size_t rows, size_t row, size_t columns, size_t column, size_t g)
{
	const size_t block = kind.block_bytes * 8 / kind.bits;
	struct few few = { .kind = kind, .rows = rows, .columns = columns };

	UNROLLED
	for (size_t i = 0; i < MOST; i++) {
		const size_t c = column + i / rows, r = row + i / columns;
		few.values[i] = p->values + c * p->row_bytes + g * GROUP * kind.block_bytes;
		few.zeros[i] = p->zeros + c * p->zero_bytes + g * kind.bits;
		few.scales[i] = p->scales + c * p->blocks + g * GROUP;
		few.codes[i] = p->codes + r * p->stride + g * GROUP * block;
		few.sums[i] = p->sums + (r * p->groups + g) * GROUP;
		few.row_scales[i] = p->row_scales + (r * p->groups + g) * GROUP;
		__asm__("" : "+r"(few.sums[i])); /* reading a start twice costs less than copying it */
	}
	return few;
}

/* What is there of a column's last group, and zeros. */
struct rest {
	uint8_t values[GROUP * MAX_BLOCK], zeros[GROUP];
	uint16_t scales[GROUP];
};

INLINE void use_rest(struct few *few, size_t c, size_t blocks, struct rest *rest)
{
	memset(rest, 0, sizeof(*rest));
	few->values[c] = memcpy(rest->values, few->values[c], blocks * few->kind.block_bytes);
	few->scales[c] = memcpy(rest->scales, few->scales[c], blocks * sizeof(*rest->scales));
	if (few->kind.zeros)
		few->zeros[c] = memcpy(rest->zeros, few->zeros[c], (blocks * few->kind.bits + 7) / 8);
}

/* Results of `rows` rows and `columns` columns. */
INLINE void few_results(const struct product *p, struct kind kind, size_t rows, size_t row, size_t columns, size_t column)
{
	const size_t whole = p->blocks / GROUP;
	float32x4_t lanes[MOST][2];

	UNROLLED
	for (size_t i = 0; i < rows * columns; i++)
		lanes[i][0] = lanes[i][1] = vdupq_n_f32(0);
	struct few few = few_at(p, kind, rows, row, columns, column, 0);
	for (size_t g = 0; g < whole; g++, next_group(&few))
		add_group(&few, lanes);
	if (whole < p->groups) {
		struct few last = few_at(p, kind, rows, row, columns, column, whole);
		struct rest rest[MOST];
		UNROLLED
		for (size_t c = 0; c < columns; c++)
			use_rest(&last, c, p->blocks % GROUP, &rest[c]);
		add_group(&last, lanes);
	}
	for (size_t i = 0; i < rows * columns; i++) {
		const float32x4_t four = vaddq_f32(lanes[i][0], lanes[i][1]);
		p->out[(row + i / columns) * p->n + column + i / rows] = vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
	}
}

INLINE void few_of_kind(const struct product *p, struct kind kind, size_t first, size_t end)
{
	size_t row = 0, column;

	for (; MIN_TILED > 2 && row + 2 <= p->m; row += 2)
		for (column = first; column < end; column++)
			few_results(p, kind, 2, row, 1, column);
	for (; row < p->m; row++) {
		for (column = first; column + 2 <= end; column += 2)
			few_results(p, kind, 1, row, 2, column);
		if (column < end)
			few_results(p, kind, 1, row, 1, column);
	}
}

INLINE void few_rows(const struct product *p, size_t bits, size_t block_bytes, size_t first, size_t end)
{
	if (p->zeros)
		few_of_kind(p, (struct kind){ bits, block_bytes, true }, first, end);
	else
		few_of_kind(p, (struct kind){ bits, block_bytes, false }, first, end);
}

/* --- many rows --- */

#define COLUMNS 4		/* of a tile */
#define VECTORS (COLUMNS * SIDE / 4) /* of a tile, for each SIDE rows */
#define TILE_ROWS 8

/* Where a tile's columns and rows lie: the latter, for each SIDE of them. */
struct tile {
	const struct product *p;
	struct kind kind;
	size_t sides;
	const uint8_t *values[COLUMNS];
	const uint8_t *zeros[COLUMNS];
	const float *scales[COLUMNS]; /* widened */
	const int8_t *codes[TILE_ROWS / SIDE];
	const int32_t *sums[TILE_ROWS / SIDE];
	const float *row_scales[TILE_ROWS / SIDE];
};

/* Adds `run` bytes of each column, from `byte` on, times codes of the rows from `code` on, to the dot products. */
INLINE void add_run(const struct tile *tile, size_t run, size_t byte, size_t code, int32x4_t (*dots)[VECTORS]);
/* What the columns of a vector bring: scales and zero points of block b. */
INLINE column_floats column_scales(const struct tile *tile, size_t vector, size_t b);
INLINE column_ints column_zeros(const struct tile *tile, size_t vector, size_t b);
INLINE float32x4_t times_floats(float32x4_t rows, column_floats columns);
INLINE int32x4_t add_times_ints(int32x4_t to, int32x4_t rows, column_ints columns);
/* The results of SIDE rows, row by row. */
INLINE void by_rows(const float32x4_t *vectors, float (*rows)[COLUMNS]);

INLINE int tile_zero(const struct tile *tile, size_t column, size_t b)
{
	const uint8_t *zeros = tile->zeros[column];

	return tile->kind.bits == 8 ? zeros[b] - BYTE_SHIFT : zeros[b / 2] >> b % 2 * 4 & 15;
}

/* Where the dot products of a block begin. */
INLINE void begin_block(const struct tile *tile, size_t b, int32x4_t (*dots)[VECTORS])
{
	const int32x4_t start = vdupq_n_s32(begins_high(tile->kind) ? START_BITS : 0);

	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		const int32_t *sums = tile->sums[s] + 4 * b;
		UNROLLED
		for (size_t v = 0; v < VECTORS; v++) {
			__asm__("" : "+r"(sums)); /* reading it again costs less than copying it */
			if (tile->kind.zeros)
				dots[s][v] = add_times_ints(start, vld1q_s32(sums), column_zeros(tile, v, b));
			else
				dots[s][v] = vld1q_s32(sums);
		}
	}
}

/* A lane: each GROUP-th block, whose sums then stay in registers. */
INLINE void add_lane(const struct tile *tile, size_t lane, float32x4_t (*out)[VECTORS])
{
	const size_t bits = tile->kind.bits, block_bytes = tile->kind.block_bytes, run = block_bytes < LOAD ? block_bytes : LOAD;
	size_t code = code_offset(bits, lane * block_bytes) * SIDE;
	float32x4_t sums[TILE_ROWS / SIDE][VECTORS];

	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		UNROLLED
		for (size_t v = 0; v < VECTORS; v++)
			sums[s][v] = vdupq_n_f32(0);
	}
	for (size_t b = lane; b < tile->p->blocks; b += GROUP, code += GROUP * block_bytes * 8 / bits * SIDE) {
		int32x4_t dots[TILE_ROWS / SIDE][VECTORS];
		begin_block(tile, b, dots);
		for (size_t byte = 0; byte < block_bytes; byte += run)
			add_run(tile, run, b * block_bytes + byte, code + code_offset(bits, byte) * SIDE, dots);
		UNROLLED
		for (size_t v = 0; v < VECTORS; v++) {
			const column_floats scales = column_scales(tile, v, b);
			UNROLLED
			for (size_t s = 0; s < tile->sides; s++) {
				const float32x4_t product = times_floats(vld1q_f32(tile->row_scales[s] + 4 * b), scales);
				sums[s][v] = vfmaq_f32(sums[s][v], as_floats(tile->kind, dots[s][v]), product);
			}
		}
	}
	UNROLLED
	for (size_t s = 0; s < tile->sides; s++) {
		UNROLLED
		for (size_t v = 0; v < VECTORS; v++)
			out[s][v] = sums[s][v];
	}
}

INLINE float32x4_t fold_vectors(const float32x4_t *l, size_t pitch)
{
	return vaddq_f32(vaddq_f32(vaddq_f32(l[0], l[4 * pitch]), vaddq_f32(l[2 * pitch], l[6 * pitch])),
			 vaddq_f32(vaddq_f32(l[pitch], l[5 * pitch]), vaddq_f32(l[3 * pitch], l[7 * pitch])));
}

/* The scales of a column. */
INLINE void widen_scales(const struct product *p, size_t column, float *to)
{
	const uint16_t *scales = p->scales + column * p->blocks;
	size_t b = 0;

	for (; b + 4 <= p->blocks; b += 4)
		vst1q_f32(to + b, four_scales(scales + b));
	for (; b < p->blocks; b++)
		to[b] = from_half(scales[b]);
}

/* Results of sides * SIDE rows, of which those below m are kept, and `count` columns. `scales`: room for the columns' scales. */
INLINE void tile_results(const struct product *p, struct kind kind, size_t sides, size_t row, size_t column, size_t count, float *scales)
{
	struct tile tile = { .p = p, .kind = kind, .sides = sides };
	float32x4_t lanes[GROUP][TILE_ROWS / SIDE][VECTORS], folded[VECTORS];
	float results[SIDE][COLUMNS];

	for (size_t c = 0; c < COLUMNS; c++) {
		const size_t source = column + (c < count ? c : 0);
		tile.values[c] = p->values + source * p->row_bytes;
		tile.zeros[c] = p->zeros + source * p->zero_bytes;
		tile.scales[c] = scales + c * p->blocks;
		widen_scales(p, source, scales + c * p->blocks);
	}
	for (size_t s = 0; s < sides; s++) {
		tile.codes[s] = p->codes + (row + s * SIDE) * p->stride;
		tile.sums[s] = p->sums + (row + s * SIDE) * COPIES * p->groups * GROUP;
		tile.row_scales[s] = p->row_scales + (row + s * SIDE) * COPIES * p->groups * GROUP;
	}
	for (size_t lane = 0; lane < GROUP; lane++)
		add_lane(&tile, lane, lanes[lane]);
	for (size_t s = 0; s < sides; s++) {
		for (size_t v = 0; v < VECTORS; v++)
			folded[v] = fold_vectors(&lanes[0][s][v], &lanes[1][0][0] - &lanes[0][0][0]);
		by_rows(folded, results);
		for (size_t r = row + s * SIDE; r < row + (s + 1) * SIDE && r < p->m; r++)
			memcpy(p->out + r * p->n + column, results[r % SIDE], count * sizeof(float));
	}
}

/* Rows from `row` on, sides * SIDE of them. */
INLINE void tile_columns(const struct product *p, struct kind kind, size_t sides, size_t row, size_t first, size_t end, float *scales)
{
	for (size_t column = first; column < end; column += COLUMNS)
		tile_results(p, kind, sides, row, column, end - column < COLUMNS ? end - column : COLUMNS, scales);
}

INLINE void tiles_of_kind(const struct product *p, struct kind kind, size_t first, size_t end, float *scales)
{
	for (size_t row = 0; row < p->m; row += TILE_ROWS) {
		const size_t left = p->m - row;
		if (left > 4)
			tile_columns(p, kind, 8 / SIDE, row, first, end, scales);
		else if (left > 2 || SIDE > 2)
			tile_columns(p, kind, 4 / SIDE, row, first, end, scales);
		else
			tile_columns(p, kind, 1, row, first, end, scales);
	}
}

INLINE bool tiled(const struct product *p, size_t bits, size_t block_bytes, size_t first, size_t end)
{
	float *scales = p->column_scales + first / TASK_COLUMNS * p->blocks * COLUMNS;

	if (p->zeros)
		tiles_of_kind(p, (struct kind){ bits, block_bytes, true }, first, end, scales);
	else
		tiles_of_kind(p, (struct kind){ bits, block_bytes, false }, first, end, scales);
	return true;
}

/* Few rows lie one after another, many by turns. Where zero points are alike, a dot product's start has their part. */
TARGET static void quantize(struct product *p, size_t row)
{
	const int32_t middle = p->bits == 8 ? middle_code(8) - BYTE_SHIFT : middle_code(4);
	const int32_t times = p->zeros ? -1 : -middle, plus = p->zeros ? 0 : START_BITS;

	if (p->m < MIN_TILED)
		quantize_row(p, row, (struct row_layout){ 1, 1, 1, times, plus });
	else
		quantize_row(p, row, (struct row_layout){ SIDE, PIECE, COPIES, times, plus });
}

#include "ways.h"

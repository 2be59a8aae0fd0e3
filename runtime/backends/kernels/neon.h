/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product on arm64 with sdot, included once for each instruction set, which before defines TARGET, and after it tile().
 *
 * Few rows: a group of eight blocks of a column is read as it lies; pairwise additions bring its dot products into two vectors.
 * Many rows: as in x86.h, in panels of PANEL columns.
 */
#include <arm_neon.h>

#define INLINE TARGET static inline __attribute__((always_inline))
#define LOAD 16			/* bytes of a matrix's row at once */
#define TILE_ROWS ROW_MULTIPLE
#define PANEL 8
#define MIN_TILED 6		/* rows from which unpacking once pays */
#define BYTE_SHIFT 128		/* what an 8-bit code is worth less in a kernel: sdot wants signs */

/* --- few rows --- */

struct parts {
	int32x4_t of[TILE_ROWS];
};

INLINE int8x16_t low_codes(size_t bits, uint8x16_t packed)
{
	return vreinterpretq_s8_u8(bits == 4 ? vandq_u8(packed, vdupq_n_u8(15)) : veorq_u8(packed, vdupq_n_u8(BYTE_SHIFT)));
}

INLINE int8x16_t high_codes(uint8x16_t packed)
{
	return vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
}

/* Partial sums of the matrix's bytes byte .. byte + max(block_bytes, 16). */
INLINE struct parts part(size_t bits, size_t block_bytes, size_t rows, const uint8_t *values, const int8_t *x, size_t stride, size_t byte)
{
	struct parts sums;

	for (size_t r = 0; r < rows; r++)
		sums.of[r] = vdupq_n_s32(0);
	for (size_t end = byte + (block_bytes > LOAD ? block_bytes : LOAD); byte < end; byte += LOAD) {
		const uint8x16_t packed = vld1q_u8(values + byte);
		const int8_t *codes = x + code_offset(bits, byte);
		for (size_t r = 0; r < rows; r++, codes += stride) {
			sums.of[r] = vdotq_s32(sums.of[r], low_codes(bits, packed), vld1q_s8(codes));
			if (bits == 4)
				sums.of[r] = vdotq_s32(sums.of[r], high_codes(packed), vld1q_s8(codes + CHUNK / 2));
		}
	}
	return sums;
}

INLINE struct parts pairs(size_t rows, struct parts a, struct parts b)
{
	for (size_t r = 0; r < rows; r++)
		a.of[r] = vpaddq_s32(a.of[r], b.of[r]);
	return a;
}

/* The dot products of four blocks, for each row. */
INLINE struct parts four_blocks(size_t bits, size_t bytes, size_t rows, const uint8_t *values, const int8_t *x, size_t stride, size_t byte)
{
#define PART(i) part(bits, bytes, rows, values, x, stride, byte + (i) * (bytes > LOAD ? bytes : LOAD))
	if (bytes < LOAD)
		return pairs(rows, PART(0), PART(1));
	return pairs(rows, pairs(rows, PART(0), PART(1)), pairs(rows, PART(2), PART(3)));
#undef PART
}

/* What of a group a column brings, for blocks 0 .. 3 and 4 .. 7: zero points less BYTE_SHIFT at 8 bits, and scales. */
struct column_part {
	int32x4_t zeros[2];
	float32x4_t scales[2];
};

/* `left` blocks are there. */
INLINE struct column_part column_part(const struct product *p, size_t bits, size_t column, size_t g, size_t left)
{
	const float *scales = p->scales + column * p->blocks + g * GROUP;
	const int shift = bits == 8 ? BYTE_SHIFT : 0;
	struct column_part part;
	float copied[GROUP] = { 0 };
	int32_t zeros[GROUP] = { 0 };

	if (left < GROUP)
		scales = memcpy(copied, scales, left * sizeof(float));
	for (size_t i = 0; p->zeros && i < left; i++)
		zeros[i] = zero_point(p, bits, column, g * GROUP + i) - shift;
	for (size_t i = 0; i < 2; i++) {
		part.zeros[i] = p->zeros ? vld1q_s32(zeros + 4 * i) : vdupq_n_s32(middle_code(bits) - shift);
		part.scales[i] = vld1q_f32(scales + 4 * i);
	}
	return part;
}

/* Adds a group of a column, of whose blocks `left` are there, to the lanes of each row. */
INLINE void add_group(const struct product *p, size_t bits, size_t block_bytes, size_t row, size_t rows, size_t column, size_t g,
		      size_t left, const uint8_t *values, float32x4_t (*lanes)[2])
{
	const int8_t *x = p->codes + row * p->stride + g * GROUP * (block_bytes * 8 / bits);
	const struct column_part of_column = column_part(p, bits, column, g, left);

	for (size_t i = 0; i < 2; i++) {
		struct parts dots = four_blocks(bits, block_bytes, rows, values, x, p->stride, i * 4 * block_bytes);
		for (size_t r = 0; r < rows; r++) {
			const size_t entry = ((row + r) * p->groups + g) * GROUP + 4 * i;
			const int32x4_t exact = vmlsq_s32(dots.of[r], of_column.zeros[i], vld1q_s32(p->sums + entry));
			const float32x4_t scales = vmulq_f32(vld1q_f32(p->row_scales + entry), of_column.scales[i]);
			lanes[r][i] = vfmaq_f32(lanes[r][i], vcvtq_f32_s32(exact), scales);
		}
	}
}

/* Results of a column. */
INLINE void few(const struct product *p, size_t bits, size_t block_bytes, size_t row, size_t rows, size_t column)
{
	const size_t bytes = GROUP * block_bytes, whole = p->blocks / GROUP, begin = column * p->row_bytes;
	uint8_t copy[GROUP * MAX_BLOCK];
	float32x4_t lanes[TILE_ROWS][2];

	for (size_t r = 0; r < rows; r++)
		lanes[r][0] = lanes[r][1] = vdupq_n_f32(0);
	for (size_t g = 0; g < whole; g++)
		add_group(p, bits, block_bytes, row, rows, column, g, GROUP, p->values + begin + g * bytes, lanes);
	if (whole < p->groups) {
		const uint8_t *values = readable(p->values, begin + whole * bytes, bytes, p->n * p->row_bytes, copy);
		add_group(p, bits, block_bytes, row, rows, column, whole, p->blocks % GROUP, values, lanes);
	}
	for (size_t r = 0; r < rows; r++) {
		const float32x4_t four = vaddq_f32(lanes[r][0], lanes[r][1]);
		p->out[(row + r) * p->n + column] = vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
	}
}

/* --- many rows --- */

/*
 * Columns of a matrix, as tiles want them: [pieces of WIDTH bytes, halves, PANEL] codes, [blocks, PANEL] scales and zero points.
 * Codes of 4 bits are less their zero points, which a byte has room for: sums are the same, and a tile has less to do.
 */
struct panel {
	size_t first, count;
	uint8_t *codes;
	float *scales;
	int32_t *zeros;
};

/* A piece of WIDTH bytes of a column goes to codes, its low halves before the high ones. */
INLINE void put_piece(size_t bits, uint8_t *to, const uint8_t *from, int zero)
{
	uint8_t codes[2][WIDTH];

	for (size_t i = 0; i < WIDTH; i++) {
		codes[0][i] = bits == 4 ? (from[i] & 15) - zero : from[i] ^ BYTE_SHIFT;
		codes[1][i] = (from[i] >> 4) - zero;
	}
	memcpy(to, codes[0], WIDTH);
	if (bits == 4)
		memcpy(to + PANEL * WIDTH, codes[1], WIDTH);
}

INLINE void fill(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel)
{
	const size_t halves = bits == 4 ? 2 : 1;

	for (size_t c = 0; c < PANEL; c++) {
		const size_t column = panel->first + c < p->n ? panel->first + c : p->n - 1;
		const uint8_t *values = p->values + column * p->row_bytes;
		for (size_t block = 0; block < p->blocks; block++) {
			const int zero = zero_point(p, bits, column, block);
			for (size_t byte = block * block_bytes; byte < (block + 1) * block_bytes; byte += WIDTH)
				put_piece(bits, panel->codes + (byte * halves * PANEL + c * WIDTH), values + byte, zero);
			panel->scales[block * PANEL + c] = p->scales[column * p->blocks + block];
			panel->zeros[block * PANEL + c] = zero - BYTE_SHIFT;
		}
	}
}

/* Sixteen codes, or eight where no more may be read. */
INLINE int8x16_t row_codes(const int8_t *codes, size_t run)
{
	return run < LOAD ? vcombine_s8(vld1_s8(codes), vdup_n_s8(0)) : vld1q_s8(codes);
}

/* Folds the lanes of a row's results, and keeps those of the panel's columns. */
INLINE void store_row(const struct product *p, const struct panel *panel, size_t row, float (*lanes)[PANEL])
{
	float results[PANEL];

	for (size_t c = 0; c < PANEL; c++)
		results[c] = fold(lanes[0] + c, PANEL);
	memcpy(p->out + row * p->n + panel->first, results, panel->count * sizeof(float));
}

/* Results of TILE_ROWS rows, of which those below m are kept, and a panel's columns. */
INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel, size_t row);

/* Columns first .. end by panels; false where there is no memory for one. */
INLINE bool tiled(const struct product *p, size_t bits, size_t block_bytes, size_t first, size_t end)
{
	const size_t codes = p->row_bytes * (bits == 4 ? 2 : 1) * PANEL, entries = p->blocks * PANEL;
	uint8_t *room = aligned_alloc(64, (codes + entries * (sizeof(float) + sizeof(int32_t)) + 63) / 64 * 64);
	struct panel panel = { .codes = room, .scales = (float *)(room + codes) };

	if (!room)
		return false;
	panel.zeros = (int32_t *)(panel.scales + entries);
	for (panel.first = first; panel.first < end; panel.first += PANEL) {
		panel.count = end - panel.first < PANEL ? end - panel.first : PANEL;
		fill(p, bits, block_bytes, &panel);
		for (size_t row = 0; row < p->m; row += TILE_ROWS)
			tile(p, bits, block_bytes, &panel, row);
	}
	free(room);
	return true;
}

#include "ways.h"

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product on x86, included once per instruction set, which must first define
 *
 *     TARGET              the attribute that lets a function use the set
 *     dot_codes           8 sums of 4-bit codes (low and high halves of 32 bytes) times codes of a row, at most 15240
 *     dot_bytes           the same of 32 8-bit codes; a matrix's code is worth BYTE_SHIFT less in it
 *     ints, floats, ...   the vectors of a tile, LANES columns each (see tile())
 *
 * Few rows: a group of eight blocks of a column is read in place, and its eight dot products end up in one vector. A single row
 * meets columns of both halves of a piece in turn.
 * Many rows: the columns of a panel are unpacked and transposed once, each lane is a column, and tiles run over all rows.
 */

#define UNROLLED _Pragma("GCC unroll 16")
#define LOAD 32			/* bytes of a matrix's row read at once */
#define AHEAD 2048		/* prefetch distance in bytes */
#define SCALES_AHEAD 256	/* bytes of the scales of the next piece's streams */
#define STREAMS 2		/* columns at once for one row: its codes are read once, and memory delivers several streams */
#define TILE_TARGET TARGET
#define TILE_ROWS ROW_MULTIPLE
#define TILE_VECTORS 2
#define PANEL (TILE_VECTORS * LANES)
#define MIN_TILED 6		/* number of rows from which unpacking once pays */
#define BAND 32			/* rows for which an accumulator's part of a panel is read at a time */

/* --- few rows --- */

/* Zero points times sums of a row's codes: at 4 bits both fit into 16 bits, and a zero point's upper half is zero. */
INLINE __m256i times(size_t bits, __m256i zeros, __m256i sums)
{
	return bits == 4 ? _mm256_madd_epi16(zeros, sums) : _mm256_mullo_epi32(zeros, sums);
}

/* Sums of neighbours in both vectors; `small`: they fit into 16 bits. */
INLINE __m256i pair(bool small, __m256i a, __m256i b)
{
	return small ? _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1)) : _mm256_hadd_epi32(a, b);
}

/* What is computed at once: so many rows and columns, one of them alone or a few; a vector of partial sums for each result. */
struct few {
	bool zeros; /* there are zero points */
	size_t bits, block_bytes, rows, columns;
	size_t apart; /* columns at once are so many columns apart */
	size_t pitch, stride; /* bytes from a column to the next, codes from a row to the next */
	const uint8_t *turn; /* end of the first of two streams of columns */
};
struct parts {
	__m256i of[TILE_ROWS]; /* by column, by row */
};

/* Partial sums of the matrix's bytes byte .. byte + max(block_bytes, 32). */
INLINE struct parts part(struct few few, const uint8_t *const *values, const int8_t *x, size_t byte)
{
	struct parts sums;

	UNROLLED
	for (size_t i = 0; i < few.columns * few.rows; i++)
		sums.of[i] = _mm256_setzero_si256();
	for (size_t end = byte + (few.block_bytes > LOAD ? few.block_bytes : LOAD); byte < end; byte += LOAD)
		UNROLLED
		for (size_t i = 0; i < few.columns * few.rows; i++) {
			const __m256i packed = _mm256_loadu_si256((const void *)(values[i / few.rows] + byte)), mask = _mm256_set1_epi8(15);
			const int8_t *codes = x + i % few.rows * few.stride + code_offset(few.bits, byte);
			const __m256i first = _mm256_loadu_si256((const void *)codes);
			if (few.bits == 8) {
				sums.of[i] = dot_bytes(sums.of[i], packed, first);
				continue;
			}
			const __m256i low = _mm256_and_si256(packed, mask), high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
			sums.of[i] = dot_codes(sums.of[i], low, high, _mm256_loadu_si256((const void *)(codes + CHUNK / 2)), first);
		}
	return sums;
}

INLINE struct parts pairs(bool small, struct few few, struct parts a, struct parts b)
{
	UNROLLED
	for (size_t i = 0; i < few.columns * few.rows; i++)
		a.of[i] = pair(small, a.of[i], b.of[i]);
	return a;
}

/* The dot products of a group's eight blocks, for each result. */
INLINE struct parts group(struct few few, const uint8_t *const *values, const int8_t *x)
{
#define PART(i) part(few, values, x, (i) * (bytes > LOAD ? bytes : LOAD))
#define FOUR(i) pairs(small, few, pairs(small, few, PART(i), PART(i + 1)), pairs(small, few, PART(i + 2), PART(i + 3)))
	const size_t bytes = few.block_bytes, results = few.columns * few.rows;
	const bool small = few.bits == 4 && bytes <= LOAD;
	const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
	struct parts sums = bytes == 8 ? pairs(small, few, PART(0), PART(1)) : FOUR(0);

	if (bytes < LOAD) {
		UNROLLED
		for (size_t i = 0; i < results; i++)
			sums.of[i] = bytes == 8 ? _mm256_permute4x64_epi64(sums.of[i], 0xd8) : _mm256_permutevar8x32_epi32(sums.of[i], order);
		return sums;
	}
	struct parts others = FOUR(4);
	UNROLLED
	for (size_t i = 0; i < results; i++)
		sums.of[i] = _mm256_add_epi32(_mm256_permute2x128_si256(sums.of[i], others.of[i], 0x20),
					      _mm256_permute2x128_si256(sums.of[i], others.of[i], 0x31));
	return sums;
#undef PART
#undef FOUR
}

/* The zero points where all are the middle code, minus BYTE_SHIFT at 8 bits. */
INLINE __m256i middle_zeros(size_t bits)
{
	return _mm256_set1_epi32(middle_code(bits) - (bits == 8 ? BYTE_SHIFT : 0));
}

/* The zero points of a group's blocks, of which `left` exist, minus BYTE_SHIFT at 8 bits. */
INLINE __m256i group_zeros(const struct product *p, size_t bits, size_t column, size_t g, size_t left)
{
	const __m256i shift = _mm256_set1_epi32(bits == 8 ? BYTE_SHIFT : 0);
	uint64_t packed = 0;

	memcpy(&packed, p->zeros + column * p->zero_bytes + g * bits, left == GROUP ? bits : (left * bits + 7) / 8);
	if (bits == 8)
		return _mm256_sub_epi32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)packed)), shift);
	__m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32((int)packed), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
	return _mm256_and_si256(nibbles, _mm256_set1_epi32(15));
}

/* Scales of a column's blocks from `block` on, of which `left` exist. Those beyond are the next column's, and meet zeros. */
INLINE __m256 group_scales(const struct product *p, size_t column, size_t block, size_t left)
{
	const size_t size = sizeof(*p->scales), offset = (column * p->blocks + block) * size;
	uint8_t copy[GROUP * sizeof(*p->scales)];
	const void *scales = (const uint8_t *)p->scales + offset;

	if (left < GROUP)
		scales = readable(p->scales, offset, GROUP * size, p->n * p->blocks * size, copy);
	return _mm256_cvtph_ps(_mm_loadu_si128(scales));
}

INLINE float fold_vector(__m256 lanes)
{
	__m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
	__m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

	return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Adds group g of `columns` columns, of whose blocks `left` exist, to the lanes of each result. */
INLINE void add_group(const struct product *p, struct few few, size_t row, size_t column, size_t g, size_t left,
		      const uint8_t *const *values, __m256 *lanes)
{
	const int8_t *x = p->codes + row * few.stride + g * GROUP * (few.block_bytes * 8 / few.bits);
	const struct parts dots = group(few, values, x);

	UNROLLED
	for (size_t i = 0; i < few.columns * few.rows; i++) {
		const size_t entry = ((row + i % few.rows) * p->groups + g) * GROUP, c = column + i / few.rows * few.apart;
		const __m256i zeros = few.zeros ? group_zeros(p, few.bits, c, g, left) : middle_zeros(few.bits);
		const __m256 scales = group_scales(p, c, g * GROUP, left);
		const __m256i sums = _mm256_loadu_si256((const void *)(p->sums + entry));
		const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(dots.of[i], times(few.bits, zeros, sums)));
		lanes[i] = _mm256_fmadd_ps(exact, _mm256_mul_ps(_mm256_loadu_ps(p->row_scales + entry), scales), lanes[i]);
	}
}

/*
 * Weights are used once. On AMD they are prefetched past the second-level cache; on Intel that would leave only the few line fill
 * buffers of the first level for all reads, and decoding took 1.3 times as long. A thread mostly computes the next piece too: both
 * streams run on into those of it.
 */
INLINE void prefetch_ahead(struct few few, size_t stream, const uint8_t *values, size_t bytes)
{
	if (few.columns == STREAMS && !stream && values + AHEAD >= few.turn)
		values += STREAMS * few.apart * few.pitch;
	if (__builtin_cpu_is("amd")) /* available() has initialized it */
		for (size_t line = 0; line < bytes; line += 64)
			_mm_prefetch(values + AHEAD + line, _MM_HINT_NTA);
	else
		for (size_t line = 0; line < bytes; line += 64)
			_mm_prefetch(values + AHEAD + line, _MM_HINT_T1);
}

/* Results of the columns from `column` on and the rows from `row` on. */
INLINE void results(const struct product *p, struct few few, size_t row, size_t column)
{
	const size_t bytes = GROUP * few.block_bytes, whole = p->blocks / GROUP, begin = column * few.pitch;
	uint8_t copies[STREAMS][GROUP * MAX_BLOCK];
	const uint8_t *values[STREAMS];
	__m256 lanes[TILE_ROWS];

	UNROLLED
	for (size_t i = 0; i < few.columns * few.rows; i++)
		lanes[i] = _mm256_setzero_ps();
	for (size_t g = 0; g < whole; g++) {
		for (size_t c = 0; c < few.columns; c++) {
			values[c] = p->values + begin + c * few.apart * few.pitch + g * bytes;
			prefetch_ahead(few, c, values[c], bytes);
		}
		add_group(p, few, row, column, g, GROUP, values, lanes);
	}
	if (whole < p->groups) {
		for (size_t c = 0; c < few.columns; c++) {
			const size_t offset = begin + c * few.apart * few.pitch + whole * bytes;
			prefetch_ahead(few, c, p->values + offset, few.pitch - whole * bytes);
			values[c] = readable(p->values, offset, bytes, p->n * few.pitch, copies[c]);
		}
		add_group(p, few, row, column, whole, p->blocks % GROUP, values, lanes);
	}
	UNROLLED
	for (size_t i = 0; i < few.columns * few.rows; i++)
		p->out[(row + i % few.rows) * p->n + column + i / few.rows * few.apart] = fold_vector(lanes[i]);
}

/* Results of columns first .. end, rows by rows. */
INLINE void few_of_kind(const struct product *p, bool zeros, size_t bits, size_t block_bytes, size_t first, size_t end)
{
#define FEW(rows, columns) ((struct few){ zeros, bits, block_bytes, rows, columns, apart, p->row_bytes, p->stride, turn })
	const size_t apart = (end - first) / STREAMS;
	const uint8_t *turn = p->values + (first + apart) * p->row_bytes;
	size_t row = 0, column;

	for (; row + TILE_ROWS <= p->m; row += TILE_ROWS)
		for (column = first; column < end; column++)
			results(p, FEW(TILE_ROWS, 1), row, column);
	for (; row + 2 <= p->m; row += 2)
		for (column = first; column < end; column++)
			results(p, FEW(2, 1), row, column);
	for (; row < p->m; row++) {
		for (size_t line = 0; line < SCALES_AHEAD; line += 64) {
			_mm_prefetch((const char *)(p->scales + end * p->blocks) + line, _MM_HINT_T1);
			_mm_prefetch((const char *)(p->scales + (end + apart) * p->blocks) + line, _MM_HINT_T1);
		}
		for (column = first; column < first + apart; column++)
			results(p, FEW(1, STREAMS), row, column);
		for (column = first + STREAMS * apart; column < end; column++)
			results(p, FEW(1, 1), row, column);
	}
#undef FEW
}

INLINE void few_rows(const struct product *p, size_t bits, size_t block_bytes, size_t first, size_t end)
{
	if (p->zeros)
		few_of_kind(p, true, bits, block_bytes, first, end);
	else
		few_of_kind(p, false, bits, block_bytes, first, end);
}

/* --- many rows --- */

/*
 * Columns of a matrix in the tiles' layout: by block [dwords, halves, PANEL] of four codes, [PANEL] scales and zero points. All
 * blocks of an accumulator follow each other, so that they stay in the first-level cache while tiles run over many rows.
 */
struct panel {
	size_t first, count;
	uint8_t *codes;
	float *scales;
	int32_t *zeros; /* NULL: all are the middle code */
	const uint8_t *ahead, *ahead_end; /* the next columns, not yet prefetched */
	size_t lines; /* of them, for each block of a tile */
};

INLINE size_t place_of(size_t groups, size_t block)
{
	return block % GROUP * groups + block / GROUP;
}

/* In both halves of vectors, four dwords of four vectors. */
INLINE void transpose(__m256i *v)
{
	const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
	const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);

	v[0] = _mm256_unpacklo_epi64(a, c);
	v[1] = _mm256_unpackhi_epi64(a, c);
	v[2] = _mm256_unpacklo_epi64(b, d);
	v[3] = _mm256_unpackhi_epi64(b, d);
}

/* 16 bytes of each of eight columns: v[i] has their i-th dwords. The last column is repeated for those beyond. */
INLINE void eight_columns(const void *base, size_t pitch, size_t n, size_t column, size_t byte, __m256i *v)
{
	const uint8_t *from = (const uint8_t *)base + column * pitch + byte;
	uint8_t copies[8][16], copy[16];

	if ((column + 7) * pitch + byte + 16 > n * pitch) {
		for (size_t i = 0; i < 8; i++)
			memcpy(copies[i], readable(base, (column + i < n ? column + i : n - 1) * pitch + byte, 16, n * pitch, copy), 16);
		from = copies[0];
		pitch = sizeof(copies[0]);
	}
	for (size_t i = 0; i < 4; i++)
		v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)(from + i * pitch))),
					       _mm_loadu_si128((const void *)(from + (i + 4) * pitch)), 1);
	transpose(v);
}

INLINE void fill_codes(const struct product *p, size_t bits, size_t block_bytes, const struct panel *panel)
{
	const size_t halves = bits == 4 ? 2 : 1, dwords = block_bytes < 16 ? block_bytes / 4 : 4;
	const __m256i mask = _mm256_set1_epi8(15);
	__m256i v[4];

	for (size_t b = 0; b < p->blocks; b++) {
		uint8_t *to = panel->codes + place_of(p->groups, b) * block_bytes * halves * PANEL;
		for (size_t byte = b * block_bytes; byte < (b + 1) * block_bytes; byte += 16, to += dwords * halves * PANEL * 4)
			for (size_t c = 0; c < PANEL; c += 8) {
				eight_columns(p->values, p->row_bytes, p->n, panel->first + c, byte, v);
				for (size_t i = 0; i < dwords; i++) {
					__m256i *place = (__m256i *)(to + (i * halves * PANEL + c) * 4);
					_mm256_store_si256(place, bits == 4 ? _mm256_and_si256(v[i], mask) : v[i]);
					if (bits == 4)
						_mm256_store_si256(place + PANEL / 8, _mm256_and_si256(_mm256_srli_epi16(v[i], 4), mask));
				}
			}
	}
}

/* Eight vectors' elements go to places of a panel's blocks. */
INLINE void put_blocks(__m256i *v, void *to, size_t groups, size_t block, size_t c)
{
	__m256i halves[2][4];

	for (size_t i = 0; i < 4; i++) {
		halves[0][i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
		halves[1][i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
	}
	for (size_t half = 0; half < 2; half++) {
		transpose(halves[half]);
		for (size_t i = 0; i < 4; i++)
			_mm256_store_si256((__m256i *)((int32_t *)to + place_of(groups, block + 4 * half + i) * PANEL + c), halves[half][i]);
	}
}

INLINE void fill_scales(const struct product *p, size_t bits, const struct panel *panel)
{
	__m256i scales[8], zeros[8];

	for (size_t block = 0; block < p->blocks; block += GROUP)
		for (size_t c = 0; c < PANEL; c += 8) {
			const size_t left = p->blocks - block < GROUP ? p->blocks - block : GROUP;
			for (size_t i = 0; i < 8; i++) {
				size_t column = panel->first + c + i < p->n ? panel->first + c + i : p->n - 1;
				scales[i] = _mm256_castps_si256(group_scales(p, column, block, left));
				_mm_prefetch((const char *)(p->scales + (column + PANEL) * p->blocks + block), _MM_HINT_T1);
				if (panel->zeros)
					zeros[i] = group_zeros(p, bits, column, block / GROUP, left);
			}
			put_blocks(scales, panel->scales, p->groups, block, c);
			if (panel->zeros)
				put_blocks(zeros, panel->zeros, p->groups, block, c);
		}
}

/* Every row and vector of a tile. */
#define EACH(r, v)                                      \
	UNROLLED                                        \
	for (size_t r = 0; r < TILE_ROWS; r++)          \
		UNROLLED                                \
		for (size_t v = 0; v < TILE_VECTORS; v++)

/* Adds to the dot products of a block: TILE_ROWS rows from `x` on with the columns of a panel, whose `codes` these are. */
INLINE void tile_block(size_t bits, size_t block_bytes, const uint8_t *codes, const int8_t *x, size_t stride, size_t block,
		       ints (*dots)[TILE_VECTORS])
{
	const size_t halves = bits == 4 ? 2 : 1, run = block_bytes < 16 ? block_bytes : 16;

	for (size_t begin = 0; begin < block_bytes; begin += run) {
		const int8_t *row_codes[TILE_ROWS];
		ints sums[TILE_ROWS][TILE_VECTORS];
		UNROLLED
		for (size_t r = 0; r < TILE_ROWS; r++) {
			row_codes[r] = x + r * stride + code_offset(bits, block * block_bytes + begin);
			__asm__("" : "+r"(row_codes[r])); /* otherwise every code's place takes a register */
		}
		EACH(r, v) sums[r][v] = begin_run(bits, dots[r][v]);
		UNROLLED
		for (size_t i = 0; i < run / 4 * halves; i++) {
			const uint8_t *w = codes + (begin / 4 * halves + i) * PANEL * 4;
			ints w_of[TILE_VECTORS];
			UNROLLED
			for (size_t v = 0; v < TILE_VECTORS; v++) {
				w_of[v] = load_ints(w + v * LANES * 4);
				__asm__("" : "+v"(w_of[v])); /* otherwise it is loaded again for each row */
			}
			UNROLLED
			for (size_t r = 0; r < TILE_ROWS; r++) {
				const ints four = repeat_four(row_codes[r] + i / halves * 4 + i % halves * (CHUNK / 2));
				UNROLLED
				for (size_t v = 0; v < TILE_VECTORS; v++)
					sums[r][v] = add_run(bits, sums[r][v], w_of[v], four);
			}
		}
		EACH(r, v) dots[r][v] = end_run(bits, dots[r][v], sums[r][v]);
	}
}

/* The sum of accumulators `first` and first + GROUP / 2 of TILE_ROWS rows and a panel's columns, to [row, PANEL]. */
INLINE void tile(const struct product *p, size_t bits, size_t block_bytes, struct panel *panel, size_t row, size_t first,
		 float (*to)[PANEL])
{
	const size_t block_codes = block_bytes * (bits == 4 ? 2 : 1) * PANEL, entries = p->groups * GROUP;
	floats both[TILE_ROWS][TILE_VECTORS];

	EACH(r, v) both[r][v] = zero_floats();
	for (size_t lane = first; lane < GROUP; lane += GROUP / 2) {
		size_t place = lane * p->groups;
		floats lanes[TILE_ROWS][TILE_VECTORS];
		EACH(r, v) lanes[r][v] = zero_floats();
		for (size_t b = lane; b < p->blocks; b += GROUP, place++) {
			const int32_t *sums = p->sums + row * entries + b;
			const float *row_scales = p->row_scales + row * entries + b;
			ints dots[TILE_ROWS][TILE_VECTORS];
			for (size_t i = 0; i < panel->lines && panel->ahead < panel->ahead_end; i++, panel->ahead += 64)
				_mm_prefetch(panel->ahead, _MM_HINT_T1);
			EACH(r, v) {
				dots[r][v] = repeat_int(sums[r * entries]);
				if (panel->zeros)
					dots[r][v] = times_ints(bits, load_ints(panel->zeros + place * PANEL + v * LANES), dots[r][v]);
			}
			tile_block(bits, block_bytes, panel->codes + place * block_codes, p->codes + row * p->stride, p->stride, b, dots);
			EACH(r, v) {
				const floats scale = load_floats(panel->scales + place * PANEL + v * LANES);
				lanes[r][v] = add_scaled(dots[r][v], multiply_floats(repeat_float(row_scales[r * entries]), scale), lanes[r][v]);
			}
		}
		EACH(r, v) both[r][v] = add_floats(both[r][v], lanes[r][v]);
	}
	EACH(r, v) store_floats(to[r] + v * LANES, both[r][v]);
}

/* Results of rows first .. end, at most BAND, and a panel's columns; accumulators are summed as fold() does. */
INLINE void band(const struct product *p, size_t bits, size_t block_bytes, struct panel *panel, size_t first, size_t end)
{
	static const uint8_t order[GROUP / 2] = { 0, 2, 1, 3 };
	_Alignas(64) float pairs_of[GROUP / 2][BAND][PANEL];

	for (size_t turn = 0; turn < GROUP / 2; turn++)
		for (size_t row = first; row < end; row += TILE_ROWS)
			tile(p, bits, block_bytes, panel, row, order[turn], &pairs_of[turn][row - first]);
	for (size_t row = 0; row < end - first; row++) {
		for (size_t i = 0; i < PANEL; i++)
			pairs_of[0][row][i] = (pairs_of[0][row][i] + pairs_of[1][row][i]) + (pairs_of[2][row][i] + pairs_of[3][row][i]);
		memcpy(p->out + (first + row) * p->n + panel->first, pairs_of[0][row], panel->count * sizeof(float));
	}
}

/* Computes columns first .. end by panels; false if there is no memory for a panel. */
INLINE bool tiled(const struct product *p, size_t bits, size_t block_bytes, size_t first, size_t end)
{
	const size_t entries = p->groups * GROUP * PANEL, codes = entries * block_bytes * (bits == 4 ? 2 : 1);
	const size_t tiles = (p->m + TILE_ROWS - 1) / TILE_ROWS;
	uint8_t *room = aligned_alloc(64, codes + entries * (sizeof(float) + sizeof(int32_t)));
	struct panel panel = { .codes = room, .scales = (float *)(room + codes) };

	if (!room)
		return false;
	if (p->zeros)
		panel.zeros = (int32_t *)(panel.scales + entries);
	for (panel.first = first; panel.first < end; panel.first += PANEL) {
		panel.count = end - panel.first < PANEL ? end - panel.first : PANEL;
		panel.ahead = p->values + (panel.first + PANEL) * p->row_bytes;
		panel.ahead_end = panel.ahead + PANEL * p->row_bytes;
		panel.lines = (PANEL * block_bytes / 64 + tiles - 1) / tiles;
		fill_codes(p, bits, block_bytes, &panel);
		fill_scales(p, bits, &panel);
		for (size_t row = 0; row < p->m; row += BAND)
			band(p, bits, block_bytes, &panel, row, p->m - row < BAND ? p->m : row + BAND);
	}
	free(room);
	return true;
}

/* A tile's dot products begin with its rows' sums times the zero points, less than zero. */
TARGET static void quantize(struct product *p, size_t row)
{
	const int32_t middle = middle_code(p->bits) - (p->bits == 8 ? BYTE_SHIFT : 0);
	const struct row_layout tiled_rows = { 1, 1, 1, p->zeros ? -1 : -middle, 0 };

	quantize_row(p, row, p->m < MIN_TILED ? PLAIN_ROWS : tiled_rows);
}

#include "ways.h"

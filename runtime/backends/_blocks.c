/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ONNX Runtime's custom operator moescope.BlockMatMul: rows of floats times a matrix of 4 or 8 bits, used as it lies on disk.
 *
 *     rows [..., K] float, values [N, blocks, block * bits / 8] uint8, scales [N, blocks] float, zero points (optional, packed
 *     [N, ceil(blocks * bits / 8)] uint8), attribute bits  ->  [..., N] float
 *
 * It is MatMulNBits at accuracy level 4 (8-bit activations, a scale for each block of a row) without its prepacking, which takes
 * longer than to read an expert: what is read can run. Each result is summed up in the same order however many rows there are.
 *
 * Of ONNX Runtime's C API only what is used is declared: a table of functions to which versions add, and which they never reorder.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CHUNK 64	/* codes at once */
#define LANES 16	/* sums at once; a lane takes four codes of a chunk */
#define ROWS 4		/* rows and columns whose sums are kept in registers */
#define COLUMNS 4
#define AHEAD 8192	/* bytes of a matrix fetched early */
#define PIECE 64	/* columns of one task */
#define MOST_BLOCK 256
#define VALUES 1
#define SCALES 2
#define ZEROS 3
#if defined(__x86_64__)
#define EVERY_CLONE __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define EVERY_CLONE
#endif

/* --- ONNX Runtime's C API --- */

enum { API_VERSION = 17, FLOAT = 1, UINT8 = 2, REQUIRED = 0, OPTIONAL = 1, MOST_DIMS = 8 };
enum { FAIL = 1, INVALID_ARGUMENT = 2 };
enum slot {
	CREATE_STATUS = 0,
	CREATE_DOMAIN = 26,
	DOMAIN_ADD = 27,
	ADD_DOMAIN = 28,
	TENSOR_DATA = 51,
	DIMS_COUNT = 61,
	DIMS = 62,
	TYPE_AND_SHAPE = 65,
	ATTRIBUTE_INT64 = 86,
	INPUT_COUNT = 88,
	INPUT = 90,
	OUTPUT = 91,
	RELEASE_SHAPE = 99,
	PARALLEL_FOR = 274,
};
typedef void *status;
typedef void (*function)(void);
struct api_base {
	const function *(*get)(uint32_t version);
};
struct op {
	uint32_t version;
	void *(*create_kernel)(const struct op *, const function *api, const void *info);
	const char *(*name)(const struct op *);
	const char *(*provider)(const struct op *);
	int (*input_type)(const struct op *, size_t index);
	size_t (*input_count)(const struct op *);
	int (*output_type)(const struct op *, size_t index);
	size_t (*output_count)(const struct op *);
	void (*compute)(void *kernel, void *context);
	void (*destroy)(void *kernel);
	int (*input_characteristic)(const struct op *, size_t index);
	int (*output_characteristic)(const struct op *, size_t index);
	int (*input_memory)(const struct op *, size_t index);
	int (*variadic[4])(const struct op *);
	status (*create_kernel_2)(const struct op *, const function *api, const void *info, void **kernel);
	status (*compute_2)(void *kernel, void *context);
	status (*infer_shape)(const struct op *, void *context);
	int (*versions[2])(const struct op *);
};
static const function *ort;
#define CALL(slot, ...) (((status (*)())ort[slot])(__VA_ARGS__))

/* --- the product --- */

struct product {
	const float *rows;
	const uint8_t *values, *zeros;
	const float *scales;
	float *out;
	size_t m, k, n, bits, block, blocks, chunks;
	/* Of the rows, per chunk: codes in the order in which the matrix's lie, what the middle of its codes adds to a lane, the
	 * lane's scale; and per block the sum of the codes times the scale. */
	int8_t *codes;
	int32_t *offsets;
	float *lane_scales, *block_sums;
	/* Which of a chunk's blocks a lane belongs to. */
	int32_t lane_blocks[LANES];
};

static size_t middle(const struct product *p)
{
	return (size_t)1 << (p->bits - 1);
}

EVERY_CLONE static float quantize_block(const float *x, size_t count, int8_t *codes, int *sum)
{
	uint32_t largest = 0, bits;

	for (size_t i = 0; i < count; i++) {
		memcpy(&bits, &x[i], sizeof(bits));
		bits &= 0x7fffffff;
		largest = bits > largest ? bits : largest;
	}
	float most, scale, inverse;
	memcpy(&most, &largest, sizeof(most));
	scale = most / 127;
	inverse = scale > 0 ? 1 / scale : 0;
	int total = 0;
	for (size_t i = 0; i < count; i++) {
		/* Adding and taking away 1.5 * 2^23 rounds to the nearest integer. */
		float code = x[i] * inverse + 12582912.0f;
		int32_t whole;
		memcpy(&whole, &code, sizeof(whole));
		codes[i] = (int8_t)(whole - 0x4b400000);
		total += codes[i];
	}
	*sum = total;
	return scale;
}

EVERY_CLONE static void quantize_row(struct product *p, size_t row)
{
	const size_t block = p->block, bits = p->bits, in_chunk = block < CHUNK ? CHUNK / block : 1;
	const float *x = p->rows + row * p->k;
	int8_t *codes = p->codes + row * p->chunks * CHUNK, plain[MOST_BLOCK];
	int32_t *offsets = p->offsets + row * p->chunks * LANES;
	float *scales = p->lane_scales + row * p->chunks * LANES;

	memset(codes, 0, p->chunks * CHUNK);
	for (size_t b = 0, first = 0; b < p->blocks; b++, first += block) {
		size_t count = first >= p->k ? 0 : p->k - first < block ? p->k - first : block, of_chunk = b % in_chunk;
		int sum;
		float scale = quantize_block(x + first, count, plain, &sum);
		p->block_sums[row * p->blocks + b] = scale * (float)sum;
		memset(plain + count, 0, block - count);
		/* Four bits: even codes into the low halves of 32 bytes, odd ones into the high. */
		for (size_t part = 0; part < block; part += CHUNK) {
			int8_t *to = codes + (first + part) / CHUNK * CHUNK + first % CHUNK / (bits == 4 ? 2 : 1);
			size_t length = block - part < CHUNK ? block - part : CHUNK;
			if (bits == 8)
				memcpy(to, plain + part, length);
			for (size_t i = 0; bits == 4 && i < length / 2; i++) {
				to[i] = plain[part + 2 * i];
				to[CHUNK / 2 + i] = plain[part + 2 * i + 1];
			}
			for (size_t lane = 0; lane < LANES; lane++) {
				float *of_lane = &scales[(first + part) / CHUNK * LANES + lane];
				*of_lane = in_chunk == 1 || (size_t)p->lane_blocks[lane] == of_chunk ? scale : *of_lane;
			}
		}
	}
	for (size_t lane = 0; lane < p->chunks * LANES; lane++)
		offsets[lane] = -(int)middle(p) * (codes[4 * lane] + codes[4 * lane + 1] + codes[4 * lane + 2] + codes[4 * lane + 3]);
}

/* What zero points off the middle add to a result. */
static float beside_the_middle(const struct product *p, size_t row, size_t column)
{
	size_t bytes = (p->blocks * p->bits + 7) / 8;
	float sum = 0;

	for (size_t b = 0; b < p->blocks; b++) {
		uint8_t packed = p->zeros[column * bytes + b * p->bits / 8];
		int zero = p->bits == 8 ? packed : b % 2 ? packed >> 4 : packed & 15;
		sum += p->scales[column * p->blocks + b] * p->block_sums[row * p->blocks + b] * (float)((int)middle(p) - zero);
	}
	return sum;
}

/* Codes of a chunk in the order of the rows', as bytes; beyond the matrix's row they meet zeros, and are not read. */
static inline void unpack(const struct product *p, const uint8_t *packed, size_t bytes, uint8_t *codes)
{
	if (p->bits == 8) {
		for (size_t i = 0; i < bytes; i++)
			codes[i] = packed[i];
		return;
	}
	for (size_t i = 0; i < bytes; i++) {
		codes[i] = packed[i] & 15;
		codes[CHUNK / 2 + i] = packed[i] >> 4;
	}
}

static inline size_t chunk_bytes(const struct product *p)
{
	return CHUNK * p->bits / 8;
}

static inline size_t row_bytes(const struct product *p)
{
	return p->blocks * p->block * p->bits / 8;
}

/* Bytes of chunk c that a matrix's row has. */
static inline size_t bytes_of(const struct product *p, size_t c)
{
	size_t left = row_bytes(p) - c * chunk_bytes(p);

	return left < chunk_bytes(p) ? left : chunk_bytes(p);
}

EVERY_CLONE static void columns_plainly(const struct product *p, size_t first, size_t end)
{
	size_t per_chunk = p->block < CHUNK ? CHUNK / p->block : 1;

	for (size_t column = first; column < end; column++) {
		for (size_t row = 0; row < p->m; row++) {
			float sums[LANES] = { 0 }, sum = 0;
			for (size_t c = 0; c < p->chunks; c++) {
				uint8_t codes[CHUNK] = { 0 };
				size_t at = row * p->chunks + c, block = c * CHUNK / p->block;
				const int8_t *x = p->codes + at * CHUNK;
				float scales[4] = { 0 };
				for (size_t b = 0; b < per_chunk && block + b < p->blocks; b++)
					scales[b] = p->scales[column * p->blocks + block + b];
				unpack(p, p->values + column * row_bytes(p) + c * chunk_bytes(p), bytes_of(p, c), codes);
				for (size_t lane = 0; lane < LANES; lane++) {
					int32_t dot = p->offsets[at * LANES + lane];
					for (size_t i = 4 * lane; i < 4 * lane + 4; i++)
						dot += codes[i] * x[i];
					sums[lane] += (float)dot * (p->lane_scales[at * LANES + lane] * scales[p->lane_blocks[lane]]);
				}
			}
			for (size_t lane = 0; lane < LANES; lane++)
				sum += sums[lane];
			p->out[row * p->n + column] = sum;
		}
	}
}

#if defined(__x86_64__)
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

/* Codes of a chunk; `left` bytes of it are there. */
VNNI static inline __attribute__((always_inline)) __m512i vnni_codes(size_t bits, const uint8_t *packed, size_t left)
{
	const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);

	if (bits == 8)
		return left < 64 ? _mm512_maskz_loadu_epi8((1ull << left) - 1, packed) : _mm512_loadu_si512(packed);
	__m256i both = left < 32 ? _mm256_maskz_loadu_epi8((1u << left) - 1, packed) : _mm256_loadu_si256((const void *)packed);

	return _mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i64x4(both), halves), _mm512_set1_epi8(15));
}

/* The scale of each lane, of a chunk with `in_chunk` blocks of which `left` are there. */
VNNI static inline __attribute__((always_inline)) __m512 vnni_scales(size_t in_chunk, const float *scales, size_t left, __m512i of_lane)
{
	if (in_chunk == 1)
		return _mm512_set1_ps(*scales);
	return _mm512_permutexvar_ps(of_lane, _mm512_maskz_loadu_ps((__mmask16)((1u << (left < in_chunk ? left : in_chunk)) - 1), scales));
}

/* Results of `rows` rows and `columns` columns, both known when this is compiled, as are `bits` and `in_chunk`. */
VNNI static inline __attribute__((always_inline)) void
vnni_tile(const struct product *p, size_t bits, size_t in_chunk, size_t row, size_t rows, size_t column, size_t columns)
{
	const __m512i of_lane = _mm512_loadu_si512(p->lane_blocks);
	const size_t chunks = p->chunks, width = row_bytes(p), blocks = p->blocks, log_block = (size_t)__builtin_ctzl(p->block);
	const uint8_t *values = p->values + column * width;
	const float *scales = p->scales + column * blocks;
	const int8_t *x = p->codes + row * chunks * CHUNK;
	const int32_t *offsets = p->offsets + row * chunks * LANES;
	const float *lane_scales = p->lane_scales + row * chunks * LANES;
	__m512 sums[ROWS][COLUMNS];

	for (size_t r = 0; r < rows; r++)
		for (size_t n = 0; n < columns; n++)
			sums[r][n] = _mm512_setzero_ps();
	for (size_t c = 0; c < chunks; c++) {
		const size_t first = c * CHUNK * bits / 8, block = c * CHUNK >> log_block;
		__m512i codes[COLUMNS];
		__m512 scale[COLUMNS];
		/* A matrix comes from memory once, in rows too short for the processor to foresee what follows. */
		for (size_t line = 0; line < columns * CHUNK * bits / 8; line += 64)
			_mm_prefetch(values + AHEAD + columns * first + line, _MM_HINT_T0);
		for (size_t n = 0; n < columns; n++) {
			codes[n] = vnni_codes(bits, values + n * width + first, width - first);
			scale[n] = vnni_scales(in_chunk, scales + n * blocks + block, blocks - block, of_lane);
		}
		for (size_t r = 0; r < rows; r++) {
			const size_t at = r * chunks + c;
			__m512i of_row = _mm512_loadu_si512(x + at * CHUNK), offset = _mm512_loadu_si512(offsets + at * LANES);
			__m512 lane_scale = _mm512_loadu_ps(lane_scales + at * LANES);
			for (size_t n = 0; n < columns; n++) {
				__m512 dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offset, codes[n], of_row));
				sums[r][n] = _mm512_fmadd_ps(dot, _mm512_mul_ps(lane_scale, scale[n]), sums[r][n]);
			}
		}
	}
	for (size_t r = 0; r < rows; r++)
		for (size_t n = 0; n < columns; n++)
			p->out[(row + r) * p->n + column + n] = _mm512_reduce_add_ps(sums[r][n]);
}

VNNI static inline __attribute__((always_inline)) void
vnni_rows(const struct product *p, size_t bits, size_t in_chunk, size_t row, size_t rows, size_t first, size_t end)
{
	size_t column = first;

	for (; column + COLUMNS <= end; column += COLUMNS)
		vnni_tile(p, bits, in_chunk, row, rows, column, COLUMNS);
	for (; column < end; column++)
		vnni_tile(p, bits, in_chunk, row, rows, column, 1);
}

VNNI static inline __attribute__((always_inline)) void
vnni_all(const struct product *p, size_t bits, size_t in_chunk, size_t first, size_t end)
{
	size_t row = 0;

	for (; row + ROWS <= p->m; row += ROWS)
		vnni_rows(p, bits, in_chunk, row, ROWS, first, end);
	for (; row < p->m; row++)
		vnni_rows(p, bits, in_chunk, row, 1, first, end);
}

VNNI static void columns_vnni(const struct product *p, size_t first, size_t end)
{
	size_t in_chunk = p->block < CHUNK ? CHUNK / p->block : 1;

	if (p->bits == 4 && in_chunk == 1)
		vnni_all(p, 4, 1, first, end);
	else if (p->bits == 4)
		vnni_all(p, 4, in_chunk, first, end);
	else if (in_chunk == 1)
		vnni_all(p, 8, 1, first, end);
	else
		vnni_all(p, 8, in_chunk, first, end);
}
#endif

static void (*columns)(const struct product *p, size_t first, size_t end) = columns_plainly;

static void piece(void *of, size_t index)
{
	const struct product *p = of;
	size_t first = index * PIECE, end = first + PIECE < p->n ? first + PIECE : p->n;

	columns(p, first, end);
	if (p->zeros)
		for (size_t row = 0; row < p->m; row++)
			for (size_t column = first; column < end; column++)
				p->out[row * p->n + column] += beside_the_middle(p, row, column);
}

/* --- the operator --- */

static status refusal(int code, const char *why)
{
	return ((status (*)(int, const char *))ort[CREATE_STATUS])(code, why);
}

struct tensor {
	void *data;
	int64_t dims[MOST_DIMS];
	size_t rank;
};

/* An input; no data where it was left out. */
static status read_input(void *context, size_t index, struct tensor *tensor)
{
	void *value = NULL, *shape = NULL;
	size_t count;
	status failed = CALL(INPUT_COUNT, context, &count);

	memset(tensor, 0, sizeof(*tensor));
	if (failed || index >= count)
		return failed;
	if ((failed = CALL(INPUT, context, index, &value)) || !value)
		return failed;
	if ((failed = CALL(TENSOR_DATA, value, &tensor->data)) || (failed = CALL(TYPE_AND_SHAPE, value, &shape)))
		return failed;
	if (!(failed = CALL(DIMS_COUNT, shape, &tensor->rank))) {
		if (tensor->rank > MOST_DIMS)
			failed = refusal(INVALID_ARGUMENT, "BlockMatMul: an input has more than 8 dimensions");
		else
			failed = CALL(DIMS, shape, tensor->dims, tensor->rank);
	}
	((void (*)(void *))ort[RELEASE_SHAPE])(shape);
	return failed;
}

/* Sizes, from the shapes and `bits`. */
static const char *describe(struct product *p, const struct tensor *rows, const struct tensor *values, const struct tensor *scales,
			    const struct tensor *zeros)
{
	if (!rows->rank || values->rank != 3 || scales->rank != 2 || scales->dims[0] != values->dims[0] ||
	    scales->dims[1] != values->dims[1] || !values->dims[1])
		return "BlockMatMul wants rows [..., K], values [N, blocks, bytes] and scales [N, blocks]";
	p->k = (size_t)rows->dims[rows->rank - 1];
	p->m = 1;
	for (size_t i = 0; i + 1 < rows->rank; i++)
		p->m *= (size_t)rows->dims[i];
	p->n = (size_t)values->dims[0];
	p->blocks = (size_t)values->dims[1];
	p->block = (size_t)values->dims[2] * 8 / p->bits;
	if (p->block < 16 || p->block > MOST_BLOCK || p->block & (p->block - 1) || (p->k + p->block - 1) / p->block != p->blocks)
		return "BlockMatMul wants blocks of 16, 32, 64, 128 or 256 codes that cover K";
	if (zeros->data && (zeros->rank != 2 || zeros->dims[0] != values->dims[0] ||
			    (size_t)zeros->dims[1] != (p->blocks * p->bits + 7) / 8))
		return "BlockMatMul wants zero points [N, ceil(blocks * bits / 8)]";
	p->chunks = (p->blocks * p->block + CHUNK - 1) / CHUNK;
	p->rows = rows->data;
	p->values = values->data;
	p->scales = scales->data;
	p->zeros = zeros->data;
	for (size_t lane = 0; lane < LANES; lane++) {
		size_t code = p->bits == 4 ? lane % (LANES / 2) * 8 : lane * 4;
		p->lane_blocks[lane] = p->block < CHUNK ? (int32_t)(code / p->block) : 0;
	}
	return NULL;
}

/* Room for what the rows become: one piece of memory, every part of which begins at a cache line. */
static void *take_room(struct product *p)
{
	size_t chunks = p->m * p->chunks, sums = (p->m * p->blocks * sizeof(float) + 63) / 64 * 64;
	char *room = aligned_alloc(64, chunks * CHUNK + 2 * chunks * LANES * sizeof(float) + sums + 64);

	if (!room)
		return NULL;
	p->codes = (int8_t *)room;
	p->offsets = (int32_t *)(room + chunks * CHUNK);
	p->lane_scales = (float *)(p->offsets + chunks * LANES);
	p->block_sums = p->lane_scales + chunks * LANES;
	memset(p->lane_scales, 0, chunks * LANES * sizeof(float));
	return room;
}

static status compute(void *kernel, void *context)
{
	struct tensor rows, values, scales, zeros;
	struct product p;
	void *out = NULL, *room;
	const char *why;
	status failed;

	if ((failed = read_input(context, 0, &rows)) || (failed = read_input(context, VALUES, &values)) ||
	    (failed = read_input(context, SCALES, &scales)) || (failed = read_input(context, ZEROS, &zeros)))
		return failed;
	p.bits = (size_t)(intptr_t)kernel;
	if ((why = describe(&p, &rows, &values, &scales, &zeros)))
		return refusal(INVALID_ARGUMENT, why);
	rows.dims[rows.rank - 1] = (int64_t)p.n;
	if ((failed = CALL(OUTPUT, context, (size_t)0, rows.dims, rows.rank, &out)) || (failed = CALL(TENSOR_DATA, out, (void **)&p.out)))
		return failed;
	if (!p.m || !p.n)
		return NULL;
	if (!(room = take_room(&p)))
		return refusal(FAIL, "BlockMatMul: no memory");
	for (size_t row = 0; row < p.m; row++)
		quantize_row(&p, row);
	failed = CALL(PARALLEL_FOR, context, piece, (p.n + PIECE - 1) / PIECE, (size_t)0, (void *)&p);
	free(room);
	return failed;
}

static status create(const struct op *op, const function *api, const void *info, void **kernel)
{
	int64_t bits;
	status failed = CALL(ATTRIBUTE_INT64, info, "bits", &bits);

	if (!failed && bits != 4 && bits != 8)
		failed = refusal(INVALID_ARGUMENT, "BlockMatMul knows 4 and 8 bits");
	*kernel = (void *)(intptr_t)bits;
	return failed;
}

static void destroy(void *kernel)
{
}

static const char *name(const struct op *op)
{
	return "BlockMatMul";
}

static const char *provider(const struct op *op)
{
	return NULL;
}

static int input_type(const struct op *op, size_t index)
{
	return index == VALUES || index == ZEROS ? UINT8 : FLOAT;
}

static size_t input_count(const struct op *op)
{
	return ZEROS + 1;
}

static int output_type(const struct op *op, size_t index)
{
	return FLOAT;
}

static size_t output_count(const struct op *op)
{
	return 1;
}

static int input_characteristic(const struct op *op, size_t index)
{
	return index == ZEROS ? OPTIONAL : REQUIRED;
}

static int first_or_required(const struct op *op, size_t index)
{
	return 0;
}

static const struct op block_matmul = {
	.version = API_VERSION,
	.name = name,
	.provider = provider,
	.input_type = input_type,
	.input_count = input_count,
	.output_type = output_type,
	.output_count = output_count,
	.destroy = destroy,
	.input_characteristic = input_characteristic,
	.output_characteristic = first_or_required,
	.input_memory = first_or_required,
	.create_kernel_2 = create,
	.compute_2 = compute,
};

#define VISIBLE __attribute__((visibility("default")))

/* Take the fastest way that this processor knows, or for comparison the plain one; says whether they differ. */
VISIBLE int moescope_choose(int plain)
{
	columns = columns_plainly;
#if defined(__x86_64__)
	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
		columns = plain ? columns_plainly : columns_vnni;
		return 1;
	}
#endif
	return 0;
}

/* What ONNX Runtime calls when it has loaded this library. */
VISIBLE status RegisterCustomOps(void *options, const struct api_base *base)
{
	void *domain = NULL;
	status failed;

	ort = base->get(API_VERSION);
	moescope_choose(0);
	if ((failed = CALL(CREATE_DOMAIN, "moescope", &domain)) || (failed = CALL(DOMAIN_ADD, domain, &block_matmul)))
		return failed;
	return CALL(ADD_DOMAIN, options, domain);
}

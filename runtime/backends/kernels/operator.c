/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ONNX Runtime's custom operator moescope.BlockMatMul: rows of floats times a matrix of 4 or 8 bits, in its layout on disk.
 *
 *     rows [..., K] float, values [N, blocks, block * bits / 8] uint8, scales [N, blocks] float, zero points (optional, packed
 *     [N, ceil(blocks * bits / 8)] uint8), attributes bits and gated  ->  [..., N] float
 *
 * gated, 0 or 1: rows are [..., 2 K], a gate and an up projection side by side, and gate * sigmoid(gate) * up is multiplied.
 *
 * It is MatMulNBits at accuracy level 4 (8-bit activations, a scale per block of a row) without its prepacking, which takes
 * longer than reading an expert: an expert can run as soon as it is read. product.h defines the computation.
 *
 * Only the used part of ONNX Runtime's C API is declared: a table of functions that versions extend but never reorder.
 */
#include "product.h"

#define VALUES 1
#define SCALES 2
#define ZEROS 3

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

/* --- the operator --- */

static status refusal(int code, const char *why)
{
	return ((status (*)(int, const char *))ort[CREATE_STATUS])(code, why);
}

struct attributes {
	size_t bits;
	bool gated;
};

struct tensor {
	void *data;
	int64_t dims[MOST_DIMS];
	size_t rank;
};

/* Reads an input; without data if it was omitted. */
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
	if (p->gated && rows->dims[rows->rank - 1] % 2)
		return "BlockMatMul wants gated rows [..., 2 K]";
	p->k = (size_t)rows->dims[rows->rank - 1] / (p->gated ? 2 : 1);
	p->m = 1;
	for (size_t i = 0; i + 1 < rows->rank; i++)
		p->m *= (size_t)rows->dims[i];
	p->n = (size_t)values->dims[0];
	p->block = (size_t)values->dims[2] * 8 / p->bits;
	if (!product_sizes(p) || p->blocks != (size_t)values->dims[1])
		return "BlockMatMul wants blocks of 16, 32, 64, 128 or 256 codes that cover K";
	if (zeros->data && (zeros->rank != 2 || zeros->dims[0] != values->dims[0] ||
			    (size_t)zeros->dims[1] != p->zero_bytes))
		return "BlockMatMul wants zero points [N, ceil(blocks * bits / 8)]";
	p->rows = rows->data;
	p->values = values->data;
	p->scales = scales->data;
	p->zeros = zeros->data;
	return NULL;
}

static void piece(void *product, size_t index)
{
	product_piece(product, index);
}

static void round_rows(void *product, size_t group)
{
	product_quantize(product, group);
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
	p.bits = ((struct attributes *)kernel)->bits;
	p.gated = ((struct attributes *)kernel)->gated;
	if ((why = describe(&p, &rows, &values, &scales, &zeros)))
		return refusal(INVALID_ARGUMENT, why);
	rows.dims[rows.rank - 1] = (int64_t)p.n;
	if ((failed = CALL(OUTPUT, context, (size_t)0, rows.dims, rows.rank, &out)) || (failed = CALL(TENSOR_DATA, out, (void **)&p.out)))
		return failed;
	if (!p.m || !p.n)
		return NULL;
	if (!(room = product_room(&p)))
		return refusal(FAIL, "BlockMatMul: no memory");
	if (product_row_groups(&p) > 1)
		failed = CALL(PARALLEL_FOR, context, round_rows, product_row_groups(&p), (size_t)0, (void *)&p);
	else
		product_quantize(&p, 0);
	if (!failed)
		/* Pieces go to whichever thread is free: a preempted thread delays the others by one piece only. */
		failed = CALL(PARALLEL_FOR, context, piece, product_pieces(&p), product_pieces(&p), (void *)&p);
	free(room);
	return failed;
}

static status create(const struct op *op, const function *api, const void *info, void **kernel)
{
	struct attributes *attributes;
	int64_t bits, gated;
	status failed = CALL(ATTRIBUTE_INT64, info, "bits", &bits);

	if (failed || (failed = CALL(ATTRIBUTE_INT64, info, "gated", &gated)))
		return failed;
	if (bits != 4 && bits != 8)
		return refusal(INVALID_ARGUMENT, "BlockMatMul knows 4 and 8 bits");
	if (!(attributes = malloc(sizeof(*attributes))))
		return refusal(FAIL, "BlockMatMul: no memory");
	*attributes = (struct attributes){ (size_t)bits, gated != 0 };
	*kernel = attributes;
	return NULL;
}

static void destroy(void *kernel)
{
	free(kernel);
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

/* Called by ONNX Runtime after loading this library. */
VISIBLE status RegisterCustomOps(void *options, const struct api_base *base)
{
	void *domain = NULL;
	status failed;

	ort = base->get(API_VERSION);
	if ((failed = CALL(CREATE_DOMAIN, "moescope", &domain)) || (failed = CALL(DOMAIN_ADD, domain, &block_matmul)))
		return failed;
	return CALL(ADD_DOMAIN, options, domain);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ONNX Runtime's custom operator moescope.BlockMatMul: rows of floats times a matrix of 4 or 8 bits, in its layout on disk.
 *
 *     rows [..., K] float, values [N, blocks, block * bits / 8] uint8, scales [N, blocks] float16; optional: zero points, packed
 *     [N, ceil(blocks * bits / 8)] uint8, bias [N] float, residual [..., N] float; attributes bits, gated and unsqueezed
 *     ->  [..., N] float
 *
 * gated, 0 or 1: rows are [..., 2 K], a gate and an up projection side by side, and gate * sigmoid(gate) * up is multiplied.
 * The result has the residual's shape, if there is one. unsqueezed, 0 or 1: it has a leading dimension of one.
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
#define BIAS 4
#define RESIDUAL 5
#define INPUTS 6

/* --- ONNX Runtime's C API --- */

enum { API_VERSION = 17, FLOAT = 1, UINT8 = 2, FLOAT16 = 10, REQUIRED = 0, OPTIONAL = 1, MOST_DIMS = 8 };
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
	int64_t bits, gated, unsqueezed;
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

static size_t elements(const struct tensor *tensor)
{
	size_t count = 1;

	for (size_t i = 0; i < tensor->rank; i++)
		count *= (size_t)tensor->dims[i];
	return count;
}

/* Sizes, from the shapes and `bits`. */
static const char *describe(struct product *p, const struct tensor *inputs)
{
	const struct tensor *rows = &inputs[0], *values = &inputs[VALUES], *scales = &inputs[SCALES], *zeros = &inputs[ZEROS];
	const struct tensor *bias = &inputs[BIAS], *residual = &inputs[RESIDUAL];

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
	if (bias->data && (bias->rank != 1 || elements(bias) != p->n))
		return "BlockMatMul wants a bias [N]";
	if (residual->data && (!residual->rank || residual->dims[residual->rank - 1] != values->dims[0] ||
			       elements(residual) != p->m * p->n))
		return "BlockMatMul wants a residual [..., N] with as many rows as are multiplied";
	p->rows = rows->data;
	p->values = values->data;
	p->scales = scales->data;
	p->zeros = zeros->data;
	p->bias = bias->data;
	p->residual = residual->data;
	return NULL;
}

/* Allocates the result. */
static status make_result(void *context, struct product *p, const struct tensor *inputs, bool unsqueezed)
{
	const struct tensor *like = p->residual ? &inputs[RESIDUAL] : &inputs[0];
	int64_t dims[MOST_DIMS + 1] = { 1 }, *shape = unsqueezed ? dims + 1 : dims;
	void *out = NULL;
	status failed;

	memcpy(shape, like->dims, like->rank * sizeof(*dims));
	shape[like->rank - 1] = (int64_t)p->n;
	if ((failed = CALL(OUTPUT, context, (size_t)0, dims, like->rank + unsqueezed, &out)))
		return failed;
	return CALL(TENSOR_DATA, out, (void **)&p->out);
}

/* A product on several threads. One group of rows is rounded by whichever thread begins; the others then wait for it. */
struct work {
	struct product p;
	atomic_bool begun, rounded;
};

static void piece(void *given, size_t index)
{
	struct work *work = given;

	if (!atomic_load_explicit(&work->rounded, memory_order_acquire)) {
		if (atomic_exchange(&work->begun, true)) {
			product_await(&work->p, index, &work->rounded);
		} else {
			product_quantize(&work->p, 0);
			atomic_store_explicit(&work->rounded, true, memory_order_release);
		}
	}
	product_piece(&work->p, index);
}

static void round_rows(void *work, size_t group)
{
	product_quantize(&((struct work *)work)->p, group);
}

static status multiply(void *context, struct work *work)
{
	const size_t groups = product_row_groups(&work->p), pieces = product_pieces(&work->p);
	void *room = product_room(&work->p);
	status failed = NULL;

	if (!room)
		return refusal(FAIL, "BlockMatMul: no memory");
	if (groups > 1) {
		failed = CALL(PARALLEL_FOR, context, round_rows, groups, (size_t)0, (void *)work);
		work->begun = work->rounded = true;
	}
	if (!failed)
		/* Pieces go to whichever thread is free: a preempted thread delays the others by one piece only. */
		failed = CALL(PARALLEL_FOR, context, piece, pieces, pieces, (void *)work);
	free(room);
	return failed;
}

static status compute(void *kernel, void *context)
{
	const struct attributes *attributes = kernel;
	struct work work = { .p = { .bits = (size_t)attributes->bits, .gated = attributes->gated } };
	struct tensor inputs[INPUTS];
	const char *why;
	status failed;

	for (size_t i = 0; i < INPUTS; i++)
		if ((failed = read_input(context, i, &inputs[i])))
			return failed;
	if ((why = describe(&work.p, inputs)))
		return refusal(INVALID_ARGUMENT, why);
	if ((failed = make_result(context, &work.p, inputs, attributes->unsqueezed)))
		return failed;
	return work.p.m && work.p.n ? multiply(context, &work) : NULL;
}

static status create(const struct op *op, const function *api, const void *info, void **kernel)
{
	struct attributes read, *attributes;
	status failed;

	if ((failed = CALL(ATTRIBUTE_INT64, info, "bits", &read.bits)) || (failed = CALL(ATTRIBUTE_INT64, info, "gated", &read.gated)) ||
	    (failed = CALL(ATTRIBUTE_INT64, info, "unsqueezed", &read.unsqueezed)))
		return failed;
	if (read.bits != 4 && read.bits != 8)
		return refusal(INVALID_ARGUMENT, "BlockMatMul knows 4 and 8 bits");
	if (!(attributes = malloc(sizeof(*attributes))))
		return refusal(FAIL, "BlockMatMul: no memory");
	*attributes = read;
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
	if (index == SCALES)
		return FLOAT16;
	return index == VALUES || index == ZEROS ? UINT8 : FLOAT;
}

static size_t input_count(const struct op *op)
{
	return INPUTS;
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
	return index >= ZEROS ? OPTIONAL : REQUIRED;
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

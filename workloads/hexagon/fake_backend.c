/*
 * The outline of llama.cpp with its Hexagon backend: graphs of nodes in ggml's layout, sent to the queue in messages of LAYOUT as the
 * backend sends them, fused likewise, and nothing computed. fake_backend STEPS LAYERS [BATCH_OPS [FALLBACK_US]]. Prints each operator
 * that it sent: step, position in its batch, opcode, types of its nodes, name of the last one. With FALLBACK_US the CPU computes an
 * operator amid each layer, between two batches, for so much CPU time: "cpu", step, ns of CPU time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fastrpc.h"
#include "messages.h"

#define KEEP(x) __asm__ volatile("" : : "r"(x) : "memory")
#define OUTLINE __attribute__((noinline, noclone))
#define MOST 4096

struct tensor {
	uint32_t type;
	void *buffer;
	int64_t ne[4];
	uint64_t nb[4];
	uint32_t op;
	int32_t params[16], flags;
	struct tensor *src[10], *view_src;
	uint64_t view_offs;
	void *data;
	char name[64];
	void *extra;
	char padding[16];
};

struct graph {
	int size, n_nodes, n_leafs;
	struct tensor **nodes;
};

struct backend {
	const unsigned char *guid;
};

static const unsigned char hexagon_guid[16] = {0x7b, 0x57, 0xdc, 0xaf, 0xde, 0x12, 0x1d, 0x49, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11};
static const unsigned char cpu_guid[16] = {0xaa, 0x67, 0xc7, 0x43, 0x96, 0xe6, 0xa3, 0x8a, 0xe3, 0xaf, 0xea, 0x92, 0x36, 0xbc, 0xfc, 0x89};
enum { NONE, DUP, ADD, MUL, RMS_NORM, MUL_MAT, VIEW, ROPE, SOFT_MAX };
const char *const GGML_OP_NAME[] = {"NONE", "DUP", "ADD", "MUL", "RMS_NORM", "MUL_MAT", "VIEW", "ROPE", "SOFT_MAX"};
enum { OP_ADD = 1, OP_MUL_MAT = 4, OP_MUL_MAT_NX = 6, OP_RMS_NORM_MUL = 10, OP_ROPE = 28 };

static struct tensor weights = {.name = "token_embd.weight"}, tensors[MOST], *nodes[MOST];
static dspqueue_t queue;
static uint8_t *memory, *message;
static uint64_t sent;
static int most_ops = 1280, fallback_us, step;

static struct batch {
	struct op_desc ops[1280];
	struct tensor_desc tensors[1280];
	uint32_t n;
} batch;

/* Sends what is in the batch and waits until it is done. */
static void flush(void)
{
	struct request request = {.seq = ++sent, .n_bufs = 1, .n_tensors = batch.n, .n_ops = batch.n};
	struct buffer_desc buffer = {.base = (uintptr_t)memory, .size = 1 << 20};
	struct response response;
	struct dspqueue_buffer given = {.ptr = message}, answered;
	uint32_t flags, count, length;
	uint8_t *at = message;

	if (!batch.n)
		return;
	at = mempcpy(at, &buffer, sizeof(buffer));
	at = mempcpy(at, batch.tensors, batch.n * sizeof(batch.tensors[0]));
	at = mempcpy(at, batch.ops, batch.n * sizeof(batch.ops[0]));
	given.size = at - message + batch.n * sizeof(struct op_profile);
	if (dspqueue_write(queue, 0, 1, &given, sizeof(request), (uint8_t *)&request, 1000000))
		exit(1);
	while (dspqueue_read(queue, &flags, 1, &count, &answered, sizeof(response), &length, (uint8_t *)&response, 1000000))
		;
	batch.n = 0;
}

static void push(uint32_t opcode, const char *types, struct tensor *makes, struct tensor *last)
{
	struct tensor_desc *tensor;
	struct op_desc *op;

	if (batch.n == (uint32_t)most_ops)
		flush();
	tensor = memset(&batch.tensors[batch.n], 0, sizeof(*tensor));
	op = memset(&batch.ops[batch.n], 0, sizeof(*op));
	tensor->data = (uint8_t *)makes->data - memory;
	for (int i = 0; i < 4; i++)
		tensor->ne[i] = makes->ne[i];
	op->opcode = opcode;
	FIRST_DST(op) = batch.n;
	printf("%d %u %u %s %s\n", step, batch.n++, opcode, types, last->name);
}

static struct tensor *node(struct graph *graph, uint32_t op, int place, const char *name, int layer)
{
	struct tensor *tensor = &tensors[graph->n_nodes];

	tensor->op = op;
	tensor->src[0] = graph->n_nodes ? tensor - 1 : &weights;
	tensor->data = memory + 4096 * place;
	tensor->ne[0] = 64;
	tensor->ne[1] = step ? 1 : 5;
	tensor->ne[2] = tensor->ne[3] = 1;
	snprintf(tensor->name, sizeof(tensor->name), "%s-%d", name, layer);
	graph->nodes[graph->n_nodes++] = tensor;
	return tensor;
}

/* Results share places, as an allocator lets them, so that a fused operator's nodes have one address. */
static void layer(struct graph *graph, int i)
{
	node(graph, RMS_NORM, 1, "norm", i);
	node(graph, MUL, 1, "attn_norm", i);
	node(graph, MUL_MAT, 2, "Qcur", i);
	node(graph, MUL_MAT, 3, "Kcur", i);
	node(graph, MUL_MAT, 4, "Vcur", i);
	node(graph, ADD, 2, "Qcur", i);
	node(graph, VIEW, 2, "Qcur (view)", i);
	node(graph, ROPE, 5, "Qcur", i);
	if (fallback_us)
		node(graph, SOFT_MAX, 6, "kq_soft_max", i);
	node(graph, MUL_MAT, 1, "attn_out", i);
	node(graph, ADD, 1, "l_out", i);
}

static uint64_t cpu_time(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

/* Puts the operator of the first of these nodes into the batch; answers how many of them it computes. */
static int push_at(struct tensor **of)
{
	switch (of[0]->op) {
	case RMS_NORM:
		push(OP_RMS_NORM_MUL, "RMS_NORM+MUL", of[0], of[1]);
		return 2;
	case MUL_MAT:
		if (of[1]->op == MUL_MAT) {
			push(OP_MUL_MAT_NX, "MUL_MAT+MUL_MAT+MUL_MAT", of[0], of[2]);
			return 3;
		}
		push(OP_MUL_MAT, "MUL_MAT", of[0], of[0]);
		return 1;
	case ADD:
		push(OP_ADD, "ADD", of[0], of[0]);
		return 1;
	case ROPE:
		push(OP_ROPE, "ROPE", of[0], of[0]);
		return 1;
	}
	return 1; /* a view */
}

/* void ggml_compute_forward(struct ggml_compute_params *, struct ggml_tensor *) */
OUTLINE void ggml_compute_forward(void *params, struct tensor *tensor)
{
	uint64_t begun = cpu_time(), spent;

	KEEP(params);
	KEEP(tensor);
	while ((spent = cpu_time() - begun) < 1000ULL * fallback_us)
		;
	printf("cpu %d %lu\n", step, spent);
}

/* enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t, struct ggml_cgraph *) */
OUTLINE int ggml_backend_graph_compute_async(struct backend *backend, struct graph *graph)
{
	if (backend->guid == cpu_guid)
		for (int i = 0; i < graph->n_nodes; i++)
			ggml_compute_forward(graph, graph->nodes[i]);
	else
		for (int i = 0; i < graph->n_nodes; i += push_at(graph->nodes + i))
			;
	return 0;
}

/* The parts of a graph as a scheduler cuts it: what the CPU computes stands alone, and waits for what is before it. */
OUTLINE int llama_decode(void *context, struct graph *graph)
{
	static struct graph parts[MOST];
	struct backend hexagon = {hexagon_guid}, cpu = {cpu_guid};
	int n = 0;

	KEEP(context);
	for (int first = 0, end; first < graph->n_nodes; first = end) {
		int on_cpu = graph->nodes[first]->op == SOFT_MAX;

		for (end = first + 1; end < graph->n_nodes && !on_cpu && graph->nodes[end]->op != SOFT_MAX; end++)
			;
		parts[n] = (struct graph){.nodes = graph->nodes + first, .n_nodes = end - first};
		ggml_backend_graph_compute_async(on_cpu ? &cpu : &hexagon, &parts[n++]);
		flush();
	}
	return 0;
}

int main(int argc, char **argv)
{
	remote_handle64 handle;
	uint32_t mode = 1;
	remote_arg profiler = {.buf = {&mode, sizeof(mode)}};

	KEEP(GGML_OP_NAME);
	KEEP((long)(*(volatile const char *)hexagon_guid + *(volatile const char *)cpu_guid)); /* ggml compares them when it starts */
	if (argc > 3)
		most_ops = atoi(argv[3]);
	if (argc > 4)
		fallback_us = atoi(argv[4]);
	memory = rpcmem_alloc2(RPCMEM_HEAP_ID_SYSTEM, RPCMEM_DEFAULT_FLAGS, 1 << 20);
	message = rpcmem_alloc2(RPCMEM_HEAP_ID_SYSTEM, RPCMEM_DEFAULT_FLAGS, 1 << 20);
	fastrpc_mmap(CDSP_DOMAIN_ID, rpcmem_to_fd(memory), memory, 0, 1 << 20, FASTRPC_MAP_FD);
	remote_handle64_open("standin", &handle);
	remote_handle64_invoke(handle, REMOTE_SCALARS_MAKE(6, 1, 0), &profiler);
	dspqueue_create(CDSP_DOMAIN_ID, 0, 0, 0, 0, 0, 0, &queue);
	for (step = 0; step < atoi(argv[1]); step++) {
		struct graph graph = {.nodes = nodes};

		for (int i = 0; i < atoi(argv[2]); i++)
			layer(&graph, i);
		llama_decode(0, &graph);
	}
	dspqueue_close(queue);
	return 0;
}

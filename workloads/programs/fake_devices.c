/*
 * A llama.cpp with another device, which takes a graph's operators one by one by the function SYMBOL: fake_devices STEPS. Each step
 * computes a graph of LAYERS times a product and a sum on it, and waits for it; nothing is computed. IDENTITY are the first bytes
 * by which the backend is known. Prints the operators of a graph: name of the operator, of the result, dims.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAYERS 3
#define KEEP(x) __asm__ volatile("" : : "r"(x) : "memory")
#define OUTLINE __attribute__((noinline, noclone))

struct tensor {
	int type, pad;
	void *buffer;
	long ne[4];
	unsigned long nb[4];
	int op, op_params[16], flags;
	struct tensor *src[10], *view_src;
	unsigned long view_offset;
	void *data;
	char name[64];
};

struct graph {
	int size, n_nodes, n_leafs;
	struct tensor **nodes;
};

struct backend {
	const unsigned char *identity;
	int (*graph_compute)(struct backend *, struct graph *);
};

struct batch {
	int n_tokens;
	void *token, *embd, *pos, *rest[3];
};

enum { ADD = 2, MUL_MAT = 3 };
const char *const GGML_OP_NAME[] = {"NONE", "DUP", "ADD", "MUL_MAT"};
static const unsigned char identity[16] = {IDENTITY};
static struct tensor weight = {.name = "blk.0.weight", .ne = {8, 16, 1, 1}}, nodes[2 * LAYERS];
static struct tensor *order[2 * LAYERS];

OUTLINE int compute_forward(struct backend *, struct tensor *) __asm__(SYMBOL);
OUTLINE int compute_forward(struct backend *backend, struct tensor *result)
{
	KEEP(backend);
	KEEP(result);
	usleep(100);
	return 1;
}

static int graph_compute(struct backend *backend, struct graph *graph)
{
	for (int i = 0; i < graph->n_nodes; i++)
		compute_forward(backend, graph->nodes[i]);
	return 0;
}

OUTLINE int ggml_backend_graph_compute_async(struct backend *backend, struct graph *graph)
{
	int status = backend->graph_compute(backend, graph);

	KEEP((long)status);
	return status;
}

OUTLINE void ggml_backend_synchronize(struct backend *backend)
{
	KEEP(backend);
	usleep(300);
}

OUTLINE int llama_decode(struct backend *backend, struct batch batch)
{
	struct graph graph = {2 * LAYERS, 2 * LAYERS, 0, order};

	KEEP(batch.token);
	ggml_backend_graph_compute_async(backend, &graph);
	ggml_backend_synchronize(backend);
	return 0;
}

static void describe(struct tensor *node, int layer, int op, struct tensor *source)
{
	*node = (struct tensor){.op = op, .ne = {16, 1 + layer, 1, 1}, .src = {source, op == ADD ? source : &weight}, .flags = 16};
	snprintf(node->name, sizeof(node->name), "%s-%d", op == ADD ? "l_out" : "ffn_out", layer);
	printf("%s %s %ldx%ldx1x1\n", GGML_OP_NAME[op], node->name, node->ne[0], node->ne[1]);
}

int main(int argc, char **argv)
{
	struct backend device = {identity, graph_compute};
	struct batch batch = {1, 0, 0, 0, {0}};

	KEEP((long)*(volatile const char *)identity); /* ggml compares them when it starts */
	for (int i = 0; i < 2 * LAYERS; i++) {
		order[i] = &nodes[i];
		describe(order[i], i / 2, i % 2 ? ADD : MUL_MAT, i ? order[i - 1] : &weight);
	}
	for (int step = 0; argc > 1 && step < atoi(argv[1]); step++)
		llama_decode(&device, batch);
	return 0;
}

/*
 * The outline of llama.cpp: its functions' names, arguments and texts, and nothing computed. fake_ggml STEPS GRAPHS [MICROSECONDS],
 * which it rests behind each step. A graph passes a wrapper, the generic entry, a backend's own function by a jump, and on the
 * CPU one more; with INLINED only the backend's own.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define KEEP(x) __asm__ volatile("" : : "r"(x) : "memory")
#define OUTLINE __attribute__((noinline, noclone))

struct batch {
	int n_tokens;
	void *token, *embd;
	int *pos;
	void *rest[3];
};

struct graph {
	int size, n_nodes, n_leafs;
	void **nodes;
};

struct backend {
	const unsigned char *guid;
	int (*graph_compute)(struct backend *, void *);
};

static const unsigned char cpu_guid[16] = {0xaa, 0x67, 0xc7, 0x43, 0x96, 0xe6, 0xa3, 0x8a, 0xe3, 0xaf, 0xea, 0x92, 0x36, 0xbc, 0xfc, 0x89};
static const unsigned char cuda_guid[16] = {0x2c, 0xdd, 0xe8, 0x1c, 0x65, 0xb3, 0x65, 0x73, 0x6a, 0x12, 0x88, 0x61, 0x1c, 0xc9, 0xdc, 0x25};
static const unsigned char own_guid[16] = {1, 2, 3};
const char *const GGML_OP_NAME[] = {"NONE", "DUP", "ADD", "MUL_MAT", "GLU"};

OUTLINE void ggml_barrier(int *threads)
{
	if (*threads == 1)
		return;
#ifdef _OPENMP
#pragma omp barrier
#endif
}

OUTLINE int ggml_graph_compute(void *graph, void *plan)
{
	int threads = 2;

	if (!plan) {
		fprintf(stderr, "GGML_ASSERT(%s) failed", "cplan->work_size == 0 || cplan->work_data != NULL");
		abort();
	}
	KEEP(graph);
#ifdef _OPENMP
#pragma omp parallel num_threads(2)
#endif
	ggml_barrier(&threads);
	return 0;
}

/* As a C++ compiler names functions that are local to a file. */
OUTLINE int cpu_compute(struct backend *, void *) __asm__("_ZL30ggml_backend_cpu_graph_computeP12ggml_backendP11ggml_cgraph");
OUTLINE int cuda_compute(struct backend *, void *) __asm__("_ZL31ggml_backend_cuda_graph_computeP12ggml_backendP11ggml_cgraph");

OUTLINE int cpu_compute(struct backend *backend, void *graph)
{
	int status = ggml_graph_compute(graph, backend);

	KEEP((long)status);
	return status;
}

OUTLINE int cuda_compute(struct backend *backend, void *graph)
{
	KEEP(backend);
	KEEP(graph);
	return 3;
}

OUTLINE int ggml_backend_graph_compute_async(struct backend *backend, void *graph)
{
	return backend->graph_compute(backend, graph);
}

OUTLINE int ggml_backend_graph_compute(struct backend *backend, void *graph)
{
	int status = ggml_backend_graph_compute_async(backend, graph);

	KEEP((long)status);
	return status;
}

OUTLINE int llama_decode(void *context, struct batch batch)
{
	int status = batch.pos[0] < 0;

	KEEP(context);
	if (status)
		fprintf(stderr, "%s: failed to decode, ret = %d\n", __func__, status);
	return status;
}

OUTLINE int llama_encode(void *context, struct batch batch)
{
	int status = batch.pos[0] < 0;

	KEEP(context);
	if (status)
		fprintf(stderr, "%s: failed to encode, ret = %d\n", __func__, status);
	return status;
}

int main(int argc, char **argv)
{
	struct backend cpu = {cpu_guid, cpu_compute}, cuda = {cuda_guid, cuda_compute}, own = {own_guid, cuda_compute};
	struct graph graphs[3] = {0}; /* of no nodes */

	KEEP(GGML_OP_NAME);
	KEEP((long)(*(volatile const char *)cpu_guid + *(volatile const char *)cuda_guid)); /* ggml compares them when it starts */
	for (int step = 0; step < atoi(argv[1]); step++) {
		struct batch batch = {step ? 1 : 5, 0, 0, &step, {0}};

		if (step)
			llama_decode(0, batch);
		else
			llama_encode(0, batch);
		for (int i = 0; i < atoi(argv[2]); i++) {
#ifdef INLINED
			cpu.graph_compute(&cpu, &graphs[0]);
#else
			ggml_backend_graph_compute(&cpu, &graphs[0]);
			ggml_backend_graph_compute_async(&cuda, &graphs[1]);
			ggml_backend_graph_compute_async(&own, &graphs[2]);
			ggml_graph_compute(&graphs[0], &cpu);
#endif
		}
		usleep(argc > 3 ? atoi(argv[3]) : 0);
	}
	return 0;
}

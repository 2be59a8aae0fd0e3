/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Poses as llama.cpp: truth_llama LOG STEPS PROMPT PAUSE_US [PLANT]. Linked into one program, or a library and a program (truth_llama_main.c).
 *
 * Its functions have llama.cpp's names and arguments and are called in the order in which ggml's CPU backend calls them: for
 * every node every thread asks the extra buffers, computes, and meets the others at the barrier; nodes that only rename memory
 * are passed over, a norm and its product are computed in one go, and a matrix product has a barrier of its own inside.
 * Thread 0 computes for 200 us where thread 1 computes for 50, and the other way round in every second node, touching a known
 * number of fresh pages. GRADIENT, COUNTERS and ONE_CALL make tensors and the loop those of builds of 2024, STRANGE and TWICE
 * those of none; NAMELESS takes steps by a function that is none of llama.cpp's; with REST_US thread 0 rests, longer and longer, in front of each
 * layer and of the output. With PLANT (plants.h) every operator is short on both threads, and one of each layer loses time. Each layer has a router whose choice lies in memory, its rows further apart than they are long, and
 * three operators that use it.
 */
#include "plants.h"
#include <stdatomic.h>

#define LAYERS 2
#define EXPERTS 8
#define TOP_K 2
#define MAX_PROMPT 512
#define LAYER_NODES 8
#define PLANTED_NODE 6 /* ffn_moe_up */
#define NODES (LAYERS * LAYER_NODES + 2)
#define LONG_NS 200000
#define SHORT_NS 50000
#define THREADS 2
#define CACHE_LINE 64

enum { OP_NONE, OP_DUP, OP_ADD, OP_GET_ROWS, OP_MUL_MAT, OP_MUL_MAT_ID, OP_RESHAPE, OP_ARGSORT, OP_RMS_NORM, OP_MUL, OP_COUNT };
enum { TYPE_F32 = 0, TYPE_I32 = 26 };
enum { FLAG_COMPUTE = 16 };

struct ggml_tensor {
	u32 type;
	void *buffer;
	s64 ne[4];
	u64 nb[4];
	u32 op;
	s32 op_params[16];
	s32 flags;
#ifdef STRANGE
	u64 strange[4];
#endif
#ifdef GRADIENT
	struct ggml_tensor *grad;
#endif
	struct ggml_tensor *src[10];
#ifdef COUNTERS
	int runs;
	s64 cycles, time_us;
#endif
	struct ggml_tensor *view_src;
	u64 view_offs;
	void *data;
	char name[64];
	void *extra;
	char padding[8];
};

struct ggml_cgraph {
	int size, n_nodes, n_leafs;
	struct ggml_tensor **nodes;
};

struct ggml_threadpool {
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	struct ggml_cgraph *cgraph;
	void *cplan;
	atomic_int n_graph;
	_Alignas(CACHE_LINE) atomic_int n_barrier;
	_Alignas(CACHE_LINE) atomic_int n_barrier_passed;
};

struct ggml_compute_params {
	int ith, nth;
	size_t wsize;
	void *wdata;
	struct ggml_threadpool *threadpool;
	_Bool use_ref;
};

struct llama_batch {
	s32 n_tokens;
	s32 *token;
	float *embd;
	s32 *pos;
	s32 *n_seq_id;
	s32 **seq_id;
	signed char *logits;
};

const char *ggml_op_name(int op);
#ifdef NAMELESS
#define llama_decode take_step
#endif
int llama_decode(void *context, struct llama_batch batch);
int ggml_backend_graph_compute_async(void *backend, struct ggml_cgraph *graph);
_Bool ggml_cpu_extra_compute_forward(struct ggml_compute_params *params, struct ggml_tensor *tensor);
void ggml_compute_forward_rms_norm_mul_fused(struct ggml_compute_params *params, struct ggml_tensor *norm, struct ggml_tensor *product);
void ggml_barrier(struct ggml_threadpool *pool);
int truth(int count, char **arguments);

static struct ggml_threadpool pool;
static struct ggml_tensor tensors[NODES + 2 * LAYERS];
static struct ggml_tensor *nodes[NODES];
static struct ggml_cgraph graph = {NODES, NODES, 0, nodes};
static struct log logs[THREADS];
static s32 choices[LAYERS][MAX_PROMPT][EXPERTS];
static atomic_int work, ready, step_number;

static const char *GGML_OP_NAME[OP_COUNT] = {"NONE",	"DUP",	   "ADD",      "GET_ROWS", "MUL_MAT",
						"MUL_MAT_ID", "RESHAPE", "ARGSORT", "RMS_NORM", "MUL"};

const char *ggml_op_name(int op)
{
	return op < OP_COUNT ? GGML_OP_NAME[op] : "";
}

__attribute__((noinline)) static void meet(struct ggml_threadpool *p)
{
	int passed = atomic_load(&p->n_barrier_passed);

	if (atomic_fetch_add(&p->n_barrier, 1) == THREADS - 1) {
		atomic_store(&p->n_barrier, 0);
		atomic_fetch_add(&p->n_barrier_passed, 1);
		return;
	}
	while (atomic_load(&p->n_barrier_passed) == passed)
		;
}

/* A short function that leaves by a jump, as where OpenMP provides the barrier. */
__attribute__((noinline)) void ggml_barrier(struct ggml_threadpool *p)
{
	if ((atomic_load_explicit(&p->n_graph, memory_order_relaxed) & 0xffff) == 1)
		return;
	meet(p);
}

#if defined(__x86_64__)
#define SAVED_REGISTER "rbx"
#else
#define SAVED_REGISTER "x19"
#endif

/* Its first instruction saves a register, as the real one's does. */
__attribute__((noinline)) _Bool ggml_cpu_extra_compute_forward(struct ggml_compute_params *params, struct ggml_tensor *tensor)
{
	__asm__ volatile("" : : "r"(params), "r"(tensor) : "memory", SAVED_REGISTER);
	return 0;
}

__attribute__((noinline)) void ggml_compute_forward_rms_norm_mul_fused(struct ggml_compute_params *params, struct ggml_tensor *norm,
								       struct ggml_tensor *product)
{
	__asm__ volatile("" : : "r"(params), "r"(norm), "r"(product) : "memory", SAVED_REGISTER);
}

/* Long on one thread and short on the other; which one changes from node to node. */
__attribute__((noinline)) static void compute(struct ggml_compute_params *params, struct ggml_tensor *node, int n, u64 since)
{
	struct log *log = &logs[params->ith];

	touch(log, (n + params->ith) % 3);
	if (node->op == OP_MUL_MAT)
		ggml_barrier(params->threadpool);
	if (plant.thread < 0) {
		busy_until(since + ((n + params->ith) % 2 ? SHORT_NS : LONG_NS));
		return;
	}
	compute_until(log, step_number, since + planted_ns(params->ith, SHORT_NS));
	if (node->op == OP_MUL_MAT_ID && n % LAYER_NODES == PLANTED_NODE)
		plant_within(log, params->ith, step_number);
}

static void compute_graph(struct ggml_threadpool *p, int ith)
{
	struct ggml_compute_params params = {ith, THREADS, 0, NULL, p, 0};
	const struct ggml_cgraph *graph = p->cgraph;
	struct log *log = &logs[ith];
	struct row *row = NULL;

	for (int n = 0; n < graph->n_nodes; n++) {
		struct ggml_tensor *node = graph->nodes[n];

#ifdef REST_US
		if (!ith && n % LAYER_NODES == 1)
			usleep((1 + n / LAYER_NODES) * REST_US);
#endif
		if (node->op == OP_NONE || node->op == OP_RESHAPE || !(node->flags & FLAG_COMPUTE))
			continue;
		row = row_open(log, "op", atomic_load(&step_number), n);
		if (node->op == OP_RMS_NORM) {
			BEGIN(row, ggml_compute_forward_rms_norm_mul_fused(&params, node, graph->nodes[n + 1]));
			n++;
		} else {
			BEGIN(row, ggml_cpu_extra_compute_forward(&params, node));
		}
		compute(&params, node, n, row->after_begin);
#ifdef TWICE
		for (int i = 0; i < 2; i++)
#endif
#if !defined(ONE_CALL) && !defined(TWICE)
			if (n + 1 < graph->n_nodes)
#endif
				END(row, ggml_barrier(p));
	}
#if !defined(ONE_CALL) && !defined(TWICE)
	END(row, ggml_barrier(p)); /* the last node is one that is computed */
#endif
}

static void *worker(void *argument)
{
	int seen = 0;

	(void)argument;
	log_open(&logs[1]);
	plant_thread(1);
	atomic_store(&ready, 1);
	for (;;) {
		if (plant.thread >= 0)
			await_step(&logs[1]);
		while (atomic_load(&work) == seen)
			;
		seen = atomic_load(&work);
		if (seen < 0)
			return NULL;
		compute_graph(&pool, 1);
		atomic_fetch_add(&ready, 1);
	}
}

__attribute__((noinline)) int ggml_backend_graph_compute_async(void *backend, struct ggml_cgraph *g)
{
	int done = atomic_load(&ready);

	(void)backend;
	pool.cgraph = g;
	atomic_store(&pool.n_graph, THREADS);
	atomic_fetch_add(&work, 1);
	compute_graph(&pool, 0);
	while (atomic_load(&ready) == done)
		;
	return 0;
}

/* What the router of a layer chooses in a step; the test knows the rule. */
static void route(int step, int layer, int rows)
{
	for (int row = 0; row < rows; row++)
		for (int k = 0; k < EXPERTS; k++)
			choices[layer][row][k] = (step + row + 3 * layer + k) % EXPERTS;
}

__attribute__((noinline)) int llama_decode(void *context, struct llama_batch batch)
{
	struct row *row = row_open(&logs[0], "graph", step_number, batch.n_tokens);

	for (int i = 0; i < NODES + 2 * LAYERS; i++)
		if (tensors[i].op != OP_NONE)
			tensors[i].ne[1] = batch.n_tokens;
	nodes[0]->src[1]->ne[0] = batch.n_tokens;
	for (int layer = 0; layer < LAYERS; layer++)
		route(step_number, layer, batch.n_tokens);
	BEGIN(row, (void)0);
	ggml_backend_graph_compute_async(context, &graph);
	END(row, (void)0);
	return (int)(intptr_t)context;
}

static struct ggml_tensor *tensor(int i, u32 op, const char *name, int layer, s64 width)
{
	struct ggml_tensor *t = &tensors[i];

	t->op = op;
	t->flags = op == OP_NONE ? 0 : FLAG_COMPUTE;
	t->ne[0] = width;
	t->ne[1] = t->ne[2] = t->ne[3] = 1;
	if (layer < 0)
		snprintf(t->name, sizeof(t->name), "%s", name);
	else
		snprintf(t->name, sizeof(t->name), "%s-%d", name, layer);
	return t;
}

static struct ggml_tensor *node(int at, u32 op, const char *name, int layer, s64 width, struct ggml_tensor *weight,
				struct ggml_tensor *input)
{
	nodes[at] = tensor(at, op, name, layer, width);
	nodes[at]->src[0] = weight ? weight : input;
	nodes[at]->src[1] = weight ? input : NULL;
	return nodes[at];
}

static struct ggml_tensor *build_layer(int layer, struct ggml_tensor *input)
{
	static const char *const names[] = {"ffn_moe_gate", "ffn_moe_up", "ffn_moe_down"};
	struct ggml_tensor *weight = tensor(NODES + 2 * layer, OP_NONE, "blk.weight", -1, 64), *sorted, *last;
	int at = 1 + LAYER_NODES * layer;

	last = node(at, OP_RMS_NORM, "norm", layer, 32, NULL, input);
	last = node(at + 1, OP_MUL, "ffn_norm", layer, 32, last, weight);
	last = node(at + 2, OP_MUL_MAT, "ffn_moe_logits", layer, EXPERTS, weight, last);
	sorted = node(at + 3, OP_ARGSORT, "ffn_moe_argsort", layer, TOP_K, NULL, last);
	sorted->type = TYPE_I32;
	sorted->nb[0] = 4;
	sorted->nb[1] = EXPERTS * 4;
	sorted->data = choices[layer];
	for (int i = 0; i < 3; i++) {
		last = node(at + 4 + i, OP_MUL_MAT_ID, names[i], layer, 32, weight, nodes[at + 1]);
		last->src[2] = sorted;
	}
	return node(at + 7, OP_RESHAPE, "ffn_out", layer, 32, NULL, last);
}

static void build(void)
{
	struct ggml_tensor *tokens = tensor(NODES + 1, OP_NONE, "tokens", -1, 1);
	struct ggml_tensor *last = node(0, OP_GET_ROWS, "embd", -1, 32, tensor(NODES + 3, OP_NONE, "token_embd.weight", -1, 32), tokens);

	tokens->type = TYPE_I32;
	for (int layer = 0; layer < LAYERS; layer++)
		last = build_layer(layer, last);
	node(NODES - 1, OP_MUL_MAT, "result_output", -1, 64, NULL, last);
}

static void decode_all(int steps, int prompt, int pause_us)
{
	static s32 token[MAX_PROMPT], pos[MAX_PROMPT];

	for (int step = 0; step < steps; step++) {
		struct llama_batch batch = {step ? 1 : prompt, token, NULL, pos, NULL, NULL, NULL};
		struct row *row = row_open(&logs[0], "token", step, batch.n_tokens), *delay = row_open(&logs[0], "delay", step, run_delay());
		int result = 0;

		atomic_store(&step_number, step);
		plant_step();
		pos[0] = step ? prompt + step - 1 : 0;
		BEGIN(row, (void)0);
		result = llama_decode(NULL, batch);
		END(row, (void)0);
		delay->detail = run_delay() - delay->detail;
		if (result)
			abort();
		usleep(pause_us);
	}
}

int truth(int count, char **arguments)
{
	char cold_path[4096];
	pthread_t thread;
	FILE *out;

	if (count < 5)
		return 2;
	log_open(&logs[0]);
	if (count > 5)
		plant_open(arguments[5], strcat(strcpy(cold_path, arguments[1]), ".cold"));
	build();
	pthread_create(&thread, NULL, worker, NULL);
	while (!atomic_load(&ready))
		;
	plant_thread(0); /* only now: a new thread begins on its maker's CPU */
	decode_all(atoi(arguments[2]), atoi(arguments[3]), atoi(arguments[4]));
	atomic_store(&work, -1);
	plant_step();
	pthread_join(thread, NULL);
	out = log_file(arguments[1]);
	log_write(out, &logs[0]);
	log_write(out, &logs[1]);
	return fclose(out);
}

/*
 * Drives a real llama.cpp through its C API where there is no Python: llama_steps LIBRARY MODEL PROMPT NEW PAUSE_MS [TOLD]
 *
 * LIBRARY is libllama.so, with its backends beside it. One step of PROMPT tokens, then NEW steps of one, greedily; a rest behind
 * each, for a tracer to learn from the first graphs. Prints the tokens that were made. With TOLD, llama.cpp's own evaluation
 * callback writes a line for each node that it is told of into that file: step, operator, name, dims, flags.
 *
 * Parameters of unknown size go by value as blocks that are larger than any version's (workloads/programs/llama_steps.py).
 */
#include <dlfcn.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VOCABULARY 512
#define THREADS 2

struct opaque {
	uint8_t bytes[1024];
};

struct batch {
	int32_t n_tokens;
	void *fields[6];
	int64_t rest[9];
};

struct tensor { /* the beginning of struct ggml_tensor, unchanged since 2023 */
	int32_t type;
	void *buffer;
	int64_t ne[4];
	size_t nb[4];
	int32_t op, params[16], flags;
};

static const char *(*name_of)(const void *);
static const char *(*operator_of)(int);
static FILE *told;
static int step;

static void *function(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (!found) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return found;
}

/* cb_eval: asked in front of a node whether its result is wanted; it is not, so the graph is not parted there. */
static bool tell(struct tensor *node, bool ask, void *unused)
{
	const int64_t *ne = node->ne;

	(void)unused;
	if (ask)
		fprintf(told, "%d\t%s\t%s\t%lldx%lldx%lldx%lld\t%d\n", step, operator_of(node->op), name_of(node), (long long)ne[0],
			(long long)ne[1], (long long)ne[2], (long long)ne[3], node->flags);
	return false;
}

/* `cb_eval` stands in front of its data and of the cache's two element types, F16 both. */
static void set_callback(struct opaque *params)
{
	static const int32_t mark[6] = {0, 0, 0, 0, 1, 1};
	void *callback = tell;

	for (size_t at = 0; at + sizeof(mark) <= sizeof(params->bytes); at += 8)
		if (!memcmp(params->bytes + at, mark, sizeof(mark))) {
			memcpy(params->bytes + at, &callback, sizeof(callback));
			return;
		}
	fprintf(stderr, "llama_context_params has changed\n");
	exit(1);
}

static int32_t best(const float *logits)
{
	int32_t most = 0;

	for (int32_t each = 1; each < VOCABULARY; each++)
		if (logits[each] > logits[most])
			most = each;
	return most;
}

static void *make_context(void *library, const char *path)
{
	struct opaque (*model_params)(void) = function(library, "llama_model_default_params");
	struct opaque (*context_params)(void) = function(library, "llama_context_default_params");
	void *(*load)(const char *, struct opaque) = function(library, "llama_model_load_from_file");
	void *(*init)(void *, struct opaque) = function(library, "llama_init_from_model");
	void (*set_threads)(void *, int32_t, int32_t) = function(library, "llama_set_n_threads");
	struct opaque params = context_params();
	void *context;

	if (told)
		set_callback(&params);
	context = init(load(path, model_params()), params);
	set_threads(context, THREADS, THREADS);
	return context;
}

static void take_steps(void *library, void *context, int prompt, int new, int pause_ms)
{
	struct batch (*batch_of)(int32_t *, int32_t) = function(library, "llama_batch_get_one");
	int32_t (*decode)(void *, struct batch) = function(library, "llama_decode");
	float *(*logits)(void *, int32_t) = function(library, "llama_get_logits_ith");
	int32_t *tokens = calloc(prompt, sizeof(*tokens));

	for (int each = 0; each < prompt; each++)
		tokens[each] = 7 * each % 500;
	for (step = 0; step <= new; step++) {
		int status = decode(context, batch_of(tokens, step ? 1 : prompt));

		if (status) {
			fprintf(stderr, "llama_decode: %d\n", status);
			exit(1);
		}
		tokens[0] = best(logits(context, -1));
		printf("%d%s", tokens[0], step < new ? " " : "\n");
		usleep(1000 * pause_ms);
	}
	free(tokens);
}

int main(int argc, char **argv)
{
	void *library = argc > 5 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;

	if (!library) {
		fprintf(stderr, "%s\n", argc > 5 ? dlerror() : "llama_steps LIBRARY MODEL PROMPT NEW PAUSE_MS [TOLD]");
		return 2;
	}
	name_of = function(library, "ggml_get_name");
	operator_of = function(library, "ggml_op_name");
	told = argc > 6 ? fopen(argv[6], "w") : NULL;
	((void (*)(const char *))function(library, "ggml_backend_load_all_from_path"))(dirname(strdup(argv[1])));
	((void (*)(void))function(library, "llama_backend_init"))();
	take_steps(library, make_context(library, argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
	return told && fclose(told);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Poses as MoEScope's runtime: truth_runtime LOG STEPS THREADS FILE.
 *
 * Every thread takes STEPS token steps. In each layer of a step stand, one within the other, a graph, an operator and an expert
 * run that lasts BUSY_NS and touches a known number of fresh pages; beside them a load, an eviction and a routing choice. Every
 * tenth step sleeps SLEEP_NS and reads one page of FILE that is not in memory. Choices follow a rule that the test knows.
 */
#include "truth.h"
#include "sites.h"
#include <pthread.h>

#define LAYERS 2
#define EXPERTS 8
#define TOP_K 2
#define BUSY_NS 60000
#define SLEEP_NS 3000000
#define FILE_PAGES 256
#define SEQ_OF_THREAD 1000000
#define RESULT 0x7000

static int steps;
static const char *file_path;

static struct thread {
	pthread_t handle;
	int number;
	struct log log;
	volatile char *mapped;
} threads[8];

/* A private file, none of whose pages is in memory. */
static volatile char *map_cold_file(int number)
{
	char path[512], page[PAGE] = {1};
	volatile char *mapped;
	int fd;

	snprintf(path, sizeof(path), "%s.%d", file_path, number);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	for (int i = 0; i < FILE_PAGES; i++)
		if (write(fd, page, PAGE) != PAGE)
			abort();
	fsync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	mapped = mmap(NULL, FILE_PAGES * PAGE, PROT_READ, MAP_SHARED, fd, 0);
	madvise((void *)mapped, FILE_PAGES * PAGE, MADV_RANDOM);
	close(fd);
	return mapped;
}

static void expert_run(struct thread *t, s64 seq, int layer, int expert)
{
	struct row *row = row_open(&t->log, "expert", seq, layer * 100 + expert);

	BEGIN(row, moescope_expert__begin(layer, expert, 1, 1 + seq % 3, 1, 0));
	busy_until(row->after_begin + BUSY_NS);
	touch(&t->log, (seq + layer) % 4);
	END(row, moescope_expert__end(layer, expert));
}

static void move_expert(struct thread *t, s64 seq, int layer, int expert)
{
	struct row *row = row_open(&t->log, "load", seq, layer * 100 + expert);

	BEGIN(row, moescope_load__begin(layer, expert, 4096 + expert, 1, 1));
	busy_until(row->after_begin + 5000);
	END(row, moescope_load__end(layer, expert, 4096 + expert, 9 * 4096));
	moescope_evict(layer, (expert + 1) % EXPERTS, 4096, 8 * 4096);
}

static void layer_run(struct thread *t, s64 seq, int layer)
{
	struct row *graph = row_open(&t->log, "graph", seq, layer), *op = row_open(&t->log, "op", seq, layer);
	uint16_t experts[TOP_K];
	float weights[TOP_K] = {0.75f, 0.25f};
	u64 sources[1] = {RESULT + layer - 1};

	for (int k = 0; k < TOP_K; k++)
		experts[k] = (seq + 3 * layer + k) % EXPERTS;
	moescope_route(layer, 1, TOP_K, experts, weights);
	BEGIN(graph, moescope_graph__begin(layer + 1, 4, layer, -1, 1, (8ULL << 32) | 1));
	BEGIN(op, moescope_op__begin(4, layer, 1, RESULT + layer, sources, 1));
	for (int k = 0; k < TOP_K; k++)
		expert_run(t, seq, layer, experts[k]);
	END(op, moescope_op__end(RESULT + layer, op->before_end));
	END(graph, moescope_graph__end(layer + 1, 0, 0)); /* does not say when */
	move_expert(t, seq, layer, experts[0]);
}

static void rest(struct thread *t, s64 seq, int step)
{
	struct timespec pause = {0, SLEEP_NS};
	struct row *row = row_open(&t->log, "sleep", seq, SLEEP_NS);

	BEGIN(row, (void)0);
	clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
	END(row, (void)0);
	(void)t->mapped[(size_t)(step % FILE_PAGES) * PAGE];
}

static void *run(void *argument)
{
	struct thread *t = argument;

	log_open(&t->log);
	t->mapped = map_cold_file(t->number);
	for (int step = 0; step < steps; step++) {
		s64 seq = t->number * SEQ_OF_THREAD + step;
		struct row *row = row_open(&t->log, "token", seq, seq + 7);

		BEGIN(row, moescope_token__begin(seq, 2, 1, step));
		for (int layer = 0; layer < LAYERS; layer++)
			layer_run(t, seq, layer);
		if (step % 10 == 9)
			rest(t, seq, step);
		END(row, moescope_token__end(seq, seq + 7, row->before_end));
	}
	return NULL;
}

int main(int count, char **arguments)
{
	int n_threads = count > 4 ? atoi(arguments[3]) : 0;
	FILE *out;

	if (n_threads < 1 || n_threads > 8)
		return 2;
	steps = atoi(arguments[2]);
	file_path = arguments[4];
	for (int i = 0; i < n_threads; i++) {
		threads[i].number = i;
		pthread_create(&threads[i].handle, NULL, run, &threads[i]);
	}
	for (int i = 0; i < n_threads; i++)
		pthread_join(threads[i].handle, NULL);
	out = log_file(arguments[1]);
	for (int i = 0; i < n_threads; i++)
		log_write(out, &threads[i].log);
	return fclose(out);
}

/*
 * A stand-in for BigMoeOnEdge's expert cache: functions under the names and with the arguments of its version 0.19.0 (own
 * definitions). A cache of HELD experts; misses are read matrix by matrix by two threads, every seventh request is read ahead.
 * Prints what it did, a row of JSON each: [action, layer, expert, matrix, bytes]. -DOTHER_VERSION renames init.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef OTHER_VERSION
#define PATHS "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#else
#define PATHS "RKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE"
#endif
#define OF(name) __asm__("_ZN4bmoe18ExpertStreamSource" name) __attribute__((noinline, noipa))
enum { LAYERS = 2, EXPERTS = 8, MATRICES = 3, HELD = 5, BYTES = 8192, REQUESTS = 60 };
struct job { char *to; uint64_t offset, bytes; int32_t flag; int16_t file; int32_t expert; int16_t layer; int8_t matrix; uint8_t ahead; };

static char (*weights)[EXPERTS][MATRICES][BYTES];
static int held[HELD], used; /* layer * EXPERTS + expert, the oldest first */
static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;

static void report(const char *action, int layer, int expert, int matrix, uint64_t bytes)
{
	pthread_mutex_lock(&output);
	printf("[\"%s\", %d, %d, %d, %ld]\n", action, layer, expert, matrix, (long)bytes);
	pthread_mutex_unlock(&output);
}

void init(void *this, void *paths, int n_expert) OF("4initE" PATHS "iS1_INS_12LayerExpertsESaISC_EERKNS_15MoeStreamConfigE");
void init(void *this, void *paths, int n_expert) { puts("[\"bmoe: expert streaming ON\", 0, 0, 0, 0]"); }

bool read_slice(void *this, int lane, const struct job *job) OF("10read_sliceEiRKNS0_5IoJobE");
bool read_slice(void *this, int lane, const struct job *job)
{
	for (uint64_t i = 0; i < job->bytes; i++)
		job->to[i] = (char)(job->offset + i);
	report(job->ahead ? "prefetch" : "demand", job->layer, job->expert, job->matrix, job->bytes);
	return true;
}

bool touch_entry(void *this, int layer, int expert, bool *hit, bool promote, int only) OF("11touch_entryEiiRbbi");
bool touch_entry(void *this, int layer, int expert, bool *hit, bool promote, int only)
{
	for (int i = 0; i < used; i++)
		*hit |= held[i] == layer * EXPERTS + expert;
	if (*hit)
		report("hit", layer, expert, -1, -1);
	return true;
}

void vm_evict(void *address, size_t bytes) __asm__("_ZN4bmoe3pio8vm_evictEPvm") __attribute__((noinline, noipa));
void vm_evict(void *address, size_t bytes) { *(volatile char *)address = 0; }

void evict_tail(void *this) OF("10evict_tailEv");
void evict_tail(void *this)
{
	int layer = held[0] / EXPERTS, expert = held[0] % EXPERTS;

	for (int m = 0; m < MATRICES; m++)
		vm_evict((char *)(((uintptr_t)weights[layer][expert][m] + 4095) & -4096), 4096);
	report("evict", layer, expert, -1, MATRICES * BYTES);
	for (int i = 1; i < used; i++)
		held[i - 1] = held[i];
	used--;
}

static void *read_last(void *job) { return read_slice(NULL, 1, job), NULL; }

static void load(int layer, int expert, bool ahead)
{
	struct job jobs[MATRICES];
	pthread_t lane;

	for (int m = 0; m < MATRICES; m++)
		jobs[m] = (struct job){weights[layer][expert][m], m, BYTES, -1, 0, expert, layer, m, ahead};
	pthread_create(&lane, NULL, read_last, &jobs[MATRICES - 1]);
	for (int m = 0; m < MATRICES - 1; m++)
		read_slice(NULL, 0, &jobs[m]);
	pthread_join(lane, NULL);
	held[used++] = layer * EXPERTS + expert;
}

int main(void)
{
	weights = (void *)((char *)malloc(LAYERS * EXPERTS * MATRICES * BYTES + 32) + 32);
	init(NULL, NULL, EXPERTS);
	for (int i = 0; i < REQUESTS; i++) {
		int layer = i % LAYERS, expert = i * i % 13 % EXPERTS;
		bool hit = false, ahead = i % 7 == 6;

		if (!ahead || used == 0)
			touch_entry(NULL, layer, expert, &hit, true, -1);
		for (int h = 0; ahead && h < used; h++)
			hit |= held[h] == layer * EXPERTS + expert;
		if (!hit && used == HELD)
			evict_tail(NULL);
		if (!hit)
			load(layer, expert, ahead);
	}
}

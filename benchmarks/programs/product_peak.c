/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of bytes per second that an instruction set reaches in registers: product_peak SET
 *
 * Of AVX2, products are added up in 16 bits, as 4-bit codes allow. Ten chains hide latency.
 */
#include <immintrin.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define CHAINS 10
#define TURNS 20000000

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* What the compiler cannot know it cannot take out of the loop. */
#define TEN(each) each(0) each(1) each(2) each(3) each(4) each(5) each(6) each(7) each(8) each(9)
#define BEGIN(i) vector sum##i = w;
#define STEP(i)                                                                                                  \
	sum##i = ADD(sum##i, w, x);                                                                              \
	__asm__ volatile("" : "+x"(sum##i), "+x"(w), "+x"(x));
#define LOOP(zero)                                                                                               \
	vector w = zero, x = zero;                                                                               \
	__asm__ volatile("" : "+x"(w), "+x"(x));                                                                 \
	TEN(BEGIN)                                                                                               \
	for (long turn = 0; turn < TURNS; turn++) {                                                              \
		TEN(STEP)                                                                                        \
	}

__attribute__((target("avx2"))) static void avx2(void)
{
	typedef __m256i vector;
#define ADD(sum, w, x) _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x))
	LOOP(_mm256_setzero_si256())
#undef ADD
}

__attribute__((target("avx2,avxvnni"))) static void avxvnni(void)
{
	typedef __m256i vector;
#define ADD _mm256_dpbusd_avx_epi32
	LOOP(_mm256_setzero_si256())
#undef ADD
}

__attribute__((target("avx512f,avx512vnni"))) static void avx512vnni(void)
{
	typedef __m512i vector;
#define ADD _mm512_dpbusd_epi32
	LOOP(_mm512_setzero_si512())
#undef ADD
}

static const struct {
	const char *name;
	void (*loop)(void);
	double products;
} sets[] = { { "avx2", avx2, 32 }, { "avxvnni", avxvnni, 32 }, { "avx512vnni", avx512vnni, 64 } };

int main(int count, char **arguments)
{
	for (size_t i = 0; count == 2 && i < sizeof(sets) / sizeof(*sets); i++)
		if (!strcmp(sets[i].name, arguments[1])) {
			double begin = seconds();
			sets[i].loop();
			printf("%.6g\n", TURNS * sets[i].products * CHAINS / (seconds() - begin));
			return 0;
		}
	return 1;
}

/* A target whose calls are known: named COUNT DEPTH. Prints what deep() returned. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct row {
	uint64_t pad[2];
	uint64_t rows;
	float *weights;
};

#define KEEP(x) __asm__ volatile("" : : "r"(x) : "memory")

__attribute__((noinline)) int32_t work(int32_t n, const char *name, struct row *row, uint8_t small, int64_t e, void *f)
{
	KEEP(name);
	KEEP(row);
	KEEP(f);
	return n * 2 + small + (int32_t)e;
}

__attribute__((noinline)) int32_t work_other(void)
{
	KEEP(0L);
	return -1;
}

__attribute__((noinline)) int32_t deep(int32_t n)
{
	int32_t below = n ? deep(n - 1) : 0;

	KEEP((long)below);
	return below + 1;
}

int main(int argc, char **argv)
{
	static const char *names[] = {"gate", "up", "down"};
	float weights[2] = {0, 0};
	struct row row = {{0, 0}, 0, weights};

	for (int32_t i = 0; i < atoi(argv[1]); i++) {
		row.rows = i;
		weights[1] = i / 2.0f;
		work(i - 3, names[i % 3], &row, 7, -1, 0);
	}
	work_other();
	printf("%d\n", deep(atoi(argv[2])));
	return 0;
}

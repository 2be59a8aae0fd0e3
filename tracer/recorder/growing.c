// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdio.h>
#include <stdlib.h>

#include "growing.h"

#define LEAST_ROOM 64

void *with_room(void *rows, int *room, int needed, size_t size)
{
	int wanted = *room ? *room : LEAST_ROOM;

	if (needed <= *room)
		return rows;
	while (wanted < needed)
		wanted *= 2;
	rows = realloc(rows, wanted * size);
	if (!rows) {
		fputs("moescope-recorder: out of memory; everything written before is readable\n", stderr);
		exit(2);
	}
	*room = wanted;
	return rows;
}

void add_number(struct numbers *numbers, double value)
{
	*ADD(numbers) = value;
}

static int by_value(const void *a, const void *b)
{
	double first = *(const double *)a, second = *(const double *)b;

	return (first > second) - (first < second);
}

void sort_numbers(struct numbers *numbers)
{
	if (numbers->count)
		qsort(numbers->rows, numbers->count, sizeof(double), by_value);
}

double quantile(const struct numbers *sorted, double share)
{
	double place = share * (sorted->count - 1);
	int below = place;

	if (!sorted->count)
		return 0;
	if (below + 1 >= sorted->count)
		return sorted->rows[sorted->count - 1];
	return sorted->rows[below] + (place - below) * (sorted->rows[below + 1] - sorted->rows[below]);
}

double median(struct numbers *numbers)
{
	sort_numbers(numbers);
	return quantile(numbers, 0.5);
}

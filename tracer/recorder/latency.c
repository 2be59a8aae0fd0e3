// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdlib.h>
#include <string.h>

#include "latency.h"

#define FORGET 0.98 /* discount of the past per step: its weight halves every 34 steps */
#define WIDE 1e6    /* initial variance of the constant (unknown) ... */
#define SLOPE 100.0 /* ... and of the slopes, relative to the noise's */
#define REMEMBERED 10000
#define CONTEXT_SCALE 1000.0

void begin_latency(struct latency *latency)
{
	memset(latency, 0, sizeof(*latency));
	latency->covariance[0][0] = WIDE;
	for (int i = 1; i < TERMS; i++)
		latency->covariance[i][i] = SLOPE;
}

static double product(const double *a, const double *b)
{
	double sum = 0;

	for (int i = 0; i < TERMS; i++)
		sum += a[i] * b[i];
	return sum;
}

static void fill_terms(double *row, u32 context, int missed)
{
	row[0] = 1.0;
	row[1] = context / CONTEXT_SCALE;
	row[2] = missed;
}

static void remember_error(struct latency *latency, double error)
{
	if (latency->errors.count < REMEMBERED)
		add_number(&latency->errors, error);
	else
		latency->errors.rows[latency->next] = error;
	latency->next = (latency->next + 1) % REMEMBERED;
}

/* Discounts the past, symmetric despite rounding, and bounded while a term does not vary. */
static void update_covariance(struct latency *latency, const double *gain, const double *spread)
{
	double next[TERMS][TERMS], trace = 0, bound;

	for (int i = 0; i < TERMS; i++)
		for (int j = 0; j < TERMS; j++)
			next[i][j] = (latency->covariance[i][j] - gain[i] * spread[j]) / FORGET;
	for (int i = 0; i < TERMS; i++)
		trace += next[i][i];
	bound = 3 * WIDE / trace < 1.0 ? 3 * WIDE / trace : 1.0;
	for (int i = 0; i < TERMS; i++)
		for (int j = 0; j < TERMS; j++)
			latency->covariance[i][j] = (next[i][j] + next[j][i]) / 2 * bound;
}

void learn_step(struct latency *latency, u32 context, int missed, double seconds)
{
	double row[TERMS], spread[TERMS], gain[TERMS], expected, rest, share;

	fill_terms(row, context, missed);
	expected = product(row, latency->coefficients);
	rest = seconds - expected;
	if (latency->steps >= TERMS)
		remember_error(latency, (expected > 0 ? expected : 0) / seconds - 1);
	for (int i = 0; i < TERMS; i++)
		spread[i] = product(latency->covariance[i], row);
	for (int i = 0; i < TERMS; i++)
		gain[i] = spread[i] / (FORGET + product(row, spread));
	for (int i = 0; i < TERMS; i++)
		latency->coefficients[i] += gain[i] * rest;
	update_covariance(latency, gain, spread);
	latency->steps++;
	share = 1.0 / latency->steps > 1 - FORGET ? 1.0 / latency->steps : 1 - FORGET;
	for (int i = 0; i < TERMS; i++)
		latency->typical[i] += (row[i] - latency->typical[i]) * share;
}

double beyond_typical(const struct latency *latency, u32 context, int missed)
{
	double row[TERMS];

	fill_terms(row, context, missed);
	for (int i = 0; i < TERMS; i++)
		row[i] -= latency->typical[i];
	return latency->steps > TERMS ? product(row, latency->coefficients) : 0;
}

struct latency_error latency_error(const struct latency *latency)
{
	struct latency_error answer = {.steps = latency->errors.count};
	struct numbers sizes = {0};

	for (int i = 0; i < latency->errors.count; i++) {
		double error = latency->errors.rows[i];

		answer.bias += error / latency->errors.count;
		add_number(&sizes, error < 0 ? -error : error);
	}
	answer.median = median(&sizes);
	answer.p90 = quantile(&sizes, 0.9);
	free(sizes.rows);
	return answer;
}

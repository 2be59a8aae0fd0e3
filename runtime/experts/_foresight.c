/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Predicts which experts a layer will choose while tokens are decoded, and asks for those that are not in memory.
 *
 * A layer's router is nearly linear in the state that it reads. Its map is applied twice before the router runs: to the state as
 * far as it is known while the layer before still waits for experts (FAR), and to the state that enters the layer (NEAR). How
 * often a score so far above the border of the k-th was chosen is counted, and is the chance by which experts are read ahead.
 */
#include "_slots.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FAR, NEAR };
enum { LOGITS, SIGMOID, SOFTMAX }; /* what experts are ranked by */
enum { MIDDLE = 4, PER_DEVIATION = 4 }; /* of the bins of margins, in quarters of the scores' standard deviation from -1 to 3 */
enum { PRESENT = BINS }; /* what is in memory has a bin of its own: what is not is chosen less often */
enum { LANES = 8 };
/* PRIOR: what is known before counts for, in scores; RECENT: scores of a bin after which the older ones count half. */
static const float PRIOR = 4, RECENT = 512, TINY = 1e-6f;
/* Least chance of a read; below the other, a read that was asked for is forgotten. */
static const float LEAST = 0.6f, NEEDLESS = 0.1f;
/* Reads of a nearer layer come first; within a layer, log odds decide. */
static const double LAYER_AHEAD = 100;

#if defined(__x86_64__) && defined(__GLIBC__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

struct foresight {
	PyObject_HEAD
	struct slots *slots;
	int32_t layer, stage, k, rule;
	int normed; /* whether the router's input is divided by its root mean square */
	float multiplier; /* of what a layer adds to its state */
	float slope, offset; /* of the log odds over margins, before anything was counted */
	Py_ssize_t hidden;
	Py_buffer map, offsets, corrections; /* bfloat16 [experts, hidden] and float [experts]; the last none by LOGITS */
	Py_buffer state, common, weights; /* float: [hidden], [hidden] or none; by place in the choice [k], or none */
	Py_buffer chosen; /* int64 [k]: the choice that `weights` belongs to, or none */
	float *known, *scores; /* [hidden], [experts] */
	uint8_t *bin; /* [experts]: of the last prediction */
	int early; /* of a FAR one: whether it was made before the layer's experts ran */
	int made; /* whether there is one that was not judged yet */
	struct tally tally;
};

#define FLOATS(buffer) ((const float *)(buffer).buf)

static void add_row(float *sum, const float *row, float weight, Py_ssize_t n)
{
	for (Py_ssize_t i = 0; i < n; i++)
		sum[i] += weight * row[i];
}

/* What is known of the state: with `late`, the shared expert and those that have run count; the others are missing. */
static void gather(struct foresight *f, int late)
{
	const struct slots *s = f->slots;
	const int64_t *chosen = f->chosen.buf;

	memcpy(f->known, f->state.buf, (size_t)f->state.len);
	if (late && f->common.obj)
		add_row(f->known, f->common.buf, f->multiplier, f->hidden);
	for (int i = 0; late && chosen && i < s->chosen; i++)
		for (int j = 0; s->ran[i] && j < f->k; j++)
			if (chosen[j] == EXPERT_OF(s, s->event[i]))
				add_row(f->known, FLOATS(s->rows) + chosen[j] * f->hidden, f->multiplier * FLOATS(f->weights)[j], f->hidden);
}

/* A row is a page or more: its successor is fetched meanwhile, as the processor's own prefetching ends with a page. */
VECTORS static float product(const uint16_t *row, const float *state, Py_ssize_t n)
{
	lanes sums[2] = {{0}};
	float sum = 0;
	Py_ssize_t i;

	for (i = 0; i + 2 * LANES <= n; i += 2 * LANES) {
		__builtin_prefetch(row + n + i);
		for (int part = 0; part < 2; part++) {
			halves half;
			words word;
			lanes wide, given;

			memcpy(&half, row + i + part * LANES, sizeof(half));
			memcpy(&given, state + i + part * LANES, sizeof(given));
			word = __builtin_convertvector(half, words) << 16;
			memcpy(&wide, &word, sizeof(wide));
			sums[part] += wide * given;
		}
	}
	for (int lane = 0; lane < LANES; lane++)
		sum += sums[0][lane] + sums[1][lane];
	for (; i < n; i++) {
		uint32_t word = (uint32_t)row[i] << 16;
		float wide;

		memcpy(&wide, &word, sizeof(wide));
		sum += wide * state[i];
	}
	return sum;
}

static void compute_logits(struct foresight *f)
{
	float squares = 0, scale;

	for (Py_ssize_t i = 0; i < f->hidden; i++)
		squares += f->known[i] * f->known[i];
	scale = f->normed ? 1 / sqrtf(squares / (float)f->hidden + TINY) : 1;
	for (int32_t expert = 0; expert < f->slots->experts; expert++)
		f->scores[expert] = product((const uint16_t *)f->map.buf + expert * f->hidden, f->known, f->hidden) * scale +
				    FLOATS(f->offsets)[expert];
}

/* Probabilities of the logits, each plus its correction, where a router ranks experts by them. */
static void correct(struct foresight *f)
{
	float sum = 0, most = -INFINITY;

	for (int32_t expert = 0; f->rule == SOFTMAX && expert < f->slots->experts; expert++)
		most = fmaxf(most, f->scores[expert]);
	for (int32_t expert = 0; f->rule == SOFTMAX && expert < f->slots->experts; expert++)
		sum += f->scores[expert] = expf(f->scores[expert] - most);
	for (int32_t expert = 0; expert < f->slots->experts; expert++)
		f->scores[expert] = (f->rule == SIGMOID ? 1 / (1 + expf(-f->scores[expert])) : f->scores[expert] / sum) +
				    FLOATS(f->corrections)[expert];
}

/* The middle between the k-th and the next best score. */
static float border_of(const struct foresight *f)
{
	int32_t experts = f->slots->experts;
	int held = 0, wanted = f->k < experts ? f->k + 1 : f->k;
	float top[MOST_CHOSEN + 1];

	for (int32_t expert = 0; expert < experts; expert++) {
		float value = f->scores[expert];
		int place = held;

		if (held == wanted && value <= top[wanted - 1])
			continue;
		if (held < wanted)
			held++;
		else
			place = wanted - 1;
		for (; place > 0 && top[place - 1] < value; place--)
			top[place] = top[place - 1];
		top[place] = value;
	}
	return (top[f->k - 1] + top[wanted - 1]) / 2;
}

static float deviation_of(const float *values, int32_t n)
{
	float sum = 0, squares = 0;

	for (int32_t i = 0; i < n; i++) {
		sum += values[i];
		squares += values[i] * values[i];
	}
	sum /= (float)n;
	return sqrtf(fmaxf(squares / (float)n - sum * sum, TINY * TINY));
}

static int bin_of(float margin, float deviation)
{
	int bin = (int)floorf(margin / deviation * PER_DEVIATION) + MIDDLE;

	return bin < 0 ? 0 : bin < BINS ? bin : BINS - 1;
}

static float counted(const struct tally *tally, int bin, float before)
{
	return (before * PRIOR + tally->hit[bin]) / (PRIOR + tally->seen[bin]);
}

/* The chance that an expert with this margin is chosen: the given curve, corrected by all layers' counts, and by the layer's own. */
static float chance(const struct foresight *f, float margin, int bin)
{
	float given = 1 / (1 + expf(-(f->slope * margin + f->offset)));

	return counted(&f->tally, bin, counted(&f->slots->tally[f->stage], bin, given));
}

static int ask(struct foresight *f, int late)
{
	struct slots *s = f->slots;
	uint64_t began = now();
	float deviation, border;

	gather(f, late);
	compute_logits(f);
	if (f->rule != LOGITS)
		correct(f);
	border = border_of(f);
	deviation = deviation_of(f->scores, s->experts);
	for (int32_t expert = 0; expert < s->experts; expert++) {
		float margin = f->scores[expert] - border, likely;
		int32_t form = f->layer * s->experts + expert;

		if (s->place[form] >= 0) {
			f->bin[expert] = PRESENT;
			continue;
		}
		f->bin[expert] = (uint8_t)bin_of(margin, deviation);
		likely = chance(f, margin, f->bin[expert]);
		if (likely < NEEDLESS)
			forget_wish(s, form);
		else if (likely > LEAST)
			wish_for(s, form, f->layer * LAYER_AHEAD - log(likely / (1 - likely + TINY)));
	}
	f->made = 1;
	f->early = !late;
	COUNTER(s, PREDICT_NS) += (int64_t)(now() - began);
	return read_ahead(s);
}

static void count(const struct slots *s, const uint8_t *bins, struct tally *tally)
{
	for (int32_t expert = 0; expert < s->experts; expert++)
		tally->seen[bins[expert]]++;
	for (int i = 0; i < s->chosen; i++)
		tally->hit[bins[EXPERT_OF(s, s->event[i])]]++;
	for (int bin = 0; bin < BINS; bin++)
		if (tally->seen[bin] > RECENT) {
			tally->seen[bin] /= 2;
			tally->hit[bin] /= 2;
		}
}

/* The layer has chosen: count what was predicted. */
void judge(struct slots *s, int32_t layer)
{
	for (int stage = 0; stage < STAGES; stage++) {
		struct foresight *f = s->foresight[layer * STAGES + stage];

		if (!f || !f->made)
			continue;
		f->made = 0;
		count(s, f->bin, &f->tally);
		count(s, f->bin, &s->tally[stage]);
	}
}

/* The layer is about to run its place `i`: if it has to wait for a read, or none is missing, what comes next is predicted. */
int foresee_late(struct slots *s, int32_t layer, int i)
{
	struct foresight *f = layer + 1 < s->layers ? s->foresight[(layer + 1) * STAGES + FAR] : NULL;
	int32_t place = s->place[s->event[i]];

	if (!f || !s->foreseeing || s->foreseen || (place >= 0 && s->slot[place].state == LANDED && layer_waits(s)))
		return 0;
	s->foreseen = 1;
	return ask(f, 1);
}

/* Whether nearly everything was known when the layer was predicted. */
static int foreseen_late(const struct foresight *near)
{
	const struct foresight *far = near->slots->foresight[near->layer * STAGES + FAR];

	return far && far->made && !far->early;
}

/* FAR: once the layer before has chosen, if it does not wait for a read; NEAR: as the layer begins. */
int do_foresight(PyObject *item, int64_t *times)
{
	struct foresight *f = (struct foresight *)item;
	struct slots *s = f->slots;
	int failed = 0;

	times[0] = (int64_t)now();
	reap(s, 0);
	if (s->foreseeing && (f->stage == NEAR ? !foreseen_late(f) : !layer_waits(s))) {
		s->foreseen |= f->stage == FAR;
		failed = ask(f, 0);
	} else
		failed = read_ahead(s);
	times[1] = failed ? 0 : (int64_t)now();
	return failed;
}

static int buffer(PyObject *object, Py_buffer *view, Py_ssize_t bytes)
{
	if (object == Py_None)
		return 0;
	if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE))
		return -1;
	if (view->len == bytes)
		return 0;
	PyErr_SetString(PyExc_ValueError, "what a prediction reads does not belong together");
	return -1;
}

/* Foresight(slots, layer, stage, k, map, offsets, normed, rule, corrections, slope, offset, multiplier, state, common, chosen, weights) */
static int foresight_init(struct foresight *f, PyObject *arguments, PyObject *keywords)
{
	PyObject *map, *offsets, *corrections, *state, *common, *chosen, *weights;
	Py_ssize_t experts;

	(void)keywords;
	if (f->slots) {
		PyErr_SetString(PyExc_TypeError, "a prediction is made once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "O!iiiOOpiOfffOOOO", slots_type, &f->slots, &f->layer, &f->stage, &f->k, &map, &offsets,
			      &f->normed, &f->rule, &corrections, &f->slope, &f->offset, &f->multiplier, &state, &common, &chosen, &weights)) {
		f->slots = NULL;
		return -1;
	}
	Py_INCREF((PyObject *)f->slots);
	experts = f->slots->experts;
	f->hidden = f->slots->rows.len / experts / (Py_ssize_t)sizeof(float);
	if (f->layer < 0 || f->layer >= f->slots->layers || f->stage < 0 || f->stage >= STAGES || f->k < 1 || f->k > MOST_CHOSEN ||
	    f->k > experts) {
		PyErr_SetString(PyExc_ValueError, "no such layer, stage or number of experts");
		return -1;
	}
	if (buffer(map, &f->map, experts * f->hidden * 2) || buffer(offsets, &f->offsets, experts * 4) ||
	    buffer(corrections, &f->corrections, experts * 4) ||
	    buffer(state, &f->state, f->hidden * 4) || buffer(common, &f->common, f->hidden * 4) ||
	    buffer(chosen, &f->chosen, f->k * 8) || buffer(weights, &f->weights, f->k * 4))
		return -1;
	f->known = malloc((size_t)f->hidden * sizeof(float));
	f->scores = malloc((size_t)experts * sizeof(float));
	f->bin = malloc((size_t)experts);
	if (!f->known || !f->scores || !f->bin || !f->map.obj || !f->offsets.obj || !f->state.obj || !f->chosen.obj != !f->weights.obj ||
	    (f->rule != LOGITS && !f->corrections.obj)) {
		PyErr_SetString(PyExc_ValueError, "a prediction needs a map, offsets and a state");
		return -1;
	}
	f->slots->foresight[f->layer * STAGES + f->stage] = f;
	return 0;
}

static void foresight_dealloc(struct foresight *f)
{
	PyTypeObject *type = Py_TYPE((PyObject *)f);
	struct foresight **kept = f->bin ? f->slots->foresight + f->layer * STAGES + f->stage : NULL;

	if (kept && *kept == f)
		*kept = NULL;
	free(f->known);
	free(f->scores);
	free(f->bin);
	PyBuffer_Release(&f->map);
	PyBuffer_Release(&f->offsets);
	PyBuffer_Release(&f->corrections);
	PyBuffer_Release(&f->state);
	PyBuffer_Release(&f->common);
	PyBuffer_Release(&f->chosen);
	PyBuffer_Release(&f->weights);
	Py_XDECREF((PyObject *)f->slots);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(f);
	Py_DECREF(type);
}

static PyType_Slot foresight_slots[] = {
	{Py_tp_init, foresight_init},
	{Py_tp_dealloc, foresight_dealloc},
	{Py_tp_doc, "A prediction of what a layer will choose."},
	{0, NULL},
};
PyType_Spec foresight_spec = {
	.name = "runtime.telemetry._probes.Foresight",
	.basicsize = sizeof(struct foresight),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = foresight_slots,
};

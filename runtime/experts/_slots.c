/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The expert cache of decoded tokens: which experts are in memory, which leave, and the direct reads of those that are missing.
 *
 * A slot is the memory of one expert, with a run that was prepared once; an expert in it costs its read alone. Reads are Linux's
 * asynchronous ones (io_submit): the engine's own thread submits them as soon as the router has chosen, and sees their end in
 * the kernel's ring between two graphs. No other thread has to get a processor for that, which the threads that compute would
 * keep from it for milliseconds. The rule is that of runtime/cache_rules/rule.py, for experts of one size.
 *
 * What is read ahead is read in pieces, few at a time, so that a layer's own reads wait for little. A layer that chooses an
 * expert of which pieces were read asks for the rest at once; what it does not choose is finished when nothing else is to read.
 */
#define _GNU_SOURCE
#include "_slots.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, AT_ONCE = 256, AHEAD = 2 }; /* AHEAD: pieces of prefetches that are read at a time */
static const uint64_t PIECE = 3 << 19; /* of a prefetch, in bytes; smaller ones make a disk slower */
/* Of a useful load, this share may be wasted; at first EXTRA loads, at most SAVED: runtime/cache_rules/rule.py. */
static const double EXTRA_SHARE = 0.4, EXTRA = 8, SAVED = 128;
/* Urgency of a read that was begun for a layer that did not choose the expert. */
static const double IDLE = 1e12;
enum { KEPT_LOADS = 1024 };

/* --- what is in memory --- */

/* OTHERS: bytes that forms of other backends hold. */
static uint64_t resident_bytes(const struct slots *s)
{
	return (uint64_t)s->holding * s->size + (uint64_t)COUNTER(s, OTHERS);
}

/* A load, or a use; `loaded_for_it`: the first one after a load that was noted. */
static void note_use(struct slots *s, int32_t form, int loaded_for_it)
{
	double *rank = (double *)s->rank.buf + form, *clock = (double *)s->counters.buf + CLOCK;

	if (!s->half_life)
		*rank = ++*clock;
	else if (!loaded_for_it) {
		COUNTER(s, KNOWN) += isinf(*rank) != 0;
		*clock += 1 / (s->half_life * (double)COUNTER(s, KNOWN));
		*rank = *clock + log2(1 + exp2(*rank - *clock));
	}
}

static void show(struct slots *s, struct slot *slot)
{
	int32_t i = (int32_t)(slot - s->slot);

	((int32_t *)s->held.buf)[i] = slot->state == FREE ? -1 : slot->form;
	((uint8_t *)s->unused.buf)[i] = (uint8_t)slot->prefetched;
}

static void put_in(struct slots *s, struct slot *slot, int32_t form, int state, int prefetched)
{
	slot->form = form;
	slot->state = state;
	slot->prefetched = prefetched;
	slot->error = 0;
	s->place[form] = (int32_t)(slot - s->slot);
	COUNTER(s, HOLDING) = ++s->holding;
	show(s, slot);
}

static void take_out(struct slots *s, struct slot *slot)
{
	s->place[slot->form] = -1;
	slot->state = FREE;
	COUNTER(s, HOLDING) = --s->holding;
	show(s, slot);
}

static int in_event(const struct slots *s, int32_t form)
{
	for (int i = 0; i < s->chosen; i++)
		if (s->event[i] == form)
			return 1;
	return 0;
}

static void useful(struct slots *s)
{
	s->allowance = s->allowance + EXTRA_SHARE > SAVED ? SAVED : s->allowance + EXTRA_SHARE;
}

/* --- reads --- */

static void landed(struct slots *s, struct slot *slot)
{
	int64_t *load = (int64_t *)s->loads.buf + COUNTER(s, LOADED)++ % KEPT_LOADS * 3;
	const int32_t *files = s->files.buf;
	int32_t layer = LAYER(s, slot->form), expert = EXPERT_OF(s, slot->form);

	load[0] = slot->form;
	load[1] = (int64_t)slot->submitted;
	load[2] = (int64_t)now();
	if (slot->got < s->bytes && !slot->error)
		slot->error = -1;
	if (!files[s->layers])
		posix_fadvise(files[layer], (off_t)((uint64_t)expert * s->aligned), (off_t)s->aligned, POSIX_FADV_DONTNEED);
	slot->state = LANDED;
	slot->fresh = 1;
	moescope_load__end(layer, expert, s->size, resident_bytes(s));
}

static void piece_ended(struct slots *s, struct slot *slot, int64_t result)
{
	if (result < 0)
		slot->error = (int)-result;
	else
		slot->got += (uint64_t)result;
	if (--s->in_flight == 0)
		COUNTER(s, LOAD_NS) += (int64_t)(now() - s->busy_since);
	if (--slot->pending == 0 && slot->asked == s->aligned)
		landed(s, slot);
}

/* The kernel's ring of finished reads, as it maps it: nothing has ended while head and tail are equal. */
struct finished {
	uint32_t id, count, head, tail, magic;
};

static int none_ended(const struct slots *s)
{
	const volatile struct finished *ring = (const void *)s->ring;

	return ring->magic == 0xa10a10a1 && ring->head == ring->tail;
}

/* Note the reads that have ended; waits for one if `wait`. */
void reap(struct slots *s, int wait)
{
	struct io_event events[16];
	long i, n;

	if (!s->in_flight || (!wait && none_ended(s)))
		return;
	do
		n = syscall(SYS_io_getevents, s->ring, wait ? 1L : 0L, 16L, events, NULL);
	while (n < 0 && errno == EINTR && wait);
	for (i = 0; i < n; i++)
		piece_ended(s, s->slot + events[i].data, events[i].res);
}

/* Submit the next `bytes` of the expert's read, at most what is left of it. */
static void submit(struct slots *s, struct slot *slot, uint64_t bytes)
{
	struct iocb piece = {0}, *pieces = &piece;
	int32_t layer = LAYER(s, slot->form), expert = EXPERT_OF(s, slot->form);
	uint64_t first = slot->asked;

	bytes = bytes < s->aligned - first ? bytes : s->aligned - first;
	piece.aio_data = (uint64_t)(slot - s->slot);
	piece.aio_lio_opcode = IOCB_CMD_PREAD;
	piece.aio_fildes = ((const uint32_t *)s->files.buf)[layer];
	piece.aio_buf = (uint64_t)(uintptr_t)(slot->memory + first);
	piece.aio_nbytes = bytes;
	piece.aio_offset = (int64_t)((uint64_t)expert * s->aligned + first);
	if (!s->in_flight++)
		s->busy_since = now();
	slot->asked += bytes;
	slot->pending++;
	if (!s->ring || syscall(SYS_io_submit, s->ring, 1L, &pieces) != 1) {
		/* Without asynchronous reads, it is read at once. */
		ssize_t done = pread((int)piece.aio_fildes, slot->memory + first, bytes, piece.aio_offset);

		piece_ended(s, slot, done < 0 ? -errno : done);
	}
}

/* Begin to read an expert into a slot. */
static void begin(struct slots *s, struct slot *slot, int32_t form, int prefetched)
{
	put_in(s, slot, form, IN_FLIGHT, prefetched);
	slot->asked = slot->got = 0;
	slot->submitted = now();
	moescope_load__begin(LAYER(s, form), EXPERT_OF(s, form), s->bytes, prefetched ? PREFETCH : DEMAND, CPU);
	COUNTER(s, prefetched ? AHEAD_READ : DEMANDED)++;
}

static void evict(struct slots *s, struct slot *slot)
{
	int32_t layer = LAYER(s, slot->form), expert = EXPERT_OF(s, slot->form);

	take_out(s, slot);
	COUNTER(s, EVICTED)++;
	moescope_evict(layer, expert, s->size, resident_bytes(s));
}

/* End a read of which pieces are missing. Its load counts whole. */
static void give_up(struct slots *s, struct slot *slot)
{
	moescope_load__end(LAYER(s, slot->form), EXPERT_OF(s, slot->form), s->size, resident_bytes(s));
	evict(s, slot);
}

/* A free slot, or that of the expert that leaves first; NULL if there is none now, or with an exception set. */
static struct slot *find_slot(struct slots *s)
{
	const double *rank = s->rank.buf;
	struct slot *first = NULL;

	if (s->holding < s->count) {
		for (struct slot *slot = s->slot; slot < s->slot + s->count; slot++)
			if (slot->state == FREE)
				return slot;
	}
	if (s->count < s->most) {
		PyObject *added = PyObject_CallFunctionObjArgs(s->take, NULL);

		Py_XDECREF(added);
		return added ? s->slot + s->count - 1 : NULL;
	}
	for (struct slot *slot = s->slot; slot < s->slot + s->count; slot++)
		if (slot->state == LANDED && !in_event(s, slot->form) && (!first || rank[slot->form] < rank[first->form]))
			first = slot;
	if (first)
		evict(s, first);
	return first;
}

static void drop_wish(struct slots *s, Py_ssize_t i)
{
	s->wish[i] = s->wish[--s->wishes];
}

static Py_ssize_t find_wish(const struct slots *s, int32_t form)
{
	Py_ssize_t i = s->wishes;

	while (--i >= 0 && s->wish[i].form != form)
		;
	return i;
}

/* Whether an expert of the event is not in memory: its read comes first. */
int layer_waits(const struct slots *s)
{
	for (int i = 0; i < s->chosen; i++) {
		int32_t place = s->place[s->event[i]];

		if (!s->ran[i] && (place < 0 || s->slot[place].state != LANDED))
			return 1;
	}
	return 0;
}

static Py_ssize_t most_urgent(const struct slots *s)
{
	Py_ssize_t best = 0;

	for (Py_ssize_t i = 1; i < s->wishes; i++)
		if (s->wish[i].urgency < s->wish[best].urgency)
			best = i;
	return best;
}

/* Read pieces of what was asked for ahead, the most urgent first, while no layer waits for a read. */
int read_ahead(struct slots *s)
{
	while (s->wishes && s->in_flight < AHEAD && !layer_waits(s)) {
		Py_ssize_t i = most_urgent(s);
		int32_t form = s->wish[i].form, place = s->place[form];
		struct slot *slot = place < 0 ? find_slot(s) : s->slot + place;

		if (!slot)
			return PyErr_Occurred() ? -1 : 0;
		if (place < 0) {
			begin(s, slot, form, 1);
			note_use(s, form, 0);
		}
		submit(s, slot, s->aligned - slot->asked < PIECE + PIECE / 2 ? s->aligned : PIECE); /* no small rest */
		if (slot->asked == s->aligned)
			drop_wish(s, i);
	}
	return 0;
}

int wish_for(struct slots *s, int32_t form, double urgency)
{
	Py_ssize_t wished = find_wish(s, form);

	if (wished < 0 && s->place[form] >= 0)
		return 1;
	if (wished < 0) {
		if (s->wishes == MOST_QUEUED || s->allowance + EXTRA < 1)
			return 0;
		s->allowance -= 1;
		wished = s->wishes++;
		s->wish[wished] = (struct wish){form, urgency};
	}
	if (urgency < s->wish[wished].urgency)
		s->wish[wished].urgency = urgency;
	return 1;
}

int forget_wish(struct slots *s, int32_t form)
{
	Py_ssize_t wished = find_wish(s, form);

	if (wished < 0 || s->place[form] >= 0)
		return 0;
	drop_wish(s, wished);
	s->allowance += 1;
	return 1;
}

/* The layer has chosen: what it did not choose is not urgent any more. */
static void outdate_wishes(struct slots *s, int32_t layer)
{
	for (Py_ssize_t i = s->wishes; i-- > 0;) {
		int32_t form = s->wish[i].form;

		if (LAYER(s, form) != layer || in_event(s, form))
			continue;
		if (s->place[form] >= 0)
			s->wish[i].urgency = IDLE;
		else
			forget_wish(s, form);
	}
}

/* --- a token's layer --- */

/* Give up a prefetch of which pieces are missing; returns whether there is one. */
static int give_up_prefetch(struct slots *s)
{
	for (struct slot *slot = s->slot; slot < s->slot + s->count; slot++)
		if (slot->state == IN_FLIGHT && !slot->pending && !in_event(s, slot->form)) {
			drop_wish(s, find_wish(s, slot->form));
			give_up(s, slot);
			return 1;
		}
	return 0;
}

/* Read what is left of an expert that the layer has chosen. */
static int fetch(struct slots *s, int32_t form)
{
	Py_ssize_t wished = find_wish(s, form);
	int32_t place = s->place[form];
	struct slot *slot = place < 0 ? NULL : s->slot + place;

	if (wished >= 0) {
		drop_wish(s, wished);
		s->allowance += place < 0;
	}
	if (!slot) {
		while (!(slot = find_slot(s))) {
			if (PyErr_Occurred())
				return -1;
			if (give_up_prefetch(s))
				continue;
			if (!s->in_flight) {
				PyErr_SetString(PyExc_MemoryError, "no room for a token's experts");
				return -1;
			}
			reap(s, 1);
		}
		begin(s, slot, form, 0);
	}
	if (slot->asked < s->aligned)
		submit(s, slot, s->aligned);
	return 0;
}

/* The router has chosen: note hits and request the others. The order of use is that of the replay: hits, then misses. */
static int request(struct slots *s, int32_t layer, const int64_t *chosen, int k)
{
	int i, hits = 0;

	reap(s, 0);
	s->chosen = s->foreseen = 0;
	COUNTER(s, EVENT)++;
	for (i = 0; i < k; i++)
		if (chosen[i] < 0 || chosen[i] >= s->experts) {
			PyErr_SetString(PyExc_ValueError, "no such expert");
			return -1;
		}
	for (int missing = 0; missing < 2; missing++)
		for (i = 0; i < k; i++) {
			int32_t form = layer * s->experts + (int32_t)chosen[i], place = s->place[form];
			const struct slot *slot = place < 0 ? NULL : s->slot + place;
			int in_time = slot && slot->state == LANDED;

			if (in_time == missing)
				continue;
			s->event[s->chosen] = form;
			s->state[s->chosen] = !in_time ? MISS : slot->prefetched ? PREFETCHED : HIT;
			s->ran[s->chosen++] = 0;
		}
	for (i = 0; i < k && s->state[i] != MISS; i++, hits++) {
		note_use(s, s->event[i], s->state[i] == PREFETCHED);
		COUNTER(s, USED_AHEAD) += s->state[i] == PREFETCHED;
	}
	COUNTER(s, HITS) += hits;
	COUNTER(s, MISSES) += k - hits;
	for (; i < k; i++) {
		int absent = s->place[s->event[i]] < 0;

		note_use(s, s->event[i], !absent);
		if ((!absent || s->beside) && fetch(s, s->event[i]))
			return -1;
	}
	outdate_wishes(s, layer);
	judge(s, layer);
	return read_ahead(s);
}

static int refuse(struct slots *s, struct slot *slot)
{
	int32_t form = slot->form;
	int error = slot->error;
	PyObject *said;

	take_out(s, slot);
	said = PyObject_CallFunction(s->failed, "iii", (int)LAYER(s, form), (int)EXPERT_OF(s, form), error);
	Py_XDECREF(said);
	if (said)
		PyErr_SetString(PyExc_OSError, "an expert cannot be read");
	return -1;
}

static int widened(struct slots *s, struct slot *slot)
{
	PyObject *done;

	if (!slot->fresh || s->widen == Py_None)
		return 1;
	done = PyObject_CallFunctionObjArgs(s->widen, slot->keeper, NULL);
	Py_XDECREF(done);
	return done != NULL;
}

static void first_use(struct slots *s, struct slot *slot)
{
	if (slot->prefetched) {
		slot->prefetched = 0;
		s->allowance += 1;
		useful(s);
		show(s, slot);
	} else if (slot->fresh)
		useful(s);
	slot->fresh = 0;
}

static uint64_t identity(uint64_t what, uint64_t kind, int32_t layer, int32_t expert)
{
	return what << 48 | kind << 32 | (uint64_t)(layer + 1) << 16 | (uint64_t)(expert + 1);
}

/* Run one expert that is in memory, between its probes; its operator began before the wait for it. */
static int run_slot(struct slots *s, struct slot *slot, int64_t *times)
{
	int32_t layer = LAYER(s, slot->form), expert = EXPERT_OF(s, slot->form);
	Py_ssize_t row = s->rows.len / s->experts;
	PyObject *done;

	if (slot->error)
		return refuse(s, slot);
	if (!widened(s, slot))
		return -1;
	first_use(s, slot);
	moescope_graph__begin(slot->handle, EXPERT, layer, expert, CPU, 1);
	times[0] = (int64_t)now();
	done = PyObject_CallFunctionObjArgs(slot->run, slot->binding, Py_None, NULL);
	if (done)
		times[1] = (int64_t)now();
	moescope_graph__end(slot->handle, done ? 0 : -1, (uint64_t)times[1]);
	Py_XDECREF(done);
	if (done)
		memcpy((uint8_t *)s->rows.buf + expert * row, slot->output, (size_t)row);
	return done ? 0 : -1;
}

/* The expert to run next: the first that is in memory, else the first whose read was submitted; NULL if all have run. */
static int next_place(const struct slots *s)
{
	int i, first = -1;

	for (i = 0; i < s->chosen; i++) {
		int32_t place = s->place[s->event[i]];

		if (!s->ran[i] && place >= 0 && s->slot[place].state == LANDED)
			return i;
		if (!s->ran[i] && first < 0)
			first = i; /* reads were submitted in this order */
	}
	return first;
}

static void wait_for(struct slots *s, const struct slot *slot)
{
	uint64_t began = now();

	while (slot->state != LANDED) {
		Py_BEGIN_ALLOW_THREADS
		reap(s, 1);
		Py_END_ALLOW_THREADS
	}
	COUNTER(s, STALL_NS) += (int64_t)(now() - began);
}

static int run_next(struct slots *s, int32_t layer, int64_t *order, int64_t *times)
{
	struct slot *slot;
	uint64_t result, sources[2];
	int32_t expert;
	int i, failed;

	reap(s, 0);
	i = next_place(s);
	if (i < 0 || LAYER(s, s->event[i]) != layer) {
		PyErr_SetString(PyExc_ValueError, "no chosen expert is left to run");
		return -1;
	}
	*order = expert = EXPERT_OF(s, s->event[i]);
	if (foresee_late(s, layer, i))
		return -1;
	result = identity(1, EXPERT, layer, expert);
	sources[0] = identity(1, DISPATCH, layer, -1);
	sources[1] = identity(2, EXPERT, layer, expert);
	moescope_op__begin(EXPERT, layer, 1, result, sources, 2);
	moescope_expert__begin(layer, expert, 1, (uint32_t)s->state[i], CPU, 0);
	failed = s->place[s->event[i]] < 0 && fetch(s, s->event[i]);
	if (!failed) {
		slot = s->slot + s->place[s->event[i]];
		if (slot->state != LANDED)
			wait_for(s, slot);
		s->ran[i] = 1;
		failed = read_ahead(s) || run_slot(s, slot, times); /* the disk works beside the expert that a layer waited for */
	}
	if (!failed)
		moescope_expert__end(layer, expert);
	moescope_op__end(result, now());
	return failed ? -1 : read_ahead(s);
}

/* --- for Python --- */

static int view(PyObject *object, Py_buffer *buffer, size_t bytes, int writable)
{
	if (PyObject_GetBuffer(object, buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
		return -1;
	if ((size_t)buffer->len == bytes)
		return 0;
	PyErr_SetString(PyExc_ValueError, "what slots share does not belong together");
	return -1;
}

static int set_up(struct slots *s)
{
	size_t forms = (size_t)s->layers * (size_t)s->experts;

	s->slot = calloc((size_t)s->most, sizeof(*s->slot));
	s->place = malloc(forms * sizeof(*s->place));
	s->foresight = calloc((size_t)s->layers * STAGES, sizeof(struct foresight *));
	if (!s->slot || !s->place || !s->foresight) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t form = 0; form < forms; form++)
		s->place[form] = -1;
	if (syscall(SYS_io_setup, AT_ONCE, &s->ring))
		s->ring = 0;
	return 0;
}

/* Slots(layers, experts, most, bytes, aligned, size, beside, half_life, take, failed, widen,
 *       counters, rank, held, unused, rows, loads, files) */
static int slots_init(struct slots *s, PyObject *arguments, PyObject *keywords)
{
	PyObject *shared[7];
	unsigned long long bytes, aligned, size;
	size_t forms;

	(void)keywords;
	if (s->slot) {
		PyErr_SetString(PyExc_TypeError, "slots are made once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "iiiKKKpdOOOOOOOOOO", &s->layers, &s->experts, &s->most, &bytes, &aligned, &size,
			      &s->beside, &s->half_life, &s->take, &s->failed, &s->widen, shared, shared + 1, shared + 2, shared + 3,
			      shared + 4, shared + 5, shared + 6)) {
		s->take = s->failed = s->widen = NULL;
		return -1;
	}
	Py_INCREF(s->take);
	Py_INCREF(s->failed);
	Py_INCREF(s->widen);
	if (s->layers < 1 || s->experts < 1 || s->most < 1 || aligned % PAGE || bytes > aligned) {
		PyErr_SetString(PyExc_ValueError, "slots need layers, experts, and reads of whole pages");
		return -1;
	}
	s->bytes = bytes;
	s->aligned = aligned;
	s->size = size;
	forms = (size_t)s->layers * (size_t)s->experts;
	if (view(shared[0], &s->counters, COUNTERS * sizeof(int64_t), 1) || view(shared[1], &s->rank, forms * sizeof(double), 1) ||
	    view(shared[2], &s->held, (size_t)s->most * sizeof(int32_t), 1) ||
	    view(shared[3], &s->unused, (size_t)s->most, 1) ||
	    view(shared[5], &s->loads, 3 * KEPT_LOADS * sizeof(int64_t), 1) ||
	    view(shared[6], &s->files, (size_t)(s->layers + 1) * sizeof(int32_t), 0) || PyObject_GetBuffer(shared[4], &s->rows, PyBUF_WRITABLE))
		return -1;
	return set_up(s);
}

static void drop_slot(struct slot *slot)
{
	Py_XDECREF(slot->keeper);
	Py_XDECREF(slot->run);
	Py_XDECREF(slot->binding);
	memset(slot, 0, sizeof(*slot));
}

static void settle(struct slots *s)
{
	s->wishes = 0;
	while (s->in_flight)
		reap(s, 1);
	for (struct slot *slot = s->slot; slot < s->slot + s->count; slot++)
		if (slot->state == IN_FLIGHT)
			give_up(s, slot);
}

static void slots_dealloc(struct slots *s)
{
	PyTypeObject *type = Py_TYPE((PyObject *)s);

	if (s->ring) {
		settle(s);
		syscall(SYS_io_destroy, s->ring);
	}
	for (int32_t i = 0; i < s->count; i++)
		drop_slot(s->slot + i);
	free(s->slot);
	free(s->place);
	free(s->foresight);
	PyBuffer_Release(&s->counters);
	PyBuffer_Release(&s->rank);
	PyBuffer_Release(&s->held);
	PyBuffer_Release(&s->unused);
	PyBuffer_Release(&s->rows);
	PyBuffer_Release(&s->loads);
	PyBuffer_Release(&s->files);
	Py_XDECREF(s->take);
	Py_XDECREF(s->failed);
	Py_XDECREF(s->widen);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(s);
	Py_DECREF(type);
}

/* add(keeper, run, binding, memory, output, handle, form, prefetched): one more slot; form: the expert in it, -1: none. */
static PyObject *slots_add(struct slots *s, PyObject *arguments)
{
	PyObject *keeper, *run, *binding;
	unsigned long long memory, output, handle;
	int form, prefetched;
	struct slot *slot;

	if (!PyArg_ParseTuple(arguments, "OOOKKKip", &keeper, &run, &binding, &memory, &output, &handle, &form, &prefetched))
		return NULL;
	if (s->count == s->most || form >= s->layers * s->experts || (form >= 0 && s->place[form] >= 0))
		return PyErr_Format(PyExc_ValueError, "no slot is left, or the expert is in one");
	slot = s->slot + s->count++;
	Py_INCREF(slot->keeper = keeper);
	Py_INCREF(slot->run = run);
	Py_INCREF(slot->binding = binding);
	slot->memory = (uint8_t *)(uintptr_t)memory;
	slot->output = (const float *)(uintptr_t)output;
	slot->handle = handle;
	if (form >= 0)
		put_in(s, slot, form, LANDED, prefetched);
	else
		show(s, slot);
	Py_RETURN_NONE;
}

/* clear(): forget all slots, after the reads in flight have ended. What they hold is in `held` until then: see settle(). */
static PyObject *slots_clear(struct slots *s, PyObject *unused)
{
	(void)unused;
	settle(s);
	for (int32_t i = 0; i < s->count; i++) {
		if (s->slot[i].state != FREE)
			take_out(s, s->slot + i);
		drop_slot(s->slot + i);
	}
	s->count = s->chosen = 0;
	Py_RETURN_NONE;
}

/* settle(): drop what was asked for ahead and wait for the reads in flight; forgets experts whose read failed. */
static PyObject *slots_settle(struct slots *s, PyObject *unused)
{
	(void)unused;
	settle(s);
	for (int32_t i = 0; i < s->count; i++)
		if (s->slot[i].state != FREE && s->slot[i].error)
			take_out(s, s->slot + i);
	Py_RETURN_NONE;
}

/* foresee(on): whether predictions are made. */
static PyObject *slots_foresee(struct slots *s, PyObject *on)
{
	s->foreseeing = PyObject_IsTrue(on);
	Py_RETURN_NONE;
}

static PyMethodDef slots_methods[] = {
	{"add", (PyCFunction)slots_add, METH_VARARGS, NULL},	  {"clear", (PyCFunction)slots_clear, METH_NOARGS, NULL},
	{"settle", (PyCFunction)slots_settle, METH_NOARGS, NULL}, {"foresee", (PyCFunction)slots_foresee, METH_O, NULL},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot slots_slots[] = {
	{Py_tp_init, slots_init},	{Py_tp_dealloc, slots_dealloc},
	{Py_tp_methods, slots_methods}, {Py_tp_doc, "The experts in memory while tokens are decoded, and their reads."},
	{0, NULL},
};
PyType_Spec slots_spec = {
	.name = "runtime.telemetry._probes.Slots",
	.basicsize = sizeof(struct slots),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = slots_slots,
};

/* An item of a token: the request for a layer's chosen experts, or the run of the next of them. */
struct slot_work {
	PyObject_HEAD
	PyObject *slots, *sources; /* sources: bytes, of a request; None: a run */
	int32_t layer;
	Py_buffer place; /* int64: the choice [k]; of a run, the number of the expert that ran */
};

/* SlotWork(slots, layer, place, sources=None) */
static int slot_work_init(struct slot_work *self, PyObject *arguments, PyObject *keywords)
{
	PyObject *place;

	(void)keywords;
	self->sources = Py_None;
	if (self->slots) {
		PyErr_SetString(PyExc_TypeError, "an item is made once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "OiO|O", &self->slots, &self->layer, &place, &self->sources)) {
		self->slots = self->sources = NULL;
		return -1;
	}
	Py_INCREF(self->slots);
	Py_INCREF(self->sources);
	if (PyObject_GetBuffer(place, &self->place, PyBUF_WRITABLE))
		return -1;
	if (slots_type && Py_TYPE(self->slots) == slots_type && self->layer >= 0 && self->layer < ((struct slots *)self->slots)->layers &&
	    self->place.len >= (Py_ssize_t)sizeof(int64_t) && self->place.len <= (Py_ssize_t)(MOST_CHOSEN * sizeof(int64_t)) &&
	    (self->sources == Py_None || PyBytes_Check(self->sources)))
		return 0;
	PyErr_SetString(PyExc_ValueError, "an item needs slots, one of their layers, and one to 64 int64");
	return -1;
}

static void slot_work_dealloc(struct slot_work *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	PyBuffer_Release(&self->place);
	Py_XDECREF(self->slots);
	Py_XDECREF(self->sources);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

int do_slot_work(PyObject *item, int64_t *times)
{
	struct slot_work *self = (struct slot_work *)item;
	struct slots *s = (struct slots *)self->slots;
	uint64_t result = identity(1, DISPATCH, self->layer, -1);
	int failed;

	if (self->sources == Py_None)
		return run_next(s, self->layer, self->place.buf, times);
	moescope_op__begin(DISPATCH, self->layer, 1, result, (const uint64_t *)PyBytes_AsString(self->sources),
			   (uint32_t)(PyBytes_Size(self->sources) / 8));
	times[0] = (int64_t)now();
	failed = request(s, self->layer, self->place.buf, (int)(self->place.len / (Py_ssize_t)sizeof(int64_t)));
	times[1] = failed ? 0 : (int64_t)now();
	moescope_op__end(result, now());
	return failed;
}

static PyType_Slot slot_work_slots[] = {
	{Py_tp_init, slot_work_init},
	{Py_tp_dealloc, slot_work_dealloc},
	{Py_tp_doc, "The request for a layer's chosen experts, or the run of the next of them."},
	{0, NULL},
};
PyType_Spec slot_work_spec = {
	.name = "runtime.telemetry._probes.SlotWork",
	.basicsize = sizeof(struct slot_work),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = slot_work_slots,
};

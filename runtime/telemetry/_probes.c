/* SPDX-License-Identifier: Apache-2.0 */
/*
 * USDT probes of the runtime (provider "moescope"), as a CPython extension.
 *
 * Each probe is a function of nops and a `ret`. The one-byte nop is the probe site: the kernel emulates it, so a hit costs a trap
 * but no single step, and every argument is still in the register of the calling convention. The notes that tracers read
 * (.note.stapsdt, described in SystemTap's wiki under UserSpaceProbeImplementation) are written here.
 *
 * An end probe carries the time at which its span ended: before a tracer's program reads its clock, the trap takes some more µs
 * if the work has evicted the kernel's code from the caches.
 *
 * `run` calls prepared graphs in sequence, each between its probes: reading an expert's weights evicts the caches, so that data
 * which the interpreter uses between two graphs comes from memory each time. `graph` does the same for a single graph.
 */
#include "_probes.h"
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#if defined(__x86_64__)
#define U32_1 "4@%edi"
#define U32_2 "4@%esi"
#define U32_3 "4@%edx"
#define U32_4 "4@%ecx"
#define U32_5 "4@%r8d"
#define U32_6 "4@%r9d"
#define U64_1 "8@%rdi"
#define U64_2 "8@%rsi"
#define U64_3 "8@%rdx"
#define U64_4 "8@%rcx"
#define U64_5 "8@%r8"
#define U64_6 "8@%r9"
#elif defined(__aarch64__)
#define U32_1 "4@x0"
#define U32_2 "4@x1"
#define U32_3 "4@x2"
#define U32_4 "4@x3"
#define U32_5 "4@x4"
#define U32_6 "4@x5"
#define U64_1 "8@x0"
#define U64_2 "8@x1"
#define U64_3 "8@x2"
#define U64_4 "8@x3"
#define U64_5 "8@x4"
#define U64_6 "8@x5"
#else
#error "the runtime's probes know x86-64 and aarch64"
#endif
#define I32_1 "-" U32_1
#define I32_2 "-" U32_2
#define I32_3 "-" U32_3
#define I32_4 "-" U32_4
#define I64_2 "-" U64_2

/*
 * Newer x86-64 kernels turn a probed 5-byte nop into a system call, at half the cost of a trap; older ones single-step it.
 * So there is one before the site, for tracers that know which kernel they run on. It is safe as a function's first instruction:
 * the call that replaces it writes below the stack pointer, where nothing is stored yet.
 */
#if defined(__x86_64__)
#define NOP5 "	.byte 0x0f, 0x1f, 0x44, 0x00, 0x00\n"
#else
#define NOP5 ""
#endif

/* One function, its site and its note. The base section lets a reader correct addresses after prelink. */
#define PROBE(name, arguments)                                                  \
	__asm__(".text\n"                                                       \
		".balign 16\n"                                                  \
		".globl moescope_" #name "\n"                                   \
		".protected moescope_" #name "\n"                               \
		".type moescope_" #name ", %function\n"                         \
		"moescope_" #name ":\n"                                         \
		NOP5                                                            \
		"9:	nop\n"                                                  \
		"	ret\n"                                                  \
		".size moescope_" #name ", . - moescope_" #name "\n"            \
		".pushsection .note.stapsdt, \"\", %note\n"                     \
		".balign 4\n"                                                   \
		".4byte 2f - 1f, 4f - 3f, 3\n"                                  \
		"1: .asciz \"stapsdt\"\n"                                       \
		"2: .balign 4\n"                                                \
		"3: .8byte 9b\n"                                                \
		".8byte _.stapsdt.base\n"                                       \
		".8byte 0\n"                                                    \
		".asciz \"moescope\"\n"                                         \
		".asciz \"" #name "\"\n"                                        \
		".asciz \"" arguments "\"\n"                                    \
		"4: .balign 4\n"                                                \
		".popsection\n")

__asm__(".pushsection .stapsdt.base, \"aG\", %progbits, .stapsdt.base, comdat\n"
	".weak _.stapsdt.base\n"
	".hidden _.stapsdt.base\n"
	"_.stapsdt.base: .space 1\n"
	".size _.stapsdt.base, 1\n"
	".popsection\n");

PROBE(token__begin, U64_1 " " U32_2 " " U32_3 " " U32_4);
PROBE(token__end, U64_1 " " I64_2 " " U64_3);
PROBE(op__begin, U32_1 " " I32_2 " " U32_3 " " U64_4 " " U64_5 " " U32_6);
PROBE(op__end, U64_1 " " U64_2);
PROBE(graph__begin, U64_1 " " U32_2 " " I32_3 " " I32_4 " " U32_5 " " U64_6);
PROBE(graph__end, U64_1 " " I64_2 " " U64_3);
PROBE(expert__begin, I32_1 " " I32_2 " " U32_3 " " U32_4 " " U32_5 " " U32_6);
PROBE(expert__end, I32_1 " " I32_2);
PROBE(route, I32_1 " " U32_2 " " U32_3 " " U64_4 " " U64_5);
PROBE(load__begin, I32_1 " " I32_2 " " U64_3 " " U32_4 " " U32_5);
PROBE(load__end, I32_1 " " I32_2 " " U64_3 " " U64_4);
PROBE(evict, I32_1 " " I32_2 " " U64_3 " " U64_4);

static int arity(Py_ssize_t count, Py_ssize_t expected)
{
	if (count == expected)
		return 1;
	PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", expected, count);
	return 0;
}

#define ARGUMENT(i) PyLong_AsLongLong(arguments[i])
#define U32(i) ((uint32_t)ARGUMENT(i))
#define I32(i) ((int32_t)ARGUMENT(i))
#define U64(i) ((uint64_t)PyLong_AsUnsignedLongLongMask(arguments[i]))
#define I64(i) ((int64_t)ARGUMENT(i))

/* A Python function of n integers that calls its site. */
#define FUNCTION(name, n, ...)                                                                     \
	static PyObject *name(PyObject *module, PyObject *const *arguments, Py_ssize_t count)      \
	{                                                                                          \
		(void)module;                                                                      \
		if (!arity(count, n))                                                              \
			return NULL;                                                               \
		moescope_##name(__VA_ARGS__);                                                      \
		if (PyErr_Occurred())                                                              \
			return NULL;                                                               \
		Py_RETURN_NONE;                                                                    \
	}

FUNCTION(token__begin, 4, U64(0), U32(1), U32(2), U32(3))
FUNCTION(token__end, 3, U64(0), I64(1), U64(2))
FUNCTION(op__end, 1, U64(0), now())
FUNCTION(expert__begin, 6, I32(0), I32(1), U32(2), U32(3), U32(4), U32(5))
FUNCTION(expert__end, 2, I32(0), I32(1))
FUNCTION(load__begin, 5, I32(0), I32(1), U64(2), U32(3), U32(4))
FUNCTION(load__end, 4, I32(0), I32(1), U64(2), U64(3))
FUNCTION(evict, 4, I32(0), I32(1), U64(2), U64(3))

/* op__begin(type, layer, n_tokens, result, sources): sources is a bytes object, 8 bytes per id. */
static PyObject *op__begin(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	char *sources;
	Py_ssize_t bytes;

	(void)module;
	if (!arity(count, 5) || PyBytes_AsStringAndSize(arguments[4], &sources, &bytes))
		return NULL;
	moescope_op__begin(U32(0), I32(1), U32(2), U64(3), (const uint64_t *)sources, (uint32_t)(bytes / 8));
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

/* route(layer, n_tokens, k, experts, weights): contiguous buffers of u16 and float, n_tokens * k of each. */
static PyObject *route(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	Py_buffer experts, weights;
	Py_ssize_t entries;

	(void)module;
	if (!arity(count, 5))
		return NULL;
	entries = (Py_ssize_t)U32(1) * (Py_ssize_t)U32(2);
	if (PyErr_Occurred() || PyObject_GetBuffer(arguments[3], &experts, PyBUF_SIMPLE))
		return NULL;
	if (PyObject_GetBuffer(arguments[4], &weights, PyBUF_SIMPLE)) {
		PyBuffer_Release(&experts);
		return NULL;
	}
	if (experts.len != entries * 2 || weights.len != entries * 4)
		PyErr_SetString(PyExc_ValueError, "experts must hold n_tokens * k u16 and weights as many floats");
	else
		moescope_route(I32(0), U32(1), U32(2), experts.buf, weights.buf);
	PyBuffer_Release(&experts);
	PyBuffer_Release(&weights);
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

/* graph(run, first, second, handle, kind, layer, expert, backend, tier << 32 | n_tokens): (run(first, second), ns that it took). */
static PyObject *graph(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	PyObject *result, *answer = NULL;
	uint64_t began, ended, handle;

	(void)module;
	if (!arity(count, 9))
		return NULL;
	handle = U64(3);
	moescope_graph__begin(handle, U32(4), I32(5), I32(6), U32(7), U64(8));
	if (PyErr_Occurred())
		return NULL;
	began = now();
	result = PyObject_CallFunctionObjArgs(arguments[0], arguments[1], arguments[2], NULL);
	ended = now();
	moescope_graph__end(handle, result ? 0 : -1, ended);
	if (result)
		answer = Py_BuildValue("OK", result, (unsigned long long)(ended - began));
	Py_XDECREF(result);
	return answer;
}

static void on_bus_error(int signal)
{
	static const char line[] = "moescope: a mapped file of the package cannot be read any more: check its disk, then convert again\n";
	ssize_t written = write(STDERR_FILENO, line, sizeof(line) - 1);

	(void)signal;
	(void)written;
	_exit(2);
}

/* Weights are used in mapped files, and the kernel sends SIGBUS for an unreadable page: end with a message instead of a core. */
static PyObject *guard_mapped_files(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct sigaction action = {.sa_handler = on_bus_error};

	(void)module;
	(void)arguments;
	if (!arity(count, 0))
		return NULL;
	sigemptyset(&action.sa_mask);
	sigaction(SIGBUS, &action, NULL);
	Py_RETURN_NONE;
}

/* A session's run for one token on the CPU, with everything bound, and its probes' arguments. A router's run also reports its
 * choice. If `run` is None, only the operator is reported. */
struct call {
	PyObject_HEAD
	PyObject *run, *binding, *sources;
	uint64_t handle, result;
	uint32_t kind, backend;
	int32_t layer, expert;
	Py_buffer chosen, weights; /* int64 and float, of equal length; empty if it is not a router */
};

static int view(PyObject *object, Py_buffer *buffer)
{
	return object == Py_None ? 0 : PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE);
}

/* Call(run, binding, handle, kind, layer, expert, backend, result, sources, chosen=None, weights=None) */
static int call_init(struct call *self, PyObject *arguments, PyObject *keywords)
{
	PyObject *chosen = Py_None, *weights = Py_None;
	unsigned long long handle, result;

	(void)keywords;
	if (self->run) {
		PyErr_SetString(PyExc_TypeError, "a call is prepared once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "OOKIiiIKS|OO", &self->run, &self->binding, &handle, &self->kind, &self->layer, &self->expert,
			      &self->backend, &result, &self->sources, &chosen, &weights)) {
		self->run = self->binding = self->sources = NULL;
		return -1;
	}
	Py_INCREF(self->run);
	Py_INCREF(self->binding);
	Py_INCREF(self->sources);
	self->handle = handle;
	self->result = result;
	if (view(chosen, &self->chosen) || view(weights, &self->weights))
		return -1;
	if (self->chosen.len == 2 * self->weights.len && self->chosen.len <= (Py_ssize_t)(MOST_CHOSEN * sizeof(int64_t)))
		return 0;
	PyErr_SetString(PyExc_ValueError, "chosen must hold at most 64 int64 and weights as many floats");
	return -1;
}

static void call_dealloc(struct call *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	PyBuffer_Release(&self->chosen);
	PyBuffer_Release(&self->weights);
	Py_XDECREF(self->run);
	Py_XDECREF(self->binding);
	Py_XDECREF(self->sources);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static void probe_choice(const struct call *call)
{
	uint16_t experts[MOST_CHOSEN];
	uint32_t i, k = (uint32_t)(call->weights.len / sizeof(float));

	for (i = 0; i < k; i++)
		experts[i] = (uint16_t)((const int64_t *)call->chosen.buf)[i];
	moescope_route(call->layer, 1, k, experts, call->weights.buf);
}

/* Runs one graph within its operator; writes begin and end of the session's run to `times`. */
static int run_one(const struct call *call, uint32_t cache, int64_t *times)
{
	PyObject *done, *sources = call->sources;

	moescope_op__begin(call->kind, call->layer, 1, call->result, (const uint64_t *)PyBytes_AsString(sources),
			   (uint32_t)(PyBytes_Size(sources) / 8));
	if (call->run == Py_None) {
		times[0] = times[1] = (int64_t)now();
		moescope_op__end(call->result, (uint64_t)times[1]);
		return 0;
	}
	if (call->kind == EXPERT)
		moescope_expert__begin(call->layer, call->expert, 1, cache, call->backend, 0);
	moescope_graph__begin(call->handle, call->kind, call->layer, call->expert, call->backend, 1);
	times[1] = 0;
	times[0] = (int64_t)now();
	done = PyObject_CallFunctionObjArgs(call->run, call->binding, Py_None, NULL);
	if (done)
		times[1] = (int64_t)now();
	moescope_graph__end(call->handle, done ? 0 : -1, (uint64_t)times[1]);
	Py_XDECREF(done);
	if (call->kind == EXPERT && done)
		moescope_expert__end(call->layer, call->expert);
	if (call->weights.len && done)
		probe_choice(call);
	moescope_op__end(call->result, now());
	return done ? 0 : -1;
}

/* The end of a token's layer: the residual plus the chosen experts' rows by router weight, plus the shared expert's. */
struct combine {
	PyObject_HEAD
	uint64_t result;
	float multiplier;
	Py_ssize_t hidden, experts;
	Py_buffer sources, results; /* u64: identities of its sources other than experts, and of each expert's result */
	Py_buffer chosen, weights; /* int64 and float */
	Py_buffer rows, common, attended, out; /* float: [experts, hidden], and [hidden] */
};

/* Combine(result, sources, results, chosen, weights, rows, common, multiplier, attended, out) */
static int combine_init(struct combine *self, PyObject *arguments, PyObject *keywords)
{
	PyObject *sources, *results, *chosen, *weights, *rows, *common, *attended, *out;
	unsigned long long result;
	Py_ssize_t row;

	(void)keywords;
	if (self->out.obj) {
		PyErr_SetString(PyExc_TypeError, "a sum is prepared once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "KSSOOOOfOO", &result, &sources, &results, &chosen, &weights, &rows, &common,
			      &self->multiplier, &attended, &out))
		return -1;
	self->result = result;
	if (view(sources, &self->sources) || view(results, &self->results) || view(chosen, &self->chosen) ||
	    view(weights, &self->weights) || view(rows, &self->rows) || view(common, &self->common) ||
	    view(attended, &self->attended) || PyObject_GetBuffer(out, &self->out, PyBUF_WRITABLE))
		return -1;
	row = self->out.len;
	self->hidden = row / (Py_ssize_t)sizeof(float);
	self->experts = self->results.len / (Py_ssize_t)sizeof(uint64_t);
	if (self->chosen.len == 2 * self->weights.len && self->chosen.len <= (Py_ssize_t)(MOST_CHOSEN * sizeof(int64_t)) &&
	    self->sources.len <= (Py_ssize_t)(MOST_CHOSEN * sizeof(uint64_t)) && self->rows.len == row * self->experts &&
	    (!self->common.obj || self->common.len == row) && self->attended.len == row)
		return 0;
	PyErr_SetString(PyExc_ValueError, "what is summed up does not belong together");
	return -1;
}

static void combine_dealloc(struct combine *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	PyBuffer_Release(&self->sources);
	PyBuffer_Release(&self->results);
	PyBuffer_Release(&self->chosen);
	PyBuffer_Release(&self->weights);
	PyBuffer_Release(&self->rows);
	PyBuffer_Release(&self->common);
	PyBuffer_Release(&self->attended);
	PyBuffer_Release(&self->out);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

/* In the router's order, rounding after each operation: the same bits for one row as for many, and as in NumPy. */
static void sum_up(float *restrict out, const float *weights, Py_ssize_t k, const float *rows, const int64_t *chosen,
		   const float *common, float multiplier, const float *attended, Py_ssize_t n)
{
	Py_ssize_t i, j;

	for (j = 0; j < k; j++) {
		const float *restrict row = rows + (chosen ? chosen[j] : j) * n;
		float weight = weights[j];

		if (j)
			for (i = 0; i < n; i++)
				out[i] += weight * row[i];
		else
			for (i = 0; i < n; i++)
				out[i] = weight * row[i];
	}
	for (i = 0; common && i < n; i++)
		out[i] += common[i];
	for (i = 0; multiplier != 1 && i < n; i++)
		out[i] *= multiplier;
	for (i = 0; i < n; i++)
		out[i] += attended[i];
}

/* combine(weights [n, k], outputs [n, k, hidden], common [n, hidden] or None, multiplier, attended, out [n, hidden]) */
static PyObject *combine(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	enum { WEIGHTS, OUTPUTS, COMMON, ATTENDED, OUT, BUFFERS };
	static const int places[BUFFERS] = {0, 1, 2, 4, 5};
	Py_buffer b[BUFFERS] = {{0}};
	Py_ssize_t i, k, n, rows = 0;
	double multiplier;
	int failed = 0;

	(void)module;
	if (!arity(count, 6))
		return NULL;
	multiplier = PyFloat_AsDouble(arguments[3]);
	rows = PyObject_Size(arguments[5]);
	for (i = 0; i < BUFFERS && !failed; i++)
		failed = PyErr_Occurred() || (i == OUT ? PyObject_GetBuffer(arguments[5], &b[i], PyBUF_WRITABLE)
						       : view(arguments[places[i]], &b[i]));
	if (!failed) {
		n = rows ? b[OUT].len / rows / (Py_ssize_t)sizeof(float) : 0;
		k = rows ? b[WEIGHTS].len / rows / (Py_ssize_t)sizeof(float) : 0;
		if (b[ATTENDED].len != b[OUT].len || (b[COMMON].obj && b[COMMON].len != b[OUT].len) ||
		    b[WEIGHTS].len != rows * k * (Py_ssize_t)sizeof(float) || b[OUTPUTS].len != k * b[OUT].len) {
			PyErr_SetString(PyExc_ValueError, "what is summed up does not belong together");
			failed = 1;
		}
		for (i = 0; i < rows && !failed; i++)
			sum_up((float *)b[OUT].buf + i * n, (float *)b[WEIGHTS].buf + i * k, k, (float *)b[OUTPUTS].buf + i * k * n, NULL,
			       b[COMMON].obj ? (float *)b[COMMON].buf + i * n : NULL, (float)multiplier, (float *)b[ATTENDED].buf + i * n, n);
	}
	for (i = 0; i < BUFFERS; i++)
		PyBuffer_Release(&b[i]);
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

/* Runs the sum within its operator. Its sources list experts in order of their numbers. */
static int sum_one(const struct combine *self, int64_t *times)
{
	uint64_t sources[2 * MOST_CHOSEN];
	const uint64_t *fixed = self->sources.buf, *results = self->results.buf;
	const int64_t *chosen = self->chosen.buf;
	uint32_t i, place, n = 0, first = (uint32_t)(self->sources.len / sizeof(uint64_t));
	uint32_t k = (uint32_t)(self->weights.len / sizeof(float));

	for (i = 0; i < first; i++)
		sources[n++] = fixed[i];
	for (i = 0; i < k; i++, n++) {
		if (chosen[i] < 0 || chosen[i] >= self->experts) {
			PyErr_SetString(PyExc_ValueError, "no such expert");
			return -1;
		}
		for (place = n; place > first && sources[place - 1] > results[chosen[i]]; place--)
			sources[place] = sources[place - 1];
		sources[place] = results[chosen[i]];
	}
	moescope_op__begin(COMBINE, (int32_t)((self->result >> 16) & 0xffff) - 1, 1, self->result, sources, n);
	times[0] = (int64_t)now();
	sum_up(self->out.buf, self->weights.buf, k, self->rows.buf, chosen, self->common.buf, self->multiplier, self->attended.buf,
	       self->hidden);
	times[1] = (int64_t)now();
	moescope_op__end(self->result, (uint64_t)times[1]);
	return 0;
}

static PyTypeObject *call_type, *choice_type, *combine_type, *work_type, *foresight_type;
PyTypeObject *slots_type;

/* One of several calls, one per expert: the router's result determines which. */
struct choice {
	PyObject_HEAD
	PyObject *calls, *prepare;
	Py_buffer chosen; /* one int64 */
};

/* Choice(calls, prepare, chosen): `calls`: a list, in which prepare(expert) replaces None; chosen: one int64. */
static int choice_init(struct choice *self, PyObject *arguments, PyObject *keywords)
{
	PyObject *chosen;

	(void)keywords;
	if (self->calls) {
		PyErr_SetString(PyExc_TypeError, "a choice is prepared once");
		return -1;
	}
	if (!PyArg_ParseTuple(arguments, "OOO", &self->calls, &self->prepare, &chosen)) {
		self->calls = self->prepare = NULL;
		return -1;
	}
	Py_INCREF(self->calls);
	Py_INCREF(self->prepare);
	if (PyObject_GetBuffer(chosen, &self->chosen, PyBUF_SIMPLE))
		return -1;
	if (self->chosen.len == sizeof(int64_t) && PyList_Check(self->calls))
		return 0;
	PyErr_SetString(PyExc_ValueError, "calls must be a list and chosen one int64");
	return -1;
}

static void choice_dealloc(struct choice *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);

	PyBuffer_Release(&self->chosen);
	Py_XDECREF(self->calls);
	Py_XDECREF(self->prepare);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

/* The call that was chosen, a new reference. */
static PyObject *chosen_call(const struct choice *self)
{
	int64_t expert = *(const int64_t *)self->chosen.buf;
	PyObject *call;

	if (expert < 0 || expert >= PyList_Size(self->calls)) {
		PyErr_SetString(PyExc_ValueError, "no such expert");
		return NULL;
	}
	call = PyList_GetItem(self->calls, (Py_ssize_t)expert);
	if (call == Py_None)
		return PyObject_CallFunction(self->prepare, "L", (long long)expert);
	Py_XINCREF(call);
	return call;
}

static int do_one(PyObject *item, uint32_t cache, int64_t *times)
{
	PyObject *call;
	int failed = -1;

	if (Py_TYPE(item) == call_type)
		return run_one((struct call *)item, cache, times);
	times[1] = 0;
	if (Py_TYPE(item) == combine_type)
		return sum_one((struct combine *)item, times);
	if (Py_TYPE(item) == work_type)
		return do_slot_work(item, times);
	if (Py_TYPE(item) == foresight_type)
		return do_foresight(item, times);
	call = Py_TYPE(item) == choice_type ? chosen_call((struct choice *)item) : NULL;
	if (call && Py_TYPE(call) == call_type)
		failed = run_one((struct call *)call, cache, times);
	else if (!PyErr_Occurred())
		PyErr_SetString(PyExc_TypeError, "neither a call nor a sum");
	Py_XDECREF(call);
	return failed;
}

/* run(calls, caches, times, first): equally long lists of calls, choices or sums and of cache states; times: int64, a pair each
 * from `first` on, with end 0 if the run failed. Returns the number of pairs filled so far. */
static PyObject *run(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	Py_ssize_t i, n, first;
	Py_buffer times;
	int failed = 0;

	(void)module;
	if (!arity(count, 4))
		return NULL;
	first = PyLong_AsSsize_t(arguments[3]);
	n = PyList_Size(arguments[0]);
	if (PyErr_Occurred() || PyObject_GetBuffer(arguments[2], &times, PyBUF_WRITABLE))
		return NULL;
	if (PyList_Size(arguments[1]) != n || first < 0 || times.len < (Py_ssize_t)(2 * sizeof(int64_t)) * (first + n)) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_ValueError, "calls, caches and times do not belong together");
		failed = 1;
	}
	for (i = 0; i < n && !failed; i++) {
		PyObject *item = PyList_GetItem(arguments[0], i);
		PyObject *state = PyList_GetItem(arguments[1], i);
		uint32_t cache = state ? (uint32_t)PyLong_AsLongLong(state) : 0;

		if (!item || !state) { /* another thread shortened the lists while a graph ran */
			failed = 1;
			break;
		}
		Py_INCREF(item);
		failed = PyErr_Occurred() || do_one(item, cache, (int64_t *)times.buf + 2 * (first + i));
		Py_DECREF(item);
	}
	PyBuffer_Release(&times);
	return failed ? NULL : PyLong_FromSsize_t(first + n);
}

#define TYPE(kind, python_name, meaning)                                                                                  \
	static PyType_Slot kind##_slots[] = {                                                                             \
		{Py_tp_init, kind##_init}, {Py_tp_dealloc, kind##_dealloc}, {Py_tp_doc, meaning}, {0, NULL},              \
	};                                                                                                                \
	static PyType_Spec kind##_spec = {                                                                                \
		.name = "runtime.telemetry._probes." python_name,                                                         \
		.basicsize = sizeof(struct kind),                                                                         \
		.flags = Py_TPFLAGS_DEFAULT,                                                                              \
		.slots = kind##_slots,                                                                                    \
	}

TYPE(call, "Call", "A prepared run of a graph.");
TYPE(choice, "Choice", "The prepared run of the expert that a router chooses.");
TYPE(combine, "Combine", "A prepared sum of a layer's results.");

static int add_type(PyObject *module, PyTypeObject **type, PyType_Spec *spec)
{
	if (!*type)
		*type = (PyTypeObject *)PyType_FromSpec(spec);
	return *type ? PyModule_AddType(module, *type) : -1;
}

static int add_types(PyObject *module)
{
	int failed = add_type(module, &call_type, &call_spec) || add_type(module, &choice_type, &choice_spec) ||
		     add_type(module, &combine_type, &combine_spec) || add_type(module, &slots_type, &slots_spec) ||
		     add_type(module, &work_type, &slot_work_spec) ||
		     add_type(module, &foresight_type, &foresight_spec);

	return failed ? -1 : 0;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
	METHOD(token__begin), METHOD(token__end),   METHOD(op__begin), METHOD(op__end),     METHOD(graph),
	METHOD(expert__begin), METHOD(expert__end), METHOD(route), METHOD(load__begin),
	METHOD(load__end),    METHOD(evict),        METHOD(guard_mapped_files), METHOD(run),
	METHOD(combine),
	{NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef module = {
	.m_base = PyModuleDef_HEAD_INIT,
	.m_name = "_probes",
	.m_doc = "USDT probes of the MoEScope runtime.",
	.m_size = 0,
	.m_methods = methods,
	.m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__probes(void)
{
	return PyModuleDef_Init(&module);
}

/* The loop of analyzer/questions/replays.py, which says what it computes. analyzer/records/loops.py declares it to Python. */
#include <math.h>
#include <stdint.h>

enum { RANKED, KEEPING, LFRU, LRU }; /* policies: analyzer/questions/replays.py */

struct held { /* the held keys as a heap: the lowest rank first, of equal ones the lower key */
	int64_t n;
	int64_t *heap;
	int64_t *place; /* of each key in the heap, -1 where it is not held */
	double *rank;
};

static int is_before(const struct held *h, int64_t a, int64_t b)
{
	return h->rank[a] < h->rank[b] || (h->rank[a] == h->rank[b] && a < b);
}

static void put(struct held *h, int64_t place, int64_t key)
{
	h->heap[place] = key;
	h->place[key] = place;
}

/* Puts a key where it belongs, from a place that is free. */
static void settle(struct held *h, int64_t free, int64_t key)
{
	for (; free > 0 && is_before(h, key, h->heap[(free - 1) / 2]); free = (free - 1) / 2)
		put(h, free, h->heap[(free - 1) / 2]);
	for (int64_t below; (below = 2 * free + 1) < h->n; free = below) {
		below += below + 1 < h->n && is_before(h, h->heap[below + 1], h->heap[below]);
		if (is_before(h, key, h->heap[below]))
			break;
		put(h, free, h->heap[below]);
	}
	put(h, free, key);
}

static void take_out(struct held *h, int64_t key)
{
	int64_t free = h->place[key], last = h->heap[--h->n];

	h->place[key] = -1;
	if (last != key)
		settle(h, free, last);
}

/* Evicts until so many bytes are freed or nothing is left; answers how many are. */
static int64_t evict(struct held *h, const int64_t *size, int64_t excess)
{
	int64_t freed = 0;

	while (h->n && freed < excess) {
		freed += size[h->heap[0]];
		take_out(h, h->heap[0]);
	}
	return freed;
}

/* The same of an event's own keys, which are in no order. */
static int64_t evict_own(const struct held *h, int64_t *own, int64_t *n, const int64_t *size, int64_t excess)
{
	int64_t freed = 0;

	while (*n && freed < excess) {
		int64_t lowest = 0;

		for (int64_t i = 1; i < *n; i++)
			if (is_before(h, own[i], own[lowest]))
				lowest = i;
		freed += size[own[lowest]];
		own[lowest] = own[--*n];
	}
	return freed;
}

/* The rank that the use of a key gives it: by LFRU, log2 of the sum of 2^age over its uses; a key ever used ages it by a share. */
static double rank_of_use(int64_t policy, double given, double old, double half_life, double *age, int64_t *known)
{
	if (policy != LFRU)
		return policy == LRU ? ++*age : given;
	*known += isinf(old) != 0;
	*age += 1 / (half_life * (double)*known);
	return *age + log2(1 + exp2(old - *age));
}

/* missed: whether each request found its key absent. room: of three numbers per key; rank: minus infinity for each. */
int64_t replay(int64_t policy, int64_t events, const int64_t *begin, const int64_t *keys, const double *given, double half_life,
	       int64_t capacity, int64_t n, const int64_t *size, int64_t *room, double *rank, int64_t *missed)
{
	struct held h = {0, room, room + n, rank};
	int64_t *own = room + 2 * n, filled = 0, known = 0;
	double age = 0;

	for (int64_t i = 0; i < n; i++)
		h.place[i] = -1;
	for (int64_t e = 0; e < events; e++) {
		int64_t owned = 0, needed = 0;

		for (int64_t i = begin[e]; i < begin[e + 1]; i++) {
			int64_t key = keys[i];

			missed[i] = h.place[key] < 0;
			if (missed[i]) {
				needed += size[key];
				continue;
			}
			take_out(&h, key);
			rank[key] = rank_of_use(policy, given[i], rank[key], half_life, &age, &known);
			own[owned++] = key;
		}
		if (policy == KEEPING || policy == LFRU)
			filled -= evict(&h, size, filled + needed - capacity);
		for (int64_t i = begin[e]; i < begin[e + 1]; i++) {
			int64_t key = keys[i];

			if (!missed[i] || (size[key] > capacity && policy != LRU))
				continue;
			filled += size[key];
			if (policy == KEEPING || policy == LFRU)
				filled -= evict_own(&h, own, &owned, size, filled - capacity);
			rank[key] = rank_of_use(policy, given[i], rank[key], half_life, &age, &known);
			own[owned++] = key;
		}
		while (owned)
			settle(&h, h.n++, own[--owned]);
		filled -= evict(&h, size, filled - capacity);
	}
	return 1;
}

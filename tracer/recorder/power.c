// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Reads sources of power, each by a sampler of its own; the plan says what their files mean (tracer/sensors/sources.toml). */
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define ROOT "/sys"
#define MOST_SOURCES 32
#define MOST_GAUGES 256
#define MOST_RAILS 1024
#define MOST_QUEUED 16384
#define LINES_BYTES 8192
#define USUAL_HZ 10.0
#define SHARE 1000 /* of a core, whose part reading may cost unless a rate is asked for */
#define FLOOR_NS NS_PER_S
#define TRIAL_HZ 100.0
#define CHIPS 63
#define CHIP_NS 80000000ULL
#define MOST_PLAYERS 256
#define TRIAL_US 1000000

/* Where a plan's patterns may lead: it comes from a process with fewer rights. */
static const char *const folders[] = {"class/powercap/", "class/hwmon/", "class/power_supply/", "bus/iio/devices/"};

enum { VALUE, FACTOR, STATE, FILES };

struct gauge {
	char *paths[FILES]; /* NULL: it has no such file */
	int fds[FILES];     /* -1: it cannot be opened now */
	int first_rail, rails;
	bool lines;
	bool fails; /* at its last reading; a sensor that comes back has files of its own */
};

static struct source {
	struct sampler sampler; /* first: it stands for its source */
	struct gauge *gauges;
	int gauge_count;
} sources[MOST_SOURCES];

/* What a rail's numbers mean, and its last reading. */
static struct rail {
	char kind; /* first letter of the source's */
	bool multiplied;
	double unit;
	s64 value;
	u64 ts;
} rails[MOST_RAILS];
static double joules; /* read so far of all rails; those that overlap count twice */

static struct gauge gauges[MOST_GAUGES];
static int source_count, gauge_count, rail_count;
static struct rec_power queue[MOST_QUEUED], taken[MOST_QUEUED];
static u32 queued;
static u64 missed, floor_ns[2], next_opening;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool asked_rate;
static const char *root;
static bool of_user; /* who named that folder */
static json_t *found_sources, *found_rails;
static char chips[CHIPS + 1];
static u64 pattern_ns;

static u8 supply_in(int fd)
{
	char text[32];

	if (fd < 0 || sensor_text(fd, text, sizeof(text)) <= 0)
		return SUPPLY_UNKNOWN;
	return *text == 'D' ? SUPPLY_DISCHARGING : *text == 'C' ? SUPPLY_CHARGING : *text == 'F' || *text == 'N' ? SUPPLY_RESTING : SUPPLY_UNKNOWN;
}

static void push(const struct rec_power *record)
{
	pthread_mutex_lock(&lock);
	if (queued < MOST_QUEUED)
		queue[queued++] = *record;
	else
		missed++;
	pthread_mutex_unlock(&lock);
}

/* A rail's line, "CH3(T=1234)[NAME], 5678": its name's place, its value and the sensor's time. */
static bool parse_line(char *line, char **name, s64 *value, s64 *stamp)
{
	char *opens = strchr(line, '['), *closes = opens ? strstr(opens, "], ") : NULL, *at = strstr(line, "(T=");

	if (!closes || !number_from(closes + 3, value))
		return false;
	*closes = 0;
	*name = opens + 1;
	*stamp = at && at < opens ? strtoll(at + 3, NULL, 10) : 0;
	return true;
}

static void read_lines(struct gauge *g, struct rec_power *r)
{
	char text[LINES_BYTES], *rest = text, *name;
	int rail = 0;
	s64 stamp;

	r->failed = sensor_text(g->fds[VALUE], text, sizeof(text)) <= 0;
	g->fails = r->failed;
	r->after = now_ns();
	for (char *line; (line = strsep(&rest, "\n")) && rail < g->rails;) {
		if (!parse_line(line, &name, (s64 *)&r->value, &stamp))
			continue;
		r->rail = g->first_rail + rail++;
		r->factor = stamp;
		push(r);
	}
}

static void read_gauge(struct gauge *g)
{
	struct rec_power r = {.h = {.ts = now_ns(), .kind = KIND_POWER}, .rail = g->first_rail};
	s64 value = 0, factor = 0;

	if (g->lines) {
		read_lines(g, &r);
		return;
	}
	r.failed = !sensor_number(g->fds[VALUE], &value) || (g->paths[FACTOR] && !sensor_number(g->fds[FACTOR], &factor));
	g->fails = r.failed;
	r.after = now_ns();
	r.value = value;
	r.factor = factor;
	r.supply = g->paths[STATE] ? supply_in(g->fds[STATE]) : SUPPLY_NONE;
	push(&r);
}

static void read_source(struct sampler *sampler)
{
	struct source *s = (struct source *)sampler;

	for (int i = 0; i < s->gauge_count; i++)
		read_gauge(&s->gauges[i]);
}

/* The file beside a gauge's that `form` names, NULL if it leads elsewhere; a * in it stands for what the pattern's last one matched. */
static char *beside(const char *path, const char *pattern, const char *form)
{
	const char *folder = strrchr(path, '/') + 1, *star = strchr(form, '*'), *of = strrchr(pattern, '/') + 1, *mark = strchr(of, '*');
	int same = mark ? mark - of : 0, length = mark ? (int)strlen(folder) - (int)strlen(of) + 1 : 0;
	char *answer = NULL;
	int done = strchr(form, '/') ? -1 : star ? asprintf(&answer, "%.*s%.*s%.*s%s", (int)(folder - path), path, (int)(star - form), form, length, folder + same, star + 1)
			: asprintf(&answer, "%.*s%s", (int)(folder - path), path, form);

	return done < 0 ? NULL : answer;
}

/* The first line of a file beside a gauge's; "" if it cannot be read or `form` is empty. */
static char *text_beside(const char *path, const char *pattern, const char *form)
{
	static char text[128];
	char *place = *form ? beside(path, pattern, form) : NULL;
	int fd = place ? open_sensor(place, of_user) : -1;

	sensor_text(fd, text, sizeof(text));
	text[strcspn(text, "\n")] = 0;
	if (fd >= 0)
		close(fd);
	free(place);
	return text;
}

static bool is_wanted(json_t *row, const char *path, const char *pattern)
{
	json_t *only = json_object_get(row, "only");
	const char *name = json_string_value(json_array_get(only, 0)), *unless = text_of(row, "unless");
	char *other = *unless ? beside(path, pattern, unless) : NULL;
	bool is_other = other && !access(other, F_OK);

	free(other);
	return !is_other && (!name || lists(only, text_beside(path, pattern, name)));
}

static void add_rail(int source, const char *path, const char *pattern, json_t *row, const char *name)
{
	json_t *rail = json_pack("{si ss so}", "source", source, "file", path + strlen(root) + 1, "rail", plain_text(name));
	s64 range; /* `name` may be in text_beside's buffer */
	bool wraps = number_from(text_beside(path, pattern, text_of(row, "wrap")), &range);

	json_object_set_new(rail, "range", wraps ? json_integer(range) : json_null());
	json_array_append_new(found_rails, rail);
	rails[rail_count++] = (struct rail){*text_of(row, "kind"), *text_of(row, "times"), json_number_value(json_object_get(row, "unit")), 0, 0};
}

static void add_lines(struct gauge *g, int source, const char *pattern, json_t *row)
{
	char text[LINES_BYTES], *rest = text, *name;
	s64 value, stamp;

	sensor_text(g->fds[VALUE], text, sizeof(text));
	for (char *line; (line = strsep(&rest, "\n")) && rail_count < MOST_RAILS;)
		if (parse_line(line, &name, &value, &stamp))
			add_rail(source, g->paths[VALUE], pattern, row, name);
}

static void forget(struct gauge *g)
{
	for (int i = 0; i < FILES; i++) {
		free(g->paths[i]);
		if (g->fds[i] >= 0)
			close(g->fds[i]);
	}
}

static void add_gauge(int source, const char *path, const char *pattern, json_t *row)
{
	struct gauge *g = &gauges[gauge_count];
	const char *times = text_of(row, "times"), *state = text_of(row, "state"), *label;
	s64 value;

	*g = (struct gauge){.first_rail = rail_count, .lines = json_is_true(json_object_get(row, "lines"))};
	g->paths[VALUE] = strdup(path);
	g->paths[FACTOR] = *times ? beside(path, pattern, times) : NULL;
	g->paths[STATE] = *state ? beside(path, pattern, state) : NULL;
	for (int i = 0; i < FILES; i++)
		g->fds[i] = g->paths[i] ? open_sensor(g->paths[i], of_user) : -1;
	if (g->lines) {
		add_lines(g, source, pattern, row);
	} else if (sensor_number(g->fds[VALUE], &value) && (!*times || sensor_number(g->fds[FACTOR], &value))) {
		label = text_beside(path, pattern, text_of(row, "label"));
		add_rail(source, path, pattern, row, *label ? label : strrchr(path, '/') + 1);
	}
	g->rails = rail_count - g->first_rail;
	if (g->rails)
		gauge_count++;
	else
		forget(g);
}

static bool is_allowed(const char *pattern)
{
	for (size_t i = 0; i < sizeof(folders) / sizeof(*folders); i++)
		if (!strncmp(pattern, folders[i], strlen(folders[i])))
			return !strstr(pattern, "..");
	return false;
}

static void add_source(json_t *row, double hz)
{
	struct source *s = &sources[source_count];
	const char *pattern = text_of(row, "files");
	double most = json_number_value(json_object_get(row, "most_hz"));
	char *place = NULL;
	glob_t paths = {0};

	if (source_count == MOST_SOURCES || !is_allowed(pattern) || asprintf(&place, "%s/%s", root, pattern) < 0)
		return;
	*s = (struct source){.gauges = &gauges[gauge_count]};
	glob(place, 0, NULL, &paths);
	for (size_t i = 0; i < paths.gl_pathc && gauge_count < MOST_GAUGES && rail_count < MOST_RAILS; i++)
		if (is_wanted(row, paths.gl_pathv[i], place))
			add_gauge(source_count, paths.gl_pathv[i], place, row);
	globfree(&paths);
	free(place);
	s->gauge_count = &gauges[gauge_count] - s->gauges;
	if (!s->gauge_count)
		return;
	hz = most > 0 && hz > most ? most : hz;
	s->sampler = (struct sampler){.name = text_of(row, "name"), .read = read_source, .period_ns = NS_PER_S / hz,
				      .least_pause = asked_rate ? 0 : SHARE};
	json_array_append_new(found_sources, json_copy(row));
	json_object_set_new(json_array_get(found_sources, source_count++), "hz", json_real(hz));
}

static void find_sources(json_t *declared, const char *below, double hz)
{
	size_t index;
	json_t *row;

	of_user = below;
	root = below ? below : ROOT;
	asked_rate = hz > 0;
	found_sources = json_array();
	found_rails = json_array();
	json_array_foreach(declared, index, row)
		add_source(row, asked_rate ? hz : USUAL_HZ);
}

/* All together may cost as much as one would. */
static void start_sources(void)
{
	for (int i = 0; i < source_count; i++) {
		sources[i].sampler.least_pause *= source_count;
		start_sampler(&sources[i].sampler);
	}
}

void power_begin(const struct choice *choice)
{
	find_sources(choice->power_hz < 0 ? NULL : json_object_get(choice->plan, "power"), choice->sysfs, choice->power_hz);
	start_sources();
}

/* Lets the machine be idle for a moment, if anything measures that. */
void power_floor(void)
{
	if (!source_count && !pattern_ns)
		return;
	floor_ns[0] = now_ns();
	floor_ns[1] = floor_ns[0] + FLOOR_NS;
	while (now_ns() < floor_ns[1]) {
		usleep(100000);
		heed_planner();
	}
}

/* A sequence that resembles itself at no other offset: a shift register of six bits, x^6 + x^5 + 1. */
static void draw_chips(void)
{
	u32 state = 1;

	for (int i = 0; i < CHIPS; i++) {
		chips[i] = '0' + (state & 1);
		state = state >> 1 | ((state ^ state >> 1) & 1) << 5;
	}
}

static void *play(void *context)
{
	(void)context;
	for (int i = 0; i < CHIPS; i++) {
		u64 until = pattern_ns + (i + 1) * CHIP_NS, now;

		while ((now = now_ns()) < until)
			if (chips[i] == '0')
				usleep((until - now) / 1000);
	}
	return NULL;
}

/* Computes on all CPUs and rests in turns, so that an external meter's file can be joined by what it saw of this. */
void play_pattern(void)
{
	pthread_t players[MOST_PLAYERS];
	int count = sysconf(_SC_NPROCESSORS_ONLN), started = 0;

	draw_chips();
	pattern_ns = now_ns() + CHIP_NS;
	while (started < count && started < MOST_PLAYERS && !pthread_create(&players[started], NULL, play, NULL))
		started++;
	while (now_ns() < pattern_ns + CHIPS * CHIP_NS) {
		usleep(100000);
		heed_planner();
	}
	for (int i = 0; i < started; i++)
		pthread_join(players[i], NULL);
}

static void open_failing(void)
{
	if (now_ns() < next_opening)
		return;
	next_opening = now_ns() + NS_PER_S;
	for (int i = 0; i < gauge_count; i++)
		for (int file = 0; gauges[i].fails && file < FILES; file++)
			if (gauges[i].paths[file])
				open_sensor_again(gauges[i].paths[file], of_user, &gauges[i].fds[file]);
}

static void count_energy(const struct rec_power *r)
{
	struct rail *rail = &rails[r->rail];
	double factor = rail->multiplied ? (double)(s64)r->factor : 1;
	s64 value = r->value;

	if (r->failed)
		return;
	if (rail->ts && rail->kind == 'p')
		joules += fabs(value * factor) * rail->unit * (r->h.ts - rail->ts) / NS_PER_S;
	else if (rail->ts && rail->kind == 'e' && value > rail->value)
		joules += (value - rail->value) * rail->unit;
	rail->value = value;
	rail->ts = r->h.ts;
}

double joules_read(void)
{
	return joules;
}

void power_turn(void)
{
	u32 count;

	if (!source_count)
		return;
	pthread_mutex_lock(&lock);
	count = queued;
	memcpy(taken, queue, count * sizeof(*taken));
	queued = 0;
	pthread_mutex_unlock(&lock);
	for (u32 i = 0; i < count; i++) {
		add_event(&taken[i].h);
		count_energy(&taken[i]);
	}
	open_failing();
}

/* null if there is nothing */
json_t *power_found(void)
{
	if (!rail_count && !pattern_ns)
		return json_null();
	for (int i = 0; i < source_count; i++)
		json_object_set_new(json_array_get(found_sources, i), "cpu_ns", json_integer(sources[i].sampler.cpu_ns));
	return json_pack("{sO sO sI s[II] s{sI sI ss}}", "sources", found_sources, "rails", found_rails, "missed", (json_int_t)missed, "floor_ns",
			 (json_int_t)floor_ns[0], (json_int_t)floor_ns[1], "pattern", "begin_ns", (json_int_t)pattern_ns, "chip_ns",
			 (json_int_t)CHIP_NS, "chips", chips);
}

/* What a rail did while it was tried: readings, changes, the smallest of them, and how long a reading takes, ns. */
static json_t *tried(int rail)
{
	s64 last = 0, least = 0, step;
	u64 took = 0, count = 0, changes = 0, failures = 0;

	for (u32 i = 0; i < queued; i++) {
		struct rec_power *r = &queue[i];

		if (r->rail != rail)
			continue;
		failures += r->failed;
		step = llabs(r->value - last);
		if (count++ && step) {
			changes++;
			least = least && least < step ? least : step;
		}
		last = r->value;
		took += r->after - r->h.ts;
	}
	return json_pack("{sI sI sI sI sI}", "readings", (json_int_t)count, "changes", (json_int_t)changes, "step", (json_int_t)least, "failures",
			 (json_int_t)failures, "reading_ns", (json_int_t)(count ? took / count : 0));
}

json_t *try_power(json_t *declared, const char *below)
{
	size_t index;
	json_t *rail;

	find_sources(declared, below, TRIAL_HZ);
	start_sources();
	usleep(source_count ? TRIAL_US : 0);
	end_samplers();
	json_array_foreach(found_rails, index, rail)
		json_object_update_new(rail, tried(index));
	return json_pack("{sO sO}", "sources", found_sources, "rails", found_rails);
}

/*
 * Files of power sensors whose values follow a law: energy = IDLE * seconds + WATTS * CPU seconds of a process * clock share squared.
 *
 * power_sensors IDLE WATTS PID_FILE END_FILE [heat:ROOT,LOG,TAU_S,DEGREES_PER_W,LIMIT,HIDDEN] FILE,KIND,HZ,UNIT,RANGE,DELAY_S,NOISE_W ...
 *
 * The process is the one whose number PID_FILE holds, once it does; END_FILE ends this program. KIND: energy (a counter modulo RANGE),
 * stock (RANGE minus it) or power (mean since the sensor's last update). UNIT: joules or watts of one. Each value appears DELAY_S
 * after its time; NOISE_W is the standard deviation of a power's white noise.
 *
 * With heat, the process warms what has a thermal mass: dT/dt = (AMBIENT + DEGREES_PER_W * watts - T) / TAU_S, the watts being
 * IDLE + WATTS * clock share squared, and t its CPU time, so that a busy machine warms nothing and cools nothing. At LIMIT the clock
 * falls by a level, as the limit of the policy and the cooling device below ROOT show, or HIDDEN: as its frequency alone shows.
 * LIMIT - HYSTERESIS lets it rise again. LOG gets a line for each change: monotonic ns, kHz, 1/1000 degree.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#define MOST 32

static struct sensor {
	char path[256], kind[16];
	double hz, unit, range, delay, noise, measure_at, show_at, last_joules, last_at;
	long long shown;
	int fd;
} sensors[MOST];

#define AMBIENT 30.0
#define HYSTERESIS 8.0
#define HEAT_S 0.1
#define LEVELS 3
static const int khz[LEVELS] = {2800000, 1900000, 1400000};

static struct {
	int clock, most, zone, cooling, level; /* files and the level in force */
	double tau, degrees_per_w, limit, celsius, at, cpu_s;
	bool is_on, hidden;
	FILE *log;
} heat;

static double idle_w, cpu_w, began;
static const char *pid_file;

static double seconds(clockid_t clock)
{
	struct timespec now = {0};

	clock_gettime(clock, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

static pid_t named_pid(void)
{
	FILE *file = fopen(pid_file, "r");
	pid_t pid = 0;

	if (file && fscanf(file, "%d", &pid) != 1)
		pid = 0;
	if (file)
		fclose(file);
	return pid;
}

/* CPU time of the process, which stays when it has ended, and of those before it. */
static double cpu_s(void)
{
	static double past, last;
	static pid_t pid;
	clockid_t clock;

	if (!pid || clock_getcpuclockid(pid, &clock)) {
		pid_t other = named_pid();

		past += other == pid ? 0 : last;
		last = other == pid ? last : 0;
		pid = other;
	}
	if (pid && !clock_getcpuclockid(pid, &clock))
		last = fmax(last, seconds(clock));
	return past + last;
}

static double normal(void)
{
	return sqrt(-2 * log((random() + 1.0) / (RAND_MAX + 2.0))) * cos(2 * M_PI * random() / RAND_MAX);
}

/* So far. A lower clock needs a lower voltage, too: the energy of a CPU second falls with its square. */
static double joules_until(double now)
{
	static double cpu_joules, last_cpu;
	double cpu = cpu_s(), share = (double)khz[heat.level] / khz[0];

	cpu_joules += cpu_w * share * share * (cpu - last_cpu);
	last_cpu = cpu;
	return idle_w * (now - began) + cpu_joules;
}

/* In place and of one length, so that no reader finds half a number. */
static void write_number(int fd, long long number)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "%20lld\n", number);

	if (pwrite(fd, text, length, 0) != length)
		exit(1);
}

static int sensor_file(const char *root, const char *name)
{
	char path[512];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", root, name);
	fd = open(path, O_WRONLY | O_CREAT, 0644);
	if (fd < 0)
		exit(1);
	return fd;
}

static void show_clock(double now)
{
	write_number(heat.clock, khz[heat.level]);
	if (!heat.hidden) {
		write_number(heat.most, khz[heat.level]);
		write_number(heat.cooling, heat.level);
	}
	fprintf(heat.log, "%.0f %d %.0f\n", now * 1e9, khz[heat.level], heat.celsius * 1000);
	fflush(heat.log);
}

static void begin_heat(const char *text)
{
	char root[256], log[256];
	int hidden;

	if (sscanf(text, "%255[^,],%255[^,],%lf,%lf,%lf,%d", root, log, &heat.tau, &heat.degrees_per_w, &heat.limit, &hidden) != 6)
		exit(2);
	heat.is_on = true;
	heat.hidden = hidden;
	heat.log = fopen(log, "w");
	heat.clock = sensor_file(root, "devices/system/cpu/cpufreq/policy0/scaling_cur_freq");
	heat.most = sensor_file(root, "devices/system/cpu/cpufreq/policy0/scaling_max_freq");
	heat.zone = sensor_file(root, "class/thermal/thermal_zone0/temp");
	heat.cooling = sensor_file(root, "class/thermal/cooling_device0/cur_state");
	heat.celsius = AMBIENT + heat.degrees_per_w * idle_w;
	heat.at = began;
	show_clock(began);
}

static void turn_heat(double now)
{
	double cpu = cpu_s(), share = (double)khz[heat.level] / khz[0];
	double aim = AMBIENT + heat.degrees_per_w * (idle_w + cpu_w * share * share);
	int level = heat.level;

	heat.celsius = aim + (heat.celsius - aim) * exp(-(cpu - heat.cpu_s) / heat.tau);
	heat.cpu_s = cpu;
	heat.at = now;
	if (heat.celsius >= heat.limit && level < LEVELS - 1)
		level++;
	else if (heat.celsius < heat.limit - HYSTERESIS && level)
		level--;
	write_number(heat.zone, llround(heat.celsius * 1000));
	if (level != heat.level) {
		heat.level = level;
		show_clock(now);
	}
}

static void measure(struct sensor *s, double now)
{
	double joules = joules_until(now);
	double watts = (joules - s->last_joules) / (now - s->last_at) + (s->noise ? s->noise * normal() : 0);

	if (!strcmp(s->kind, "power"))
		s->shown = llround(watts / s->unit);
	else if (!strcmp(s->kind, "stock"))
		s->shown = s->range - floor(joules / s->unit);
	else
		s->shown = fmod(floor(joules / s->unit), s->range > 0 ? s->range : 1e18);
	s->last_joules = joules;
	s->last_at = now;
	s->show_at = now + s->delay;
	while (s->measure_at <= now)
		s->measure_at += 1 / s->hz;
}

static void show(struct sensor *s)
{
	write_number(s->fd, s->shown);
	s->show_at = INFINITY;
}

static void wait_for_next(int count)
{
	double next = INFINITY, now = seconds(CLOCK_MONOTONIC);

	for (int i = 0; i < count; i++)
		next = fmin(next, fmin(sensors[i].measure_at, sensors[i].show_at));
	next = heat.is_on ? fmin(next, heat.at + HEAT_S) : next;
	if (next > now)
		usleep((next - now) * 1e6);
}

int main(int argc, char **argv)
{
	int count = argc - 5, first = 5;

	idle_w = atof(argv[1]);
	cpu_w = atof(argv[2]);
	pid_file = argv[3];
	began = seconds(CLOCK_MONOTONIC);
	sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}); /* a sensor does not wait for a CPU */
	if (count && !strncmp(argv[5], "heat:", 5)) {
		begin_heat(argv[5] + 5);
		count--;
		first++;
	}
	for (int i = 0; i < count && i < MOST; i++) {
		struct sensor *s = &sensors[i];

		if (sscanf(argv[first + i], "%255[^,],%15[^,],%lf,%lf,%lf,%lf,%lf", s->path, s->kind, &s->hz, &s->unit, &s->range, &s->delay, &s->noise) != 7)
			return 2;
		s->fd = open(s->path, O_WRONLY | O_CREAT, 0644);
		s->last_at = s->measure_at = began;
		s->show_at = INFINITY;
		show(s);
	}
	while (access(argv[4], F_OK)) {
		wait_for_next(count);
		if (heat.is_on && seconds(CLOCK_MONOTONIC) >= heat.at + HEAT_S)
			turn_heat(seconds(CLOCK_MONOTONIC));
		for (int i = 0; i < count; i++) {
			double now = seconds(CLOCK_MONOTONIC);

			if (now >= sensors[i].show_at)
				show(&sensors[i]);
			if (now >= sensors[i].measure_at && now > sensors[i].last_at)
				measure(&sensors[i], now);
			if (!sensors[i].delay)
				show(&sensors[i]);
		}
	}
	return 0;
}

/*
 * Files of power sensors whose values follow a law: energy = IDLE * seconds + WATTS * CPU seconds of a process.
 *
 * power_sensors IDLE WATTS PID_FILE END_FILE FILE,KIND,HZ,UNIT,RANGE,DELAY_S,NOISE_W ...
 *
 * The process is the one whose number PID_FILE holds, once it does; END_FILE ends this program. KIND: energy (a counter modulo RANGE),
 * stock (RANGE minus it) or power (mean since the sensor's last update). UNIT: joules or watts of one. Each value appears DELAY_S
 * after its time; NOISE_W is the standard deviation of a power's white noise.
 */
#include <math.h>
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

static double idle_w, cpu_w, began;
static const char *pid_file;

static double seconds(clockid_t clock)
{
	struct timespec now = {0};

	clock_gettime(clock, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

/* CPU time of the process, which stays when it has ended. */
static double cpu_s(void)
{
	static double last;
	static pid_t pid;
	clockid_t clock;
	FILE *file;

	if (!pid && (file = fopen(pid_file, "r"))) {
		if (fscanf(file, "%d", &pid) != 1)
			pid = 0;
		fclose(file);
	}
	if (pid && !clock_getcpuclockid(pid, &clock)) {
		double now = seconds(clock);

		last = now > last ? now : last;
	}
	return last;
}

static double normal(void)
{
	return sqrt(-2 * log((random() + 1.0) / (RAND_MAX + 2.0))) * cos(2 * M_PI * random() / RAND_MAX);
}

static void measure(struct sensor *s, double now)
{
	double joules = idle_w * (now - began) + cpu_w * cpu_s();
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

/* In place and of one length, so that no reader finds half a number. */
static void show(struct sensor *s)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "%20lld\n", s->shown);

	if (pwrite(s->fd, text, length, 0) != length)
		exit(1);
	s->show_at = INFINITY;
}

static void wait_for_next(int count)
{
	double next = INFINITY, now = seconds(CLOCK_MONOTONIC);

	for (int i = 0; i < count; i++)
		next = fmin(next, fmin(sensors[i].measure_at, sensors[i].show_at));
	if (next > now)
		usleep((next - now) * 1e6);
}

int main(int argc, char **argv)
{
	int count = argc - 5;

	idle_w = atof(argv[1]);
	cpu_w = atof(argv[2]);
	pid_file = argv[3];
	began = seconds(CLOCK_MONOTONIC);
	sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}); /* a sensor does not wait for a CPU */
	for (int i = 0; i < count && i < MOST; i++) {
		struct sensor *s = &sensors[i];

		if (sscanf(argv[5 + i], "%255[^,],%15[^,],%lf,%lf,%lf,%lf,%lf", s->path, s->kind, &s->hz, &s->unit, &s->range, &s->delay, &s->noise) != 7)
			return 2;
		s->fd = open(s->path, O_WRONLY | O_CREAT, 0644);
		s->last_at = s->measure_at = began;
		s->show_at = INFINITY;
		show(s);
	}
	while (access(argv[4], F_OK)) {
		wait_for_next(count);
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

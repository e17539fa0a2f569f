#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

enum { MOST_MEMBERS = 256 };
enum { SPINS = 20000, YIELD_EACH = 50 }; /* well under a millisecond, in turns with whoever wants the processor */

struct team {
    pthread_mutex_t busy;                /* held for the length of a run */
    pthread_mutex_t parking;             /* guards `parked` */
    pthread_cond_t awake;
    atomic_int parked;                   /* members that sleep, or are about to */
    atomic_uint jobs, barriers;          /* how many of each there were: what members wait for */
    atomic_int arrived, next;
    int members, workers;                /* of this run, the caller among them; threads that exist */
    pthread_t threads[MOST_MEMBERS];
    unsigned started[MOST_MEMBERS];      /* the job before the first of each worker */
    void (*work)(team *, int, void *);   /* NULL: workers end */
    void *argument;
};

static _Thread_local int leading; /* this thread is member 0 of a run */

static team the_team = {
    .busy = PTHREAD_MUTEX_INITIALIZER, .parking = PTHREAD_MUTEX_INITIALIZER, .awake = PTHREAD_COND_INITIALIZER};

/* Waits until `counter` is no longer `seen`: spins a little, then sleeps. */
static void wait_for_change(team *t, atomic_uint *counter, unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != seen) return;
        if (i % YIELD_EACH == YIELD_EACH - 1) sched_yield();
        else _mm_pause();
    }
    pthread_mutex_lock(&t->parking);
    atomic_fetch_add(&t->parked, 1);
    while (atomic_load(counter) == seen) pthread_cond_wait(&t->awake, &t->parking);
    atomic_fetch_sub(&t->parked, 1);
    pthread_mutex_unlock(&t->parking);
}

static void change(team *t, atomic_uint *counter) {
    atomic_fetch_add(counter, 1);
    if (atomic_load(&t->parked) == 0) return; /* who parks later sees the new count first */
    pthread_mutex_lock(&t->parking);
    pthread_cond_broadcast(&t->awake);
    pthread_mutex_unlock(&t->parking);
}

int team_take(team *t) { return atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed); }

void team_barrier(team *t) {
    unsigned seen = atomic_load(&t->barriers);
    if (atomic_fetch_add(&t->arrived, 1) == t->members - 1) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->next, 0);
        change(t, &t->barriers);
    } else {
        wait_for_change(t, &t->barriers, seen);
    }
}

static void *member(void *number) {
    team *t = &the_team;
    int self = (int)(ptrdiff_t)number;
    for (unsigned seen = t->started[self];; seen++) {
        wait_for_change(t, &t->jobs, seen);
        if (t->work == NULL) return NULL;
        t->work(t, self, t->argument);
        team_barrier(t);
    }
}

static void dismiss(team *t) {
    t->work = NULL;
    change(t, &t->jobs);
    for (int i = 1; i <= t->workers; i++) pthread_join(t->threads[i], NULL);
    t->workers = 0;
}

static void before_fork(void) { pthread_mutex_lock(&the_team.busy); }
static void in_parent(void) { pthread_mutex_unlock(&the_team.busy); }

/* A child has no workers and may have found a lock held: it begins anew. */
static void in_child(void) {
    team *t = &the_team;
    t->workers = 0;
    atomic_store(&t->parked, 0);
    pthread_mutex_init(&t->parking, NULL);
    pthread_cond_init(&t->awake, NULL);
    pthread_mutex_init(&t->busy, NULL);
}

static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* Workers 1 to threads - 1 exist afterwards, as far as the system gives them. */
static void recruit(team *t, int threads) {
    if (threads - 1 < t->workers) dismiss(t);
    while (t->workers < threads - 1) {
        int self = t->workers + 1;
        t->started[self] = atomic_load(&t->jobs);
        if (pthread_create(&t->threads[self], NULL, member, (void *)(ptrdiff_t)self) != 0) break;
        t->workers = self;
    }
}

void team_run(int threads, void (*work)(team *, int, void *), void *argument) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    team *t = &the_team;
    if (leading) { /* called back between two layers: alone, since all others wait for this thread */
        team alone = {.members = 1};
        work(&alone, 0, argument);
        return;
    }
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&t->busy);
    recruit(t, threads < MOST_MEMBERS ? threads : MOST_MEMBERS);
    t->members = t->workers + 1;
    t->work = work;
    t->argument = argument;
    atomic_store(&t->next, 0);
    change(t, &t->jobs);
    leading = 1;
    work(t, 0, argument);
    leading = 0;
    team_barrier(t);
    pthread_mutex_unlock(&t->busy);
}

/* A team of threads that run one function together. One team a process; who comes while it works waits, but for who
   leads it and comes back from within, who works alone. */
#ifndef KVOUCH_TEAM_H
#define KVOUCH_TEAM_H

typedef struct team team;

/* Runs work(team, member, argument) on `threads` members at once, the caller among them, and returns when all are done.
   Where threads cannot be had there are fewer members: no result depends on how many. */
void team_run(int threads, void (*work)(team *, int member, void *argument), void *argument);

/* The next number of those below a count that the members share out among themselves; counts anew behind a barrier. */
int team_take(team *);

/* Waits for all members. */
void team_barrier(team *);

#endif

/* Waiting, as migrations/000004_waiters.up.sql and internal/waitqueue have it: tickets, wake-ups that
 * may be lost, the wake timeout, and the check about every second. lease.pml says how to read Promela,
 * and has the steps of an acquire, which is one step here; README.md names the assumptions.
 *
 * Three processes acquire, hold and release again and again. Processes 2 and 3 may stop at any time:
 * die, or freeze with their session alive. Process 1 does not stop. What is proven is that whenever
 * process 1 waits it is served later (the ltl below), if every process and every timer goes on (A6).
 *
 * Break it with
 *   -DNO_TIMEOUT      a ticket that was woken keeps its precedence for ever
 *   -DNO_CHECK        no check about every second: no refresh of the ticket, no try at the holder's expiry
 *   -DNO_SOON         a waiter that was refused by a row that is just being deleted sleeps as any other
 *   -DLOOK_FIRST      a release looks for tickets before it touches the row
 */

#ifndef LOST
#define LOST 0          /* notifications that are lost with the listener's connection; tickets that go with it */
#endif
#ifndef STOPS
#define STOPS 0         /* processes that die or freeze */
#endif
#define SLOTS 4

byte holder;            /* of the committed row; 0: there is none */
bool deleting;          /* a release has locked the row, and is not committed */

bool ticket[SLOTS];
byte place[SLOTS];      /* in the order of the tickets */
byte woken[SLOTS];      /* NO, YES, or PASSED: longer ago than the wake timeout */
bool notified[SLOTS];   /* the listener has received it */
bool missed[SLOTS];     /* it was lost */

bool waits[SLOTS];
bool dead[SLOTS], frozen[SLOTS];
byte lost = LOST, stops = STOPS;

#define NO      0
#define YES     1
#define PASSED  2
#define stopped(p) (dead[p] || frozen[p])

/* pgxlock_first_ahead(): tickets that were not passed, of processes whose session lives. */
#define counts(p) (ticket[p] && woken[p] != PASSED && !dead[p])
#define before(q, p) (counts(q) && (!ticket[p] || place[q] < place[p]))
#define ahead(p) (p != 1 && before(1, p) || p != 2 && before(2, p) || p != 3 && before(3, p))
#define isFirst(p) (counts(p) && !ahead(p))
#define anyTicket (ticket[1] || ticket[2] || ticket[3])

inline drop(p)
{
	if
	:: ticket[p] ->
		place[1] = (place[1] > place[p] -> place[1] - 1 : place[1]);
		place[2] = (place[2] > place[p] -> place[2] - 1 : place[2]);
		place[3] = (place[3] > place[p] -> place[3] - 1 : place[3]);
		ticket[p] = false; place[p] = 0; woken[p] = NO; missed[p] = false
	:: else
	fi
}

inline publish(p)
{
	if
	:: !ticket[p] ->
		place[p] = 1 + (ticket[1] -> 1 : 0) + (ticket[2] -> 1 : 0) + (ticket[3] -> 1 : 0);
		ticket[p] = true
	:: else
	fi
}

inline notify(p)
{
	woken[p] = (woken[p] == NO -> YES : woken[p]);
	if
	:: notified[p] = true
	:: lost > 0 -> lost--; missed[p] = true
	fi
}

/* pgxlock_wake_batch(): the first ticket; if all were passed, the first of those. */
inline wake()
{
	if
	:: isFirst(1) -> notify(1)
	:: isFirst(2) -> notify(2)
	:: isFirst(3) -> notify(3)
	:: !counts(1) && !counts(2) && !counts(3) ->
		if
		:: ticket[1] && !dead[1] && (!ticket[2] || dead[2] || place[1] < place[2]) && (!ticket[3] || dead[3] || place[1] < place[3]) -> notify(1)
		:: ticket[2] && !dead[2] && (!ticket[1] || dead[1] || place[2] < place[1]) && (!ticket[3] || dead[3] || place[2] < place[3]) -> notify(2)
		:: ticket[3] && !dead[3] && (!ticket[1] || dead[1] || place[3] < place[1]) && (!ticket[2] || dead[2] || place[3] < place[2]) -> notify(3)
		:: else
		fi
	fi
}

proctype Process(byte me)
{
	bool wanted;

	{ skip;
end:
try:    atomic {
		notified[me] = false;
		if
		:: holder == 0 && !ahead(me) -> holder = me; drop(me); waits[me] = false; goto hold
		:: !(holder == 0 && !ahead(me)) -> waits[me] = true;
			woken[me] = NO; missed[me] = false      /* settle: it has shown that it lives */
		fi;
		if
		:: !ticket[me] -> goto enter
#ifndef NO_SOON
		:: ticket[me] && (deleting || holder == 0) && !ahead(me) -> goto try    /* the row is going, or gone: soon again */
		:: ticket[me] && !((deleting || holder == 0) && !ahead(me)) -> goto sleep
#else
		:: ticket[me] -> goto sleep
#endif
		fi
	}
enter:  atomic { publish(me) };     /* it commits, and tries again whatever it saw before */
	goto try;

sleep:  if
	:: atomic { notified[me] -> goto try }
#ifndef NO_CHECK
	:: atomic { goto try }                          /* at the expiry that the refusal named */
	:: atomic { !ticket[me] -> publish(me); goto sleep }            /* the refresh: the ticket again */
	:: atomic { ticket[me] && holder == 0 && !ahead(me) -> goto try }   /* or try now; or see Refresh */
#endif
	fi;

hold:   skip;
	atomic {            /* ---- the release: DELETE, then a later statement looks for tickets, then the commit ---- */
#ifdef LOOK_FIRST
		wanted = anyTicket
	};
	atomic {
#endif
		if
		:: holder != me -> wanted = false; goto try     /* expired, and perhaps another's */
		:: holder == me -> deleting = true
		fi
	};
#ifndef LOOK_FIRST
	wanted = anyTicket;
#endif
	atomic { holder = 0; deleting = false };
	if
	:: atomic { wanted -> wanted = false; wake() }      /* in a transaction of its own */
	:: !wanted
	fi;
	goto try
	} unless { stopped(me) }
}

/* What time does: to those that stopped, and to those that were woken and do not know it. */
active proctype Clock()
{
end:	do
	:: atomic { holder != 0 && stopped(holder) -> holder = 0; deleting = false }
#ifndef NO_TIMEOUT
	:: atomic { ticket[1] && woken[1] == YES && missed[1] -> woken[1] = PASSED }
	:: atomic { ticket[2] && woken[2] == YES && (missed[2] || stopped(2)) -> woken[2] = PASSED }
	:: atomic { ticket[3] && woken[3] == YES && (missed[3] || stopped(3)) -> woken[3] = PASSED }
#endif
	od
}

/* A refresh that finds the lease free and a ticket ahead that no release has woken, wakes that one. */
#define refreshes(p) (waits[p] && ticket[p] && !stopped(p))
active proctype Refresh()
{
end:	do
#ifndef NO_CHECK
	:: atomic { holder == 0 && isFirst(1) && woken[1] == NO && !notified[1] && (refreshes(2) || refreshes(3)) -> notify(1) }
	:: atomic { holder == 0 && isFirst(2) && woken[2] == NO && !notified[2] && (refreshes(1) || refreshes(3)) -> notify(2) }
	:: atomic { holder == 0 && isFirst(3) && woken[3] == NO && !notified[3] && (refreshes(1) || refreshes(2)) -> notify(3) }
#endif
	:: false
	od
}

active proctype Faults()
{
end:	do
	:: atomic { stops > 0 -> stops--;
		if
		:: dead[2] = true :: dead[3] = true :: frozen[2] = true :: frozen[3] = true
		fi }
	:: atomic { lost > 0 && ticket[1] -> lost--; drop(1) }  /* its listener is away: it seems to be dead */
	od
}

init { atomic { run Process(1); run Process(2); run Process(3) } }

ltl served { [] (waits[1] -> <> !waits[1]) }

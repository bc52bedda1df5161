/* A lease is handed over by its release: a design that is not built, beside today's protocol in lease.pml
 * and waiting.pml. lease.pml says how to read Promela, and has the steps of a fence and of an acquire by
 * which nobody hands over; README.md names the assumptions.
 *
 *   - A release grants the lease to the first ticket in its own transaction: it marks the ticket with
 *     the new token, and writes the row of the lease for the ticket's holder.
 *   - The waiter is woken as today. Its try finds its ticket marked, and takes: it deletes the ticket.
 *   - A mark whose waiter does not come is taken back: the row of the lease goes, and the mark.
 *
 * Two processes. Process 1 holds the lease at the beginning, and comes back after its release, with a
 * ticket or without. Process 2 waits. Its caller may leave at any time, and a second one goes on with the
 * ticket. FAULTS is how many of these happen, in any order: a process dies, or freezes for good; a process
 * that was woken does not try within the wake timeout; its sessions are cut, and with them an answer is
 * lost; a notification is lost; a listener is away, and others take its process for dead; a refresh is sent
 * at a bad time; the server crashes, which empties the tickets; a standby is promoted.
 *
 * Nobody waits for a TTL: a lease expires only if its holder died or froze with it, or a failover brought
 * it back, or the server crashed when it was granted to a caller that had left. So a waiter that only an
 * expiry would wake is an invalid end state, with -DPATIENT: else it may leave. With -DEXPIRY any lease in
 * which nobody believes may expire.
 *
 * scripts/model takes away, one by one, what mends the design, and expects that spin finds out:
 *   -DTAKE_UNLOCKED   a try takes a lease that is its own without locking its ticket
 *   -DBACK_UNLOCKED   a take-back does not lock the ticket
 *   -DPIN_FIRST       a take-back takes the pin before it locks the ticket
 *   -DTAKE_NO_PIN     a take does not try the pin
 *   -DMARK_ALONE      a take believes its mark, and does not compare it with the lease's token
 *   -DTAKE_KEEPS      a take does not withdraw the ticket that a refresh on its way may have made again
 *   -DLEAVE_DROPS     a withdrawal deletes a marked ticket, and leaves the lease as it is
 *   -DJUDGE_FIRST     a withdrawal reads the lease before it has locked the ticket
 *   -DDEAD_DROPS      the ticket of a dead process is deleted, marked or not
 *   -DNO_LOOK_AGAIN   nobody takes back what a dead or frozen process does not take
 *   -DSETTLE_MARKS    a try that is refused clears the stamp of a marked ticket
 *   -DNO_REFRESH      no refresh says that the ticket is marked, or makes a lost ticket again
 *   -DMARKS_ONLY      a refresh says so of marked tickets only, not of a lease whose ticket a crash has emptied
 *   -DSAME_HOLDER     all callers of a process have one holder id
 *   -DNO_EXCHANGE     a try that finds its ticket marked for an earlier caller does not take that back
 *   -DCRASH_LEAVES    a caller that leaves only withdraws its ticket, and releases nothing
 *   -DASYNC_GRANT     a release that did not wait for the disk grants to a waiter that would
 *   -DNO_ERA          tokens do not carry the timeline and the epoch
 */

#ifndef FAULTS
#define FAULTS 0
#endif
#define N     2
#define SLOTS 3         /* arrays begin at 0, processes at 1 */

/* ---- the server ---- */

byte holder = 1, token = 1; /* the committed row of the lease; holder ids: process p, p + N its second caller */
bool expired;
byte pin, rowLock;      /* transactions: p a request of process p, p + N its background, LOOK a look-again */
byte pins;
byte seq = 1, era;
byte last = 1;          /* ghost */

bool ticket[SLOTS];     /* pgxlock_waiters: a ticket for each process */
byte number[SLOTS];     /* its place, 1 or 2 */
byte forHolder[SLOTS];  /* its column holder */
byte mark[SLOTS];       /* its column granted; 0: NULL */
byte woken[SLOTS];      /* NO, YES, or PASSED: longer ago than the wake timeout */
byte ticketLock[SLOTS];

bool behind;            /* the standby has stopped to replay, or (-DASYNC_...) the disk lacks commits; what it has: */
byte sHolder, sToken, sSeq, sLast;
bool sExpired;

/* ---- the processes ---- */

byte tx[6];             /* NONE, OPEN until the answer has come, or CUT */
bool held[SLOTS], due[SLOTS], dead[SLOTS], frozen[SLOTS];
byte mine[SLOTS];       /* the token of the hold */
byte caller[SLOTS];     /* the holder id of the first waiter, or of the holder */
bool waits[SLOTS];      /* its local queue has a waiter: refreshes go on */
bool asleep[SLOTS];
bool notified[SLOTS];
bool refreshing[SLOTS]; /* a refresh is under way */
bool anew[SLOTS];       /* it was sent after the last try, or was under way then */
bool withdrawn[SLOTS];  /* the ticket is to be withdrawn */
byte release[SLOTS];    /* the holder id whose lease is to be released; 0: none */
byte releaseToken[SLOTS]; /* 0: any */
bool looks[SLOTS];      /* it woke a waiter, and looks again after the wake timeout */
byte faults = FAULTS;

/* ---- ghosts ---- */
byte highest = 1;
bool old[SLOTS];        /* as in lease.pml */
bool orphan;            /* the lease has no owner, by a fault for which the protocol says: it ends by its TTL */

#define NO     0
#define YES    1
#define PASSED 2
#define NONE   0
#define OPEN   1
#define CUT    2
#define LOOK   5

#define open(t)  (tx[t] == OPEN)
#define stopped(p) (dead[p] || frozen[p])
#define believes(p) (held[p] && !due[p])
#define bit(p)   (1 << (p))
#define other(p) (3 - (p))
#define pinFree  (pin == 0 && pins == 0)
#define process(h) ((h) > N -> (h) - N : (h))
#define live     (holder != 0 && !expired)
#define marked(p) (ticket[p] && mark[p] != 0)
#define inForce(p) (marked(p) && live && token == mark[p])
#define isOurs   (live && holder == caller[me])
#define quiet(p) (!believes(p) || old[p])
#define alone    quiet(other(me))

/* What a refresh says: try now. */
#ifdef MARKS_ONLY
#define granted(p) inForce(p)
#elif defined(NO_EXCHANGE)
#define granted(p) (live && holder == caller[p])
#else
#define granted(p) (inForce(p) || live && holder == caller[p])
#endif

/* pgxlock_first_ahead() */
#define counts(p) (ticket[p] && woken[p] != PASSED && !dead[p])
#define ahead(p)  (counts(other(p)) && number[other(p)] < number[p])
#define anyCounts (counts(1) || counts(2))
#define isFirst(p) (counts(p) && !ahead(p))

#ifdef NO_ERA
#define NEXT     seq
#else
#define NEXT     (era * 16 + seq)
#endif

#define unlock(x) \
	pin = (pin == (x) -> 0 : pin); rowLock = (rowLock == (x) -> 0 : rowLock); \
	ticketLock[1] = (ticketLock[1] == (x) -> 0 : ticketLock[1]); \
	ticketLock[2] = (ticketLock[2] == (x) -> 0 : ticketLock[2])
#define ends(x)  unlock(x); tx[x] = NONE

#define drop(p)  ticket[p] = false; mark[p] = 0; woken[p] = NO; forHolder[p] = 0
#define no_row   holder = 0; token = 0; expired = false; orphan = false
#define grant(h, t) \
	holder = h; token = t; expired = false; orphan = false; \
	assert(quiet(1) && quiet(2));   /* I2 */ \
	assert(t > highest); highest = t; last = t      /* I3 */

#define keep     behind = true; sHolder = holder; sToken = token; sExpired = expired; sSeq = seq; sLast = last
#define forget   behind = false; sHolder = 0; sToken = 0; sExpired = false; sSeq = 0; sLast = 0

/* A commit may be the first that the standby lacks, or the disk. */
inline commits(async)
{
#ifdef ASYNC_RELEASES
	if
	:: async && !behind -> keep
	:: async && behind
	:: !async -> forget         /* the disk has this commit, and all before */
	fi
#else
	if
	:: true
	:: faults > 0 && !behind -> faults--; keep
	fi
#endif
}

/* Refused by a lock, or cut: it tries again at once; the old session has ended (A4). */
#ifdef SETTLE_MARKS
#define settle   woken[me] = (ticket[me] && ticketLock[me] == 0 -> NO : woken[me])
#else
#define settle   woken[me] = (ticket[me] && ticketLock[me] == 0 && mark[me] == 0 -> NO : woken[me])
#endif
#define again    ends(me); pins = pins & ~bit(me); old[me] = false; due[me] = false; found = 0; settle; goto try

/* pgxlock_wake_batch(): the first ticket that was not passed, or else the first. NOTIFY may be lost. */
#define wakes(p) (isFirst(p) || !anyCounts && ticket[p] && !dead[p] && !(ticket[other(p)] && !dead[other(p)] && number[other(p)] < number[p]))
#define notify(p) \
	woken[p] = (woken[p] == NO -> YES : woken[p]); \
	if :: notified[p] = waits[p] && !stopped(p) :: faults > 0 -> faults-- fi
inline wake()
{
	if
	:: wakes(1) -> notify(1)
	:: wakes(2) -> notify(2)
	:: else
	fi
}

/* Who may leave is not stuck, so with -DPATIENT only first callers leave. */
#ifdef PATIENT
#define mayLeave !second
#else
#define mayLeave true
#endif

/* A caller leaves; a second one goes on with the ticket. */
inline leaves()
{
	asleep[me] = false; found = 0; old[me] = false; due[me] = false; releaseToken[me] = 0;
	if
	:: !second -> second = true;
#ifndef SAME_HOLDER
		caller[me] = me + N;
#endif
		goto try
	:: waits[me] = false; notified[me] = false; withdrawn[me] = true; goto over
	fi
}

proctype Process(byte me)
{
	byte found;         /* the token of the lease that a take found */
	bool stranger;      /* it has no ticket, and asks again and again */
	bool second;        /* the second caller */

	{ skip;
	if
	:: me == 1 -> goto work
	:: me != 1
	fi;

enter:  atomic {        /* it publishes a ticket, commits, and tries */
		number[me] = 1; waits[me] = true; ticket[me] = true; forHolder[me] = caller[me];
		if
		:: number[other(me)] != 0 -> number[other(me)] = 1; number[me] = 2
		:: else
		fi
	}

try:    atomic {        /* ---- the marked ticket is locked (SKIP LOCKED) before anything is read ---- */
		notified[me] = false; asleep[me] = false; anew[me] = refreshing[me]; tx[me] = OPEN;
		if
#ifndef TAKE_UNLOCKED
		:: marked(me) && ticketLock[me] == 0 -> ticketLock[me] = me
#endif
		:: else -> goto ordinary
		fi
	}
	atomic {            /* a later statement: the lease */
		if
		:: !open(me) -> again
#ifdef MARK_ALONE
		:: open(me) -> found = mark[me]
#else
		:: open(me) && isOurs && token == mark[me] -> found = token
		:: open(me) && live && holder != caller[me] && token == mark[me] -> goto exchange
		:: open(me) && !(live && token == mark[me]) ->      /* stale: the lease has expired, and may be another's */
			mark[me] = 0; woken[me] = NO; again
#endif
		fi
	}
	atomic {            /* the pin, shared: the releaser's may not be gone yet. Then DELETE of the ticket */
		if
		:: !open(me) -> again
#ifdef TAKE_NO_PIN
		:: open(me)
#else
		:: open(me) && pin == 0 -> pins = pins | bit(me)
		:: open(me) && pin != 0 -> again
#endif
		fi
	}
	atomic {            /* the commit, in an unlogged table */
		if
		:: !open(me) -> again
		:: open(me) -> drop(me)
		fi;
		unlock(me); pins = pins & ~bit(me);
		goto answer
	}

exchange: atomic {      /* the lease was granted to an earlier caller of this process: it is taken back */
#ifdef NO_EXCHANGE
		goto refused;
#endif
		if
		:: !open(me) -> again
		:: open(me) && token == mark[me] && pinFree && rowLock == 0 -> pin = me; rowLock = me
		:: open(me) && !(token == mark[me] && pinFree && rowLock == 0) -> again
		fi
	}
	atomic {
		if
		:: !open(me) -> again
		:: open(me) -> commits(false); no_row; mark[me] = 0; woken[me] = NO; forHolder[me] = caller[me]; again
		fi
	}

ordinary: atomic {      /* one statement reads the lease and the mark */
		if
		:: !open(me) -> again
#ifdef TAKE_UNLOCKED
		:: open(me) && isOurs -> found = token
#else
		:: open(me) && isOurs && marked(me) -> again    /* locked by a take-back */
		:: open(me) && isOurs && !marked(me) -> found = token   /* taken before, or the tickets were lost */
#endif
		:: open(me) && live && holder != caller[me] -> goto refused
		:: open(me) && !live && (stranger && anyCounts || !stranger && ahead(me)) -> goto refused
		:: open(me) && !live && !(stranger && anyCounts || !stranger && ahead(me)) ->
			if
			:: pinFree && rowLock == 0 -> pin = me; rowLock = me; goto acquire
			:: else -> again
			fi
		fi
	}
	atomic {            /* the row is locked and renewed, and in any case the ticket goes */
		if
		:: !open(me) -> again
#ifdef TAKE_UNLOCKED
		:: open(me)
#else
		:: open(me) && isOurs && token == found && rowLock == 0 && ticketLock[me] == 0 -> commits(false)
		:: open(me) && !(isOurs && token == found && rowLock == 0 && ticketLock[me] == 0) -> again
#endif
		fi;
		drop(me);
		goto answer
	}

acquire: atomic {
		if
		:: !open(me) -> again
		:: open(me) && ticketLock[me] == 0 ->
			commits(false); seq++; found = NEXT;
			grant(caller[me], found); drop(me); unlock(me)
		:: open(me) && ticketLock[me] != 0 -> again
		fi
	}

answer: atomic {        /* it counts if the deadline has not passed, so neither has the server's (A1) */
		if
		:: !due[me] ->
			assert(alone && isOurs && token == found || old[me]);   /* I1 */
			tx[me] = NONE; held[me] = true; mine[me] = found; waits[me] = false;
#ifndef TAKE_KEEPS
			withdrawn[me] = anew[me];   /* a refresh that was under way may have made the ticket again */
#endif
			anew[me] = false; found = 0;
			goto work
		:: !open(me) -> again           /* lost: it asks again */
		:: release[me] == 0 -> tx[me] = NONE; release[me] = caller[me]; leaves()   /* too late; or the caller has left */
		fi
	}

refused: atomic { settle; ends(me); old[me] = false; due[me] = false; asleep[me] = true }  /* the stamp goes, but not a mark's */

sleep:  atomic {
		if
		:: notified[me] -> goto try
		:: expired -> goto try          /* the refusal said when */
		:: stranger && !live && !anyCounts -> goto try
		:: !stranger && release[me] == 0 && mayLeave ->
#ifndef CRASH_LEAVES
			release[me] = caller[me];
#endif
			leaves()
		fi
	}
work:   atomic {        /* the work: fenced transactions; lease.pml has the steps of a fence */
		if
		:: !due[me] -> tx[me] = OPEN
		:: release[me] == 0 -> held[me] = false; due[me] = false; old[me] = false;
			release[me] = caller[me]; releaseToken[me] = mine[me]; mine[me] = 0; goto back
		fi
	}
	atomic {
		if
		:: !open(me) -> tx[me] = NONE; goto work
		:: open(me) && pin == 0 && holder == caller[me] && token == mine[me] -> pins = pins | bit(me)
		:: open(me) && !(pin == 0 && holder == caller[me] && token == mine[me]) ->
#if !defined(TAKE_UNLOCKED) && !defined(BACK_UNLOCKED)
			assert(due[me] || old[me]); /* a fence fails only if the lease is lost */
#endif
			tx[me] = NONE; due[me] = true; goto work
		fi
	}
	atomic {
		if
		:: !open(me)
		:: open(me) -> assert(last == mine[me])     /* I4 */
		fi;
		pins = pins & ~bit(me); tx[me] = NONE; goto work
	}

back:   atomic {        /* process 1 comes back once */
		if
		:: me == 1 && !second -> second = true; caller[me] = me + N; goto enter
		:: me == 1 && !second -> second = true; caller[me] = me + N; stranger = true; goto try
		:: else
		fi
	}
over:   atomic { found = 0; anew[me] = false; stranger = false; second = false }

	} unless { stopped(me) }
}

#ifdef NO_REFRESH
#define useful(p) false
#else
#define useful(p) (!notified[p] && asleep[p] \
	&& (!ticket[p] || forHolder[p] != caller[p] && ticketLock[p] == 0 && mark[p] == 0 || granted(p) || !live && !ahead(p)))
#endif
/* A crash has emptied the tickets; a refresh may have made this one again, without the mark. The lease is there. */
#ifdef CRASH_LEAVES
#define leftover skip
#else
#define leftover release[me] = (!held[me] && holder == caller[me] -> caller[me] : 0)
#endif
#define isReleased(p) (holder == release[p] && (releaseToken[p] == 0 || token == releaseToken[p]))

/* What a Locker does beside its callers: refreshes, withdrawals, releases. */
proctype Background(byte me)
{
	byte g, h;

	{ skip;
end:	do
	:: atomic {         /* ---- a refresh: sent when it changes something, and at a bad time ---- */
		waits[me] && number[me] != 0 && (useful(me) || faults > 0) ->
		faults = (useful(me) -> faults : faults - 1);
		refreshing[me] = true; anew[me] = true; h = caller[me]
	   }
	   atomic {         /* it arrives; the row is skipped if it is locked, and a mark stays as it is */
		if
		:: !ticket[me] -> ticket[me] = true; mark[me] = 0; woken[me] = NO; forHolder[me] = h
		:: ticket[me] && ticketLock[me] == 0 && mark[me] == 0 -> forHolder[me] = h
		:: else
		fi;
		notified[me] = notified[me] || waits[me] && (granted(me) || !live && !ahead(me));
		refreshing[me] = false; h = 0;
		withdrawn[me] = withdrawn[me] || !waits[me]
	   }

	:: atomic {         /* ---- a withdrawal; of a marked ticket also a take-back ---- */
		withdrawn[me] && !refreshing[me] && release[me] == 0 && (!ticket[me] || ticketLock[me] == 0) -> withdrawn[me] = false;
#ifdef JUDGE_FIRST
		h = inForce(me);
	   }
	   atomic {
#endif
		if
		:: ticket[me] && ticketLock[me] == 0 -> ticketLock[me] = me + N; tx[me + N] = OPEN
		:: !ticket[me] -> leftover; goto done
#ifdef JUDGE_FIRST
		:: ticket[me] && ticketLock[me] != 0 -> withdrawn[me] = true; goto done
#endif
		fi
	   }
	   atomic {         /* a later statement: the lease */
		if
		:: !open(me + N) -> withdrawn[me] = true; goto done
#ifdef LEAVE_DROPS
		:: open(me + N) -> drop(me); goto wakes
#elif defined(JUDGE_FIRST)
		:: open(me + N) && !h -> drop(me); goto wakes
		:: open(me + N) && h && pinFree && rowLock == 0 -> pin = me + N; rowLock = me + N
		:: open(me + N) && h && !(pinFree && rowLock == 0) -> withdrawn[me] = true; goto done
#else
		:: open(me + N) && !inForce(me) -> drop(me); leftover; goto wakes
		:: open(me + N) && inForce(me) && pinFree && rowLock == 0 -> pin = me + N; rowLock = me + N
		:: open(me + N) && inForce(me) && !(pinFree && rowLock == 0) -> withdrawn[me] = true; goto done
#endif
		fi
	   }
	   atomic {
		if
		:: !open(me + N) -> withdrawn[me] = true; goto done
		:: open(me + N) -> commits(false); no_row; drop(me)
		fi
	   }
wakes:     atomic { ends(me + N); wake() }
done:      atomic { ends(me + N); h = 0 }

	:: atomic {         /* ---- a release, or the discard of what a caller may have been granted ---- */
		release[me] != 0 && !(isReleased(me) && !(pinFree && rowLock == 0)) ->
		if
		:: !isReleased(me) -> goto released         /* gone */
		:: else -> pin = me + N; rowLock = me + N; tx[me + N] = OPEN
		fi
	   }
	   atomic {         /* a later statement: the first ticket that counts; any doubt: no grant */
		if
		:: !open(me + N) -> goto retry
		:: open(me + N) && isFirst(1) && ticketLock[1] == 0 -> g = 1; ticketLock[1] = me + N
		:: open(me + N) && isFirst(2) && ticketLock[2] == 0 -> g = 2; ticketLock[2] = me + N
		:: open(me + N) && !(isFirst(1) && ticketLock[1] == 0 || isFirst(2) && ticketLock[2] == 0)
		fi
	   }
	   atomic {         /* the commit: visible, and without row locks; the pin goes later */
		if
		:: !open(me + N) -> g = 0; goto retry
		:: open(me + N) && g == 0 -> commits(true); no_row
		:: open(me + N) && g != 0 ->
#ifdef ASYNC_GRANT
			commits(true);
#else
			commits(false);
#endif
			seq++; grant(forHolder[g], NEXT); mark[g] = highest; woken[g] = YES; ticketLock[g] = 0
		fi;
		rowLock = 0; g = 0
	   }
	   atomic {         /* the answer */
		pin = (pin == me + N -> 0 : pin);
		if
		:: open(me + N) -> goto released
		:: else -> goto retry           /* lost: it asks again, and finds nothing */
		fi
	   }
released:  atomic { ends(me + N); release[me] = 0; releaseToken[me] = 0; looks[me] = true }
	   atomic { wake() }        /* a transaction of its own */
	   goto end;
retry:     atomic { ends(me + N) }
	od
	} unless { stopped(me) }
}

/* The look-again of a process that woke another one, and the tries of one that waits: a mark that was passed,
 * or whose process is dead, is taken back. */
#define cares(p) (!stopped(p) && (looks[p] || waits[p]))
#define tooLong(p) (marked(p) && (woken[p] == PASSED || dead[p]) && (cares(1) || cares(2)))

proctype LookAgain()
{
	byte p, m;
end:	do
#ifndef NO_LOOK_AGAIN
	:: atomic {
		if
		:: tooLong(1) && ticketLock[1] == 0 -> p = 1
		:: tooLong(2) && ticketLock[2] == 0 -> p = 2
		fi;
		m = mark[p]; tx[LOOK] = OPEN;
#if !defined(PIN_FIRST) && !defined(BACK_UNLOCKED)
		ticketLock[p] = LOOK
#endif
	   }
	   atomic {         /* a later statement: the lease */
		if
		:: !open(LOOK) -> goto backed
#ifdef DEAD_DROPS
		:: open(LOOK) && dead[p] -> drop(p); goto backed
#endif
		:: open(LOOK) && !(live && token == m) -> mark[p] = (mark[p] == m -> 0 : mark[p]); goto backed  /* stale */
		:: open(LOOK) && live && token == m && pinFree && rowLock == 0 -> pin = LOOK; rowLock = LOOK
		:: open(LOOK) && live && token == m && !(pinFree && rowLock == 0) -> goto backed
		fi
	   }
	   atomic {
		if
		:: !open(LOOK)
#ifdef PIN_FIRST
		:: open(LOOK) && !(mark[p] == m && ticketLock[p] == 0)
		:: open(LOOK) && mark[p] == m && ticketLock[p] == 0 ->
#else
		:: open(LOOK) ->
#endif
			commits(false); no_row; mark[p] = (mark[p] == m -> 0 : mark[p])
		fi
	   }
backed:    atomic { ends(LOOK); p = 0; m = 0; wake() }
#endif
	/* A wake that was lost with the releaser, or went to a process that was passed: the refresh of one that
	 * sleeps, and was passed itself. */
	:: atomic { !live && !anyCounts && ticket[1] && asleep[1] && !notified[1] && !stopped(1) -> notified[1] = true }
	:: atomic { !live && !anyCounts && ticket[2] && asleep[2] && !notified[2] && !stopped(2) -> notified[2] = true }
	od
}

#ifdef EXPIRY
#define mayExpire true
#else
#define mayExpire orphan
#endif
proctype Clock()
{
end:	do
	:: atomic { believes(1) -> due[1] = true }
	:: atomic { believes(2) -> due[2] = true }
	:: atomic { faults > 0 && ticket[1] && woken[1] == YES -> faults--; woken[1] = PASSED }
	:: atomic { faults > 0 && ticket[2] && woken[2] == YES -> faults--; woken[2] = PASSED }
	/* A frozen process is passed in any case, once it was woken; without a mark its ticket is void at last. */
	:: atomic { frozen[1] && ticket[1] && woken[1] == YES -> woken[1] = PASSED }
	:: atomic { frozen[2] && ticket[2] && woken[2] == YES -> woken[2] = PASSED }
	:: atomic { frozen[1] && ticket[1] && mark[1] == 0 && ticketLock[1] == 0 -> drop(1) }
	:: atomic { frozen[2] && ticket[2] && mark[2] == 0 && ticketLock[2] == 0 -> drop(2) }
	/* An answer that has not come by then is too late. */
	:: atomic { live && mayExpire && quiet(process(holder)) ->
		expired = true; due[process(holder)] = due[process(holder)] || tx[process(holder)] != NONE }
	od
}

#define cut(t)   tx[t] = (tx[t] == OPEN -> CUT : tx[t])
#define server_ends \
	era++; pin = 0; rowLock = 0; pins = 0; ticketLock[1] = 0; ticketLock[2] = 0; cut(1); cut(2); cut(3); cut(4); cut(LOOK)
#define holderStopped(h) ((h) != 0 && stopped(process(h)))
/* A mark that is lost with its ticket, for a caller that had left, is given up: the lease ends by its TTL. */
#define no_tickets  drop(1); drop(2); orphan = orphan || live && (holderStopped(holder) || caller[process(holder)] != holder)
#define lost(p)  old[p] = held[p] || tx[p] != NONE
#define hasTaken(p) (live && process(holder) == p && !inForce(p))

proctype Faults()
{
	byte p = 1;
end:	do
	:: atomic { faults > 0 -> faults--;         /* of one process */
		do :: p < N -> p++ :: break od;
		if
		/* it dies; or freezes, when its transactions have ended: each is one statement */
		:: !stopped(p) -> dead[p] = true
		:: !stopped(p) && tx[p] == NONE && tx[p + N] == NONE -> frozen[p] = true
		/* its sessions are cut */
		:: !stopped(p)
		/* its listener is away: others remove its ticket if it is not marked */
		:: !stopped(p) && ticket[p] && mark[p] == 0 && ticketLock[p] == 0 -> drop(p); p = 1; goto end
		:: stopped(p) -> p = 1; goto end
		fi;
		cut(p); cut(p + N); pins = pins & ~bit(p); unlock(p); unlock(p + N);
		if
		:: stopped(p) ->
			orphan = orphan || hasTaken(p); tx[p] = NONE; tx[p + N] = NONE;
			held[p] = false; due[p] = false; old[p] = false; mine[p] = 0; waits[p] = false; asleep[p] = false;
			notified[p] = false; refreshing[p] = false; anew[p] = false; withdrawn[p] = false;
			release[p] = 0; releaseToken[p] = 0; looks[p] = false
		:: else
		fi;
		p = 1 }
	:: atomic { faults > 0 -> faults--;         /* the server crashes: unlogged tables are empty */
#ifdef ASYNC_RELEASES
		if
		:: behind ->
			holder = sHolder; token = sToken; expired = sExpired; last = sLast; orphan = true; forget
		:: else
		fi;
#endif
		server_ends; no_tickets }
#ifndef ASYNC_RELEASES
	:: atomic {                                 /* a standby is promoted, which has no unlogged tables */
		if
		:: !behind && faults > 0 -> faults--
		:: behind ->
			lost(1); lost(2);
			holder = sHolder; token = sToken; expired = sExpired; seq = sSeq; last = sLast; orphan = true; forget
		fi;
		server_ends; no_tickets }
#endif
	od
}

init { atomic {
	held[1] = true; mine[1] = 1; caller[1] = 1; caller[2] = 2;
	run LookAgain(); run Clock(); run Faults();
	run Process(1); run Background(1); run Process(2); run Background(2)
};
end:	timeout -> assert(holder == 0 || orphan || expired || holderStopped(holder))   /* nothing is left without an owner */
}

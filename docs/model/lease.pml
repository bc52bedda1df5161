/* The lease, as migrations/000001_leases.up.sql and internal/lease have it: acquire, renew, expire,
 * take over, release, fence; lost answers, frozen and dead processes, a crash and a failover of the
 * server. Waiting is in waiting.pml. README.md names the assumptions (A1, A2, ...).
 *
 * How to read it, for those who know PostgreSQL and not Promela:
 *   - What is in one atomic { } happens at once. Between two of them anything may happen, for any time:
 *     a process that is frozen or a slow network needs no line of its own.
 *   - `if :: a -> x :: b -> y fi` does x if a holds, and y if b does; if both do, spin tries each.
 *     If none does, the process waits. `do ... od` repeats that.
 *   - assert() is what is proven: spin runs all orders of all steps, and reports one that breaks it.
 *   - A ghost is a variable that the protocol does not have; only assertions need it.
 *
 * scripts/model breaks it on purpose, and expects that spin finds out:
 *   -DNO_FENCE        the work writes without a fence
 *   -DFENCE_AT_ONCE   the fence reads the row in the statement that takes the pin
 *   -DNO_PIN          a take-over takes no pin
 *   -DNO_RECHECK      a take-over does not judge the row again once it is locked
 *   -DNO_MARGIN       the server may end a lease before its holder's deadline
 *   -DANY_ANSWER      an answer counts whenever it comes
 *   -DNO_ERA          tokens do not carry the timeline and the epoch
 *   -DEARLY_TOKEN     a token is drawn before the guard
 *   -DKEEPS           a caller that leaves the lease to another believes in it until that one has it
 *   -DSAME_TOKEN      that caller gets the token of the release
 *
 * What keeps the number of states small, and why no order is lost (README.md, "What is left out of the states"):
 *   - A try or a release that finds a lock taken has no effect, and is the same as one that was not made.
 *   - A process that dies is one whose session ends, and which then does nothing more.
 *   - What a standby lacks begins with a commit. So it stops to replay just before one, once.
 *   - A transaction does not remember in which run of the server it began: the end of the server marks it.
 */

#ifndef N
#define N 3             /* processes, numbered from 1 */
#endif
#ifndef CRASHES
#define CRASHES 0       /* of the server, or the end of the sessions of one process: it died, or they were cut */
#endif
#ifndef FAILOVERS
#define FAILOVERS 0
#endif
#define SLOTS 4         /* arrays begin at 0, processes at 1 */
/* With -DTURNS the processes are also callers of one process: one may leave its release to another, whose try
 * releases and acquires in one statement. */

/* ---- the server ---- */

byte holder;            /* the committed row of distributed_locks: 0 means that there is none */
byte token;
bool expired;           /* its clock has passed expires_at */

byte guard, pin, rowLock; /* the transaction that has each: of a request, its process; of a renewal, its process + N */
byte pins;              /* the shared pins: a bit for each process whose fenced transaction is open */
byte seq;               /* the sequence pgxlock_tokens */
byte era;               /* timeline and epoch: grows with each promotion and crash */
byte last;              /* ghost: the token of the last grant, as this database remembers it */

bool behind;            /* the standby has stopped to replay; from then on it has: */
byte sHolder, sToken, sSeq, sLast;
bool sExpired;

/* ---- the processes ---- */

byte tx[SLOTS];         /* the transaction of its request: NONE, OPEN until the answer has come, or CUT */
bool held[SLOTS];       /* from the answer to the call of Release */
bool due[SLOTS];        /* its clock has passed the deadline of that hold, or it knows that it has lost it */
byte mine[SLOTS];       /* the token; a release without one releases whatever its holder has */
byte crashes = CRASHES, failovers = FAILOVERS;
#ifdef TURNS
byte left;              /* its release is left to whoever tries next */
byte outcome[SLOTS];    /* of a release that was left */
#define RETURNED 1
#define RELEASED 2
#define settle(o) outcome[from] = (from != 0 -> (o) : 0); from = 0
#else
#define settle(o) skip
#endif

#define NONE 0
#define OPEN 1
#define CUT  2

/* ---- ghosts ---- */

byte highest;           /* the greatest token ever granted */
bool old[SLOTS];        /* its grant is older than a failover that has lost commits: I1 and I2 are not promised to it */

#define me      (_pid + 1)

/* Between two steps of a transaction; with -DFEWER what takes all its locks by try is one step. */
#ifdef FEWER
#define THEN    ;
#else
#define THEN    } atomic {
#endif

#define open    (tx[me] == OPEN)
#define believes(p) (held[p] && !due[p])
#define bit(p)  (1 << (p))
#define pinFree (pin == 0 && pins == 0)
#define isMine  (holder == me && token == mine[me])

#ifdef NO_ERA
#define number  seq
#else
#define number  (era * 16 + seq)
#endif
#ifdef EARLY_TOKEN
#define early   seq++; mine[me] = number
#define draw    skip
#else
#define early   skip
#define draw    seq++; mine[me] = number
#endif
#ifdef NO_ERA
#define isOfThisEra true
#else
#define isOfThisEra (token / 16 == era)
#endif

/* The transaction ends, and its locks with it. */
#define unlock(x) \
	guard = (guard == (x) -> 0 : guard); pin = (pin == (x) -> 0 : pin); rowLock = (rowLock == (x) -> 0 : rowLock)

/* It was refused, or its session has ended and with it what it did: it tries again, or never. */
#define again   unlock(me); tx[me] = NONE; old[me] = false; mine[me] = 0; goto endtry

/* No other process believes that it has the lock. */
#define rival(p) (me != p && believes(p) && !old[p])
#define alone   !(rival(1) || rival(2) || rival(3))

/* A commit may be the first that the standby lacks when it is promoted (A3). */
inline commits()
{
	if
	:: true
	:: failovers > 0 && !behind ->
		failovers--; behind = true; sHolder = holder; sToken = token; sExpired = expired; sSeq = seq; sLast = last
	fi
}

/* The commit of an acquire. */
inline grants()
{
	if
	:: !open -> again
	:: open && isMine ->
		assert(token >= highest);   /* I3 */
		commits(); expired = false
	:: open && !isMine ->
		assert(alone);              /* I2: the former holder knows before anybody else has the lock */
		assert(mine[me] > highest); /* I3 */
		commits(); highest = mine[me]; last = mine[me];
		holder = me; token = mine[me]; expired = false
	fi;
	unlock(me)
}

active [N] proctype Process()
{
#ifdef FENCE_AT_ONCE
	bool saw;
#endif
#ifdef TURNS
	byte from;      /* whose release its try finishes */
#endif

endtry: if              /* ---- acquire: try_acquire_lock() begins with a plain read ---- */
	/* No row. */
	:: atomic { holder == 0 -> tx[me] = OPEN; early
	   THEN             /* the guard, by try */
		if
		:: open && guard == 0 -> guard = me
		:: else -> again
		fi
	   THEN             /* a later statement: the row again, the pin by try, the token, INSERT */
		if
		:: open && holder == 0 && pinFree -> pin = me
		:: else -> again
		fi;
		draw
	   THEN grants() }

	/* An expired row. */
	:: atomic { holder != 0 && expired -> tx[me] = OPEN; early
	   THEN             /* the pin, by try */
		if
#ifdef NO_PIN
		:: open
#elif defined(ROW_FIRST)
		:: open && rowLock == 0 && holder != 0 && expired -> rowLock = me
#else
		:: open && pinFree -> pin = me
#endif
		:: else -> again
		fi
	   THEN             /* FOR UPDATE SKIP LOCKED, and then the clock is read again; the token, UPDATE */
		if
#ifdef ROW_FIRST
		:: open && pinFree -> pin = me
#elif defined(NO_RECHECK)
		:: open && rowLock == 0 && holder != 0 -> rowLock = me
#else
		:: open && rowLock == 0 && holder != 0 && expired -> rowLock = me
#endif
		:: else -> again
		fi;
		draw
	   THEN grants() }

	/* Its own live row, after a lost answer: it is renewed, and keeps its token; after a crash or a failover not. */
	:: atomic { holder == me && !expired -> tx[me] = OPEN; early
	   THEN
		if
		:: open && rowLock == 0 && holder == me && !expired -> rowLock = me
		:: else -> again
		fi;
		if
		:: isOfThisEra -> mine[me] = token
		:: else -> draw
		fi
	   THEN grants() }

	/* The same, and the caller has left: it releases whatever it may have got. */
	:: atomic { holder == me -> mine[me] = 0; goto release }
#ifdef TURNS
	/* hand_over.sql: the release of another caller. A release that fails is returned, and nothing is tried. */
	:: atomic { left != 0 -> from = left; left = 0; tx[me] = OPEN; early
	   THEN
		if
		:: open && pinFree && rowLock == 0 && holder == from && token == mine[from] -> pin = me; rowLock = me
		:: else -> settle(RETURNED); again
		fi
	   THEN             /* the guard, by try: without it the release alone commits */
		if
		:: open && guard == 0 -> guard = me
		:: open && guard != 0 -> commits(); holder = 0; token = 0; expired = false; settle(RELEASED); again
		:: !open -> settle(RETURNED); again
		fi;
#ifdef SAME_TOKEN
		mine[me] = token
#else
		draw
#endif
	   THEN
		if
		:: !open -> settle(RETURNED); again
		:: open ->
			assert(alone);              /* I2 */
			assert(mine[me] > highest); /* I3 */
			commits(); highest = mine[me]; last = mine[me];
			holder = me; token = mine[me]; expired = false
		fi;
		unlock(me) }
#endif
	fi;

	/* The answer. It counts if the deadline, which runs from before the request was sent, has not
	 * passed. The server's has not either then (A1), so the row is still there and live. */
	atomic {
		if
#ifdef ANY_ANSWER
		:: true ->
#else
		:: isMine && !expired || old[me] ->
#endif
			settle(RELEASED);
			assert(alone || old[me]);   /* I1 */
			tx[me] = NONE; held[me] = true
		:: !open -> settle(RETURNED); again     /* lost: it asks again, when the old session has ended (A4) */
		:: settle(RELEASED); tx[me] = NONE; mine[me] = 0; goto release  /* too late; or the caller has left */
		fi
	}

hold:   atomic {        /* ---- the work: any number of transactions that write ---- */
		if
		:: !due[me] -> tx[me] = OPEN    /* Fence reads the clock first */
		:: held[me] = false; due[me] = false; goto release
#ifdef KEEPS
		:: left == 0 -> left = me; goto endleft
#elif defined(TURNS)
		:: left == 0 -> held[me] = false; due[me] = false; left = me; goto endleft
#endif
		fi
	}
	/* assert_lock_held() */
#ifdef FENCE_AT_ONCE
	atomic { saw = isMine };
#endif
#ifndef NO_FENCE
	atomic {            /* the pin, shared, by try */
		if
		:: !open -> tx[me] = NONE; goto hold
		:: open && pin == 0 -> pins = pins | bit(me)
		:: open && pin != 0 -> goto no_fence
		fi
	   THEN             /* a later statement: the row, expired or not */
		if
		:: !open -> tx[me] = NONE; goto hold
#ifdef FENCE_AT_ONCE
		:: open && saw -> saw = false
		:: open && !saw -> goto no_fence
#else
		:: open && isMine
		:: open && !isMine -> goto no_fence
#endif
		fi
	}
#endif
	atomic {            /* the commit of the work */
		if
		:: !open
		:: open -> assert(last == mine[me])     /* I4 */
		fi;
		pins = pins & ~bit(me); tx[me] = NONE; goto hold
	}
no_fence: atomic {
#ifdef TRUE_LOSS
		assert(due[me] || old[me]);     /* a fence fails only if the lease is lost */
#endif
		pins = pins & ~bit(me); tx[me] = NONE; due[me] = true; goto hold
	}

#ifdef TURNS
endleft: atomic {
		if
		:: left == me -> left = 0; held[me] = false; due[me] = false; goto release       /* no caller came */
		:: outcome[me] == RETURNED -> outcome[me] = 0; held[me] = false; due[me] = false; goto release
		:: outcome[me] == RELEASED -> outcome[me] = 0; held[me] = false; due[me] = false; goto over
		fi
	}
#endif

release: atomic {       /* ---- release_batch(): one statement reads, pins, locks and deletes ---- */
		if
		:: holder == me && (mine[me] == 0 || token == mine[me]) && pinFree && rowLock == 0 ->
			pin = me; rowLock = me; tx[me] = OPEN
		:: goto over    /* it is gone; or fenced or locked for 5 s, and left to its expiry */
		fi
	   THEN             /* the commit. Whether the answer is lost or not, it may ask again */
		if
		:: !open
		:: open -> commits(); holder = 0; token = 0; expired = false
		fi;
		unlock(me); tx[me] = NONE; goto release
	}

over:   atomic { mine[me] = 0; old[me] = false }
}

/* renew_batch(), on a connection of its own, at any time: FOR NO KEY UPDATE SKIP LOCKED of a live row, and
 * the commit. One that finds its lease gone makes the hold lost, as the clock may at any time. What comes of
 * a late answer is in deadline.pml. */
active proctype Renewal()
{
end:	do
	:: atomic { holder != 0 && !expired && believes(holder) && token == mine[holder] && rowLock == 0 -> rowLock = holder + N
	   THEN
		if
		:: rowLock > N -> commits(); expired = false; rowLock = 0
		:: rowLock <= N         /* its session has ended */
		fi }
	od
}

/* Time. A deadline passes when it likes; the server ends a lease at any time after that (A1). It does not wait
 * for a deadline if a failover lost the renewal. */
active proctype Clock()
{
end:	do
	:: atomic { believes(1) -> due[1] = true }
	:: atomic { believes(2) -> due[2] = true }
	:: atomic { believes(3) -> due[3] = true }
#ifdef NO_MARGIN
	:: atomic { holder != 0 && !expired -> expired = true }
#else
	:: atomic { holder != 0 && !expired && (!believes(holder) || old[holder]) -> expired = true }
#endif
	od
}

#define cut(p)  tx[p] = (tx[p] == OPEN -> CUT : tx[p])
#define server_ends era++; guard = 0; pin = 0; rowLock = 0; pins = 0; cut(1); cut(2); cut(3)

/* The server crashes; or the sessions of one process end. A process whose session lives while it is frozen
 * needs no line, and one that died does nothing more. */
active proctype Crash()
{
	byte p = 1;
end:	do
	:: atomic { crashes > 0 -> crashes--; server_ends }
	:: atomic { crashes > 0 -> crashes--;
		do :: p < N -> p++ :: break od;
		cut(p); pins = pins & ~bit(p); unlock(p); unlock(p + N); p = 1 }
	od
}

/* The standby is promoted (A3). */
#define lost(p) old[p] = held[p] || tx[p] != NONE

active proctype Standby()
{
end:	do
	:: atomic {
		if
		:: !behind && failovers > 0 -> failovers--
		:: behind ->
			lost(1); lost(2); lost(3);
			holder = sHolder; token = sToken; expired = sExpired; seq = sSeq; last = sLast;
			behind = false; sHolder = 0; sToken = 0; sExpired = false; sSeq = 0; sLast = 0
		fi;
		server_ends }
	od
}

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
 *   -DNO_TIMELINE     tokens do not carry the timeline
 *   -DEARLY_TOKEN     a token is drawn before the guard
 */

#ifndef N
#define N 3             /* processes, numbered from 1 */
#endif
#ifndef LOST
#define LOST 0          /* how many messages or connections are lost */
#endif
#ifndef CRASHES
#define CRASHES 0       /* of the server, or of one process */
#endif
#ifndef FAILOVERS
#define FAILOVERS 0
#endif
#define SLOTS 4         /* arrays begin at 0, processes at 1 */

/* ---- the server ---- */

byte holder;            /* the committed row of distributed_locks: 0 means that there is none */
byte token;
bool expired;           /* its clock has passed expires_at */

byte guard, pin, rowLock; /* the transaction that has each: of a request, its process; of a renewal, its process + N */
byte pins;              /* the shared pins: a bit for each process whose fenced transaction is open */
byte seq;               /* the sequence pgxlock_tokens */
byte timeline;
byte boot;              /* counts crashes and failovers: sessions of earlier ones have ended */
byte last;              /* ghost: the token of the last grant, as this database remembers it */

byte sHolder, sToken, sSeq, sLast; /* what the standby has replayed */
bool sExpired;

/* ---- the processes ---- */

bool held[SLOTS];       /* from the answer to the call of Release */
bool due[SLOTS];        /* its clock has passed the deadline of that hold, or it knows that it has lost it */
byte mine[SLOTS];       /* the token */
bool dead[SLOTS];
byte lost = LOST, crashes = CRASHES, failovers = FAILOVERS;

/* ---- ghosts ---- */

byte highest;           /* the greatest token ever granted */
bool rewound;           /* a failover has lost commits: I1 and I2 are not promised from then on */

#define believes(p) (held[p] && !due[p])
#define bit(p)  (1 << (p))
#define ended   (boot != at)    /* the session of this transaction */
#define pinFree (pin == 0 && pins == 0)
#define isMine  (holder == me && token == mine[me])

#ifdef NO_TIMELINE
#define draw    seq++; mine[me] = seq
#else
#define draw    seq++; mine[me] = timeline * 16 + seq
#endif

/* The transaction ends, and its locks with it. */
#define unlock(x) \
	guard = (guard == (x) -> 0 : guard); pin = (pin == (x) -> 0 : pin); rowLock = (rowLock == (x) -> 0 : rowLock)

/* No other process believes that it has the lock. */
#define alone   (rewound || !(me != 1 && believes(1) || me != 2 && believes(2) || me != 3 && believes(3)))

proctype Process(byte me)
{
	byte at;            /* the boot in which its transaction began */
	bool discards;      /* it releases whatever it has */
	bool saw;

	{ skip;

try:    atomic {        /* ---- acquire: try_acquire_lock() begins with a plain read ---- */
		at = boot; mine[me] = 0;
#ifdef EARLY_TOKEN
		draw;
#endif
		if
		:: holder == 0 -> goto insert
		:: holder != 0 && expired -> goto take_over
		:: holder == me && !expired -> goto own         /* it asks again after a lost answer */
		:: holder != 0 && holder != me && !expired -> goto refused
		fi
	}

insert: atomic {        /* no row: the guard, by try */
		if
		:: ended -> goto unknown
		:: !ended && guard == 0 -> guard = me
		:: !ended && guard != 0 -> goto refused
		fi
	}
	atomic {            /* a later statement: the row again, the pin by try, the token, INSERT */
		if
		:: ended -> goto unknown
		:: !ended && holder == 0 && pinFree -> pin = me
		:: !ended && (holder != 0 || !pinFree) -> goto refused
		fi;
#ifndef EARLY_TOKEN
		draw;
#endif
		goto commit
	}

take_over: atomic {     /* an expired row: the pin, by try */
		if
		:: ended -> goto unknown
#ifdef NO_PIN
		:: !ended
#elif defined(ROW_FIRST)
		:: !ended && rowLock == 0 && holder != 0 && expired -> rowLock = me
		:: !ended && (rowLock != 0 || holder == 0 || !expired) -> goto refused
#else
		:: !ended && pinFree -> pin = me
		:: !ended && !pinFree -> goto refused
#endif
		fi
	}
	atomic {            /* FOR UPDATE SKIP LOCKED, and then the clock is read again; the token, UPDATE */
		if
		:: ended -> goto unknown
#ifdef ROW_FIRST
		:: !ended && pinFree -> pin = me
		:: !ended && !pinFree -> goto refused
#elif defined(NO_RECHECK)
		:: !ended && rowLock == 0 && holder != 0 -> rowLock = me
		:: !ended && (rowLock != 0 || holder == 0) -> goto refused
#else
		:: !ended && rowLock == 0 && holder != 0 && expired -> rowLock = me
		:: !ended && (rowLock != 0 || holder == 0 || !expired) -> goto refused
#endif
		fi;
#ifndef EARLY_TOKEN
		draw;
#endif
		goto commit
	}

own:    atomic {        /* its own live row: it is renewed, and keeps its token */
		if
		:: ended -> goto unknown
		:: !ended && rowLock == 0 && holder == me && !expired -> rowLock = me; mine[me] = token
		:: !ended && (rowLock != 0 || holder != me || expired) -> goto refused
		fi
	}

commit: atomic {
		if
		:: ended -> goto unknown
		:: !ended && isMine -> expired = false
		:: !ended && !isMine ->
			assert(alone);              /* I2: the former holder knows before anybody else has the lock */
			assert(mine[me] > highest); /* I3 */
			highest = mine[me]; last = mine[me];
			holder = me; token = mine[me]; expired = false
		:: !ended && lost > 0 -> lost--; unlock(me); goto unknown   /* rolled back */
		fi;
		unlock(me);
		if
		:: lost > 0 -> lost--; goto unknown
		:: true
		fi
	}
	/* The answer. It counts if the deadline, which runs from before the request was sent, has not
	 * passed. The server's has not either then (A1), so the row is still there and live. */
	atomic {
		if
#ifdef ANY_ANSWER
		:: true ->
#else
		:: isMine && !expired || rewound ->
#endif
			assert(alone);              /* I1 */
			held[me] = true
		:: discards = true; goto release /* too late; or the caller has left */
		fi
	}

hold:   atomic {        /* ---- the work: any number of transactions that write ---- */
		if
		:: !due[me] -> at = boot        /* Fence reads the clock first */
		:: held[me] = false; goto release
		fi
	}
fence:                  /* assert_lock_held() */
#ifdef FENCE_AT_ONCE
	atomic { saw = isMine };
#endif
#ifndef NO_FENCE
	atomic {            /* the pin, shared, by try */
		if
		:: ended -> goto hold
		:: !ended && pin == 0 -> pins = pins | bit(me)
		:: !ended && pin != 0 -> goto no_fence
		fi
	}
	atomic {            /* a later statement: the row, expired or not */
#ifndef FENCE_AT_ONCE
		saw = isMine;
#endif
		if
		:: ended -> saw = false; goto hold
		:: !ended && saw -> saw = false
		:: !ended && !saw -> pins = pins & ~bit(me); goto no_fence
		fi
	}
#endif
	atomic {            /* the commit of the work */
		if
		:: ended
		:: !ended ->
			assert(last == mine[me]);   /* I4 */
			pins = pins & ~bit(me)
		fi;
		goto hold
	}
no_fence: atomic {
#ifdef TRUE_LOSS
		assert(due[me] || rewound);     /* a fence fails only if the lease is lost */
#endif
		due[me] = true; goto hold
	}

unknown: atomic {       /* no answer: ask again, or release whatever it has; the old backend has ended (A4) */
		unlock(me);
		if
		:: goto try
		:: discards = true; goto release
		fi
	}

refused: atomic {       /* try again, or leave */
		unlock(me);
		if
		:: goto try
		:: goto over
		fi
	}

release: atomic {       /* ---- release_batch(): one statement reads, pins, locks and deletes ---- */
		at = boot;
		if
		:: !(holder == me && (discards || token == mine[me])) -> goto over      /* gone */
		:: holder == me && (discards || token == mine[me]) && pinFree && rowLock == 0 -> pin = me; rowLock = me
		:: holder == me && (discards || token == mine[me]) && !(pinFree && rowLock == 0) -> goto skipped
		fi
	}
	atomic {
		if
		:: ended -> goto release
		:: !ended -> holder = 0; token = 0; expired = false; unlock(me);
			if
			:: lost > 0 -> lost--; goto release     /* it asks again, and finds nothing */
			:: goto over
			fi
		:: !ended && lost > 0 -> lost--; unlock(me); goto release               /* rolled back */
		fi
	}
skipped: atomic {       /* fenced or locked by another transaction: again, or after 5 s leave it to its expiry */
		if
		:: goto release
		:: goto over
		fi
	}

over:   atomic { discards = false; mine[me] = 0; due[me] = false; at = 0 }

	} unless { dead[me] }
}

/* renew_batch(), on a connection of its own, at any time. What comes of a late answer is in deadline.pml. */
proctype Renewal(byte me)
{
	byte at, renewed;

	{ skip;
end:	do
	:: atomic { believes(me) ->
		at = boot; renewed = mine[me];
		if              /* FOR NO KEY UPDATE SKIP LOCKED of a live row */
		:: isMine && !expired && rowLock == 0 -> rowLock = me + N
		:: isMine && !expired && rowLock != 0 -> renewed = 0
		:: !(isMine && !expired) -> due[me] = true; renewed = 0     /* gone: the hold is lost */
		fi
	   }
	   atomic {         /* the commit */
		if
		:: renewed != 0 && !ended -> expired = false
		:: renewed != 0 && !ended && lost > 0 -> lost--             /* rolled back */
		:: renewed == 0 || ended
		fi;
		unlock(me + N); renewed = 0; at = 0
	   }
	od
	} unless { dead[me] }
}

/* Time. A deadline passes when it likes; the server ends a lease at any time after that (A1). */
active proctype Clock()
{
end:	do
	:: atomic { believes(1) -> due[1] = true }
	:: atomic { believes(2) -> due[2] = true }
	:: atomic { believes(3) -> due[3] = true }
#ifdef NO_MARGIN
	:: atomic { holder != 0 && !expired -> expired = true }
#else
	:: atomic { holder != 0 && !expired && !believes(holder) -> expired = true }
#endif
	od
}

#define server_ends boot++; guard = 0; pin = 0; rowLock = 0; pins = 0

/* The server crashes, or a process dies. A process that dies frozen, its session still there, needs no line. */
active proctype Crash()
{
	byte p = 1;
end:	atomic { crashes > 0 -> crashes--;
		if
		:: server_ends
		:: do
		   :: p < N -> p++
		   :: dead[p] = true; held[p] = false; due[p] = false; pins = pins & ~bit(p);
			unlock(p); unlock(p + N); break
		   od
		fi
	}
}

/* A standby replays commits when it likes, and may be promoted (A3). */
active proctype Standby()
{
end:	do
	:: atomic { failovers > 0 && (sHolder != holder || sToken != token || sExpired != expired || sSeq != seq) ->
		sHolder = holder; sToken = token; sExpired = expired; sSeq = seq; sLast = last }
	:: atomic { failovers > 0 -> failovers--;
		rewound = sHolder != holder || sToken != token || sExpired != expired;
		holder = sHolder; token = sToken; expired = sExpired; seq = sSeq; last = sLast;
		sHolder = 0; sToken = 0; sExpired = false; sSeq = 0; sLast = 0;
		timeline++; server_ends }
	od
}

init { atomic {
	run Process(1); run Renewal(1);
#if N > 1
	run Process(2); run Renewal(2);
#endif
#if N > 2
	run Process(3); run Renewal(3)
#endif
} }

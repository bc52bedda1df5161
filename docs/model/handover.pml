/* A lease is handed over by its release: a design, beside today's protocol in lease.pml and
 * waiting.pml. lease.pml says how to read Promela; README.md names the assumptions.
 *
 *   - A release grants the lease to the first ticket in its own transaction: it marks the ticket with
 *     the new token, and writes the row of the lease for the ticket's holder.
 *   - The waiter is woken as today. Its try finds its ticket marked, and takes: it deletes the ticket.
 *   - A mark whose waiter does not come is taken back: the row of the lease goes, and the mark.
 *
 * Process 1 holds the lease at the beginning. Process 2 waits, and may have a second caller, who goes
 * on with the ticket when the first one leaves. Process 3 waits, or tries without a ticket.
 *
 * Nobody waits for a TTL: a lease expires only if its holder died with it, so that spin reports a
 * waiter that only an expiry would wake as an invalid end state. With -DEXPIRY any lease that nobody
 * believes in may expire.
 *
 * scripts/model takes away, one by one, what mends the design, and expects that spin finds out:
 *   -DTAKE_UNLOCKED   a try takes a lease that is its own without locking its ticket
 *   -DBACK_UNLOCKED   a take-back does not lock the ticket
 *   -DPIN_FIRST       a take-back takes the pin before it locks the ticket
 *   -DTAKE_NO_PIN     a take does not try the pin
 *   -DLEAVE_DROPS     a withdrawal deletes a marked ticket, and leaves the lease as it is
 *   -DDEAD_DROPS      the same of a dead process's ticket
 *   -DNO_LOOK_AGAIN   nobody takes back what a dead or frozen process does not take
 *   -DNO_REFRESH      no refresh says that the ticket is marked, or makes a lost ticket again
 *   -DSAME_HOLDER     all callers of a process have one holder id
 *   -DNO_EXCHANGE     a try that finds its ticket marked for an earlier caller does not take that back
 *   -DCRASH_LEAVES    a caller that leaves after a crash of the server only withdraws its ticket
 *   -DASYNC_GRANT     a release that did not wait for the disk grants to a waiter that would
 *   -DNO_TIMELINE     tokens do not carry the timeline
 */

#ifndef LOST
#define LOST 0          /* answers and notifications that are lost */
#endif
#ifndef DEATHS
#define DEATHS 0        /* processes that die */
#endif
#ifndef CRASHES
#define CRASHES 0       /* of the server */
#endif
#ifndef FAILOVERS
#define FAILOVERS 0
#endif
#ifndef LEAVES
#define LEAVES 0        /* callers that leave */
#endif
#ifndef REFRESHES
#define REFRESHES 0     /* refreshes at a bad time, beside those that change something */
#endif
#ifndef SLOW
#define SLOW 0          /* how often a process that was woken does not try within the wake timeout */
#endif
#define SLOTS 4

/* ---- the server ---- */

byte holder, token;     /* the committed row of the lease; holder ids: process p, p + 3 its second caller */
bool expired;
byte pin, rowLock;      /* transactions: process p, p + 3 its background, 7 another process's look-again */
byte pins;
byte seq = 1, timeline, boot;
byte last = 1;          /* ghost */

bool ticket[SLOTS];     /* pgxlock_waiters: a ticket for each process */
byte number[SLOTS];     /* its place; 0: none drawn yet */
byte forHolder[SLOTS];  /* its column holder */
byte mark[SLOTS];       /* its column granted; 0: NULL */
byte woken[SLOTS];      /* NO, YES, or PASSED: longer ago than the wake timeout */
byte ticketLock[SLOTS];
byte drawnNumbers;

byte sHolder = 1, sToken = 1, sSeq = 1, sLast = 1; /* what a crash (-DASYNC_...) or a failover leaves */
bool sExpired;

/* ---- the processes ---- */

bool held[SLOTS], due[SLOTS], dead[SLOTS];
byte mine[SLOTS];       /* the token of the hold */
byte caller[SLOTS];     /* the holder id of the first waiter, or of the holder */
bool waits[SLOTS];      /* its local queue has a waiter: refreshes go on */
bool asleep[SLOTS];
bool notified[SLOTS];
bool refreshing[SLOTS]; /* a refresh is under way */
bool again[SLOTS];      /* it was sent after the last try, or was under way then */
bool withdrawn[SLOTS];  /* the ticket is to be withdrawn */
byte release[SLOTS];    /* the holder id whose lease is to be released; 0: none */
byte releaseToken[SLOTS]; /* 0: any */
bool looks[SLOTS];      /* it woke a waiter, and looks again after the wake timeout */

byte lost = LOST, deaths = DEATHS, crashes = CRASHES, failovers = FAILOVERS, leaves = LEAVES, refreshes = REFRESHES, slow = SLOW;

/* ---- ghosts ---- */
byte highest = 1;
bool rewound;
bool orphan;            /* the holder died with the lease: it ends by its TTL */

#define NO     0
#define YES    1
#define PASSED 2

#define believes(p) (held[p] && !due[p])
#define bit(p)   (1 << (p))
#define ended    (boot != at)
#define pinFree  (pin == 0 && pins == 0)
#define process(h) ((h) > 3 -> (h) - 3 : (h))
#define live     (holder != 0 && !expired)
#define marked(p) (ticket[p] && mark[p] != 0)
#define inForce(p) (marked(p) && live && token == mark[p])
#ifdef NO_EXCHANGE
#define forMe(p)   (inForce(p) && holder == caller[p])
#else
#define forMe(p)   inForce(p)
#endif
#define alone    (rewound || !(me != 1 && believes(1) || me != 2 && believes(2) || me != 3 && believes(3)))

/* pgxlock_first_ahead(): a ticket that counts, below number n. */
#define counts(p) (ticket[p] && woken[p] != PASSED && !dead[p])
#define ahead(p)  (counts(1) && number[1] < number[p] || counts(2) && number[2] < number[p] || counts(3) && number[3] < number[p])
#define anyCounts (counts(1) || counts(2) || counts(3))
#define isFirst(p) (counts(p) && !ahead(p))

#ifdef NO_TIMELINE
#define NEXT     seq
#else
#define NEXT     (timeline * 16 + seq)
#endif

#define unlock(x) \
	pin = (pin == (x) -> 0 : pin); rowLock = (rowLock == (x) -> 0 : rowLock); \
	ticketLock[1] = (ticketLock[1] == (x) -> 0 : ticketLock[1]); \
	ticketLock[2] = (ticketLock[2] == (x) -> 0 : ticketLock[2]); \
	ticketLock[3] = (ticketLock[3] == (x) -> 0 : ticketLock[3])

#define drop(p)  ticket[p] = false; mark[p] = 0; woken[p] = NO
#define no_row   holder = 0; token = 0; expired = false; orphan = false
#define granted_to(h, t) \
	holder = h; token = t; expired = false; orphan = false; \
	assert(t > highest); highest = t; last = t      /* I3 */
#define replay   sHolder = holder; sToken = token; sExpired = expired; sSeq = seq; sLast = last
#define back     holder = sHolder; token = sToken; expired = sExpired; last = sLast
#if FAILOVERS
#define flush    skip       /* the standby replays when it likes */
#else
#define flush    replay
#endif

/* pgxlock_wake_batch(): the first ticket that was not passed, or else the first. NOTIFY may be lost. */
inline wake()
{
	if
	:: isFirst(1) -> w = 1
	:: isFirst(2) -> w = 2
	:: isFirst(3) -> w = 3
	:: !anyCounts && ticket[2] && !dead[2] -> w = 2
	:: !anyCounts && ticket[3] && !dead[3] -> w = 3
	:: !anyCounts && (!ticket[2] || dead[2]) && (!ticket[3] || dead[3]) -> w = 0
	fi;
	if
	:: w != 0 ->
		woken[w] = (woken[w] == NO -> YES : woken[w]);
		if
		:: notified[w] = true
		:: lost > 0 -> lost--
		fi
	:: else
	fi;
	w = 0
}

proctype Process(byte me)
{
	byte at;
	byte found;         /* the token of the lease that a take found */
	bool stranger;      /* it has no ticket, and asks again and again */
	bool second;        /* the second caller has the ticket */

	{ skip;
	if
	:: me == 1 -> goto work
	:: me == 2 && !dead[me] -> goto enter
#ifdef STRANGER
	:: me == 3 -> stranger = true; goto try
#else
	:: me == 3 -> goto enter
#endif
	fi;

enter:  atomic {        /* it publishes a ticket, commits, and tries */
		drawnNumbers++; number[me] = drawnNumbers; ticket[me] = true; forHolder[me] = caller[me]; waits[me] = true;
		goto try
	}

try:    atomic {        /* ---- the marked ticket is locked (SKIP LOCKED) before anything is read ---- */
		at = boot; notified[me] = false; asleep[me] = false; again[me] = refreshing[me];
		if
#ifndef TAKE_UNLOCKED
		:: marked(me) && ticketLock[me] == 0 -> ticketLock[me] = me
		:: !(marked(me) && ticketLock[me] == 0) -> goto ordinary
#else
		:: goto ordinary
#endif
		fi
	}
	atomic {            /* a later statement: the lease */
		if
		:: ended -> goto unknown
		:: !ended && live && holder == caller[me] && token == mark[me] -> found = token
		:: !ended && live && holder != caller[me] && token == mark[me] -> goto exchange
		:: !ended && !(live && token == mark[me]) ->        /* a stale mark: the lease has expired, and may be another's */
			mark[me] = 0; woken[me] = NO; unlock(me); goto try
		fi
	}
	atomic {            /* the pin, shared: the releaser's may not be gone yet. Then DELETE of the ticket */
		if
		:: ended -> goto unknown
#ifdef TAKE_NO_PIN
		:: !ended
#else
		:: !ended && pin == 0 -> pins = pins | bit(me)
		:: !ended && pin != 0 -> unlock(me); goto soon
#endif
		fi
	}
	atomic {            /* the commit, in an unlogged table */
		if
		:: ended -> goto unknown
		:: !ended -> drop(me)
		fi;
		unlock(me); pins = pins & ~bit(me);
		if
		:: goto answer
		:: lost > 0 -> lost--; goto unknown
		fi
	}

exchange: atomic {      /* the lease was granted to an earlier caller of this process */
#ifdef NO_EXCHANGE
		unlock(me); goto refused;
#endif
		if
		:: ended -> goto unknown
		:: !ended && pinFree && rowLock == 0 -> pin = me; rowLock = me
		:: !ended && !(pinFree && rowLock == 0) -> unlock(me); goto soon
		fi
	}
	atomic {
		if
		:: ended -> goto unknown
		:: !ended -> no_row; flush; mark[me] = 0; woken[me] = NO; forHolder[me] = caller[me]; unlock(me); goto try
		fi
	}

ordinary: atomic {      /* one statement reads the lease and the mark */
		if
		:: ended -> goto unknown
#ifdef TAKE_UNLOCKED
		:: !ended && live && holder == caller[me] -> found = token
#else
		:: !ended && live && holder == caller[me] && marked(me) -> goto soon   /* locked by a take-back */
		:: !ended && live && holder == caller[me] && !marked(me) -> found = token   /* taken before, or tickets were lost */
#endif
		:: !ended && live && holder != caller[me] -> goto refused
		:: !ended && !live && !stranger && ahead(me) -> goto refused
		:: !ended && !live && (stranger && !anyCounts || !stranger && !ahead(me)) -> /* lease.pml has the steps of this */
			if
			:: pinFree && rowLock == 0 -> pin = me; rowLock = me; goto acquire
			:: !(pinFree && rowLock == 0) -> goto soon
			fi
		:: !ended && !live && stranger && anyCounts -> goto refused
		fi
	}
	atomic {            /* in any case the ticket goes */
		if
		:: ended -> goto unknown
		:: !ended && (!ticket[me] || ticketLock[me] == 0) -> drop(me)
#ifdef TAKE_UNLOCKED
		:: !ended && ticket[me] && ticketLock[me] != 0
#else
		:: !ended && ticket[me] && ticketLock[me] != 0 -> goto soon
#endif
		fi;
		if
		:: goto answer
		:: lost > 0 -> lost--; goto unknown
		fi
	}

acquire: atomic {
		if
		:: ended -> goto unknown
		:: !ended && (!ticket[me] || ticketLock[me] == 0) ->
			assert(alone);              /* I2 */
			seq++; found = NEXT;
			granted_to(caller[me], found); flush; drop(me); unlock(me)
		:: !ended && ticket[me] && ticketLock[me] != 0 -> unlock(me); goto soon
		fi;
		if
		:: goto answer
		:: lost > 0 -> lost--; goto unknown
		fi
	}

answer: atomic {        /* it counts if the deadline has not passed, so neither has the server's (A1) */
		if
		:: (live && holder == caller[me] && token == found) || rewound ->
			assert(alone);              /* I1 */
			held[me] = true; due[me] = false; mine[me] = found; waits[me] = false;
			/* a refresh that was under way may have made the ticket again */
			withdrawn[me] = again[me];
			goto work
		:: release[me] == 0 -> release[me] = caller[me]; releaseToken[me] = 0; goto leave
		fi
	}

soon:   goto try;

unknown: atomic {       /* no answer, and the old backend has ended (A4): ask again; or leave, and release what there may be */
		unlock(me); pins = pins & ~bit(me);
		if
		:: goto try
		:: leaves > 0 && release[me] == 0 -> leaves--; release[me] = caller[me]; releaseToken[me] = 0; goto leave
		fi
	}

refused: atomic {       /* settle: the stamp goes, but not a mark's */
		if
		:: ticket[me] && ticketLock[me] == 0 && mark[me] == 0 -> woken[me] = NO
		:: !(ticket[me] && ticketLock[me] == 0 && mark[me] == 0)
		fi;
		unlock(me); asleep[me] = true; found = 0; at = 0
	}
sleep:  atomic {
		if
		:: notified[me] -> goto try
		:: expired -> goto try          /* the refusal said when */
		:: stranger && !live && !anyCounts -> goto try
		:: leaves > 0 && !stranger && release[me] == 0 -> leaves--;
#ifndef CRASH_LEAVES
			release[me] = caller[me]; releaseToken[me] = 0;
#endif
			goto leave
		fi
	}
leave:  atomic {        /* the first caller of process 2 leaves the ticket to the second one */
		asleep[me] = false; found = 0; at = 0;
		if
		:: me == 2 && !second -> second = true;
#ifndef SAME_HOLDER
			caller[me] = 5;
#endif
			goto try
		:: waits[me] = false; withdrawn[me] = true; second = false; goto over
		fi
	}

work:   atomic {        /* the work: fenced transactions of processes 2 and 3 */
		if
		:: me != 1 && !due[me] -> at = boot
		:: release[me] == 0 -> held[me] = false; release[me] = caller[me]; releaseToken[me] = mine[me]; goto over
		fi
	}
	atomic {            /* lease.pml has the steps of a fence */
		if
		:: ended -> goto work
		:: !ended && pin == 0 && holder == caller[me] && token == mine[me] -> pins = pins | bit(me)
		:: !ended && (pin != 0 || !(holder == caller[me] && token == mine[me])) -> goto no_fence
		fi
	}
	atomic {
		if
		:: ended
		:: !ended -> assert(last == mine[me]); pins = pins & ~bit(me)   /* I4 */
		fi;
		goto work
	}
no_fence: atomic {
#if !defined(TAKE_UNLOCKED) && !defined(BACK_UNLOCKED)
		assert(due[me] || rewound);     /* a fence fails only if the lease is lost */
#endif
		due[me] = true; goto work
	}

over:   atomic { found = 0; at = 0; again[me] = false }

	} unless { dead[me] }
}

/* What a Locker does beside its callers: refreshes, releases, withdrawals. */
proctype Background(byte me)
{
	byte at, w, g, h, drawn;

	{ skip;
end:	do
	:: atomic {         /* ---- a refresh: sent when it changes something, and a few times more ---- */
		waits[me] && (
#ifndef NO_REFRESH
		!notified[me] && asleep[me] && (!ticket[me] || forHolder[me] != caller[me] || forMe(me) || !live && !ahead(me)) ||
#endif
		refreshes > 0) ->
		refreshes = (refreshes > 0 -> refreshes - 1 : 0);
		refreshing[me] = true; again[me] = true; h = caller[me]
	   }
	   atomic {         /* it arrives; the row is skipped if it is locked */
		if
		:: !ticket[me] -> ticket[me] = true; mark[me] = 0; woken[me] = NO; forHolder[me] = h
		:: ticket[me] && ticketLock[me] == 0 -> forHolder[me] = h
		:: ticket[me] && ticketLock[me] != 0
		fi;
		notified[me] = notified[me] || waits[me] && (forMe(me) || !live && !ahead(me));
		refreshing[me] = false; h = 0;
		withdrawn[me] = withdrawn[me] || !waits[me]
	   }

	:: atomic {         /* ---- a withdrawal; of a marked ticket also a take-back ---- */
		withdrawn[me] && !refreshing[me] -> withdrawn[me] = false; at = boot;
		if
		:: ticket[me] && ticketLock[me] == 0 -> ticketLock[me] = me + 3
		:: ticket[me] && ticketLock[me] != 0 -> withdrawn[me] = true; goto done      /* again later */
		:: !ticket[me] -> goto done
		fi
	   }
	   atomic {
		if
		:: ended -> withdrawn[me] = true; goto done
#ifdef LEAVE_DROPS
		:: !ended -> drop(me); goto wakes
#else
		:: !ended && !inForce(me) -> drop(me); goto wakes
		:: !ended && inForce(me) && pinFree && rowLock == 0 -> pin = me + 3; rowLock = me + 3
		:: !ended && inForce(me) && !(pinFree && rowLock == 0) -> withdrawn[me] = true; unlock(me + 3); goto done
#endif
		fi
	   }
	   atomic {
		if
		:: ended -> withdrawn[me] = true; goto done
		:: !ended -> no_row; flush; drop(me)
		fi
	   }
wakes:     atomic { unlock(me + 3); wake() }
done:      atomic { unlock(me + 3); at = 0 }

	:: atomic {         /* ---- a release, or the discard of what a caller may have been granted ---- */
		release[me] != 0 -> at = boot;
		if
		:: !(holder == release[me] && (releaseToken[me] == 0 || token == releaseToken[me])) -> goto released    /* gone */
		:: holder == release[me] && (releaseToken[me] == 0 || token == releaseToken[me]) && pinFree && rowLock == 0 ->
			pin = me + 3; rowLock = me + 3
		:: holder == release[me] && (releaseToken[me] == 0 || token == releaseToken[me]) && !(pinFree && rowLock == 0) ->
			goto retry
		fi
	   }
	   atomic {         /* a later statement: the first ticket that counts; any doubt: no grant */
		if
		:: ended -> goto retry
		:: !ended && isFirst(1) && ticketLock[1] == 0 -> g = 1
		:: !ended && isFirst(2) && ticketLock[2] == 0 -> g = 2
		:: !ended && isFirst(3) && ticketLock[3] == 0 -> g = 3
		:: !ended && !(isFirst(1) && ticketLock[1] == 0 || isFirst(2) && ticketLock[2] == 0 || isFirst(3) && ticketLock[3] == 0)
		fi;
		if
		:: g != 0 -> ticketLock[g] = me + 3; seq++; drawn = NEXT
		:: else
		fi
	   }
	   atomic {         /* the commit: visible, and without row locks; the pin goes later */
		if
		:: ended -> g = 0; drawn = 0; goto retry
		:: !ended && g == 0 -> no_row
		:: !ended && g != 0 ->
			assert(rewound || !(holder != 0 && believes(process(holder)) && release[me] != holder));
			granted_to(forHolder[g], drawn); mark[g] = drawn; woken[g] = YES
		fi;
#ifdef ASYNC_RELEASES
#ifndef ASYNC_GRANT
		if :: g != 0 -> flush :: else fi;
#endif
#else
		flush;
#endif
		if :: !ended && g != 0 -> ticketLock[g] = 0 :: else fi; rowLock = (rowLock == me + 3 -> 0 : rowLock);
		g = 0; drawn = 0
	   }
	   atomic { if :: !ended -> unlock(me + 3) :: ended fi;
		if
		:: true
		:: lost > 0 -> lost--; goto retry
		fi
	   }
released:  atomic {         /* the wake is a transaction of its own */
		if :: !ended -> unlock(me + 3) :: ended fi;
		release[me] = 0; releaseToken[me] = 0; at = 0; looks[me] = true;
		wake()
	   }
	   goto end;
retry:     atomic { if :: !ended -> unlock(me + 3) :: ended fi; at = 0 }
	od
	} unless { dead[me] }
}

/* The look-again of a process that woke another one, and the tries of those that wait: a mark that was
 * passed, or whose process is dead, is taken back. */
#define other(p) (p != 1 && !dead[1] && looks[1] || p != 2 && !dead[2] && (looks[2] || waits[2]) || p != 3 && !dead[3] && (looks[3] || waits[3]))
#define tooLong(p) (marked(p) && (woken[p] == PASSED || dead[p]) && other(p))

active proctype LookAgain()
{
	byte at, w, p, m;
end:	do
#ifndef NO_LOOK_AGAIN
	:: atomic {
		tooLong(2) && ticketLock[2] == 0 -> p = 2; at = boot; m = mark[2];
#ifdef PIN_FIRST
		goto pinFirst
#elif !defined(BACK_UNLOCKED)
		ticketLock[2] = 7
#endif
	   }
#ifndef PIN_FIRST
	   goto theLease;
#endif
	:: atomic {
		tooLong(3) && ticketLock[3] == 0 -> p = 3; at = boot; m = mark[3];
#ifdef PIN_FIRST
		goto pinFirst
#elif !defined(BACK_UNLOCKED)
		ticketLock[3] = 7
#endif
	   }
theLease:  atomic {
#ifdef DEAD_DROPS
		if :: !ended && dead[p] -> drop(p); goto backed :: else fi;
#endif
		if
		:: ended -> goto backed
		:: !ended && !(live && token == m) -> mark[p] = (mark[p] == m -> 0 : mark[p]); goto backed    /* stale */
		:: !ended && live && token == m && pinFree && rowLock == 0 -> pin = 7; rowLock = 7
		:: !ended && live && token == m && !(pinFree && rowLock == 0) -> goto backed
		fi
	   }
	   atomic {
		if
		:: ended
		:: !ended -> no_row; flush; mark[p] = 0
		fi
	   }
backed:    atomic { if :: !ended -> unlock(7) :: ended fi; wake(); at = 0; p = 0; m = 0 }
#ifdef PIN_FIRST
	   goto end;
pinFirst:  atomic { if :: pinFree -> pin = 7 :: !pinFree -> goto backed fi };
	   atomic { if :: !ended && marked(p) && mark[p] == m && ticketLock[p] == 0 && rowLock == 0 -> ticketLock[p] = 7; rowLock = 7; no_row; flush; mark[p] = 0 :: else fi; goto backed }
#endif
#endif
	/* A wake that was lost with the releaser, or with a process that was passed: the lease is free. */
	:: atomic { !live && !anyCounts && ticket[2] && !dead[2] && asleep[2] && !notified[2] && woken[2] == PASSED -> notified[2] = true }
	:: atomic { !live && !anyCounts && ticket[3] && !dead[3] && asleep[3] && !notified[3] && woken[3] == PASSED -> notified[3] = true }
	od
}

active proctype Clock()
{
end:	do
	:: atomic { believes(2) -> due[2] = true }
	:: atomic { believes(3) -> due[3] = true }
	:: atomic { slow > 0 && ticket[2] && woken[2] == YES -> slow--; woken[2] = PASSED }
	:: atomic { slow > 0 && ticket[3] && woken[3] == YES -> slow--; woken[3] = PASSED }
#ifdef EXPIRY
	:: atomic { live && !believes(process(holder)) -> expired = true }
#else
	:: atomic { live && orphan && !believes(process(holder)) -> expired = true }
#endif
	/* The listener of a process is away: others take it for dead, and remove its ticket if it is not marked. */
	:: atomic { lost > 0 && ticket[2] && mark[2] == 0 && ticketLock[2] == 0 -> lost--; drop(2) }
	:: atomic { lost > 0 && ticket[3] && mark[3] == 0 && ticketLock[3] == 0 -> lost--; drop(3) }
	od
}

#define server_ends boot++; pin = 0; rowLock = 0; pins = 0; ticketLock[1] = 0; ticketLock[2] = 0; ticketLock[3] = 0
#define no_tickets  drop(1); drop(2); drop(3)

active proctype Faults()
{
	byte p = 1;
end:	do
	:: atomic { deaths > 0 -> deaths--;
		do
		:: p < 3 -> p++
		:: orphan = orphan || process(holder) == p && live && !(marked(p) && mark[p] == token);
		   dead[p] = true; held[p] = false; due[p] = false; waits[p] = false; asleep[p] = false; looks[p] = false;
		   pins = pins & ~bit(p); unlock(p); unlock(p + 3); break
		od;
		p = 1 }
	:: atomic { crashes > 0 -> crashes--;       /* unlogged tables are empty */
#ifdef ASYNC_RELEASES
		back;
#endif
		server_ends; no_tickets }
	:: atomic { failovers > 0 && (sHolder != holder || sToken != token || sExpired != expired || sSeq != seq) -> replay }
	:: atomic { failovers > 0 -> failovers--;   /* a standby is promoted, which has no unlogged tables */
		rewound = sHolder != holder || sToken != token || sExpired != expired;
		back; seq = sSeq; orphan = rewound || orphan; timeline++;
		server_ends; no_tickets }
	od
}

init { atomic {
	holder = 1; token = 1; held[1] = true; mine[1] = 1; caller[1] = 1; caller[2] = 2; caller[3] = 3;
	run Process(1); run Background(1); run Process(2); run Background(2); run Process(3); run Background(3)
};
end:	timeout -> assert(holder == 0 || orphan || expired || dead[process(holder)])   /* nothing is left without an owner */
}

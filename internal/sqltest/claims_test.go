// claim_once(): which caller receives true, which one waits, and when a key can be claimed
// again.

package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestClaimIsTrueForOneCommittedTransaction(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			claim := "claim_once('k', " + wait + ")"
			s := d.begin(level)
			s.want(claim, "true")
			s.rollback()
			s.begin(level)
			s.want(claim, "true") // the rollback gave it back
			s.commit()
			for range 2 {
				s.begin(level)
				s.want(claim, "false")
				d.leavesNothing(s)
				s.rollback()
			}
			d.want("select count(*) from pgxlock_claims where claim_key = 'k' and expires_at is null and claimed_at <= clock_timestamp()", "1")
			d.do("delete from pgxlock_claims")
		}
	})
}

// The first claimant's transaction is open. The answer is never false then, for
// that may yet be rolled back. The key is new, or was claimed and has ended.
func TestClaimThatIsUndecidedIsNotFalse(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, expired := range []bool{false, true} {
			for _, end := range []string{"commit", "rollback", "rollback to s"} {
				for _, wait := range []string{forever, long} {
					d.do("delete from pgxlock_claims")
					if expired {
						d.do("insert into pgxlock_claims values ('k', now() - interval '2 days', now() - interval '1 day', '3')")
					}
					first := d.begin(level)
					first.do("savepoint s")
					first.want("claim_once('k')", "true")
					s := d.begin(level)
					s.do("create temp table mine ()")
					for _, wait := range []string{none, "'-1 s'", brief} {
						s.want("claim_once('k', "+wait+")", "NULL")
					}
					s.want("claim_once('other', "+none+")", "true")
					s.want("select count(*) from mine", "0") // the transaction is in order

					claim := s.start("claim_once('k', " + wait + ")")
					claim.waitsFor(first)
					first.do(end)
					switch {
					case end != "commit":
						claim.want("true")
						d.want("claim_once('k', "+none+")", "NULL")
					case level == readCommitted:
						claim.want("false")
					default:
						claim.want("40001")
					}
					s.done()
					first.done()
				}
			}
		}
	})
}

// A claim that was not decided in time must not be in the others' way.
func TestWaitForAClaimLeavesNothingLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("insert into pgxlock_claims values ('expired', now() - interval '2 days', now() - interval '1 day', '3')")
		for _, key := range []string{"new", "expired"} {
			claim := "claim_once(" + quote(key)
			first := d.begin(readCommitted)
			first.want(claim+")", "true")
			s := d.begin(level)
			s.want(claim+", "+brief+")", "NULL")
			if held := d.locks(s); held != "NULL" {
				t.Errorf("it keeps %s", held)
			}
			first.rollback()
			d.want(claim+", "+brief+")", "true") // while s is open
			s.done()
		}
	})
}

// Many wait for a key that one after the other claims, fails to use and gives
// back. One INSERT waits for all of them, each time for less than lock_timeout.
func TestWaitForManyClaimantsThatAreRolledBackLastsAsLongAsItMay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const before = "insert into pgxlock_claims values ('k', now() - interval '2 days', now() - interval '1 day', '3')"
	const most = 60 // twelve times as many as there are in a second, where this machine does not stand still
	claimants := make([]*session, 10)
	for i := range claimants {
		claimants[i] = d.connect()
	}
	waiter := d.connect()
	for name, setup := range map[string]string{"a new key": "", "a key whose claim has ended": before} {
		for {
			d.do("delete from pgxlock_claims;" + setup)
			passed, got := waitBehindMany(d, waiter, claimants, most)
			if got == "true" && passed < most {
				continue // it was the first to look after a rollback: once more
			}
			if got != "NULL" || passed == most {
				t.Errorf("%s: a wait of 1 s was not over when %d had had the key for 0.2 s each: %s", name, passed, got)
			}
			break
		}
	}
}

// waitBehindMany waits for a claim for a second while others have it for 0.2 seconds
// each. It returns what came of it, and how many of them gave the key back before;
// if those were most, they were the last.
func waitBehindMany(d *database, waiter *session, claimants []*session, most int) (passed int, got string) {
	d.t.Helper()
	others, waiting := make(chan *call), 0
	come := func(s *session) {
		s.begin(readCommitted)
		next := s.startBefore(d.session, "claim_once('k')")
		next.waitsOrEnds()
		waiting++
		go func() {
			<-next.done
			others <- next
		}()
	}
	holder := claimants[0]
	holder.begin(readCommitted)
	holder.want("claim_once('k')", "true")
	for _, s := range claimants[1:] {
		come(s)
	}
	waiter.begin(readCommitted)
	claim := waiter.startBefore(d.session, "claim_once('k', '1 s')")
	claim.waitsOrEnds()
	for over := false; passed < most && !over; {
		d.do("select pg_sleep(0.2)")
		holder.rollback()
		passed++
		select {
		case next := <-others:
			next.want("true")
			waiting--
			come(holder)
			holder = next.s
		case <-claim.done:
		}
		select {
		case <-claim.done:
			over = true
		default:
		}
	}
	holder.rollback()
	for ended := claim.done; waiting > 0 || ended != nil; {
		select {
		case next := <-others:
			next.s.rollback()
			waiting--
		case <-ended:
			got, ended = claim.got, nil
			waiter.want("1", "1") // its transaction is in order
			waiter.rollback()
		}
	}
	return passed, got
}

// Each of two has claimed what the other one wants. A caller that waits without a
// bound learns of it from PostgreSQL, the others when their wait is over.
func TestClaimsInOppositeOrdersDoNotWaitForEver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, waits := range [][2]string{{forever, forever}, {forever, "'200 ms'"}, {long, "'200 ms'"}} {
		a, b := d.begin(readCommitted), d.begin(readCommitted)
		a.do("set local deadlock_timeout = '10ms'")
		a.want("claim_once('a')", "true")
		b.do("set local deadlock_timeout = '1h'")
		b.want("claim_once('b')", "true")
		second := b.start("claim_once('a', " + waits[0] + ")")
		second.waitsFor(a)
		got := a.outcome("claim_once('b', " + waits[1] + ")")
		if got != "40P01" && (got != "NULL" || waits[1] == forever) {
			t.Errorf("%s: got %s", waits, got)
		}
		a.done()
		second.want("true")
		b.done()
	}
}

// What is known needs no write.
func TestClaimThatStandsIsSeenByAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select claim_once('k')")
		for _, wait := range waits {
			s := d.begin(level + " read only")
			s.want("claim_once('k', "+wait+")", "false")
			s.want("claim_once('new', "+wait+")", "25006")
			s.done()
		}
	})
}

func TestClaimIsItsOwnTransactionsWhenItAsksAgain(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			claim := "claim_once('k', " + wait + ")"
			d.do("delete from pgxlock_claims")
			s := d.begin(level)
			s.want(claim, "true")
			s.want(claim, "true")
			s.do("savepoint a")
			s.want(claim, "true")
			s.do("savepoint b; release a")
			s.want(claim, "true")
			s.commit()
			s.begin(level)
			s.want(claim, "false") // that was another one
			s.rollback()

			d.do("delete from pgxlock_claims")
			s.begin(level)
			s.do("savepoint a")
			s.want(claim, "true")
			s.do("savepoint b")
			s.want(claim, "true")
			s.do("rollback to b")
			s.want(claim, "true")
			s.do("rollback to a")
			d.want("select count(*) from pgxlock_claims", "0")
			other := d.begin(level)
			other.want("claim_once('k', "+none+")", "true") // it was given back
			other.done()
			s.want(claim, "true")
			s.do("release a")
			s.commit()
			s.done()
			d.want(claim, "false")
		}
	})
}

// A claim in a savepoint that is kept is decided with the transaction, and one
// after an error that was caught stands.
func TestClaimInASavepointIsDecidedByTheTransaction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		s := d.begin(level)
		s.do("savepoint a; select claim_once('k'); release a")
		s.do(`do $$ begin perform claim_once('undone'); raise 'undone'; exception when raise_exception then perform claim_once('kept'); end $$`)
		d.want("claim_once('k', "+none+")", "NULL")
		d.want("claim_once('kept', "+none+")", "NULL")
		d.want("claim_once('undone', "+none+")", "true")
		s.commit()
		d.want("claim_once('k')", "false")
		d.want("claim_once('kept')", "false")
	})
}

func TestClaimEndsWithItsRetention(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			claim := "claim_once('k', " + wait + ", '1 hour')"
			d.do("delete from pgxlock_claims")
			s := d.begin(level)
			s.want(claim, "true")
			s.commit()
			d.want("select expires_at - claimed_at from pgxlock_claims", "01:00:00")
			s.begin(level)
			s.want(claim, "false")
			s.rollback()
			d.endClaim("k")
			s.begin(level)
			s.want(claim, "true")
			s.want(claim, "true") // again
			d.want("claim_once('k', "+none+")", "NULL")
			s.rollback()
			s.begin(level)
			s.want("claim_once('k', "+wait+")", "true")
			s.commit()
			d.want("select expires_at is null and claimed_at > now() - interval '1 minute' from pgxlock_claims", "true") // now for good
			d.want(claim, "false")
		}
	})
}

// The claimant before gives the key back after a while: that is no time of ours,
// but for the few milliseconds that are not worth a second version of the row.
func TestRetentionBeginsWhenTheWaitForTheClaimIsOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range []string{forever, long} {
			for _, expired := range []bool{false, true} {
				d.do("delete from pgxlock_claims")
				if expired {
					d.do("select claim_once('k', NULL, '1 hour')")
					d.endClaim("k")
				}
				first := d.begin(readCommitted)
				first.want("claim_once('k')", "true")
				s := d.begin(level)
				claim := s.start("claim_once('k', " + wait + ", '1 hour')")
				claim.waitsFor(first)
				d.do("select pg_sleep(0.05)")
				during := d.get("clock_timestamp()")
				first.done()
				claim.want("true")
				s.want("claim_once('k')", "true")
				s.commit()
				s.done()
				d.want("select claimed_at >= "+quote(during)+"::timestamptz - interval '5 ms' and expires_at - claimed_at = interval '1 hour' from pgxlock_claims", "true")
			}
		}
	})
}

// Somebody switched it on without a policy that lets claimants see the rows.
func TestClaimThatRowLevelSecurityHidesIsAnError(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		role := d.role()
		d.do(`grant select, insert, update on pgxlock_claims to ` + role + `; select claim_once('k');
			create policy hides on pgxlock_claims for insert with check (true); alter table pgxlock_claims enable row level security`)
		s := d.connect()
		s.do("set role " + role)
		for _, wait := range []string{forever, brief} {
			s.begin(level)
			s.want("claim_once('k', "+wait+")", "42501")
			s.rollback()
		}
		d.do("alter table pgxlock_claims disable row level security; drop policy hides on pgxlock_claims")
	})
}

// endClaim lets the retention of a claim be over now.
func (d *database) endClaim(key string) {
	d.t.Helper()
	d.do("update pgxlock_claims set claimed_at = clock_timestamp() - interval '1 hour', expires_at = clock_timestamp() - interval '1 second' where claim_key = " + quote(key))
}

// Its own transaction may outlast a claim's retention.
func TestClaimThatEndsWithinItsTransactionStaysItsOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		s := d.begin(level)
		s.want("claim_once('k', NULL, '1 microsecond')", "true")
		s.want("claim_once('k', NULL, '1 microsecond')", "true")
		s.commit()
		d.want("claim_once('k')", "true")
	})
}

// A retention is a number of seconds, as a ttl is.
func TestRetentionLastsTheSameInEveryTimeZone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("set TimeZone = 'America/New_York'")
	for i, retention := range []string{"1 day", "1 month -29 days", "90 days", "180 days", "270 days"} { // some of them over a change of the clocks
		key := fmt.Sprint(i)
		d.want("claim_once("+quote(key)+", NULL, "+quote(retention)+")", "true")
		d.want("select extract(epoch from expires_at - claimed_at) = extract(epoch from interval "+quote(retention)+") from pgxlock_claims where claim_key = "+quote(key), "true")
	}
	d.want("claim_once('longest', NULL, '100 years')", "true") // a year has 365.25 days
	d.want("select expires_at - claimed_at from pgxlock_claims where claim_key = 'longest'", "36525 days")
}

// The row says of its transaction what a row of this one would say, and came
// from a backup, or from another cluster.
func TestClaimThatWasRestoredIsNobodysOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		s := d.begin(level)
		s.do("insert into pgxlock_claims values ('mine by its number', now() - interval '1 hour', NULL, pg_current_xact_id())")
		s.want("claim_once('mine by its number')", "false")
		s.want("claim_once('mine')", "true")
		s.do("update pgxlock_claims set claimed_by = (pg_current_xact_id()::text::bigint - 1)::text::xid8 where claim_key = 'mine'")
		s.want("claim_once('mine')", "false")
	})
}

// Claimants of every kind at every isolation level try the same keys, some roll
// back or keep savepoints. For each key the work of exactly one is committed;
// and false is said only when it is there.
func TestSoakExactlyOneOfManyClaimantsDoesTheWork(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	workers, keys := pgtest.Soak(t, 8, 16), pgtest.Soak(t, 60, 5000)
	d := install(t)
	d.do("create table done (key text, worker int)")
	// Every third key was claimed before, and that has ended.
	d.do(fmt.Sprintf("insert into pgxlock_claims select 'k' || i, now() - interval '2 days', now() - interval '1 day', '3' from generate_series(0, %d, 3) i", keys))
	var undecided, failed atomic.Int64
	var wg sync.WaitGroup
	for worker := range workers {
		s, random := d.connect(), rand.New(rand.NewPCG(rand.Uint64(), 0))
		wg.Go(func() {
			for i := 0; i < keys && !t.Failed(); {
				key, level := quote(fmt.Sprint("k", i)), levels[random.IntN(len(levels))]
				s.do("begin isolation level " + level)
				if random.IntN(4) == 0 {
					// What is committed between its snapshot and its look may be too much already.
					if code := outcome("", s.run("select count(*) from done; savepoint a")); code == "40001" && level == "serializable" {
						failed.Add(1)
						s.do("rollback")
						continue
					} else if code != "" {
						t.Errorf("a look at the work: %s", code)
					}
				}
				claim := fmt.Sprintf("claim_once(%s, %s, %s)", key, []string{forever, "'1 s'", "'5 ms'", none}[random.IntN(4)], []string{"NULL", "'1 day'"}[random.IntN(2)])
				got := s.outcome(claim)
				end := "rollback"
				switch got {
				case "true":
					if random.IntN(4) > 0 {
						end = "commit"
					}
					work := fmt.Sprintf("savepoint b; insert into done values (%s, %d); select pg_sleep(%d / 1000.0); release b", key, worker, random.IntN(8))
					if code := outcome("", s.run(work)); code != "" {
						if end = "rollback"; code != "40001" || level != "serializable" {
							t.Errorf("the work: %s", code)
						}
					}
				case "false":
					if level == readCommitted {
						s.want("select count(*) from done where key = "+key, "1")
					}
					i++
				case "NULL":
					undecided.Add(1)
					s.want("1", "1")
				case "40001":
					failed.Add(1)
					if level == readCommitted {
						t.Errorf("%s: %s", level, got)
					}
				default:
					t.Errorf("%s: %s", claim, got)
				}
				if err := s.run(end); err != nil {
					if code := outcome("", err); code != "40001" || level != "serializable" {
						t.Errorf("%s at %s: %v", end, level, err)
					}
					_ = s.run("rollback")
				}
			}
		})
	}
	wg.Wait()
	d.want("select count(*) || ' ' || count(distinct key) from done", fmt.Sprintf("%d %[1]d", keys))
	d.want("select count(*) from pgxlock_claims where claim_key in (select key from done) and (expires_at > now() or expires_at is null)", fmt.Sprint(keys))
	t.Logf("undecided %d times, not serializable %d times", undecided.Load(), failed.Load())
}

// Many find that a claim's retention is over.
func TestExactlyOneOfManyTakesOverAClaimThatEnded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select claim_once('k', NULL, '1 hour')")
		for range 5 {
			d.endClaim("k")
			const n = 6
			claimants, calls := make([]*session, n), make([]*call, n)
			first := d.begin(readCommitted)
			first.want("claim_once('k', NULL, '1 hour')", "true")
			for i := range n {
				claimants[i] = d.begin(level)
				calls[i] = claimants[i].start("claim_once('k', " + []string{forever, long}[i%2] + ", '1 hour')")
				calls[i].waitsOrEnds() // for the first one, or for its turn to wait for it
			}
			first.rollback()
			// One of them gets it, the others wait for that one, and so on.
			trues, left := 0, n
			for left > 0 {
				for i, c := range calls {
					if c == nil || c.waits(fmt.Sprintf("exists (select from pg_stat_activity where pid = %d and state = 'active')", c.s.pid)) {
						continue
					}
					switch c.outcome() {
					case "true":
						if trues++; trues > 1 {
							t.Error("two have it")
						}
						claimants[i].commit()
					case "false", "40001":
						if c.got == "40001" && level == readCommitted || trues == 0 {
							t.Errorf("%s before anybody has it", c.got)
						}
						claimants[i].rollback()
					default:
						t.Errorf("got %s", c.got)
					}
					calls[i], left = nil, left-1
				}
			}
			if trues != 1 {
				t.Errorf("%d have it", trues)
			}
		}
	})
}

// Each subtransaction that writes takes a transaction id; more than 64 of them
// in one transaction slow down the snapshots of all sessions.
func TestClaimsWithoutABoundNeedNoSubtransactions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := quiet(t)
	ids := func(claim string) int64 {
		t.Helper()
		s := d.begin(readCommitted)
		first := s.number("pg_current_xact_id()")
		s.want("select bool_and("+claim+") from generate_series(1, 200) i", "true")
		s.commit()
		return d.number("pg_current_xact_id()") - first
	}
	if n := ids("claim_once('a' || i)"); n != 1 {
		t.Errorf("%d transaction ids for 200 claims", n)
	}
	if n := ids("claim_once('b' || i, '1 minute')"); n != 201 { // else nothing is counted here
		t.Errorf("%d transaction ids for 200 claims with a bound", n)
	}
}

// Waiting must not use up transaction ids, however often it looks.
func TestWaitForAClaimDrawsOneTransactionIDAtMost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := quiet(t)
	first := d.begin(readCommitted)
	first.want("claim_once('k')", "true")
	s := d.begin(readCommitted)
	before := d.number("pg_current_xact_id()")
	s.want("claim_once('k', '300 ms')", "NULL")
	if n := d.number("pg_current_xact_id()") - before; n > 2 {
		t.Errorf("it drew %d transaction ids", n-1)
	}
}

func TestClaimIsDurableAsItsTransactionIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	d.want("claim_once('committed')", "true")
	open := d.begin(readCommitted)
	open.want("claim_once('open')", "true")
	d.want("claim_once('last')", "true")
	d = crash(t, server)
	d.want("claim_once('committed')", "false")
	d.want("claim_once('last')", "false")
	d.want("claim_once('open')", "true")
}

// A prepared transaction's claim is as undecided as an open one's.
func TestPreparedClaimIsUndecided(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := quiet(t)
	for _, c := range []struct{ end, want string }{{"commit prepared 'p'", "false"}, {"rollback prepared 'p'", "true"}} {
		d.do("delete from pgxlock_claims")
		s := d.begin(readCommitted)
		s.want("claim_once('k')", "true")
		s.want("lock_tx('k')", "true")
		s.do("prepare transaction 'p'")
		d.want("claim_once('k', "+brief+")", "NULL")
		d.want("lock_tx('k', "+brief+")", "false")
		d.do(c.end)
		d.want("claim_once('k')", c.want)
		d.want("lock_tx('k', "+brief+")", "true")
	}
}

// lock_tx(): which calls exclude each other, for how long, and what a wait leaves behind.
// Snapshots have a file of their own, snapshot_test.go, where they may be old: here what other
// tests commit on this server would count.

package sqltest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// lockTx is the call that locks k. The wait is an SQL literal.
func lockTx(wait string, shared bool) string {
	return fmt.Sprintf("lock_tx('k', %s, %t, true)", wait, shared)
}

const (
	forever = "NULL"
	long    = "'1 hour'" // longer than any test's patience
	brief   = "'30 ms'"
	none    = "'0'"
)

// waits are all kinds that end with the lock if it is free.
var waits = []string{forever, long, brief, none}

func TestLockInATransactionExcludesOthersUntilItsEnd(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, c := range []struct{ held, asked, together bool }{
			{false, false, false}, {false, true, false}, {true, false, false}, {true, true, true},
		} {
			for i, take := range waits {
				holder := d.begin(level)
				holder.want(lockTx(take, c.held), "true")
				for _, other := range tried() {
					asker := d.begin(other)
					for _, wait := range []string{none, "'-1 s'", brief} {
						asker.want(lockTx(wait, c.asked), fmt.Sprint(c.together))
						if !c.together {
							d.leavesNothing(asker)
						}
					}
					asker.done()
				}
				holder.do([]string{"commit", "rollback"}[i%2])
				d.want(lockTx(none, c.asked), "true")
				holder.done()
			}
		}
	})
}

// It may want to read several things of one time.
func TestReadOnlyTransactionMayLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			s := d.begin(level + " read only")
			s.want(lockTx(wait, false), "true")
			d.want(lockTx(none, false), "false")
			s.done()
		}
	})
}

func TestWaitEndsWithTheHoldersTransaction(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, end := range []string{"commit", "rollback", "savepoint"} {
			for _, wait := range []string{forever, long} {
				holder := d.begin(readCommitted)
				holder.do("savepoint s")
				holder.want(lockTx(forever, false), "true")
				waiter := d.begin(level)
				wait := waiter.start(lockTx(wait, false))
				wait.waitsFor(holder)
				if end == "savepoint" {
					holder.do("rollback to s")
				} else {
					holder.do(end)
				}
				wait.want("true")
				d.want(lockTx(none, true), "false")
				waiter.commit()
				waiter.done()
				holder.done()
			}
		}
	})
}

func TestLockBelongsToTheSavepointInWhichItWasTaken(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			for _, shared := range []bool{false, true} {
				s := d.begin(level)
				s.do("savepoint a; savepoint b")
				s.want(lockTx(wait, shared), "true")
				d.want(lockTx(none, false), "false")
				s.do("release b")
				d.want(lockTx(none, false), "false")
				s.do("rollback to a")
				d.leavesNothing(s)
				d.want(lockTx(none, false), "true")
				s.do(`do $$ begin perform ` + lockTx(wait, shared) + `; raise 'undone'; exception when raise_exception then null; end $$`)
				d.leavesNothing(s)
				s.want(lockTx(wait, shared), "true")
				s.do("savepoint c")
				s.want(lockTx(wait, shared), "true") // again
				s.do("rollback to c")
				d.want(lockTx(none, false), "false") // the first one stays
				s.done()
			}
		}
	})
}

// Programs that know nothing of pgxlock's functions lock the same key.
func TestLockIsPostgreSQLsAdvisoryLockOfThatKey(t *testing.T) {
	t.Parallel()
	d := install(t)
	const key = "(advisory_lock_key('k'))"
	a, b := d.sessions()
	for _, c := range []struct {
		lock, try string
		shared    bool // both, and then they do not exclude each other
	}{
		{"pg_advisory_xact_lock", "pg_try_advisory_xact_lock", false},
		{"pg_advisory_xact_lock_shared", "pg_try_advisory_xact_lock_shared", true},
		{"pg_advisory_lock", "pg_try_advisory_lock", false},
		{"pg_advisory_lock_shared", "pg_try_advisory_lock_shared", true},
	} {
		for _, shared := range []bool{false, true} {
			together := fmt.Sprint(c.shared && shared)
			a.begin(readCommitted)
			a.do("select " + c.lock + key)
			for _, wait := range []string{none, brief} {
				b.want(lockTx(wait, shared), together)
			}
			a.do("commit; select pg_advisory_unlock_all()")

			a.begin(readCommitted)
			a.want(lockTx(forever, shared), "true")
			b.want(c.try+key, together)
			b.do("select pg_advisory_unlock_all()")
			a.rollback()
		}
	}
	b.do("begin; select pg_advisory_xact_lock" + key)
	a.begin(readCommitted)
	wait := a.start(lockTx(forever, false))
	wait.waitsFor(b)
	b.commit()
	wait.want("true")
	wait = b.start("pg_advisory_xact_lock" + key + " is null")
	wait.waitsFor(a)
	a.commit()
	wait.want("false")
}

// A wait that is over is no error: what the transaction did before, and may do
// afterwards, is not touched, and neither are its locks.
func TestTransactionGoesOnAfterAWaitThatIsOver(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("create table if not exists work (id int primary key)")
		holder := d.begin(readCommitted)
		holder.want(lockTx(forever, false), "true")
		s := d.begin(level)
		s.do("insert into work values (1); declare c cursor for select 1; select lock_tx('mine', p_allow_stale_snapshot => true)")
		for _, wait := range []string{none, brief} {
			s.want(lockTx(wait, false), "false")
			s.want(lockTx(wait, true), "false")
		}
		s.do("fetch from c; insert into work values (2)")
		d.want("lock_tx('mine', '0', p_allow_stale_snapshot => true)", "false")
		holder.commit()
		s.want(lockTx(brief, false), "true")
		s.commit()
		d.want("select count(*) from work", "2")
		d.do("truncate work")
	})
}

func TestWaitLastsAsLongAsItMay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder := d.begin(readCommitted)
	holder.want(lockTx(forever, false), "true")
	s := d.begin(readCommitted)
	s.do("set local lock_timeout = '1ms'") // the caller's own bound is for other waits
	for _, ms := range []int{60, 200} {
		before := s.get("clock_timestamp()")
		s.want(lockTx(fmt.Sprintf("'%d ms'", ms), false), "false")
		if s.get(fmt.Sprintf("clock_timestamp() - %s::timestamptz >= interval '%d ms'", quote(before), ms)) != "true" {
			t.Errorf("it did not wait for %d ms", ms)
		}
	}
	// A wait without a bound has the caller's.
	s.want(lockTx(forever, false), "55P03")
}

// There is nothing to fear from a bound that no clock can show.
func TestAnyBoundOfAWaitIsUnderstood(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, wait := range []string{"'178000000 years'", "'290000 years'", "'25 days'", "'-290000 years'", "'1 microsecond'"} {
		d.want(lockTx(wait, false), "true")
		d.want("claim_once("+quote(wait)+", "+wait+")", "true")
		holder := d.begin(readCommitted)
		holder.want(lockTx(forever, false), "true")
		holder.want("claim_once('k', "+wait+")", "true")
		if strings.Contains(wait, "-") || strings.Contains(wait, "micro") {
			d.want(lockTx(wait, false), "false")
			d.want("claim_once('k', "+wait+")", "NULL")
		} else {
			locker, claimant := d.sessions()
			lock, claim := locker.start(lockTx(wait, false)), claimant.start("claim_once('k', "+wait+")")
			lock.waitsFor(holder)
			claim.waitsFor(holder)
			holder.rollback()
			lock.want("true")
			claim.want("true")
			d.do("delete from pgxlock_claims")
		}
		holder.done()
	}
}

// The timeouts that a wait must leave as they were, and how they came about.
var (
	timeouts = []string{"30s", "1d", "0", "7500ms"}
	setters  = []struct {
		name string
		set  func(d *database, timeout string) *session // one in a transaction
	}{
		{"for the database", func(d *database, timeout string) *session {
			for _, name := range []string{"lock_timeout", "statement_timeout"} {
				d.do("do $$ begin execute format('alter database %I set " + name + " = ''" + timeout + "''', current_database()); end $$")
			}
			return d.connectAnew()
		}},
		{"by SET", func(d *database, timeout string) *session {
			s := d.connect()
			s.do("set lock_timeout = " + quote(timeout) + "; set statement_timeout = " + quote(timeout))
			return s
		}},
		{"by SET in the transaction", func(d *database, timeout string) *session {
			s := d.connect()
			s.do("begin; set lock_timeout = " + quote(timeout) + "; set statement_timeout = " + quote(timeout) + "; commit")
			return s
		}},
		{"by SET LOCAL", func(d *database, timeout string) *session {
			s := d.connect()
			s.do("begin; set local lock_timeout = " + quote(timeout) + "; set local statement_timeout = " + quote(timeout))
			return s
		}},
	}
)

func TestWaitsLeaveTimeouts(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder := d.begin(readCommitted)
	holder.do("select lock_tx('busy'), lock_tx('shared', p_shared => true), claim_once('busy')")
	d.do("select claim_once('done')")
	calls := []struct{ expression, want string }{
		{"lock_tx('free', NULL, false, true)", "true"},
		{"lock_tx('free', '1 minute', false, true)", "true"},
		{"lock_tx('free', '0', true, true)", "true"},
		{"lock_tx('shared', '10 ms', true, true)", "true"},
		{"lock_tx('busy', '0', false, true)", "false"},
		{"lock_tx('busy', '10 ms', false, true)", "false"},
		{"lock_tx('busy', '10 ms', true, true)", "false"},
		{"claim_once('free')", "true"},
		{"claim_once('free', '1 minute')", "true"},
		{"claim_once('bounded', '1 minute')", "true"},
		{"claim_once('done', '10 ms')", "false"},
		{"claim_once('busy', '0')", "NULL"},
		{"claim_once('busy', '10 ms')", "NULL"},
		{"(claim_request('busy', 'f', '10 ms')).outcome", "pending"},
		// Errors.
		{"lock_tx('shared', '1 minute', false, true)", "55000"},
		{"lock_tx('')", "22023"},
		{"claim_once('', '10 ms')", "22023"},
	}
	for _, setter := range setters {
		for _, timeout := range timeouts {
			s := setter.set(d, timeout)
			if setter.name != "by SET LOCAL" {
				s.begin(readCommitted)
			}
			same := func(where, call string) {
				t.Helper()
				for _, name := range []string{"lock_timeout", "statement_timeout"} {
					if got := s.get("current_setting('" + name + "')"); got != timeout {
						t.Errorf("%s, %s, after %s: %s is %s, and was %s", setter.name, where, call, name, got, timeout)
					}
				}
			}
			all := func(where string) {
				t.Helper()
				for _, c := range calls {
					if len(c.want) == 5 && c.want != "false" {
						s.do("savepoint failed")
						s.want(c.expression, c.want)
						s.do("rollback to failed")
					} else {
						s.want(c.expression, c.want)
					}
					same(where, c.expression)
				}
			}
			s.do("savepoint undone")
			all("in a savepoint")
			s.do("rollback to undone")
			same("after a savepoint that was undone", "all")
			s.do("savepoint kept")
			all("in a savepoint that is kept")
			s.do("release kept")
			same("after it", "all")
			s.rollback()
			if setter.name == "by SET LOCAL" {
				timeout = "0"
			}
			same("after the transaction", "all")
			s.begin(readCommitted)
			s.want("lock_tx('free', '1 minute')", "true")
			s.commit()
			same("after a commit", "lock_tx")
		}
		d.do("do $$ begin execute format('alter database %I reset all', current_database()); end $$")
	}
}

// The lock was granted after a wait, and the claim decided.
func TestWaitThatWasWorthItChangesNoTimeout(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder := d.connect()
	for i, setter := range setters {
		timeout := timeouts[i%3] // not so short that it would end the wait
		for _, wait := range []string{"lock_tx('k', '1 minute', false, true)", "lock_tx('k', '1 minute', true, true)", "claim_once('k', '1 minute')"} {
			holder.do("begin; select lock_tx('k'), claim_once('k')")
			s := setter.set(d, timeout)
			if setter.name != "by SET LOCAL" {
				s.begin(readCommitted)
			}
			call := s.start(wait)
			call.waitsFor(holder)
			holder.rollback()
			call.want("true")
			for _, name := range []string{"lock_timeout", "statement_timeout"} {
				if got := s.get("current_setting('" + name + "')"); got != timeout {
					t.Errorf("%s, after %s: %s is %s, and was %s", setter.name, wait, name, got, timeout)
				}
			}
			s.rollback()
		}
		d.do("do $$ begin execute format('alter database %I reset all', current_database()); end $$")
	}
}

// What is set in the savepoint in which the wait takes place, and in the middle
// of the transaction for the session.
func TestWaitInASavepointKeepsWhatWasSetThere(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder := d.begin(readCommitted)
	holder.do("select lock_tx('busy'), claim_once('busy')")
	for _, calls := range [][2]string{
		{"lock_tx('free', '1 minute', false, true)", "lock_tx('busy', '10 ms', false, true)"},
		{"claim_once('free', '1 minute')", "claim_once('busy', '10 ms')"},
	} {
		s := d.connect()
		s.do("set lock_timeout = '1s'; begin; set local lock_timeout = '2s'; savepoint a; set local lock_timeout = '3s'")
		s.want(calls[0], "true")
		s.want(calls[1], "false|NULL")
		s.want("current_setting('lock_timeout')", "3s")
		s.do("savepoint b; set lock_timeout = '4s'")
		s.want(calls[0], "true")
		s.want(calls[1], "false|NULL")
		s.want("current_setting('lock_timeout')", "4s")
		s.do("rollback to b")
		s.want("current_setting('lock_timeout')", "3s")
		s.do("rollback to a")
		s.want("current_setting('lock_timeout')", "2s")
		s.do("set lock_timeout = '5s'")
		s.want(calls[0], "true")
		s.want(calls[1], "false|NULL")
		s.want("current_setting('lock_timeout')", "5s")
		s.commit()
		s.want("current_setting('lock_timeout')", "5s") // the SET in the transaction
		d.do("delete from pgxlock_claims")
	}
}

// A statement_timeout would abort the transaction, a transaction_timeout even
// end the session.
func TestWaitEndsBeforeATimeoutThatWouldAbort(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder := d.begin(readCommitted)
	holder.do("select lock_tx('k'), claim_once('k')")
	names := []string{"statement_timeout"}
	if d.get("current_setting('transaction_timeout', true)") != "NULL" {
		names = append(names, "transaction_timeout")
	} else {
		t.Log("this server has no transaction_timeout")
	}
	for _, name := range names {
		for _, c := range []struct{ expression, want string }{
			{lockTx(long, false), "false"}, {lockTx(long, true), "false"}, {"claim_once('k', " + long + ")", "NULL"},
		} {
			want := c.want + ", then 1"
			got := ""
			for late := time.Now().Add(patience); got != want && time.Now().Before(late); { // the 50 ms that are left may pass on a machine that is busy
				s := d.connectAnew()
				s.do("set " + name + " = '300ms'")
				if got = outcome("", s.run("begin")); got == "" {
					got = s.outcome(c.expression) + ", then " + s.outcome("1")
				}
				_ = s.conn.Close(t.Context())
			}
			if got != want {
				t.Errorf("%s, %s: got %s, want %s", name, c.expression, got, want)
			}
		}
	}
}

// Each of two holds what the other one wants.
func TestDeadlockIsNoWaitThatIsOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, wait := range []string{forever, long} {
		a, b := d.begin(readCommitted), d.begin(readCommitted)
		a.do("set local deadlock_timeout = '10ms'; select lock_tx('a')")
		b.do("set local deadlock_timeout = '1h'; select lock_tx('b')")
		second := b.start("lock_tx('a', " + wait + ")")
		second.waitsFor(a)
		a.want("lock_tx('b', "+wait+")", "40P01")
		a.done()
		second.want("true")
		b.done()
	}
}

// Two holders of the shared lock that both want it exclusively would wait for
// each other.
func TestUpgradeThatWouldWaitIsRefused(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for name, hold := range map[string]string{
			"lock_tx":          lockTx(forever, true),
			"an advisory lock": "pg_advisory_xact_lock_shared(advisory_lock_key('k'))::text",
			"of the session":   "pg_advisory_lock_shared(advisory_lock_key('k'))::text",
		} {
			a, b := d.begin(level), d.begin(level)
			a.do("select " + hold)
			b.do("select " + lockTx(forever, true))
			a.do("savepoint s")
			for _, wait := range []string{forever, long, brief} {
				a.want(lockTx(wait, false), "55000")
				a.do("rollback to s")
			}
			a.want(lockTx(none, false), "false")
			a.want(lockTx(brief, true), "true") // is no upgrade
			d.want(lockTx(none, false), "false")
			a.want("lock_tx('other', '1 minute', false, true)", "true") // is not held shared
			b.commit()
			for _, wait := range waits {
				a.want(lockTx(wait, false), "true")
			}
			a.want(lockTx(forever, true), "true") // nor is a downgrade
			d.want(lockTx(brief, true), "false")
			a.do("commit; select pg_advisory_unlock_all()")
			if d.get(lockTx(none, false)) != "true" {
				t.Errorf("%s: something is left", name)
			}
		}
	})
}

// A shared lock that another session holds is waited for: there is nothing to
// upgrade.
func TestHolderOfOtherLocksMayWait(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder, waiter := d.begin(readCommitted), d.begin(readCommitted)
	holder.want(lockTx(forever, true), "true")
	// The same key in the space of two integers, and other keys.
	waiter.do(`select pg_advisory_xact_lock_shared((advisory_lock_key('k') >> 32)::int, ((advisory_lock_key('k') << 32) >> 32)::int),
		lock_tx('other', p_shared => true), lock_tx('-1', p_shared => true)`)
	wait := waiter.start(lockTx(long, false))
	wait.waitsFor(holder)
	holder.commit()
	wait.want("true")
}

func TestManyLocksOfOneTransactionAreAllHeld(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	s := d.begin(readCommitted)
	s.want("select bool_and(lock_tx('k' || i, '1 minute', i % 2 = 0)) from generate_series(1, 300) i", "true")
	d.want("select bool_or(lock_tx('k' || i, '0')) from generate_series(1, 300) i", "false")
	s.commit()
	d.want("select bool_and(lock_tx('k' || i, '0')) from generate_series(1, 300) i", "true")
}

// What holds for leases holds here: two that exclude each other are of one kind.
func TestLeasesLocksAndClaimsOfOneNameAreThreeThings(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		all := []string{lockTx(forever, false), "claim_once('k')", "acquire_lock('k', 'A')"}
		for i := range all {
			holder, other := d.begin(level), d.begin(level)
			holder.want(all[i], "true")
			for _, j := range slices.Delete([]int{0, 1, 2}, i, i+1) {
				other.want(all[j], "true")
			}
			holder.done()
			other.done()
		}
	})
}

package sqltest_test

import (
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// tokens checks that the tokens of a lock grow.
type tokens struct {
	t       *testing.T
	highest int64
}

// next takes the token of the next acquisition.
func (c *tokens) next(after string, token int64) {
	c.t.Helper()
	if token <= c.highest {
		c.t.Errorf("after %s: token %d, and %d was given out before", after, token, c.highest)
	}
	c.highest = max(c.highest, token)
}

func TestTokensGrowWhateverEndsTheLease(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		seen := &tokens{t: t}
		s := d.connect()
		acquire := func(holder string) int64 {
			t.Helper()
			s.begin(level)
			defer s.commit()
			return s.token("k", holder)
		}
		seen.next("nothing", acquire("A"))

		d.want("release_lock('k', 'A')", "true")
		seen.next("a release", acquire("A"))
		d.expire("k")
		seen.next("an expiry", acquire("A")) // by the same holder, too
		d.expire("k")
		seen.next("a take-over", acquire("B"))
		d.expire("k")
		d.want("reap_expired_locks('0 s')", "1")
		seen.next("a reaping", acquire("B"))
		d.want("release_all_locks('B')", "1")
		seen.next("a release of all", acquire("A"))
		d.do("delete from distributed_locks")
		seen.next("a deletion by hand", acquire("A"))
	})
}

// A token that a transaction saw counts as given out, though it was rolled back:
// what it did outside the database may carry it.
func TestTokensGrowOverRollbacks(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, expired := range []bool{false, true} {
			seen := &tokens{t: t}
			if expired {
				seen.next("nothing", d.token("k", "X"))
				d.expire("k")
			}
			s := d.begin(level)
			s.do("savepoint s")
			seen.next("nothing", s.token("k", "A"))
			s.do("rollback to s")
			seen.next("a savepoint rolled back", s.token("k", "B"))
			s.rollback()
			seen.next("a transaction rolled back", d.token("k", "C"))
			d.want("release_lock('k', 'C')", "true")
		}
	})
}

func TestRenewalKeepsTheToken(t *testing.T) {
	t.Parallel()
	d := install(t)
	token := d.token("k", "A")
	if again := d.token("k", "A"); again != token {
		t.Errorf("token %d, then %d", token, again)
	}
	d.want(fmt.Sprintf("renew_lock('k', 'A', %d) is null", token+1), "true")
	d.want(fmt.Sprintf("release_lock_fenced('k', 'A', %d)", token+1), "false")
	d.want(fmt.Sprintf("renew_lock('k', 'A', %d) is null", token), "false")
	d.want(fmt.Sprintf("release_lock_fenced('k', 'A', %d)", token), "true")
}

// Tokens of all locks come from one sequence, so that an operator can order what
// happened to different locks; and concurrent acquires never share one.
func TestTokensAreUnique(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("select count(distinct (try_acquire_lock('k' || i, 'A')).fencing_token) from generate_series(1, 50) i", "50")
}

func TestChangeThatTokensWouldNotSurviveStopsAcquiresUntilRepaired(t *testing.T) {
	t.Parallel()
	shared := install(t)
	for _, change := range []struct{ name, sql string }{
		{"a restore into another cluster", "update pgxlock_epoch set system_identifier = system_identifier + 1"},
		{"a pg_upgrade after failovers", "update pgxlock_epoch set timeline = timeline + 41"},
		{"rows restored from elsewhere", "update distributed_locks set fencing_token = fencing_token + 1000"},
		{"rows restored from a later epoch", "update distributed_locks set fencing_token = fencing_token + (7::bigint << 40)"},
		{"the sequence restored from before", "select setval('pgxlock_tokens', 1)"},
	} {
		t.Run(change.name, func(t *testing.T) {
			d := shared.reopen(t)
			seen := &tokens{t: t}
			d.want("repair_lock_tokens()", "false")
			for range 3 {
				seen.next("a release", d.token("k", "A"))
				d.want("release_lock('k', 'A')", "true")
			}
			seen.next("a release", d.token("k", "A"))
			d.do(change.sql)
			seen.highest = d.number("select fencing_token from distributed_locks")
			d.want("extend_lock('k', 'A')", "true") // holders are left alone
			d.want("assert_lock_held('k', 'A') > 0", "true")
			d.expire("k")
			d.want("acquire_lock('k', 'B')", "LK003")
			d.want("repair_lock_tokens()", "true")
			d.want("repair_lock_tokens()", "false")
			seen.next("the repair", d.token("k", "B"))
			d.want("release_lock('k', 'B')", "true")
			seen.next("the repair", d.token("k", "C"))
		})
	}
}

// A database made from a dump without rows has neither the epoch nor a lease that tells of it, and its
// sequence begins again. That may happen twice in a row.
func TestTokensGrowOverTheLossOfTheirEpoch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	seen := &tokens{t: t}
	seen.next("nothing", d.token("k", "A"))
	d.do("update pgxlock_epoch set epoch_base = epoch_base + 1000, timeline = pgxlock_timeline()") // crashes, failovers
	for _, loss := range []string{
		"truncate pgxlock_epoch, distributed_locks; alter sequence pgxlock_tokens restart",
		"truncate pgxlock_epoch, distributed_locks; alter sequence pgxlock_tokens restart",
		"delete from pgxlock_epoch; delete from distributed_locks",
		"truncate pgxlock_epoch, distributed_locks, pgxlock_since_crash; alter sequence pgxlock_tokens restart",
		"truncate pgxlock_epoch, distributed_locks",
		"truncate pgxlock_epoch",
	} {
		seen.next("a release", d.token("before", "A"))
		d.do(loss)
		d.want("acquire_lock('new', 'A')", "LK003")
		d.want("repair_lock_tokens()", "true")
		d.want("repair_lock_tokens()", "false")
		seen.next(loss, d.token("k"+strconv.Itoa(len(loss)), "B"))
	}
	// Where more is known than the clock tells.
	d.do("update distributed_locks set fencing_token = 8000000::bigint << 40 where lock_name = 'before'; truncate pgxlock_epoch")
	seen.highest = 8000000 << 40
	d.want("repair_lock_tokens()", "true")
	seen.next("a repair over a greater token", d.token("last", "A"))
}

// A transaction with a snapshot from before the repair must not draw tokens of
// the old epoch.
func TestRepairStopsOldSnapshots(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	old := d.begin("repeatable read")
	d.do("update pgxlock_epoch set system_identifier = 0")
	d.want("repair_lock_tokens()", "true")
	old.want("acquire_lock('k', 'A')", "40001")
}

// The first acquire after a failover remembers the timeline. It may be in a
// transaction that stays open or is prepared: others do it later.
func TestOpenFirstAcquireAfterAFailoverIsInNobodysWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("update pgxlock_epoch set timeline = timeline - 1")
		first, second := d.begin(level), d.begin(level)
		low := first.token("k", "A")
		if high := second.token("l", "B"); high <= low {
			t.Errorf("token %d after %d", high, low)
		}
		d.want("acquire_lock('m', 'C')", "true")
		first.rollback()
		second.rollback()
		d.want("acquire_lock('k', 'A')", "true")
		d.want("select timeline = pgxlock_timeline() from pgxlock_epoch", "true")
	})
}

const useUpHalf = "select setval('pgxlock_tokens', greatest(1::bigint << 39, (select last_value from pgxlock_tokens)))"

func TestEpochBeginsWhenHalfTheNumbersAreUsedUp(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	seen := &tokens{t: t}
	d.do("select setval('pgxlock_tokens', (1::bigint << 39) - 2)")
	seen.next("nothing", d.token("a", "A"))
	d.want("repair_lock_tokens()", "false")
	seen.next("a repair that did nothing", d.token("b", "A"))
	s := d.connect()
	s.do("begin; select repair_lock_tokens()")
	s.rollback()
	seen.next("a repair that was rolled back", d.token("c", "A"))
	d.want("repair_lock_tokens()", "true")
	d.want("repair_lock_tokens()", "false")
	seen.next("the new epoch", d.token("d", "A"))
	d.want("(select last_value from pgxlock_tokens)", "1")
	d.want("extend_lock('a', 'A')", "true")
	d.want("assert_lock_held('b', 'A') > 0", "true")
	d.want("release_lock('c', 'A')", "true")
	seen.next("the new epoch", d.token("c", "A"))
}

func TestTokensGoOnAfterTheEndOfTheirNumbers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	seen := &tokens{t: t}
	d.do("select acquire_lock('taken', 'A', 3600), acquire_lock('expired', 'A')")
	d.do("select setval('pgxlock_tokens', (1::bigint << 40) - 2)")
	seen.next("nothing", d.token("last", "A"))
	d.expire("expired")
	for range 2 {
		d.want("acquire_lock('new', 'A')", "LK003")
		d.want("acquire_lock('expired', 'B')", "LK003")
	}
	d.want("extend_lock('taken', 'A', 3600)", "true") // holders are left alone
	d.want("release_lock('taken', 'A')", "true")
	d.want("repair_lock_tokens()", "true")
	for _, lock := range []string{"new", "taken"} {
		seen.next("the repair", d.token(lock, "A"))
	}
	seen.next("the repair", d.token("expired", "B"))
}

// A transaction that has read the old epoch may have yet to draw: its number would be one
// of the new epoch's, and its token an old one's. It keeps new epochs out until it ends.
func TestEpochBeginsAfterTransactionsThatReadTheOldOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		seen := &tokens{t: t}
		d.do(useUpHalf)
		s := d.begin(level)
		seen.next("nothing", s.token("k", "A"))
		d.want("repair_lock_tokens()", "55P03")
		d.want("acquire_lock('l', 'B')", "true") // it has stopped nobody
		seen.next("a repair that was refused", s.token("m", "A"))
		s.commit()
		d.want("repair_lock_tokens()", "true")
		d.want("release_lock('k', 'A')", "true")
		seen.next("the new epoch", d.token("k", "B"))
	})
}

// Callers acquire and release few leases while epochs begin. A lease has one holder at a
// time, so its tokens come in the order of its acquisitions.
func TestTokensGrowWhileEpochsBegin(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const epochs, acquirers = 8, 6
	var (
		locks   [2]tokens
		holding [2]sync.Mutex // makes a second holder of a lease show as a race, too
		over    = make(chan struct{})
		all     sync.WaitGroup
	)
	for i := range locks {
		locks[i].t = t
	}
	for a := range acquirers {
		s, level := d.connect(), levels[a%2]
		all.Go(func() {
			for try := a; ; try++ {
				select {
				case <-over:
					return
				default:
				}
				n := try % len(locks)
				if err := s.run("begin isolation level " + level); err != nil {
					t.Error(err)
					return
				}
				got, err := s.query(fmt.Sprintf("(try_acquire_lock('%d', '%d', '1 h')).fencing_token", n, a))
				if err != nil || got == "NULL" {
					s.do("rollback")
					if err != nil && (outcome("", err) != "40001" || level == readCommitted) {
						t.Errorf("%s: %v", level, err)
						return
					}
					continue
				}
				if code := outcome("committed", s.run("commit")); code != "committed" {
					t.Error(code)
					return
				}
				token, _ := strconv.ParseInt(got, 10, 64)
				holding[n].Lock()
				locks[n].next("an acquire", token)
				holding[n].Unlock()
				for got = "55P03"; got == "55P03"; { // another acquirer is just trying
					got = s.outcome(fmt.Sprintf("release_lock('%d', '%d')", n, a))
				}
				if got != "true" {
					t.Errorf("release: %s", got)
					return
				}
			}
		})
	}
	for range epochs {
		d.do(useUpHalf)
		for repaired := ""; repaired != "true"; {
			if repaired = d.outcome("repair_lock_tokens()"); repaired != "true" && repaired != "55P03" {
				t.Errorf("repair: %s", repaired)
				break
			}
		}
	}
	close(over)
	all.Wait()
	for n := range locks {
		locks[n].next("the last epoch", d.token(strconv.Itoa(n), "last"))
	}
}

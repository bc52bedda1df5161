package sqltest_test

import (
	"fmt"
	"testing"
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

func TestARenewalKeepsTheToken(t *testing.T) {
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

func TestAChangeThatTokensWouldNotSurviveStopsAcquiresUntilRepaired(t *testing.T) {
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
	shared.do("truncate pgxlock_epoch") // nothing tells what was lost
	shared.want("acquire_lock('new', 'A')", "LK003")
}

// A transaction with a snapshot from before the repair must not draw tokens of
// the old epoch.
func TestARepairStopsOldSnapshots(t *testing.T) {
	t.Parallel()
	d := install(t)
	old := d.begin("repeatable read")
	d.do("update pgxlock_epoch set system_identifier = 0")
	d.want("repair_lock_tokens()", "true")
	old.want("acquire_lock('k', 'A')", "LK003|40001")
}

// The first acquire after a failover remembers the timeline. It may be in a
// transaction that stays open or is prepared: others do it later.
func TestAnOpenFirstAcquireAfterAFailoverIsInNobodysWay(t *testing.T) {
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

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// claims makes claims: two without a retention, of today and of last week, and
// three with one, of which one is over.
func (d *database) claims() {
	d.t.Helper()
	d.do(`insert into pgxlock_claims
		select key, now() - age, now() + rest, '3' from (values
			('fresh', interval '1 minute', NULL), ('old', '7 days', NULL),
			('kept', '7 days', interval '1 hour'), ('ended', '7 days', '-1 hour'), ('just ended', '1 minute', '-1 second')
		) c (key, age, rest)`)
}

const allClaims = "select string_agg(claim_key, ', ' order by claim_key) from pgxlock_claims"

// A retention says how long a claim stands; how old it is does not matter then.
func TestPurgingEndsOldClaimsAndThoseWhoseRetentionIsOver(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, c := range []struct{ age, want, left string }{
			{"1 day", "3", "fresh, kept"},
			{"7 days", "3", "fresh, kept"}, // to the microsecond
			{"8 days", "2", "fresh, kept, old"},
			{"0", "4", "kept"},
			{"290000 years", "2", "fresh, kept, old"},
		} {
			d.do("delete from pgxlock_claims")
			d.claims()
			s := d.begin(level)
			s.want("purge_claims("+quote(c.age)+")", c.want)
			s.want("purge_claims("+quote(c.age)+")", "0")
			s.commit()
			d.want(allClaims, c.left)
		}
	})
}

func TestPurgedKeyCanBeClaimedAgain(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.want("claim_once('k')", "true")
		purger := d.begin(level)
		purger.want("purge_claims('0')", "1")
		d.want("claim_once('k')", "false") // not before the commit
		purger.rollback()
		d.want("claim_once('k')", "false")
		purger.begin(level)
		purger.want("purge_claims('0')", "1")
		purger.commit()
		d.want("claim_once('k')", "true")
	})
}

func TestPurgingKeepsToItsLimit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`insert into pgxlock_claims select 'a' || i, now() - interval '1 day', NULL, '3' from generate_series(1, 5) i;
		insert into pgxlock_claims select 'b' || i, now() - interval '1 day', now(), '3' from generate_series(1, 5) i`)
	for i, want := range []string{"3", "3", "3", "1", "0"} {
		d.want("purge_claims('1 hour', 3)", want)
		d.want("select count(*) from pgxlock_claims", fmt.Sprint(max(0, 10-3*(i+1))))
	}
	d.do("insert into pgxlock_claims select 'c' || i, now() - interval '1 day', NULL, '3' from generate_series(1, 10001) i")
	d.want("purge_claims('1 hour')", "10000") // by default
}

// Rows that somebody works with are left for the next time; nobody waits.
func TestPurgingSkipsWhatIsInUse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.claims()
		for _, work := range []string{
			"claim_once('ended')", // a take-over
			"select claim_key from pgxlock_claims where claim_key = 'old' for update",
			"claim_once('new')",
		} {
			d.begin(readCommitted).get(work)
		}
		purger := d.begin(level)
		purger.want("purge_claims('1 hour')", "1") // just ended
		other := d.begin(level)
		other.want("purge_claims('1 hour')", "0")
		other.rollback()
		purger.commit()
		d.want(allClaims, "ended, fresh, kept, old")
	})
}

// The row was claimed again after the purge has looked, and before it locks it.
func TestPurgingJudgesTheClaimAsItIsWhenLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, retention := range []string{"NULL", "'1 hour'"} {
		d := install(t)
		d.claims()
		// This lets others read the table and keeps them from locking rows.
		holder, purger := d.sessions()
		holder.do("begin; lock table pgxlock_claims in exclusive mode")
		purge := purger.start("purge_claims('8 days')")
		purge.waitsFor(holder)
		holder.want("claim_once('ended', NULL, "+retention+")", "true")
		holder.commit()
		holder.done()
		purge.want("1")
		d.want(allClaims, "ended, fresh, kept, old")
		d.want("claim_once('ended')", "false")
	}
}

// A claimant waits for a purge that has not committed, and then for its end.
func TestClaimantThatFindsAnEndedClaimBeingPurgedGetsIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, end := range []string{"commit", "rollback"} {
			d.do("delete from pgxlock_claims")
			d.claims()
			purger := d.begin(readCommitted)
			purger.want("purge_claims('8 days')", "2")
			s := d.begin(level)
			s.want("claim_once('ended', "+none+")", "NULL")
			claim := s.start("claim_once('ended')")
			claim.waitsFor(purger)
			purger.do(end)
			if end == "commit" && level != readCommitted {
				claim.want("40001")
			} else {
				claim.want("true")
				s.commit()
				d.want("claim_once('ended')", "false")
			}
			s.done()
		}
	})
}

// Housekeeping goes by itself, and a claim must not end by itself.
func TestHousekeepingNeverTouchesClaims(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.claims()
	before := d.get(allClaims)
	d.do("select acquire_lock(claim_key, 'A') from pgxlock_claims; update distributed_locks set expires_at = now() - interval '1 day'")
	d.want("reap_expired_locks('0')", "5")
	d.want("release_all_locks('A')", "0")
	d.want("repair_lock_tokens()", "false")
	d.want(allClaims, before)
	d.want("purge_claims('0')", "4")
	d.want("select count(*) from distributed_locks", "0")
}

package sqltest_test

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestReleaseIsTrueOnlyForALiveLeaseOfTheHolder(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		s := d.connect()
		s.do("set default_transaction_isolation = " + quote(level))
		s.want("release_lock('k', 'A')", "false")
		s.want("acquire_lock('k', 'A')", "true")
		s.want("release_lock('k', 'B')", "false")
		s.want("release_lock('k', 'A')", "true")
		s.want("release_lock('k', 'A')", "false")
		s.want("acquire_lock('k', 'A')", "true")
		d.expire("k")
		s.want("release_lock('k', 'A')", "false") // others could have had it since
		s.want("select count(*) from distributed_locks", "0")
	})
}

func TestExtendIsTrueOnlyForALiveLeaseOfTheHolder(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("extend_lock('k', 'A')", "false")
	d.do("select acquire_lock('k', 'A')")
	d.want("extend_lock('k', 'B')", "false")
	d.want("extend_lock('k', 'A', 120)", "true")
	d.want("select expires_at > clock_timestamp() + interval '100 s' from distributed_locks", "true")
	d.want("extend_lock('k', 'A', 10)", "true") // from now, so it shortens, too
	d.want("select expires_at <= clock_timestamp() + interval '10 s' from distributed_locks", "true")
	d.expire("k")
	d.want("extend_lock('k', 'A')", "false")
}

func TestReleaseAllCountsTheLiveAndRemovesAll(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('a', 'A'), acquire_lock('b', 'A'), acquire_lock('c', 'A'), acquire_lock('d', 'B')")
	d.expire("b")
	d.want("release_all_locks('A')", "2")
	d.want("select string_agg(lock_name, ',') from distributed_locks", "d")
	d.want("release_all_locks('A')", "0")
}

// One lease is pinned: none is released, so that the answer is never half true.
func TestReleaseAllIsAllOrNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('a', 'A'), acquire_lock('b', 'A'), acquire_lock('c', 'A')")
	writer := d.begin(readCommitted)
	writer.do("select assert_lock_held('b', 'A')")
	d.want("release_all_locks('A')", "55P03")
	d.want("select count(*) from distributed_locks", "3")
	writer.commit()
	d.want("release_all_locks('A')", "3")
}

func TestReapingRemovesWhatExpiredLongerAgoThanTheGrace(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('live', 'A'), acquire_lock('expired', 'A'), acquire_lock('old', 'A')")
	d.expire("expired")
	d.do("update distributed_locks set expires_at = clock_timestamp() - interval '2 hours' where lock_name = 'old'")
	d.want("select string_agg(lock_name || ' ' || state, ', ' order by lock_name) from lock_leases", "expired expired, live live, old abandoned")
	d.want("reap_expired_locks()", "1")
	d.want("select string_agg(lock_name, ',' order by lock_name) from distributed_locks", "expired,live")
	d.want("reap_expired_locks('0 s')", "1")
	d.want("select string_agg(lock_name, ',') from distributed_locks", "live")
}

func TestReapingKeepsToItsLimit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`select acquire_lock('k' || i, 'A') from generate_series(1, 5) i;
		update distributed_locks set expires_at = clock_timestamp() - interval '1 s'`)
	for _, want := range []string{"2", "2", "1", "0"} {
		d.want("reap_expired_locks('0 s', 2)", want)
	}
}

// Rows that somebody works with are left for the next time; the rest goes.
func TestReapingSkipsWhatIsInUse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do(`select acquire_lock(k, 'A') from unnest('{fenced,locked,taken,released,idle}'::text[]) k;
			update distributed_locks set expires_at = clock_timestamp() - interval '1 s'`)
		for _, work := range []string{
			"assert_lock_held('fenced', 'A', NULL, true)",
			"select lock_name from distributed_locks where lock_name = 'locked' for update",
			"acquire_lock('taken', 'B')",
			"release_lock('released', 'A')",
		} {
			d.begin(readCommitted).get(work)
		}
		reaper := d.begin(level)
		reaper.want("reap_expired_locks('0 s')", "1")
		reaper.commit()
		d.want("select string_agg(lock_name, ',' order by lock_name) from distributed_locks", "fenced,locked,released,taken")
		if held := d.locks(reaper); held != "NULL" {
			t.Errorf("reaping keeps %s", held)
		}
	})
}

// A reaper that has not committed keeps nothing locked that it did not remove.
func TestReapingKeepsNoPinOfWhatItSkipped(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	d.expire("k")
	locker := d.begin(readCommitted)
	locker.do("select from distributed_locks for update")
	reaper := d.begin(readCommitted)
	reaper.want("reap_expired_locks('0 s')", "0")
	d.leavesNothing(reaper)
	locker.rollback()
	d.want("acquire_lock('k', 'B')", "true") // while the reaper is open
}

// The row that a reaper has found expired is renewed before it gets the pin.
func TestReapingLooksAgainUnderThePin(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	d.do("select acquire_lock('k', 'A')")
	d.expire("k")
	reaper := d.begin(readCommitted)
	reap := gate.stop(reaper, "pin", "reap_expired_locks('0 s')")
	d.want("acquire_lock('k', 'A')", "true")
	gate.open()
	reap.want("0")
	d.want("extend_lock('k', 'A')", "true") // neither removed nor locked
}

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// openWork is what another transaction has done with a lock, and not committed,
// while somebody tries to take that lock.
var openWork = []struct{ name, before, work string }{
	{"an acquire", "", "acquire_lock('k', 'A')"},
	{"a release", "acquire_lock('k', 'A')", "release_lock('k', 'A')"},
	{"a release and an acquire", "acquire_lock('k', 'A')", "release_lock('k', 'A') and acquire_lock('k', 'C')"},
	{"a take-over", "expired", "acquire_lock('k', 'A')"},
	{"a release after the expiry", "expired", "release_lock('k', 'X')"},
	{"a reaping", "expired", "reap_expired_locks('0 s')"},
	{"a renewal", "acquire_lock('k', 'A')", "acquire_lock('k', 'A')"},
	{"an extension", "acquire_lock('k', 'A')", "extend_lock('k', 'A', 60)"},
	{"a fence", "acquire_lock('k', 'A')", "assert_lock_held('k', 'A')"},
	{"a renewal that is late", "expired", "from distributed_locks for no key update"}, // as far as others see
	{"a row lock by hand", "expired", "from distributed_locks for update"},
	{"a fence after the expiry", "expired", "assert_lock_held('k', 'X', NULL, true)"},
}

// One transaction works on the lock and stays open. Another tries to take the
// lock meanwhile, with a snapshot from before the lease, from before the open
// work, or from now. It has to have its answer while the first one is open.
func TestTryNeverWaitsForUncommittedWork(t *testing.T) {
	t.Parallel()
	d := install(t)
	holder, contender := d.sessions()
	for _, level := range levels {
		for _, w := range openWork {
			for snapshot := range 3 {
				try := fmt.Sprintf("%s, %s, snapshot %d", level, w.name, snapshot)
				takeSnapshot := func(now int) {
					if now == snapshot {
						contender.begin(level)
					}
				}
				takeSnapshot(0)
				switch w.before {
				case "":
				case "expired":
					d.do("select acquire_lock('k', 'X')")
					d.expire("k")
				default:
					d.do("select " + w.before)
				}
				takeSnapshot(1)
				holder.begin(readCommitted)
				holder.do("select " + w.work)
				takeSnapshot(2)

				switch got := contender.outcome("acquire_lock('k', 'B')"); {
				case got == "false":
					d.leavesNothing(contender)
				case got != "40001" || level == readCommitted:
					t.Fatalf("%s: got %s", try, got)
				}
				if t.Failed() {
					t.Fatal(try)
				}
				contender.rollback()
				holder.rollback()
				d.do("delete from distributed_locks")
			}
		}
	}
}

func TestTryOfAHeldLockTellsOfTheHolder(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A', 60)")
	d.want(`select acquired = false and fencing_token is null and held_by = 'A'
		and remaining between interval '1 s' and interval '60 s' and expires_at > clock_timestamp()
		from try_acquire_lock('k', 'B')`, "true")
	d.want("select acquired and fencing_token > 0 and held_by = 'B' and remaining = interval '5 s' from try_acquire_lock('l', 'B', '5 s')", "true")
}

// The holder must not notice that others tried, even if their transactions are
// open for long.
func TestFailedTryLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('k', 'A')")
		contender := d.begin(level)
		for range 3 {
			contender.want("acquire_lock('k', 'B')", "false")
		}
		d.leavesNothing(contender)
		d.want("extend_lock('k', 'A')", "true")
		d.want("acquire_lock('k', 'A')", "true")
		d.want("release_lock('k', 'A')", "true")
		d.want("acquire_lock('k', 'C')", "true")
		d.want("select holder_id from distributed_locks", "C")
	})
}

// The lease has expired. B reads that, and is about to lock the row; a renewal
// that was late commits now. B locks the row as the renewal left it, sees that
// the lease is live, and must let go of the row, though its transaction stays
// open: the holder has to be able to renew and release.
func TestTakeOverThatALateRenewalOvertakesKeepsNoRowLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder, contender := d.sessions()
	d.do("select acquire_lock('k', 'A')")
	d.expire("k")
	// This lets others read the table and keeps them from locking rows.
	holder.do("begin; lock table distributed_locks in exclusive mode")
	contender.begin(readCommitted)
	try := contender.start("acquire_lock('k', 'B')")
	try.waitsFor(holder)
	holder.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 minute'; commit")
	try.want("false")

	if held := d.locks(contender); held != "NULL" {
		t.Errorf("the failed try keeps %s", held)
	}
	holder.want("extend_lock('k', 'A')", "true")
	holder.want("release_lock('k', 'A')", "true")
	d.want("acquire_lock('k', 'C')", "true")
}

// B finds no row and is about to take the guard of the name; A's acquire
// commits now. B takes the guard, finds A's row and must give the guard back,
// though its transaction stays open: after A's release the lock is free.
func TestTryThatAnotherInsertOvertakesKeepsNoGuard(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	contender := d.begin(readCommitted)
	try := gate.stop(contender, "guard", "acquire_lock('k', 'B')")
	d.want("acquire_lock('k', 'A')", "true")
	gate.open()
	try.want("false")

	d.leavesNothing(contender)
	d.want("release_lock('k', 'A')", "true")
	d.want("acquire_lock('k', 'C')", "true")
}

// As before, but A's lease has come and gone when B gets the guard: B has to
// judge by what is there then.
func TestTryGoesByWhatIsThereUnderTheGuard(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	contender := d.begin(readCommitted)
	try := gate.stop(contender, "guard", "acquire_lock('k', 'B')")
	d.want("acquire_lock('k', 'A')", "true")
	d.want("release_lock('k', 'A')", "true")
	gate.open()
	try.want("true")
	d.want("acquire_lock('k', 'A')", "false")
	contender.commit()
	d.want("select holder_id from distributed_locks", "B")
}

// Two find the lease expired. The one that comes second to the pin must judge
// by the row as the first one left it.
func TestOnlyOneTakesOver(t *testing.T) {
	t.Parallel()
	atEveryLevelGated(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('k', 'X')")
		d.expire("k")
		gate := d.turnstile()
		second := d.begin(level)
		try := gate.stop(second, "pin", "acquire_lock('k', 'B')")
		d.want("acquire_lock('k', 'A')", "true")
		gate.open()
		if level == readCommitted {
			try.want("false")
		} else {
			try.want("40001")
		}
		d.want("select holder_id from distributed_locks", "A")
	})
}

// A renewal finds its lease live and waits for the row, which is locked by
// the session that takes the lease over. It must not keep the next holder's row locked.
func TestRenewalThatComesTooLateKeepsNoRowLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	late, other := d.sessions()
	d.do("select acquire_lock('k', 'A')")
	other.do("begin; select from distributed_locks for update")
	late.begin(readCommitted)
	renewal := late.start("extend_lock('k', 'A')")
	renewal.waitsFor(other)
	other.do("update distributed_locks set holder_id = 'B'; commit")
	renewal.want("false")
	if held := d.locks(late); held != "NULL" {
		t.Errorf("the failed renewal keeps %s", held)
	}
	d.want("extend_lock('k', 'B')", "true")
	d.want("release_lock('k', 'B')", "true")
}

// In SERIALIZABLE, transactions that take different locks may abort each other,
// because PostgreSQL tracks reads by page. That is documented; nothing else may
// come of it.
func TestSerializableAcquiresOfUnrelatedLocksSucceedOrFailToSerialize(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b := d.begin("serializable"), d.begin("serializable")
	for i := range 2 {
		a.want(fmt.Sprintf("acquire_lock('a%d', 'A')", i), "true|40001")
		b.want(fmt.Sprintf("acquire_lock('b%d', 'B')", i), "true|40001|25P02")
	}
	done := 0
	for _, s := range []*session{a, b} {
		if err := s.run("commit"); err == nil {
			done++
		} else if code := outcome("", err); code != "40001" {
			t.Errorf("commit: %v", err)
		}
	}
	if done == 0 {
		t.Error("both were aborted")
	}
	if n := d.number("select count(*) from distributed_locks"); n%2 != 0 {
		t.Errorf("%d leases: a transaction took one of its two", n)
	}
}

// pgxlock_acquire_batch() while other transactions commit between its statements.

package sqltest_test

import "testing"

// A batch finds no row; before it has the guard somebody takes the lease. That one runs
// out, the next takes it over, which needs no guard, and gives it back. The token of the
// batch must be greater than that one's, though it may have been drawn before.
func TestABatchThatIsOvertakenByATakeOverGetsTheGreaterToken(t *testing.T) {
	t.Parallel()
	d := install(t).withBatches()
	gate := d.turnstile()
	draw := d.connect()
	d.do(`alter function pgxlock_next_tokens(bigint) rename to draw_itself;
		create function pgxlock_next_tokens(p_count bigint) returns bigint[] language plpgsql as $$
		declare
		  drawn bigint[] := draw_itself(p_count);
		begin
		  if current_setting('sqltest.stop', true) = 'guard' then
		    perform pg_advisory_lock(2);
		    perform pg_advisory_unlock(2);
		  end if;
		  return drawn;
		end $$`)
	draw.do("select pg_advisory_lock(2)")
	a := d.connect()
	taking := gate.stop(a, "guard", batch(batches[1], "A", "k", "l"))
	d.want("acquire_lock('k', 'B', 60)", "true")
	gate.open()
	taking.waitsFor(draw)
	d.expire("k")
	d.want("acquire_lock('k', 'C', 60)", "true")
	before := d.number("select fencing_token from distributed_locks where lock_name = 'k'")
	d.want("release_lock('k', 'C')", "true")
	draw.want("pg_advisory_unlock(2)", "true")
	taking.want("t A,t A")
	if after := d.number("select fencing_token from distributed_locks where lock_name = 'k'"); after <= before {
		t.Errorf("token %d, after %d", after, before)
	}
}

// Not when its transaction began.
func TestALeaseOfABatchBeginsWhenItIsTaken(t *testing.T) {
	t.Parallel()
	d := install(t).withBatches()
	for _, function := range batches {
		s := d.begin(readCommitted)
		before := s.get("clock_timestamp()")
		s.want(batch(function, "A", "k"), "t A")
		s.want("select acquired_at >= "+quote(before)+" and expires_at = acquired_at + interval '1 minute' from distributed_locks", "true")
		s.rollback()
	}
}

func TestABatchOfWhatOthersHaveLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	d := install(t).withBatches()
	d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
	for _, function := range batches {
		s := d.begin(readCommitted)
		s.want(batch(function, "A", "k", "l"), "f H,f H")
		s.want("pg_current_xact_id_if_assigned()", "NULL")
		s.want("select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'", "0")
		s.rollback()
	}
}

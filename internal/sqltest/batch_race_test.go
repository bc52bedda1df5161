package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What commits between two steps of a batch of acquires or of releases, one interleaving in
// each test. A session that waits for a row here fails in the end; it also waits at the turnstile,
// as long as this machine takes.

const givesUp = "set lock_timeout = '15min'"

// The row appears after the batch has found none, and its owner is just renewing or evicting it.
func TestBatchAcquireNeverWaitsForAnEarlierHoldersChange(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, function := range batches[1:] {
		for _, change := range []string{"extend_lock('k', 'A', 60)", "renew_lock('k', 'A', (select fencing_token from distributed_locks where lock_name = 'k'), '1 minute')", "release_lock('k', 'A')"} {
			contender := d.connect()
			contender.do(givesUp)
			try := gate.stop(contender, "guard", batch(function, "B", "k", "l"))
			d.want("acquire_lock('k', 'A', 60)", "true")
			changing := d.begin(readCommitted)
			changing.do("select " + change)
			gate.open()
			try.want("f A,t B")
			changing.done()
			d.do("delete from distributed_locks")
		}
	}
}

// A fence, and a release, of the holder must not meet the pin of a batch that was refused.
func TestBatchAcquireThatIsRefusedPinsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, function := range batches[1:] {
		contender := d.begin(readCommitted)
		try := gate.stop(contender, "guard", batch(function, "B", "k", "l"))
		d.want("acquire_lock('k', 'A', 60)", "true")
		gate.open()
		try.want("f A,t B")
		d.want("assert_lock_held('k', 'A') is null", "false") // while the transaction of the batch is open
		d.want("release_lock('k', 'A')", "true")
		contender.done()
	}
}

// A program often locks the hash of a name itself.
func TestBatchAcquireIgnoresLocksOnHashesThatProgramsUse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	program := d.begin(readCommitted)
	program.do("select pg_advisory_xact_lock(hashtextextended(n, 0)), pg_advisory_xact_lock(hashtext(n)) from unnest('{k,l}'::text[]) n")
	for _, function := range batches[1:] {
		d.want(batch(function, "B", "k", "l"), "t B,t B")
		d.want("assert_lock_held('k', 'B') is null", "false")
		d.want(givesBack("B", "k"), "r")
		d.want(givesBack("B", "l", "k"), "rg")
	}
	program.rollback()
}

// Tokens of commits that a crash took back must not be drawn again.
func TestBatchAcquireAfterACrashBeginsAnEpoch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const epoch = "(select max(fencing_token) >> 40 from distributed_locks)"
	for _, function := range batches[1:] {
		d.want(batch(function, "B", "a", "b"), "t B,t B")
		before := d.number("select " + epoch)
		d.do("truncate pgxlock_since_crash") // as recovery does
		d.want(batch(function, "B", "c", "d"), "t B,t B")
		if after := d.number("select " + epoch); after != before+1 {
			t.Errorf("%s: epoch %d, after a crash in epoch %d", function, after, before)
		}
		d.want(batch(function, "B", "e"), "t B")
		if after := d.number("select " + epoch); after != before+1 {
			t.Errorf("%s: epoch %d without a further crash, %d before", function, after, before+1)
		}
		d.do("delete from distributed_locks")
	}
}

// Tokens drawn in a copy of a database, or on an older timeline, may repeat others.
func TestBatchAcquireDrawsNoTokenWhereTheEpochIsAnotherOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, moved := range []string{"system_identifier = system_identifier + 1", "timeline = timeline + 1", "epoch_base = 8388608"} {
		for _, function := range batches[1:] {
			s := d.begin(readCommitted)
			s.do("update pgxlock_epoch set " + moved)
			s.want(batch(function, "B", "k"), "LK003")
			s.done()
		}
	}
}

func TestBatchReleaseNeverWaitsForAnEviction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	d.do("select acquire_lock(n, 'H', 60) from unnest('{a,b}'::text[]) n")
	for _, c := range []struct {
		names []string
		want  string
	}{{[]string{"a"}, "s"}, {[]string{"b", "a"}, "rs"}} {
		r := d.connect()
		r.do(givesUp)
		releasing := gate.stop(r, "pin", givesBack("H", c.names...))
		evicting := d.begin(readCommitted)
		evicting.do("delete from distributed_locks where lock_name = 'a'")
		gate.open()
		releasing.want(c.want)
		evicting.do("delete from distributed_locks where lock_name = 'b'") // no deadlock either
		evicting.rollback()
	}
	d.want("(select string_agg(lock_name, ',') from distributed_locks)", "a")
}

func TestBatchReleaseByAnotherThanTheHolderPinsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("acquire_lock('k', 'H', 60)", "true")
	stranger := d.begin(readCommitted)
	stranger.want("pgxlock_release_batch('{k,k}', '{X,H}', array[null, 1]::bigint[])", "gg")
	stranger.want("pgxlock_release_one('k', 'X', null) || pgxlock_release_one('k', 'H', 1)", "gg")
	d.want("assert_lock_held('k', 'H') is null", "false")
	stranger.commit()
	d.want("release_lock('k', 'H')", "true")
}

// When the release looks what became of the expired lease, another caller has just taken it over:
// that one's fences must not meet a pin that the release keeps.
func TestReleaseThatLosesToATakeOverPinsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for i, release := range []string{"select pgxlock_release_batch('{k}', '{H}', '{null}')", "select pgxlock_release_one('k', 'H', null)"} {
		d.do("select acquire_lock('k', 'H', 60)")
		d.expire("k")
		taking, releaser := d.begin(readCommitted), d.begin(readCommitted)
		taking.want("acquire_lock('k', 'B', 60)", "true")
		giving := gate.stopLater(releaser, 1+i, "pin", release) // it has not got the pin as often
		taking.commit()
		gate.open()
		giving.want("s")
		d.want("assert_lock_held('k', 'B') is null", "false")
		releaser.commit()
		releaser.done()
		d.do("delete from distributed_locks")
	}
}

func TestBatchReleaseEndsALeaseThatWasRenewed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, release := range releases {
		d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
		for range 3 {
			d.want("extend_lock('k', 'H', 60)", "true")
		}
		d.want(givesBack("H", release.names...), "r"+release.rest)
		d.want("(select count(*) from distributed_locks where lock_name = 'k')", "0")
	}
}

// The row goes while the batch is at work, and another lease gets a row.
func TestBatchReleaseEndsNoLeaseInAPlaceThatWasReused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, release := range releases {
		d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
		releasing := gate.stop(d.connect(), "pin", givesBack("H", release.names...))
		d.do("delete from distributed_locks where lock_name = 'k'")
		d.do("vacuum distributed_locks")
		d.want("acquire_lock('z', 'H', 60)", "true")
		gate.open()
		if got := releasing.outcome(); got != "g"+release.rest && got != "s"+release.rest {
			t.Errorf("the lease was removed meanwhile: %s", got)
		}
		d.want("(select string_agg(lock_name, ',') from distributed_locks where lock_name <> 'l')", "z")
	}
}

// A lease that was renewed after the batch began is released by the next one, and a single one
// at once.
func TestReleaseThatMeetsARenewalIsRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, release := range releases {
		d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
		releasing := gate.stop(d.connect(), "pin", givesBack("H", release.names...))
		d.want("extend_lock('k', 'H', 60)", "true")
		gate.open()
		if len(release.names) == 1 {
			releasing.want("r")
			continue
		}
		releasing.want("s" + release.rest)
		d.want(givesBack("H", "k"), "r")
	}
}

// What looks expired is just being renewed, and would live on without a holder.
func TestBatchReleaseOfALeaseThatIsJustRenewedAtItsEndIsRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, release := range releases {
		d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
		d.expire("k")
		renewing := d.begin(readCommitted)
		renewing.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 h' where lock_name = 'k'") // as if it had begun before
		d.want(givesBack("H", release.names...), "s"+release.rest)
		renewing.commit()
		renewing.done()
		d.want(givesBack("H", "k"), "r")
	}
}

// Two callers of one process want the same lease. Another session has the guard or the pin when
// the batch tries it for the first of them, and no more when it tries it for the second.
func TestBatchAcquireTellsTheHolderOfTheRowItsToken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, space := range []string{"guard", "pin"} {
		other := d.begin(readCommitted)
		other.do("select pg_advisory_xact_lock(pgxlock_key('" + space + "', 'k'))")
		try := gate.stopLater(d.connect(), 1, space,
			"(select string_agg(concat_ws(' ', b.acquired, b.held_by), ',' order by n) from take_batch('{k,k,l}', '{A,B,C}', '{60000,60000,60000}', '{null,null,null}') with ordinality as b (acquired, token, held_by, ms, n))")
		other.rollback()
		gate.open()
		try.want("f B,t B,t C")
		d.want("select holder_id from distributed_locks where lock_name = 'k'", "B")
		d.do("delete from distributed_locks")
	}
}

// Its row is not committed when the batch looks for it.
func TestBatchAcquireOfANameThatIsJustWrittenWithoutTheGuardIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, function := range batches[1:] {
		writer, contender := d.begin(readCommitted), d.connect()
		writer.do("insert into distributed_locks (lock_name, holder_id, expires_at) values ('k', 'W', now() + interval '1 h')")
		try := contender.start(batch(function, "B", "k", "l"))
		await(t, d, fmt.Sprintf("exists (select from pg_locks where pid = %d and not granted)", contender.pid))
		writer.commit()
		writer.done()
		try.want("f W,t B")
		d.do("delete from distributed_locks")
	}
}

// A pg_upgrade starts again at timeline 1: the tokens of later ones are to be remembered.
func TestBatchAcquireAfterAFailoverRecordsTheTimeline(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, function := range batches[1:] {
		d.do("update pgxlock_epoch set timeline = timeline - 1")
		d.want(batch(function, "B", "k", "l"), "t B,t B")
		d.want("select timeline = pgxlock_timeline() from pgxlock_epoch", "true")
		d.do("delete from distributed_locks")
	}
}

// What locks a row beside a renewal leaves several numbers in it, also when it has ended.
func TestBatchReleaseEndsALeaseWhoseRowOthersHadLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, release := range releases {
		d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
		writer := d.begin("repeatable read")
		writer.want("assert_lock_held('k', 'H') is null", "false") // with a row lock, at that level
		d.want("extend_lock('k', 'H', 60)", "true")
		d.want(givesBack("H", release.names...), "s"+release.rest)
		writer.commit()
		writer.done()
		d.want(givesBack("H", "k"), "r")
		d.want("(select count(*) from distributed_locks where lock_name = 'k')", "0")
	}
}

func TestBatchesOfOneTransactionSeeEachOther(t *testing.T) {
	t.Parallel()
	d := install(t)
	s := d.begin(readCommitted)
	s.want(batch(batches[1], "A", "k", "l"), "t A,t A")
	s.want(batch(batches[1], "B", "l", "m"), "f A,t B")
	s.do("savepoint s")
	s.want(givesBack("A", "k", "l"), "rr")
	s.want(batch(batches[1], "B", "k", "l"), "t B,t B")
	s.do("rollback to s")
	s.want(givesBack("A", "k"), "r")
	s.want(batch(batches[1], "C", "k"), "t C")
	s.commit()
	d.want("(select string_agg(lock_name || ' ' || holder_id, ',' order by lock_name) from distributed_locks)", "k C,l A,m B")
	d.want("(select count(distinct fencing_token) from distributed_locks)", "3")
}

// Two processes want the same leases, one in the opposite order of the other.
func TestBatchesInOppositeOrdersDoNotWaitForEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, space := range []string{"guard", "pin"} {
		d := installGated(t)
		gate := d.turnstile()
		first, second := d.connect(), d.begin(readCommitted)
		first.do(givesUp)
		second.do(givesUp)
		try := gate.stopLater(first, 2, space, batch(batches[1], "A", "a", "b", "c", "d"))
		second.want(batch(batches[1], "B", "d", "c", "b", "a"), map[string]string{"guard": "t B,t B,f,f", "pin": "f,f,f,f"}[space])
		gate.open()
		try.want(map[string]string{"guard": "t A,t A,f,f", "pin": "t A,t A,t A,t A"}[space])
		second.commit()
		second.done()
	}
}

// A role that has rights on the tables and none on what tokens are drawn from.
func TestBatchAcquireNeedsNoRightOnTheTokens(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for what, revoked := range map[string]string{"nothing": "", "the epoch": "pgxlock_epoch", "the mark": "pgxlock_since_crash", "the sequence": "pgxlock_tokens"} {
		role := d.role()
		d.do("grant select, insert, update, delete on distributed_locks, pgxlock_waiters to " + role)
		d.do("grant select on pgxlock_epoch, pgxlock_since_crash to " + role + "; grant usage on sequence pgxlock_tokens to " + role)
		if revoked != "" {
			d.do("revoke all on " + revoked + " from " + role)
		}
		s := d.connect()
		s.do("set role " + role)
		s.want("(select tokens[1] is not null from pgxlock_acquire_batch(array['"+what+"'], '{A}', '{60000}', '{null}', '{0}'))", "true")
		s.want("pgxlock_release_batch(array['"+what+"'], '{A}', '{null}')", "r")
		s.want("(select token is not null from pgxlock_acquire_one('"+what+"', 'A', 60000, null, 0))", "true")
		s.want("pgxlock_release_one('"+what+"', 'A', null)", "r")
	}
	stranger := d.role()
	s := d.connect()
	s.do("set role " + stranger)
	s.want("(select tokens[1] is not null from pgxlock_acquire_batch('{k}', '{A}', '{60000}', '{null}', '{0}'))", "42501")
}

// This file is about a release that tells whether anybody waits: who does is woken, and
// nobody is looked for who does not.

package pgxlock_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

const wakeSQL = "-- Wakes, for each lock"

func TestAReleaseLooksForWhoWaitsOnlyWhereSomebodyDoes(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	wakes, watched := counted(t, db, wakeSQL)
	holder, waiter := newLocker(t, watched, nil), newLocker(t, db, nil)
	looked := func() int { _, locks, _ := wakes.counts(); return locks }
	for i := range 5 {
		release(t, acquire(t, holder, fmt.Sprint("k", i)))
	}
	if n := looked(); n != 0 {
		t.Errorf("%d looks for who waits, where nobody does", n)
	}

	lock := acquire(t, holder, "k")
	granted := waits(t, waiter, "k")
	untilQueued(t, db, "k", 1)
	release(t, lock)
	release(t, <-granted)
	until(t, "it looks for who waits", func() bool { return looked() > 0 })
	if err := holder.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := looked(); n > 2 { // one more when the turn time is over
		t.Errorf("looked for who waits for %d locks, want 1", n)
	}
	noTickets(t, db)
}

// holdReleases keeps releases of a holder from committing, after all that they do. What
// is returned lets them go on.
func holdReleases(t *testing.T, db *pgtest.DB, owner string) (commit func()) {
	t.Helper()
	db.Exec(t, `create table gates (name text primary key);
		insert into gates values ('release'), ('ticket');
		create function wait_at_gate() returns trigger language plpgsql as $$
		begin
		  while exists (select from public.gates where name = tg_argv[0]) loop perform pg_sleep(0.001); end loop;
		  return coalesce(new, old);
		end $$;
		create constraint trigger held after delete on distributed_locks deferrable initially deferred
		  for each row when (old.holder_id like '`+owner+`:%') execute function wait_at_gate('release')`)
	return func() { db.Exec(t, "delete from gates where name = 'release'") }
}

// atGate waits until that many sessions wait at a gate.
func atGate(t *testing.T, db *pgtest.DB, n int) {
	t.Helper()
	until(t, fmt.Sprint(n, " wait at a gate"), func() bool {
		return query[int](t, db, "select count(distinct pid) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'") == n
	})
}

// The release has seen no ticket, and is not over when there is one. Nobody will wake
// who has it.
func TestWhoBeginsToWaitDuringAReleaseAsksAgainByItself(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	holder := newLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder"})
	asks, watched := counted(t, db, acquireSQL)
	waiter := newLocker(t, watched, &pgxlock.LeaseConfig{Backoff: seldom})
	listen(t, db, waiter, holder)
	lock := acquire(t, holder, "k")
	commit := holdReleases(t, db, "holder")
	released := make(chan error, 1)
	go func() { released <- lock.Release(t.Context()) }()
	atGate(t, db, 1)
	before, _, _ := asks.counts()
	granted := waits(t, waiter, "k")
	untilQueued(t, db, "k", 1)
	// It asks to find that it is busy, when it stands in line, and with a ticket.
	until(t, "it asks again and again", func() bool { n, _, _ := asks.counts(); return n > before+5 })
	commit()
	if err := <-released; err != nil {
		t.Error(err)
	}
	release(t, <-granted)
}

// The release has seen no ticket, because that of who waits in the same process is
// published meanwhile. That does not ask when it is there: its process has the lock.
func TestAReleaseWakesThoseHereWhoseTicketItCouldNotSee(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	other, locks := newLocker(t, db, nil), newLocker(t, db, &pgxlock.LeaseConfig{Owner: "here", Backoff: seldom})
	listen(t, db, locks, other)
	commit := holdReleases(t, db, "here")
	commit()
	db.Exec(t, `delete from gates;
		create trigger held before insert on pgxlock_waiters for each row execute function wait_at_gate('ticket')`)
	woken := countNotifications(t, db)
	round := func() (n int) {
		lock := acquire(t, other, "k")
		first := waits(t, locks, "k")
		untilQueued(t, db, "k", 1)
		second := waits(t, locks, "k")
		until(t, "two stand in line", func() bool { return locks.Waiting("k") == 2 })
		db.Exec(t, "insert into gates values ('release'), ('ticket')")
		release(t, lock)
		lock = <-first
		atGate(t, db, 1) // the ticket of the second one
		released := make(chan error, 1)
		go func() { released <- lock.Release(t.Context()) }()
		atGate(t, db, 2)
		db.Exec(t, "delete from gates where name = 'ticket'")
		untilQueued(t, db, "k", 1)
		until(t, "it has heard of its ticket", func() bool { return locks.Told("k") })
		before := woken()
		commit()
		if err := <-released; err != nil {
			t.Error(err)
		}
		lock = <-second
		n = woken() - before
		release(t, lock)
		noTickets(t, db)
		return n
	}
	n := round()
	for i := 0; n == 0 && i < 4; i++ { // one of its looks came first: there is one each second
		n = round()
	}
	if n != 1 {
		t.Errorf("woken %d times", n)
	}
}

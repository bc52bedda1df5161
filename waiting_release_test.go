// This file is about a release that tells whether anybody waits: who does is woken, and
// nobody is looked for who does not.

package pgxlock_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

const wakeSQL = "-- Wakes, for each lock"

func TestAReleaseLooksForWhoWaitsOnlyWhereSomebodyDoes(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	wakes, watched := testkit.Counted(t, db, wakeSQL)
	holder, waiter := testkit.NewLocker(t, watched, nil), testkit.NewLocker(t, db, nil)
	looked := func() int { _, locks, _ := wakes.Counts(); return locks }
	for i := range 5 {
		testkit.Release(t, testkit.Acquire(t, holder, fmt.Sprint("k", i)))
	}
	if n := looked(); n != 0 {
		t.Errorf("%d looks for who waits, where nobody does", n)
	}

	lock := testkit.Acquire(t, holder, "k")
	granted := testkit.Waits(t, waiter, "k")
	testkit.UntilQueued(t, db, "k", 1)
	began := time.Now()
	testkit.Release(t, lock)
	testkit.Release(t, <-granted)
	testkit.Until(t, "it looks for who waits", func() bool { return looked() > 0 })
	if err := holder.Close(t.Context()); err != nil {
		t.Error(err)
	}
	// One more when the turn time is over, and again while who was woken has not come.
	if n, turns := looked(), int(time.Since(began)/turnTime); n > 2+turns {
		t.Errorf("looked for who waits for %d locks within %d turns, want 1", n, turns)
	}
	testkit.NoTickets(t, db)
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
	testkit.Until(t, fmt.Sprint(n, " wait at a gate"), func() bool {
		return testkit.Query[int](t, db, "select count(distinct pid) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'") == n
	})
}

// The release has seen no ticket, and is not over when there is one. Nobody will wake
// who has it.
func TestWhoBeginsToWaitDuringAReleaseAsksAgainByItself(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	holder := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder"})
	asks, watched := testkit.Counted(t, db, testkit.AcquireSQL)
	waiter := testkit.NewLocker(t, watched, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	testkit.Listen(t, db, waiter, holder)
	lock := testkit.Acquire(t, holder, "k")
	commit := holdReleases(t, db, "holder")
	released := make(chan error, 1)
	go func() { released <- lock.Release(t.Context()) }()
	atGate(t, db, 1)
	before, _, _ := asks.Counts()
	granted := testkit.Waits(t, waiter, "k")
	testkit.UntilQueued(t, db, "k", 1)
	// It asks to find that it is busy, when it stands in line, and with a ticket.
	testkit.Until(t, "it asks again and again", func() bool { n, _, _ := asks.Counts(); return n > before+5 })
	commit()
	if err := <-released; err != nil {
		t.Error(err)
	}
	testkit.Release(t, <-granted)
}

// The release has seen no ticket, because that of who waits in the same process is
// published meanwhile. That does not ask when it is there: its process has the lock.
func TestAReleaseWakesThoseHereWhoseTicketItCouldNotSee(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	other, locks := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "here", Backoff: testkit.Seldom})
	testkit.Listen(t, db, locks, other)
	commit := holdReleases(t, db, "here")
	commit()
	db.Exec(t, `delete from gates;
		create trigger held before insert on pgxlock_waiters for each row execute function wait_at_gate('ticket')`)
	woken := testkit.CountNotifications(t, db)
	round := func() (n int) {
		lock := testkit.Acquire(t, other, "k")
		first := testkit.Waits(t, locks, "k")
		testkit.UntilQueued(t, db, "k", 1)
		second := testkit.Waits(t, locks, "k")
		testkit.Until(t, "two stand in line", func() bool { return locks.Waiting("k") == 2 })
		db.Exec(t, "insert into gates values ('release'), ('ticket')")
		testkit.Release(t, lock)
		lock = <-first
		atGate(t, db, 1) // the ticket of the second one
		released := make(chan error, 1)
		go func() { released <- lock.Release(t.Context()) }()
		atGate(t, db, 2)
		db.Exec(t, "delete from gates where name = 'ticket'")
		testkit.UntilQueued(t, db, "k", 1)
		testkit.Until(t, "it has heard of its ticket", func() bool { return locks.Told("k") })
		before := woken()
		commit()
		if err := <-released; err != nil {
			t.Error(err)
		}
		lock = <-second
		n = woken() - before
		testkit.Release(t, lock)
		testkit.NoTickets(t, db)
		return n
	}
	n := round()
	for i := 0; n == 0 && i < 20; i++ { // one of its looks came first: there is one each second
		n = round()
	}
	if n != 1 {
		t.Errorf("woken %d times", n)
	}
}

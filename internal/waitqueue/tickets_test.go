package waitqueue

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// runs is a Runner whose exchanges reach the server.
type runs func(dbconn.Exchange) error

func (r runs) Do(fn dbconn.Exchange) error { return r(fn) }
func (r runs) Reached() bool               { return true }

// nobody is Leaders, of which there are none.
type nobody struct{}

func (nobody) Look()     {}
func (nobody) Any() bool { return false }

// newLocal returns a Queue without a server.
func newLocal() *Queue {
	return New(Config{Closing: context.Background(), Holds: &hold.Group{Clock: clock.System}, Backoff: clock.DefaultBackoff, Log: slog.New(slog.DiscardHandler)})
}

// newQueue returns a Queue whose statements r runs. Its listener has nowhere to listen.
func newQueue(r Runner) *Queue {
	q := newLocal()
	q.Connect(Server{Owner: "owner", Place: &dbconn.Installation{Schema: "s"}, Runner: r, Leaders: nobody{}})
	q.listener.stop()
	return q
}

// session is a Runner with a connection of its own.
type session struct{ *dbconn.Session }

func (s session) Do(fn dbconn.Exchange) error { return s.DoWithin(dbconn.Timeout, fn) }

// newDB returns a database with the migrations.
func newDB(t *testing.T) *pgtest.DB {
	t.Helper()
	return migrated.New(t)
}

var migrated = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// connected returns a Queue on the database, which knows where its table is.
func connected(t *testing.T, db *pgtest.DB, leaders Leaders) *Queue {
	t.Helper()
	config := db.Pool.Config()
	config.MaxConnIdleTime = time.Hour
	place := &dbconn.Installation{}
	s := session{&dbconn.Session{Dialer: dbconn.Dialer{Name: "queue", Config: config}, Place: place}}
	q := newLocal()
	q.Connect(Server{Owner: "owner", Place: place, Runner: s, Dialer: s.Dialer, Leaders: leaders})
	t.Cleanup(func() {
		q.Close()
		s.Close()
	})
	if err := q.Reap(); err != nil {
		t.Fatal(err)
	}
	return q
}

// Tickets become void while an earlier one is being published: by turns that take less
// time than that.
func TestVoidTicketsAreNeitherSentNorKept(t *testing.T) {
	t.Parallel()
	sent, reply := make(chan struct{}, 10), make(chan struct{})
	q := newQueue(runs(func(dbconn.Exchange) error {
		sent <- struct{}{}
		<-reply
		return errors.New("refused")
	}))
	q.listener.stop() // it has nowhere to listen
	name := lockkey.Name{Key: "k"}
	front := q.join(name, &hold.Busy{}, nil, hold.Exclusive)
	q.enter(front.local)
	<-sent
	for range 1000 {
		next := q.join(name, &hold.Busy{}, nil, hold.Exclusive)
		front.granted(0, true)
		q.Freed(name)
		if n := q.publishing.Queued(); n > 1 {
			t.Fatalf("%d tickets of one line are to be sent", n)
		}
		front = next
	}
	for range 1000 { // each makes a line of its own
		front.leave()
		front = q.join(name, &hold.Busy{}, nil, hold.Exclusive)
		q.enter(front.local)
		if n := q.publishing.Queued(); n > 1 {
			t.Fatalf("%d tickets are to be sent, of one line that is left", n)
		}
	}
	front.leave()
	close(reply)
	pgtest.Receive(t, "the end of what is to be sent", q.publishing.Done())
	select {
	case <-sent:
		t.Error("a void ticket was sent")
	default:
	}
}

// A Locker may wait for thousands of advisory locks at once, each of which it sees again
// with every refusal.
func TestManyContendedLocksCostTheQueueNoMoreEachThanFew(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	perSight := func(locks int) time.Duration {
		best := time.Hour
		for range 10 {
			q := newQueue(nil)
			began := time.Now()
			for range 4 {
				for n := range locks {
					q.seeLocked(lockkey.Name{ID: lockkey.ID{Number: int64(n)}})
				}
			}
			best = min(best, time.Since(began)/time.Duration(4*locks))
		}
		return best
	}
	if few, many := max(perSight(batcher.MaxRows/2), time.Microsecond), perSight(4*batcher.MaxRows); many > 50*few { // it was 200 µs when each sight looked at all
		t.Errorf("%s each for few locks, %s for many", few, many)
	}
	q := newQueue(nil)
	for round := range 10 {
		for name := range q.others {
			q.others[name] = time.Now().Add(-contendedFor)
		}
		for n := range batcher.MaxRows {
			q.seeLocked(lockkey.Name{ID: lockkey.ID{Number: int64(round*batcher.MaxRows + n)}})
		}
	}
	if n := len(q.others); n > 3*batcher.MaxRows {
		t.Errorf("%d locks are remembered, most of which nobody else wants any more", n)
	}
}

// The ticket of a wait that ended is in the table until it is removed from there, and the server
// would take it for that of a writer.
func TestSharedTryWaitsUntilVoidTicketsOfItsOwnLockerAreRemoved(t *testing.T) {
	t.Parallel()
	for kind, name := range map[string]lockkey.Name{"lease": {Key: "k"}, "advisory": {ID: lockkey.Identify("k")}} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			q := connected(t, newDB(t), nobody{})
			resume, withdraw := make(chan struct{}), q.withdrawing.Run
			q.withdrawing.Run = func(batch []*ticket) error {
				<-resume
				return withdraw(batch)
			}
			var writer, reader Waiter
			q.Begin(t.Context(), &writer, hold.Request{}, nil)
			writer.Enqueue(name, &hold.Busy{})
			writer.enter()
			pgtest.Until(t, "the writer has a ticket", func() bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				ticket := q.locals[name].ticket
				return ticket.number != 0 && !ticket.pendingLocked()
			})
			writer.End()

			noWait := time.Duration(0)
			q.Begin(t.Context(), &reader, hold.Request{Mode: hold.Shared}, &noWait)
			may := make(chan error, 1)
			go func() {
				_, err := reader.BehindWriter([]lockkey.Name{name})
				may <- err
			}()
			pgtest.Until(t, "the try waits for the ticket to be removed", func() bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				return len(q.void[name]) == 1 && q.void[name][0].gone != nil || len(may) == 1
			})
			if len(may) == 1 {
				t.Error("the try does not wait")
			}
			close(resume)
			if err := <-may; err != nil {
				t.Errorf("no writer waits: %v", err)
			}
		})
	}
}

// The queue of a semaphore has no lease of its own, so that it always looks free: who was
// woken without success would be woken again and again.
func TestWokenWaiterForAPermitIsCheckedOnce(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select acquire_permit('jobs', 'all', 1, 600)")
	q, waits := connected(t, db, nobody{}), connected(t, db, nobody{})
	name := lockkey.Name{Key: "jobs#"}
	var waiter Waiter
	waits.Begin(t.Context(), &waiter, hold.Request{Permits: 1}, nil)
	waiter.Enqueue(name, &hold.Busy{})
	waiter.enter()
	pgtest.Until(t, "the waiter has a ticket, and listens", func() bool {
		waits.mu.Lock()
		defer waits.mu.Unlock()
		return waiter.position.local.ticket.wokenInTurnLocked() && !waiter.position.local.ticket.pendingLocked()
	})

	looks := make(chan bool, 100) // whether there will be another
	run := q.waking.Run
	q.waking.Run = func(batch []wakeUp) error {
		err := run(batch)
		q.mu.Lock()
		_, again := q.woken[name]
		q.mu.Unlock()
		looks <- again
		return err
	}
	q.Wake([]lockkey.Name{name})
	if again := <-looks; !again {
		t.Error("nobody looks whether who was woken sleeps")
	}
	again := true
	for more := 0; more < 200 && again; more++ { // who is woken after its turn, because this machine is slow, is looked after once more
		again = <-looks
	}
	if again {
		t.Error("it is looked after for ever")
	}
	waiter.End()
}

func TestCheckForTicketsEndsWhenItsLockerIsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		answered := make(chan struct{})
		q := newQueue(runs(func(dbconn.Exchange) error {
			<-answered
			return lockerr.ErrClosed
		}))
		closing, end := context.WithCancel(t.Context())
		q.config.Closing = closing
		checked := make(chan []bool, 1)
		go func() { checked <- q.WaitedFor(t.Context(), []lockkey.Name{{Key: "k"}}) }()
		synctest.Wait()
		end()
		synctest.Wait()
		select {
		case waited := <-checked:
			if len(waited) != 1 || waited[0] {
				t.Errorf("waited for: %v", waited)
			}
		default:
			t.Error("the check goes on until the server answers")
		}
		close(answered)
	})
}

// A wantedSession is a LockSession that records which locks others want.
type wantedSession chan lockkey.Name

func (wantedSession) Had(lockkey.ID) bool            { return true }
func (s wantedSession) Wanted(name lockkey.Name)     { s <- name }
func (wantedSession) WakesOnRelease(lockkey.ID) bool { return false }
func (wantedSession) Evicted()                       {}
func (wantedSession) Unpublished() []string          { return nil }

// A holdingSession is a LockSession that has all locks, and wakes the next waiter when it releases one.
type holdingSession struct{ wantedSession }

func (holdingSession) WakesOnRelease(lockkey.ID) bool { return true }

func TestRemovalOfATicketWakesTheNextWaiterOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what     string
		session  LockSession
		turn     func(next *position) // what the caller does to which the lock was left here; nil: it was not
		unseen   bool                 // no other process was seen to want the lock
		released bool                 // while the ticket is being removed
		fails    error                // of the removal
		wakeUps  int
	}{
		{what: "the lock is free", session: wantedSession(nil), wakeUps: 1},
		{what: "the lock is released meanwhile", session: wantedSession(nil), released: true, wakeUps: 1},
		{what: "the lock is held, and its release wakes", session: holdingSession{}, wakeUps: 0},
		{what: "the lock is released and held again", session: holdingSession{}, released: true, wakeUps: 0},
		{what: "the lock is left to a caller here", session: wantedSession(nil), turn: func(*position) {}},
		{what: "it tries for it", session: wantedSession(nil), turn: func(next *position) { next.try() }},
		{what: "its try has failed", session: wantedSession(nil), turn: func(next *position) { next.try(); next.failed() }, wakeUps: 1},
		{what: "it has left", session: wantedSession(nil), turn: (*position).leave, wakeUps: 1},
		{what: "its try is granted, and the release wakes nobody", session: wantedSession(nil), turn: func(next *position) { next.try(); next.granted(0, true) }, wakeUps: 1},
		{what: "nobody else was seen", session: wantedSession(nil), turn: func(*position) {}, unseen: true, wakeUps: 1},
		{what: "the removal fails", session: wantedSession(nil), released: true, fails: errors.New("refused"), wakeUps: 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			answered, wakeUps := make(chan struct{}), 0
			q := newQueue(runs(func(dbconn.Exchange) error {
				<-answered
				return c.fails
			}))
			q.server.Session = c.session
			q.waking.Run = func(batch []wakeUp) error {
				wakeUps += len(batch)
				return nil
			}
			name := lockkey.Name{ID: lockkey.Identify("k")}
			q.mu.Lock()
			q.leaveLocked(&ticket{queue: q, local: &localQueue{name: name}, number: 7, over: true})
			if !c.unseen {
				q.seeLocked(name)
			}
			q.mu.Unlock()
			if c.turn != nil {
				all := resting(q, name, exclusively[:3]...)
				all[0].granted(0, true)
				if !q.HandOver(name, nil) {
					t.Fatalf("%s: not handed over", c.what)
				}
				c.turn(all[1])
			}
			synctest.Wait()
			if c.released {
				q.Wake([]lockkey.Name{name})
				synctest.Wait()
			}
			if wakeUps != 0 {
				t.Errorf("%s: %d wake-ups before the ticket was removed", c.what, wakeUps)
			}
			close(answered)
			synctest.Wait()
			if wakeUps != c.wakeUps {
				t.Errorf("%s: %d wake-ups, want %d", c.what, wakeUps, c.wakeUps)
			}
			q.Wake([]lockkey.Name{name})
			synctest.Wait()
			if wakeUps != c.wakeUps+1 {
				t.Errorf("%s: a later release is left to a removal that is over", c.what)
			}
			q.mu.Lock()
			q.closed = true // a failed removal is not repeated
			q.mu.Unlock()
		})
	}
}

func TestTicketInFlightIsNotPublishedAgainForAnotherWaiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		answered, sent := make(chan struct{}), 0
		q := newQueue(runs(func(dbconn.Exchange) error {
			sent++
			<-answered
			return errors.New("refused")
		}))
		all := resting(q, lockkey.Name{Key: "k"}, exclusively[:2]...)
		q.enter(all[0].local)
		synctest.Wait()
		q.enter(all[0].local)
		close(answered)
		synctest.Wait()
		if sent != 1 {
			t.Errorf("it was published %d times", sent)
		}
		q.mu.Lock()
		q.closed = true
		q.timer.Stop()
		q.mu.Unlock()
	})
}

func TestWokenTicketIsNotLookedAtAfterClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q, sent := wakes()
		q.mu.Lock()
		q.lookAgainLocked(lockkey.Name{Key: "k"}, 7)
		q.mu.Unlock()
		q.Close()
		time.Sleep(2 * clock.WakeTimeout)
		synctest.Wait()
		if n := sent.Load(); n != 0 {
			t.Errorf("%d wake-ups were sent after Close", n)
		}
	})
}

func TestWakeUpThatFoundNobodyLooksAgainWhereOthersWantTheLock(t *testing.T) {
	t.Parallel()
	lock, lease := lockkey.Name{ID: lockkey.Identify("k")}, lockkey.Name{Key: "k"}
	for _, c := range []struct {
		what      string
		session   LockSession
		sent      wakeUp
		contended bool
		more      int
	}{
		{"others want the lock", wantedSession(nil), wakeUp{name: lock}, true, len(looks)},
		{"nobody else does", wantedSession(nil), wakeUp{name: lock}, false, 0},
		{"it is held again, and its release wakes", holdingSession{}, wakeUp{name: lock}, true, 0},
		{"a new ticket for a lease tries by itself", wantedSession(nil), wakeUp{name: lease}, true, 0},
		{"a check of a ticket that was woken", wantedSession(nil), wakeUp{name: lock, number: 1}, true, 0},
		{"a check while the lock is held here", wantedSession(nil), wakeUp{name: lock, check: true}, true, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			sent := 0
			q := newQueue(runs(func(dbconn.Exchange) error { sent++; return nil })) // finds nobody
			q.server.Session = c.session
			if c.contended {
				q.mu.Lock()
				q.seeLocked(c.sent.name)
				q.mu.Unlock()
			}
			for range 2 { // one after the other: two at once look again once
				q.waking.Add(c.sent)
				synctest.Wait()
			}
			time.Sleep(clock.CheckInterval)
			synctest.Wait()
			if want := 2 + c.more; sent != want {
				t.Errorf("%s: %d looks, want %d", c.what, sent, want)
			}
		})
	}
}

// The last looks of an earlier release may come too soon after a later one.
func TestReleaseWhileAWakeUpIsToLookAgainHasAllLooksOfItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		q := newQueue(runs(func(dbconn.Exchange) error { sent++; return nil })) // finds nobody
		q.server.Session = wantedSession(nil)
		name := lockkey.Name{ID: lockkey.Identify("k")}
		q.mu.Lock()
		q.seeLocked(name)
		q.mu.Unlock()
		q.Wake([]lockkey.Name{name})
		time.Sleep(looks[0] + looks[1] + looks[2]/2) // the last look is left
		synctest.Wait()
		before := sent
		q.Wake([]lockkey.Name{name})
		time.Sleep(clock.CheckInterval)
		synctest.Wait()
		if got, want := sent-before, 1+len(looks); got != want {
			t.Errorf("%d looks after the later release, want %d", got, want)
		}
	})
}

// A publisher looks for tickets ahead of its own before it commits, and a wake-up may look in
// between: neither sees what the other one did.
func TestTicketThatIsPublishedWhileItsLockIsReleasedIsWoken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, name := newDB(t), lockkey.Name{ID: lockkey.Identify("k")}
	q := connected(t, db, nobody{})
	other, publisher := db.Connect(t), db.Connect(t)
	for _, statement := range []string{"listen pgxlock_77", "select pg_advisory_lock(pgxlock_waiter_key(77))"} {
		if _, err := other.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := publisher.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "select pgxlock_publish_batch(array[$1::integer], array[$2::text], array[null]::bigint[], "+
		"array[1], array[null]::text[], 77, 'other', 60000, 1)", name.Kind(), name.Text()); err != nil {
		t.Fatal(err)
	}

	looksAgain, committed, run := make(chan struct{}, len(looks)), make(chan struct{}), q.waking.Run
	q.waking.Run = func(batch []wakeUp) error {
		if batch[0].looks > 0 {
			looksAgain <- struct{}{}
			<-committed
		}
		return run(batch)
	}
	q.mu.Lock()
	q.seeLocked(name)
	q.mu.Unlock()
	q.Wake([]lockkey.Name{name})
	pgtest.Receive(t, "the wake-up has found nobody, and looks again", looksAgain)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(committed)
	if _, err := other.WaitForNotification(t.Context()); err != nil {
		t.Errorf("nobody wakes a ticket that was being published: %v", err)
	}
}

// The notification of a waiter elsewhere may be lost. Callers here pass the lock on among
// themselves then, and only this check shows that others wait.
func TestHandoverOfAnAdvisoryLockChecksWhetherOthersWait(t *testing.T) {
	t.Parallel()
	db, name := newDB(t), lockkey.Name{ID: lockkey.Identify("k")}
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values ($1, $2, nextval('pgxlock_tickets'), 'other', 1, now(), now() + interval '1 hour')`, name.Kind(), name.Text())
	q, wanted := connected(t, db, nobody{}), make(wantedSession, 1)
	q.server.Session = wanted
	var w Waiter
	q.Begin(t.Context(), &w, hold.Request{}, nil)
	defer w.End()
	w.Enqueue(name, &hold.Busy{Here: true})
	if queued := q.Freed(name); queued {
		t.Fatal("the waiter has a ticket, so that its refresh would find the other one as well")
	}
	if got := pgtest.Receive(t, "the lock session hears that others wait", wanted); got != name {
		t.Errorf("%v is wanted, not %v", got, name)
	}
}

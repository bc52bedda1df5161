package waitqueue

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// An owner is that of holds of which no caller hears. As a backend it grants nothing.
type owner struct{ hold.Backend }

func (owner) Ended(why error, _ time.Duration) error { return why }
func (owner) Renewed(error)                          {}
func (owner) Close(context.Context) error            { return nil }
func (owner) Keep(*hold.Hold)                        {}
func (owner) Drop(*hold.Hold, bool)                  {}
func (owner) ID(*hold.Hold) string                   { return "" }

// held returns a hold that ends after a minute.
func held(t *testing.T) *hold.Hold {
	t.Helper()
	began := time.Now()
	group := &hold.Group{Clock: func() time.Duration { return time.Since(began) }, Backend: owner{}}
	h := &hold.Hold{TTL: time.Minute + time.Second, Margin: time.Second}
	group.Begin(h, owner{}, "held", lockkey.Name{Key: "held"})
	if h.Granted(1, 0, 0); h.Admit() != nil {
		t.Fatal("it is not held")
	}
	return h
}

var theirs = &hold.Busy{Holder: "other:1"}

// seldom is a Backoff so long that a waiter tries only when something wakes it.
func seldom(int) time.Duration { return 1000 * time.Hour }

func TestWaitEndsWithItsLockerMaxWaitContextAndHolds(t *testing.T) {
	t.Parallel()
	why := errors.New("enough")
	hour := time.Hour
	for name, test := range map[string]struct {
		maxWait *time.Duration
		end     func(q *Queue, cancel context.CancelCauseFunc)
		holds   bool
		want    []error
		after   time.Duration
	}{
		"the Locker is closed": {end: func(q *Queue, _ context.CancelCauseFunc) {
			closing, end := context.WithCancel(context.Background())
			q.config.Closing = closing
			time.AfterFunc(3*time.Second, end)
		}, want: []error{lockerr.ErrClosed}, after: 3 * time.Second},
		"MaxWait is over": {maxWait: &hour, want: []error{lockerr.ErrNotAcquired}, after: time.Hour},
		"the context ends": {end: func(_ *Queue, cancel context.CancelCauseFunc) {
			time.AfterFunc(3*time.Second, func() { cancel(why) })
		}, want: []error{lockerr.ErrNotAcquired, context.Canceled, why}, after: 3 * time.Second},
	} {
		for _, first := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					q := newLocal()
					q.config.Backoff = seldom
					ctx, cancel := context.WithCancelCause(t.Context())
					defer cancel(nil)
					if test.end != nil {
						test.end(q, cancel)
					}
					key := lockkey.Name{Key: "k"}
					if !first {
						var before Waiter
						q.Begin(t.Context(), &before, hold.Request{}, nil)
						before.Enqueue(key, theirs)
						defer before.End()
					}
					var w Waiter
					q.Begin(ctx, &w, hold.Request{}, test.maxWait)
					defer w.End()
					began := time.Now()
					err := w.Wait(key, theirs)
					for _, want := range test.want {
						if !errors.Is(err, want) {
							t.Errorf("%v, want %v", err, want)
						}
					}
					if d := time.Since(began); d != test.after {
						t.Errorf("it ended after %s, want %s", d, test.after)
					}
				})
			})
		}
	}
}

func TestWaitEndsWhenALockOfTheCallIsLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newLocal()
		q.config.Backoff = seldom
		var w Waiter
		q.Begin(t.Context(), &w, hold.Request{}, nil)
		defer w.End()
		w.Holding([]*hold.Hold{held(t)})
		began := time.Now()
		if err := w.Wait(lockkey.Name{Key: "k"}, theirs); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("%v, want %v", err, lockerr.ErrLost)
		}
		if d := time.Since(began); d < time.Minute || d > time.Minute+2*clock.CheckInterval {
			t.Errorf("it ended after %s", d)
		}
	})
}

// The next waiter of this process must not inherit the position: it draws a ticket of its own,
// behind those of other processes.
func TestGrantWithdrawsTheTicketThatTheServerDoesNotRemove(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for kind, name := range map[string]lockkey.Name{
		"an advisory lock, by whatever try":     {ID: lockkey.Identify("k")},
		"a lease, by a try without that ticket": {Key: "k"},
	} {
		q := connected(t, db, nobody{})
		var w, next Waiter
		q.Begin(t.Context(), &w, hold.Request{}, nil)
		q.Begin(t.Context(), &next, hold.Request{}, nil)
		w.Enqueue(name, theirs)
		next.Enqueue(name, theirs)
		w.Turn() // before there is a ticket
		w.enter()
		var number int64
		pgtest.Until(t, kind+": it has a ticket", func() bool {
			q.mu.Lock()
			defer q.mu.Unlock()
			number, _ = next.position.ticketLocked()
			return number != 0
		})
		if name.Kind() != 0 {
			w.Turn()
		}
		w.Granted()
		pgtest.Until(t, kind+": its ticket is gone", func() bool {
			var there bool
			if err := db.Pool.QueryRow(t.Context(), "select exists (select from pgxlock_waiters where ticket = $1)", number).Scan(&there); err != nil {
				t.Fatal(err)
			}
			return !there
		})
		w.End()
		next.End()
	}
}

// The release may have checked the tickets before this one was there.
func TestNewTicketForALeaseMakesItsWaiterTry(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select acquire_lock('k', 'other:1', 600)")
	q := connected(t, db, nobody{})
	q.config.Backoff = seldom
	var w Waiter
	patience := pgtest.Patience
	q.Begin(t.Context(), &w, hold.Request{}, &patience)
	defer w.End()
	if err := w.Wait(lockkey.Name{Key: "k"}, theirs); err != nil {
		t.Errorf("it does not try: %v", err)
	}
}

func TestAdvisoryLockIsContendedForAWhileAndALeaseAlways(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(nil)
		q.client.Store(1)
		q.server.Session = make(wantedSession, 2)
		name := lockkey.Name{ID: lockkey.Identify("k")}
		contended := func(when string, want bool) {
			t.Helper()
			if q.Contended(name) != want {
				t.Errorf("%s: contended: %t", when, !want)
			}
		}
		contended("at first", false)
		q.heard("1:"+name.Text(), false)
		contended("when a waiter here was woken", false)
		q.heard("1:"+name.Text(), true)
		contended("when others were seen", true)
		time.Sleep(contendedFor - time.Nanosecond)
		contended("nearly three seconds later", true)
		time.Sleep(time.Nanosecond)
		contended("three seconds later", false)
		if q.seen.Load() {
			t.Error("each grant takes the mutex though nobody was seen lately")
		}
		q.heard("1:"+name.Text(), true)
		contended("when others were seen again", true)
		if !q.Contended(lockkey.Name{Key: "k"}) {
			t.Error("a lease is not contended")
		}
	})
}

// Its holder could not be told either that this process waits: it hears as little, perhaps.
func TestRefusedWaiterThatHearsNothingKnowsThatOthersHaveTheLock(t *testing.T) {
	t.Parallel()
	db, name := newDB(t), lockkey.Name{ID: lockkey.Identify("k")}
	q := connected(t, db, nobody{})
	q.listener.stop()
	q.config.Backoff = func(int) time.Duration { return 0 }
	resume := pgtest.Occupy(t, q.server.Runner.(session).Session)
	var w Waiter
	q.Begin(t.Context(), &w, hold.Request{}, nil)
	defer w.End()
	refused := func() {
		t.Helper()
		if err := w.Wait(name, &hold.Busy{}); err != nil {
			t.Fatal(err)
		}
	}
	refused()
	if q.Contended(name) {
		t.Error("contended before the queue was reached: callers here would leave a free lock to others, and wait for the queue")
	}
	resume()
	pgtest.Until(t, "its ticket is published", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return w.position.local.ticket.publishedLocked()
	})
	refused()
	if !q.Contended(name) {
		t.Error("others have the lock, and it counts as not contended")
	}
}

// The listener connects more slowly than the lock session, or cannot.
func TestGrantsWhileNobodyListensCheckWhetherOthersWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		q := newQueue(runs(func(dbconn.Exchange) error { sent++; return errors.New("refused") }))
		hot, other := lockkey.Name{ID: lockkey.Identify("hot")}, lockkey.Name{ID: lockkey.Identify("other")}
		granted := func(what string, name lockkey.Name, want int) {
			t.Helper()
			q.Contended(name)
			synctest.Wait()
			if sent != want {
				t.Errorf("%s: %d checks, want %d", what, sent, want)
			}
		}
		granted("a first grant", hot, 0)
		time.Sleep(handOverTime - time.Nanosecond)
		granted("another soon", hot, 0)
		time.Sleep(time.Nanosecond)
		granted("another later", hot, 1)
		time.Sleep(handOverTime)
		granted("a first grant of another lock", other, 1)
		granted("the hot one beside it", hot, 1)
		time.Sleep(handOverTime)
		granted("the other one again", other, 2)
		q.client.Store(1)
		time.Sleep(handOverTime)
		granted("where waiters are heard of", other, 2)
		q.client.Store(0)
		q.server.Place = nil
		granted("without a table for tickets", other, 2)
	})
}

func TestCallThatDoesNotWaitNeverQueues(t *testing.T) {
	t.Parallel()
	q := newLocal()
	var w Waiter
	none := time.Duration(0)
	q.Begin(t.Context(), &w, hold.Request{}, &none)
	defer w.End()
	name := lockkey.Name{Key: "k"}
	w.Enqueue(name, theirs)
	if err := w.Wait(name, theirs); !errors.Is(err, theirs) || w.Queued() || !q.Idle() || w.Waits() {
		t.Errorf("%v; it queues: %t", err, w.Queued())
	}
	if turn := w.Turn(); !turn.SkipQueue || turn.Ticket != 0 {
		t.Errorf("its turn: %+v", turn)
	}
}

package pgxlock

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// These tests cover requests that fail, or whose callers leave. They lead the wire
// themselves, so that they choose what happens between two steps of a leader.

// advisoryWire returns a Locker that is connected, and its backend.
func advisoryWire(t *testing.T, pool *pgxpool.Pool, cfg *AdvisoryConfig) (*Locker, *advisoryLocks) {
	t.Helper()
	locks, err := NewAdvisoryLocker(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // a test that failed may still have the lead
		defer cancel()
		if err := locks.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	lock, err := locks.Acquire(t.Context(), "warm")
	if err == nil {
		err = lock.Release(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return locks, locks.backend.(*advisoryLocks)
}

// stall takes the lead, so that calls queue up until resume is called.
func stall(w *wire) (resume func()) {
	c := &lockCall{}
	if !w.submit(context.Background(), c) {
		<-c.wake
	}
	return func() { w.lead(c) }
}

// queued waits until so many calls stand in the queue, that of stall included.
func queued(t *testing.T, w *wire, n int) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		got := len(w.queue)
		w.mu.Unlock()
		if got == n {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("%d calls are in the queue, want %d", got, n)
		}
	}
}

// acquiring runs an Acquire beside the test.
func acquiring(ctx context.Context, locks *Locker, key string, opts ...Option) <-chan tried {
	done := make(chan tried, 1)
	go func() {
		lock, err := locks.Acquire(ctx, key, opts...)
		done <- tried{lock, err}
	}()
	return done
}

// failing sends what stands in the queue, n calls of it, and takes in what the server
// says, as if the statement had then failed with that state.
func failing(t *testing.T, w *wire, n int, state string) {
	t.Helper()
	if err := w.begin(); err != nil || len(w.batch) != n {
		t.Fatalf("%d calls were sent, want %d: %v", len(w.batch), n, err)
	}
	if err := w.conn.receive(&w.message); err != nil {
		t.Fatal(err)
	}
	w.message.err = &pgconn.PgError{Code: state}
	w.answered()
	w.pass()
}

func TestACallThatIsLeftBeforeItWasSentTakesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	resume := stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	left := acquiring(ctx, locks, "k")
	queued(t, a.wire, 2)
	cancel()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Errorf("the call that was left: %v", got.err)
	}
	resume()
	if lock, err := locks.TryAcquire(t.Context(), "k"); err != nil {
		t.Error(err)
	} else if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// eachMode runs a test for locks of both modes.
func eachMode(t *testing.T, test func(t *testing.T, mode Mode)) {
	t.Parallel()
	for name, mode := range map[string]Mode{"exclusive": Exclusive, "shared": Shared} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}

func TestARequestThatIsLeftIsNoBusyKey(t *testing.T) {
	t.Parallel()
	for name, modes := range map[string]struct{ left, joins Mode }{
		"exclusive": {Exclusive, Exclusive}, "shared": {Shared, Shared}, "exclusive, then shared": {Exclusive, Shared},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks, a := advisoryWire(t, pgtest.New(t).Pool, nil)
			resume := stall(a.wire)
			ctx, cancel := context.WithCancel(t.Context())
			left := acquiring(ctx, locks, "k", modes.left)
			queued(t, a.wire, 2)
			joined := acquiring(t.Context(), locks, "k", modes.joins, NoWait)
			queued(t, a.wire, 3)
			cancel()
			<-left
			resume()
			if got := <-joined; got.err != nil {
				t.Error(got.err)
			} else if err := got.lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestARequestThatFailsIsNoBusyKey(t *testing.T) { eachMode(t, requestFails) }

func requestFails(t *testing.T, mode Mode) {
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	failed := acquiring(t.Context(), locks, "k", mode)
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil || len(a.wire.batch) == 0 {
		t.Fatalf("nothing was sent: %v", err)
	}
	joined := acquiring(t.Context(), locks, "k", mode, NoWait)
	queued(t, a.wire, 1)
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	for _, c := range a.wire.batch {
		c.retried = true // as if this were the second attempt
	}
	a.wire.message.err = &pgconn.PgError{Code: lockerr.StateOutOfMemory}
	a.wire.answered()
	a.wire.pass()
	if got := <-failed; lockerr.SQLState(got.err) != lockerr.StateOutOfMemory || errors.Is(got.err, ErrNotAcquired) {
		t.Errorf("the error is %v", got.err)
	}
	if got := <-joined; got.err != nil {
		t.Errorf("who joined it and asks for itself: %v", got.err)
	} else if err := got.lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	var free bool // what was granted is undone
	if err := db.Pool.QueryRow(t.Context(), "select pg_try_advisory_xact_lock($1)", AdvisoryID("k")).Scan(&free); err != nil || !free {
		t.Errorf("the key is free: %t, %v", free, err)
	}
}

func TestAStatementThatFailsOnceCostsNobodyItsLock(t *testing.T) { eachMode(t, statementFailsOnce) }

func statementFailsOnce(t *testing.T, mode Mode) {
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	asked := acquiring(t.Context(), locks, "k", mode)
	queued(t, a.wire, 2)
	failing(t, a.wire, 2, "57014") // though it has taken the lock
	got := <-asked
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	var free bool // it was taken twice, and given back twice
	if err := db.Pool.QueryRow(t.Context(), "select pg_try_advisory_xact_lock($1)", AdvisoryID("k")).Scan(&free); err != nil || !free {
		t.Errorf("the key is free: %t, %v", free, err)
	}
}

func TestARefusalIsNotOlderThanTheCall(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	other := db.Connect(t)
	if _, err := other.Exec(t.Context(), "select pg_advisory_lock($1)", AdvisoryID("k")); err != nil {
		t.Fatal(err)
	}
	_ = stall(a.wire)
	first := acquiring(t.Context(), locks, "k", NoWait)
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(t.Context(), "select pg_advisory_unlock($1)", AdvisoryID("k")); err != nil {
		t.Fatal(err)
	}
	second := acquiring(t.Context(), locks, "k", NoWait) // the key is free from here to the end
	queued(t, a.wire, 1)
	a.wire.answered()
	a.wire.pass()
	if got := <-first; !errors.Is(got.err, ErrNotAcquired) {
		t.Error(got.err)
	}
	if got := <-second; got.err != nil {
		t.Errorf("the key was free all the time: %v", got.err)
	}
}

func TestAStatementThatFailsOnceCostsNobodyWhoJoinedItsLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	asked := acquiring(t.Context(), locks, "k", Shared)
	queued(t, a.wire, 2)
	joined := acquiring(t.Context(), locks, "k", Shared)
	queued(t, a.wire, 3)
	failing(t, a.wire, 3, "57014")
	if got := <-asked; got.err != nil {
		t.Errorf("asked: %v", got.err)
	}
	if got := <-joined; got.err != nil {
		t.Errorf("joined: %v", got.err)
	}
}

// What the answer may still bring to a caller that left is not returned to it.
func TestACallThatIsLeftReturnsNoLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan []hold.Attempt)
	go func() {
		attempts := []hold.Attempt{{Hold: &locks.newLock("k").hold}}
		a.Try(ctx, hold.Request{}, attempts)
		got <- attempts
	}()
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	cancel()
	attempts := <-got
	if !errors.Is(attempts[0].Err, context.Canceled) {
		t.Errorf("%v", attempts)
	}
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	a.wire.answered()
	a.wire.pass()
}

func TestALockThatOnlyThoseAreGrantedWhoHaveLeftIsNoBusyKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	asked := acquiring(ctx, locks, "k", Shared)
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	joined := acquiring(ctx, locks, "k", Shared)
	queued(t, a.wire, 1)
	cancel()
	<-asked
	<-joined
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	a.wire.answered() // the first is granted it; what the second has asked is under way
	next := acquiring(t.Context(), locks, "k", NoWait)
	queued(t, a.wire, 1)
	a.wire.pass()
	if got := <-next; got.err != nil {
		t.Errorf("nobody has the key: %v", got.err)
	}
}

func TestAStatementThatFailsOnceCostsNobodyWhoJoinedALockThatIsHeld(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string][]string{"alone": {"k"}, "with others": {"k", "other"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks, a := advisoryWire(t, pgtest.New(t).Pool, nil)
			if _, err := locks.Acquire(t.Context(), "k", Shared); err != nil {
				t.Fatal(err)
			}
			_ = stall(a.wire)
			asked := acquiring(t.Context(), locks, "asked", Shared)
			queued(t, a.wire, 2)
			joined := make(chan error, 1)
			go func() {
				_, err := locks.AcquireAll(t.Context(), keys, Shared)
				joined <- err
			}()
			queued(t, a.wire, 3)
			failing(t, a.wire, 3, "57014")
			if got := <-asked; got.err != nil {
				t.Errorf("asked: %v", got.err)
			}
			if err := <-joined; err != nil {
				t.Errorf("joined what is held: %v", err)
			}
		})
	}
}

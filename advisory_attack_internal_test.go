package pgxlock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// These tests take the lead of a wire themselves, so that what happens between two
// steps of a leader happens when they say.

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
func acquiring(ctx context.Context, locks *Locker, key string, opts ...Option) <-chan attempt {
	done := make(chan attempt, 1)
	go func() {
		lock, err := locks.Acquire(ctx, key, opts...)
		done <- attempt{lock, err}
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

func TestARequestThatIsLeftIsNoBusyKey(t *testing.T) { eachMode(t, requestIsLeft) }

func requestIsLeft(t *testing.T, mode Mode) {
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	resume := stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	left := acquiring(ctx, locks, "k", mode)
	queued(t, a.wire, 2)
	joined := acquiring(t.Context(), locks, "k", mode, NoWait)
	queued(t, a.wire, 3)
	cancel()
	<-left
	resume()
	if got := <-joined; got.err != nil {
		t.Error(got.err)
	} else if err := got.lock.Release(t.Context()); err != nil {
		t.Error(err)
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

func TestALossIsToldBeforeTheServerHearsOfIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	lock, err := locks.Acquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(a.wire)
	conn, lost, told := a.wire.conn.conn, a.wire.lost, false
	a.wire.lost = func(why error) {
		a.wire.lost = lost
		lost(why)
		told = true
		if conn.IsClosed() {
			t.Error("others could have been granted the lock while it was believed in")
		}
	}
	a.wire.end(errSilentTooLong)
	a.wire.pass()
	if !told || !errors.Is(lock.Err(), ErrLost) {
		t.Errorf("told: %t; %v", told, lock.Err())
	}
}

func TestWhoJoinsALockThatIsJustLostHasOneOfTheNextSession(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	first, err := locks.Acquire(t.Context(), "k", Shared)
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(a.wire)
	joined := acquiring(t.Context(), locks, "k", Shared, NoWait)
	queued(t, a.wire, 2)
	a.wire.end(errSilentTooLong)
	a.wire.pass()
	got := <-joined
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.Err(); err != nil || !errors.Is(first.Err(), ErrLost) {
		t.Errorf("the first: %v; who joined: %v", first.Err(), err)
	}
	if err := got.lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// The next message is sent before callers hear what the one before has brought them.
func TestAGrantWhoseSessionEndsBeforeItIsToldIsLostOrAskedForAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	granted := acquiring(t.Context(), locks, "granted")
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil || len(a.wire.batch) != 2 {
		t.Fatalf("%d calls were sent: %v", len(a.wire.batch), err)
	}
	next := acquiring(t.Context(), locks, "next")
	queued(t, a.wire, 1)
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	if err := a.wire.conn.net.Close(); err != nil {
		t.Fatal(err)
	}
	a.wire.answered()
	a.wire.pass()
	// The call saw the grant before the loss, or it has a lock of the next session.
	if got := <-granted; got.err != nil {
		t.Error(got.err)
	} else if err := got.lock.Release(t.Context()); err != nil && !errors.Is(err, ErrLost) {
		t.Error(err)
	}
	got := <-next
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Of a lock that is shared nothing is given back, so that nothing but the session
// can tell.
func TestAReleaseWhileTheLossIsBeingToldSaysSo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	shared, err := locks.AcquireAll(t.Context(), []string{"k"}, Shared)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locks.Acquire(t.Context(), "k", Shared); err != nil {
		t.Fatal(err)
	}
	_ = stall(a.wire)
	lost, released := a.wire.lost, make(chan error, 1)
	a.wire.lost = func(why error) {
		a.wire.lost = lost
		a.wire.mu.Lock()
		before := len(a.wire.queue)
		a.wire.mu.Unlock()
		go func() { released <- shared.Release(t.Context()) }()
		queued(t, a.wire, before+1)
		lost(why)
	}
	a.wire.end(errSilentTooLong)
	a.wire.pass()
	if err := <-released; !errors.Is(err, ErrLost) {
		t.Errorf("Release: %v", err)
	}
}

func TestCloseTellsAWorkThatItDoesNotWaitFor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, err := NewAdvisoryLocker(db.Pool, &AdvisoryConfig{TTL: -1})
	if err != nil {
		t.Fatal(err)
	}
	err = locks.Do(t.Context(), "k", func(_ context.Context, lock *Lock) error {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := locks.Close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Close: %v", err)
		}
		<-locks.backend.(*advisoryLocks).wire.gone
		if err := lock.Err(); !errors.Is(err, ErrLost) {
			t.Errorf("the session has ended, and of the lock it says %v", err)
		}
		return nil
	})
	if !errors.Is(err, ErrLost) {
		t.Errorf("Do: %v", err)
	}
}

// The server counts from the last thing it was asked while the session was made.
func TestASessionThatTookLongToMakeIsNotSilent(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var slow atomic.Int64
	now := func() time.Duration { return clock.System() + time.Duration(slow.Load()) }
	cfg, err := (&AdvisoryConfig{TTL: time.Minute}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	locks := newAdvisory(db.Pool.Config(), cfg, now)
	a := locks.backend.(*advisoryLocks)
	a.wire.connect = func() (*lockConn, error) {
		slow.Add(int64(2 * time.Minute))
		return a.connect()
	}
	lock, err := locks.Acquire(t.Context(), "k")
	if err == nil {
		err = errors.Join(lock.Release(t.Context()), locks.Close(t.Context()))
	}
	if err != nil {
		t.Error(err)
	}
}

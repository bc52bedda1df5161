package advisory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// stall takes the lead, so that calls queue up until resume is called: the test leads the mux
// itself, and chooses what happens between two steps of a leader.
func stall(m *mux) (resume func()) {
	lead := takeLead(m)
	m.gathering.Hurry = math.MaxInt
	return func() { m.gathering.Hurry = 0; lead() }
}

// takeLead returns when the test is the leader, with one call in the queue. It leads from then on
// by calling lead, which returns when that call is answered.
func takeLead(m *mux) (lead func()) {
	c := &call{}
	if !m.submit(context.Background(), c) {
		<-c.wake
	}
	return func() { m.lead(c) }
}

// send sends what is queued, as a leader does.
func send(t *testing.T, m *mux) {
	t.Helper()
	if err := m.begin(); err != nil {
		t.Fatal(err)
	}
}

// receive reads the answer to what was sent, and settles nothing yet.
func receive(t *testing.T, m *mux) {
	t.Helper()
	if err := m.conn.receive(&m.message); err != nil {
		t.Fatal(err)
	}
}

// queued waits until so many calls are in the queue, that of stall included.
func queued(t *testing.T, m *mux, n int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprintf("%d calls are in the queue", n), func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.queue) == n
	})
}

// failing sends the n calls in the queue, and processes the answer as if the statement had
// failed with that state.
func failing(t *testing.T, m *mux, n int, state string) {
	t.Helper()
	if err := m.begin(); err != nil || len(m.batch) != n {
		t.Fatalf("%d calls were sent, want %d: %v", len(m.batch), n, err)
	}
	receive(t, m)
	m.message.err = &pgconn.PgError{Code: state}
	m.answered()
	m.pass()
}

func TestCallThatIsLeftBeforeItWasSentTakesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	resume := stall(p.mux)
	ctx, cancel := context.WithCancel(t.Context())
	left := acquiring(ctx, p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	cancel()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Errorf("the call that was left: %v", got.err)
	}
	resume()
	if lock, err := p.try(t.Context(), "k", hold.Exclusive); err != nil {
		t.Error(err)
	} else if err := lock.release(); err != nil {
		t.Error(err)
	}
}

// eachMode runs a test for locks of both modes.
func eachMode(t *testing.T, test func(t *testing.T, mode hold.Mode)) {
	t.Parallel()
	for name, mode := range rows(map[string]hold.Mode{"exclusive": hold.Exclusive, "shared": hold.Shared}, "exclusive") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}

func TestRequestThatIsLeftIsNoBusyKey(t *testing.T) {
	t.Parallel()
	for name, modes := range rows(map[string]struct{ left, joins hold.Mode }{
		"exclusive": {hold.Exclusive, hold.Exclusive}, "shared": {hold.Shared, hold.Shared}, "exclusive, then shared": {hold.Exclusive, hold.Shared},
	}, "exclusive, then shared") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := connected(t, pgtest.New(t).Pool, Config{})
			resume := stall(p.mux)
			ctx, cancel := context.WithCancel(t.Context())
			left := acquiring(ctx, p, "k", modes.left)
			queued(t, p.mux, 2)
			joined := trying(t.Context(), p, "k", modes.joins)
			queued(t, p.mux, 3)
			cancel()
			<-left
			resume()
			if got := <-joined; got.err != nil {
				t.Error(got.err)
			} else if err := got.lock.release(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRequestThatFailsIsNoBusyKey(t *testing.T) { eachMode(t, requestFails) }

func requestFails(t *testing.T, mode hold.Mode) {
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	failed := acquiring(t.Context(), p, "k", mode)
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil || len(p.mux.batch) == 0 {
		t.Fatalf("nothing was sent: %v", err)
	}
	joined := trying(t.Context(), p, "k", mode)
	queued(t, p.mux, 1)
	receive(t, p.mux)
	for _, c := range p.mux.batch {
		c.retried = true // as if this were the second attempt
	}
	p.mux.message.err = &pgconn.PgError{Code: lockerr.StateOutOfMemory}
	p.mux.answered()
	p.mux.pass()
	if got := <-failed; lockerr.SQLState(got.err) != lockerr.StateOutOfMemory || errors.Is(got.err, lockerr.ErrNotAcquired) {
		t.Errorf("the error is %v", got.err)
	}
	if got := <-joined; got.err != nil {
		t.Errorf("the caller that joined it and asks for itself: %v", got.err)
	} else if err := got.lock.release(); err != nil {
		t.Error(err)
	}
	var free bool // what was granted is undone
	if err := db.Pool.QueryRow(t.Context(), "select pg_try_advisory_xact_lock($1)", numberOf("k")).Scan(&free); err != nil || !free {
		t.Errorf("the key is free: %t, %v", free, err)
	}
}

// A caller joins a request that fails, asks again, and joins another one that fails: no server
// has said that the key is busy.
func TestTwoRequestsThatFailAreNoBusyKeyForTheCallerThatJoinedThem(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	fail := func() {
		t.Helper()
		receive(t, p.mux)
		for _, c := range p.mux.batch {
			c.retried = true // as if this were the second attempt
		}
		p.mux.message.err = &pgconn.PgError{Code: lockerr.StateOutOfMemory}
		p.mux.answered()
	}
	answer := func() {
		t.Helper()
		receive(t, p.mux)
		p.mux.answered()
	}
	_ = stall(p.mux)
	first := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	joined := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 1)
	fail() // the undoing comes before the call that joined
	<-first
	second := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 3)
	p.mux.mu.Lock()
	p.mux.queue[2].alone = true // not in the message of the call that joined
	p.mux.mu.Unlock()
	send(t, p.mux)
	answer()
	answer()
	queued(t, p.mux, 1) // it has joined the second, which is in flight
	fail()
	<-second
	p.mux.pass()
	if got := <-joined; lockerr.SQLState(got.err) != lockerr.StateOutOfMemory || errors.Is(got.err, lockerr.ErrNotAcquired) {
		t.Errorf("the error is %v", got.err)
	}
	wantFree(t, p, "k")
}

func TestStatementThatFailsOnceCostsNobodyItsLock(t *testing.T) { eachMode(t, statementFailsOnce) }

func statementFailsOnce(t *testing.T, mode hold.Mode) {
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	asked := acquiring(t.Context(), p, "k", mode)
	queued(t, p.mux, 2)
	failing(t, p.mux, 2, "57014") // though it has taken the lock
	got := <-asked
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.release(); err != nil {
		t.Error(err)
	}
	var free bool // it was acquired twice, and released twice
	if err := db.Pool.QueryRow(t.Context(), "select pg_try_advisory_xact_lock($1)", numberOf("k")).Scan(&free); err != nil || !free {
		t.Errorf("the key is free: %t, %v", free, err)
	}
}

func TestRefusalIsNotOlderThanTheCall(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	other := db.Connect(t)
	if _, err := other.Exec(t.Context(), "select pg_advisory_lock($1)", numberOf("k")); err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	first := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	receive(t, p.mux)
	if _, err := other.Exec(t.Context(), "select pg_advisory_unlock($1)", numberOf("k")); err != nil {
		t.Fatal(err)
	}
	second := trying(t.Context(), p, "k", hold.Exclusive) // the key is free from here to the end
	queued(t, p.mux, 1)
	p.mux.answered()
	p.mux.pass()
	if got := <-first; !errors.Is(got.err, lockerr.ErrNotAcquired) {
		t.Error(got.err)
	}
	if got := <-second; got.err != nil {
		t.Errorf("the key was free all the time: %v", got.err)
	}
}

// A second try would be refused by the lock that the first one was granted.
func TestRequestThatWasGrantedALockIsNotMadeAgainForAnother(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	if _, err := db.Connect(t).Exec(t.Context(), "select pg_advisory_lock($1)", numberOf("k")); err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	first := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	attempts := []hold.Attempt{{Hold: p.newHold("k", hold.Exclusive)}, {Hold: p.newHold("other", hold.Exclusive)}}
	tried := make(chan struct{})
	go func() {
		defer close(tried)
		p.Try(t.Context(), hold.Request{}, attempts)
	}()
	queued(t, p.mux, 1)
	p.mux.finish()
	p.mux.pass()
	<-first
	<-tried
	if !errors.Is(attempts[0].Err, lockerr.ErrNotAcquired) || attempts[1].Err != nil {
		t.Errorf("the lock that another session has: %v; the free one: %v", attempts[0].Err, attempts[1].Err)
	}
}

func TestStatementThatFailsOnceCostsNobodyWhoJoinedItsLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	asked := acquiring(t.Context(), p, "k", hold.Shared)
	queued(t, p.mux, 2)
	joined := acquiring(t.Context(), p, "k", hold.Shared)
	queued(t, p.mux, 3)
	failing(t, p.mux, 3, "57014")
	if got := <-asked; got.err != nil {
		t.Errorf("asked: %v", got.err)
	}
	if got := <-joined; got.err != nil {
		t.Errorf("joined: %v", got.err)
	}
}

// What the answer may still bring to a caller that left is not returned to it.
func TestCallThatIsLeftReturnsNoLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan []hold.Attempt)
	go func() {
		attempts := []hold.Attempt{{Hold: p.newHold("k", hold.Exclusive)}}
		p.Try(ctx, hold.Request{}, attempts)
		got <- attempts
	}()
	queued(t, p.mux, 2)
	send(t, p.mux)
	cancel()
	attempts := <-got
	if !errors.Is(attempts[0].Err, context.Canceled) {
		t.Errorf("%v", attempts)
	}
	receive(t, p.mux)
	p.mux.answered()
	p.mux.pass()
}

func TestLockThatOnlyThoseAreGrantedWhoHaveLeftIsNoBusyKey(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	ctx, cancel := context.WithCancel(t.Context())
	asked := acquiring(ctx, p, "k", hold.Shared)
	queued(t, p.mux, 2)
	send(t, p.mux)
	joined := acquiring(ctx, p, "k", hold.Shared)
	queued(t, p.mux, 1)
	cancel()
	<-asked
	<-joined
	receive(t, p.mux)
	p.mux.answered() // the first is granted it; what the second has asked is under way
	next := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 1)
	p.mux.pass()
	if got := <-next; got.err != nil {
		t.Errorf("nobody has the key: %v", got.err)
	}
}

func TestStatementThatFailsOnceCostsNobodyWhoJoinedALockThatIsHeld(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, keys := range map[string][]string{"alone": {"k"}, "with others": {"k", "other"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := connected(t, pgtest.New(t).Pool, Config{})
			if _, err := p.acquire(t.Context(), "k", hold.Shared); err != nil {
				t.Fatal(err)
			}
			_ = stall(p.mux)
			asked := acquiring(t.Context(), p, "asked", hold.Shared)
			queued(t, p.mux, 2)
			joined := make(chan error, 1)
			go func() { joined <- p.tryAll(t.Context(), keys, hold.Shared) }()
			queued(t, p.mux, 3)
			failing(t, p.mux, 3, "57014")
			if got := <-asked; got.err != nil {
				t.Errorf("asked: %v", got.err)
			}
			if err := <-joined; err != nil {
				t.Errorf("joined what is held: %v", err)
			}
		})
	}
}

// A heldWriter keeps the first message from the server until release.
type heldWriter struct {
	io.Writer
	held    []byte
	written chan struct{} // closed with that message
}

func (w *heldWriter) Write(b []byte) (int, error) {
	if w.held != nil {
		return w.Writer.Write(b)
	}
	w.held = bytes.Clone(b)
	close(w.written)
	return len(b), nil
}

func (w *heldWriter) release(t *testing.T) {
	t.Helper()
	if _, err := w.Writer.Write(w.held); err != nil {
		t.Error(err)
	}
}

// closeAndDismiss returns when the callers of queued calls have left, or are about to.
func closeAndDismiss(p *process) {
	p.closing()
	for closing := false; !closing; runtime.Gosched() {
		p.mux.mu.Lock()
		closing = p.mux.closing
		p.mux.mu.Unlock()
	}
}

// answeredNow returns when the server has answered all calls until now.
func answeredNow(t *testing.T, p *process) {
	t.Helper()
	c := &call{}
	if !p.mux.await(c, p.mux.submit(t.Context(), c)) || c.err != nil {
		t.Fatal(c.err)
	}
}

func TestClosingEndsTheWaitForAnAnswer(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, p *process) <-chan tried {
		t.Helper()
		waits := acquiring(context.Background(), p, "k", hold.Exclusive)
		queued(t, p.mux, 2)
		return waits
	}
	wantClosed := func(t *testing.T, waits <-chan tried) {
		t.Helper()
		if got := pgtest.Receive(t, "the end of the wait", waits); !errors.Is(got.err, lockerr.ErrClosed) {
			t.Errorf("%v, want ErrClosed", got.err)
		}
	}
	t.Run("of a call that was not sent", func(t *testing.T) {
		t.Parallel()
		p := connected(t, pgtest.New(t).Pool, Config{})
		resume := stall(p.mux)
		waits := begin(t, p)
		p.closing()
		wantClosed(t, waits)
		resume()
		wantFree(t, p, "k")
	})
	t.Run("of a call in flight", func(t *testing.T) {
		t.Parallel()
		p := connected(t, pgtest.New(t).Pool, Config{})
		resume := stall(p.mux)
		waits := begin(t, p)
		w := &heldWriter{Writer: p.mux.conn.net, written: make(chan struct{})}
		p.mux.conn.writer = w
		go resume()
		<-w.written
		p.closing()
		wantClosed(t, waits)
		w.release(t)
		answeredNow(t, p)
		wantFree(t, p, "k")
	})
	t.Run("of a call that has no session", func(t *testing.T) {
		pgtest.Long(t)
		t.Parallel()
		p := newProcess(t, pgtest.New(t).Pool, Config{}, clock.System)
		connecting, connect := make(chan struct{}), p.mux.connect
		p.mux.connect = func(ctx context.Context) (*session, error) { <-connecting; return connect(ctx) }
		waits := acquiring(context.Background(), p, "k", hold.Exclusive)
		queued(t, p.mux, 1)
		p.closing()
		wantClosed(t, waits)
		close(connecting)
		answeredNow(t, p)
		wantFree(t, p, "k")
	})
	t.Run("of a call whose session ends", func(t *testing.T) {
		pgtest.Long(t)
		t.Parallel()
		p := connected(t, pgtest.New(t).Pool, Config{})
		connecting, connect := make(chan struct{}), p.mux.connect
		p.mux.connect = func(ctx context.Context) (*session, error) { <-connecting; return connect(ctx) }
		_ = stall(p.mux)
		waits := begin(t, p)
		send(t, p.mux)
		closeAndDismiss(p)
		p.mux.end(io.EOF)
		p.mux.pass()
		wantClosed(t, waits)
		close(connecting)
		answeredNow(t, p)
		wantFree(t, p, "k")
	})
	t.Run("of a call whose message has failed", func(t *testing.T) {
		pgtest.Long(t)
		t.Parallel()
		p := connected(t, pgtest.New(t).Pool, Config{})
		_ = stall(p.mux)
		waits := begin(t, p)
		send(t, p.mux)
		receive(t, p.mux)
		closeAndDismiss(p)
		p.mux.message.err = &pgconn.PgError{Code: "57014"}
		p.mux.answered()
		wantClosed(t, waits) // before the server undoes what the message may have acquired
		p.mux.pass()
		answeredNow(t, p)
		wantFree(t, p, "k")
	})
	t.Run("of a call that begins later", func(t *testing.T) {
		pgtest.Long(t)
		t.Parallel()
		p := connected(t, pgtest.New(t).Pool, Config{})
		resume := stall(p.mux)
		closeAndDismiss(p)
		wantClosed(t, acquiring(context.Background(), p, "k", hold.Exclusive))
		resume()
		wantFree(t, p, "k")
	})
}

func TestGrantOfACallerThatLeftIsReleased(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	_ = stall(p.mux)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := acquiring(ctx, p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	leave()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Errorf("%v, want that its context was cancelled", got.err)
	}
	p.mux.finish()
	p.mux.pass()
	wantFree(t, p, "k")
}

func TestRefusedRequestLeavesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	other, p := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{MaxLocks: 1})
	lock := mustAcquire(t, other, "k", hold.Exclusive)
	if _, err := p.try(t.Context(), "k", hold.Exclusive); !errors.Is(err, lockerr.ErrNotAcquired) {
		t.Fatalf("%v, want ErrNotAcquired", err)
	}
	if err := mustAcquire(t, p, "another", hold.Exclusive).release(); err != nil {
		t.Error(err)
	}
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.try(t.Context(), "k", hold.Shared); err != nil {
		t.Errorf("in the other mode: %v", err)
	}
}

// A context may carry all that a request of a program needs, and a lock may be held for days.
func TestHeldLockDoesNotKeepTheContextOfItsAcquire(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	collected := make(chan struct{})
	lock := func() held {
		value := new([1 << 16]byte)
		runtime.AddCleanup(value, func(int) { close(collected) }, 0)
		type key struct{}
		ctx := context.WithValue(t.Context(), key{}, value)
		lock, err := p.acquire(ctx, "k", hold.Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		return lock
	}()
	pgtest.Until(t, "the context is collected", func() bool {
		runtime.GC()
		select {
		case <-collected:
			return true
		default:
			return false
		}
	})
	if err := lock.release(); err != nil {
		t.Error(err)
	}
}

// A leader that leaves returns while a goroutine settles its call: it must not take that for
// an answer, because what was granted is being released.
func TestAnswerAfterItsCallerHasLeftIsNoAnswerToTheCaller(t *testing.T) {
	t.Parallel()
	var c call
	c.state.Store(callLeft)
	c.settle(nil, instant{})
	if c.state.Load() != callLeft {
		t.Error("the call counts as answered")
	}
}

func TestReleaseInAMessageThatFailsIsNoLoss(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	_ = stall(p.mux)
	released := make(chan error, 1)
	go func() { released <- lock.release() }()
	queued(t, p.mux, 2)
	failing(t, p.mux, 2, "57014")
	if err := <-released; err != nil {
		t.Error(err)
	}
	wantFree(t, p, "k")
}

func TestLeaderWhoseContextEndsLeavesBeforeTheAnswerAndKeepsNothing(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	_ = stall(p.mux)
	conn := p.mux.conn
	w := &heldWriter{Writer: conn.net, written: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	left := trying(ctx, p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	conn.writer = w
	p.mux.gathering.Hurry = 0
	p.mux.pass() // to the caller
	<-w.written
	cancel()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Errorf("the caller that left: %v", got.err)
	}
	p.mux.mu.Lock()
	if p.mux.conn != conn {
		t.Error("it left only when the session had ended")
	}
	p.mux.mu.Unlock()
	w.release(t)
	answeredNow(t, p)
	wantFree(t, p, "k")
}

// The leader's context ended just when its answer arrived.
func TestNextLeaderDoesNotLeaveInPlaceOfThePreviousOne(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	_ = stall(p.mux)
	next := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	p.mux.mu.Lock()
	p.mux.leaves = true
	p.mux.mu.Unlock()
	p.mux.pass()
	got := <-next
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.release(); err != nil {
		t.Errorf("it was granted, and yet: %v", err)
	}
}

func TestReleaseDuringCloseWaitsForItsAnswer(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	resume := stall(p.mux)
	released := make(chan error, 1)
	go func() { released <- lock.release() }()
	queued(t, p.mux, 2)
	closeAndDismiss(p)
	resume()
	if err := <-released; err != nil {
		t.Error(err)
	}
	wantFree(t, p, "k")
}

// Leaders come and go while it is looked whether one must leave: nothing of a call is read
// that its caller has left. With -race.
func TestLeadersAreDismissedWhileTheirCallersLeave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ended:
				return
			default:
				p.mux.dismiss()
				runtime.Gosched()
			}
		}
	}()
	var callers sync.WaitGroup
	for i := range 16 {
		callers.Go(func() {
			for n := range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n%5)*200*time.Microsecond)
				if lock, err := p.acquire(ctx, string(rune('a'+i)), hold.Exclusive); err == nil {
					_ = lock.release()
				}
				cancel()
			}
		})
	}
	callers.Wait()
	close(ended)
	<-done
	for i := range 16 {
		becomesFree(t, p, string(rune('a'+i)))
	}
}

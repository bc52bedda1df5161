package pgxlock

import (
	"context"
	"errors"
	"io"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// These tests are about what a leader hands on, and about who stands behind the
// request of another one.

func TestARequestOfAnotherModeThatIsLeftIsNoBusyKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	resume := stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	left := acquiring(ctx, locks, "k", Exclusive)
	queued(t, a.wire, 2)
	joined := acquiring(t.Context(), locks, "k", Shared, NoWait)
	queued(t, a.wire, 3)
	cancel()
	<-left
	resume()
	if got := <-joined; got.err != nil {
		t.Error(got.err)
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

// The next message is not sent to a session that the server may have ended meanwhile:
// nobody waits for its answer.
func TestASessionThatWasSilentTooLongBeforeTheNextMessageIsGivenUpAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	cfg, err := (&AdvisoryConfig{TTL: time.Minute}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	var later atomic.Int64
	locks := newAdvisory(db.Pool.Config(), cfg, func() time.Duration { return clock.System() + time.Duration(later.Load()) })
	a := locks.backend.(*advisoryLocks)
	defer locks.Close(context.Background())
	warm, err := locks.Acquire(t.Context(), "warm")
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(a.wire)
	first := acquiring(t.Context(), locks, "first")
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	next := acquiring(t.Context(), locks, "next")
	queued(t, a.wire, 1)
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	later.Store(int64(time.Minute)) // the process was frozen
	session := a.session
	a.wire.answered()
	if !errors.Is(warm.Err(), ErrLost) {
		t.Errorf("what it held: %v", warm.Err())
	}
	a.wire.pass()
	for _, got := range []attempt{<-first, <-next} { // the grant of the first came too late, so that it has asked again
		if got.err != nil {
			t.Fatal(got.err)
		}
		if err := got.lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.session == session {
		t.Error("it is the same session")
	}
}

// Who hands the lead on hands the answer that is under way to one of those whom it is for.
func TestTheAnswerUnderWayIsReadByOneOfThoseItIsFor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	first := acquiring(t.Context(), locks, "first")
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	next := acquiring(t.Context(), locks, "next")
	queued(t, a.wire, 1)
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	a.wire.answered()
	if len(a.wire.batch) != 1 {
		t.Fatalf("%d calls are under way", len(a.wire.batch))
	}
	own := a.wire.batch[0]
	last := acquiring(t.Context(), locks, "last")
	queued(t, a.wire, 1)
	w := &signalledReader{Reader: a.wire.conn.net, blocked: make(chan struct{})}
	a.wire.conn.frontend = pgproto3.NewFrontend(w, a.wire.conn.net)
	a.wire.pass()
	a.wire.mu.Lock()
	leader := a.wire.leader
	a.wire.mu.Unlock()
	if leader != own {
		t.Error("somebody else leads")
	}
	close(w.blocked)
	for _, c := range []<-chan attempt{first, next, last} {
		if got := <-c; got.err != nil {
			t.Error(got.err)
		}
	}
}

type signalledReader struct {
	io.Reader
	blocked chan struct{}
}

func (r *signalledReader) Read(b []byte) (int, error) {
	<-r.blocked
	return r.Reader.Read(b)
}

// What is under way, and nothing behind it, when the lead is handed on.
func TestWhatIsUnderWayIsReceivedThoughNothingElseIsAskedFor(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(cancel func(), w *wire){
		"its caller waits":           func(func(), *wire) {},
		"its caller has left":        func(cancel func(), _ *wire) { cancel() },
		"the session ends":           func(_ func(), w *wire) { _ = w.conn.net.Close() },
		"the Locker is being closed": func(_ func(), w *wire) { w.mu.Lock(); w.closed = true; w.mu.Unlock() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			locks, a := advisoryWire(t, db.Pool, nil)
			_ = stall(a.wire)
			first := acquiring(t.Context(), locks, "first")
			queued(t, a.wire, 2)
			if err := a.wire.begin(); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			next := acquiring(ctx, locks, "next")
			queued(t, a.wire, 1)
			if err := a.wire.conn.receive(&a.wire.message); err != nil {
				t.Fatal(err)
			}
			a.wire.answered()
			if len(a.wire.batch) != 1 {
				t.Fatalf("%d calls are under way", len(a.wire.batch))
			}
			<-first
			prepare(cancel, a.wire)
			if name == "its caller has left" {
				<-next
			}
			a.wire.pass()
			if name != "its caller has left" {
				select {
				case <-next:
				case <-time.After(time.Minute):
					t.Fatal("nobody receives the answer")
				}
			}
			for limit := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
				a.wire.mu.Lock()
				rests := !a.wire.led || a.wire.idle
				a.wire.mu.Unlock()
				if rests {
					break
				}
				if time.Now().After(limit) {
					t.Fatal("the lead is not given back")
				}
			}
			if name == "its caller has left" {
				if lock, err := locks.TryAcquire(t.Context(), "next"); err != nil {
					t.Error(err)
				} else if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
				var held []int64
				if err := db.Pool.QueryRow(t.Context(), "select array_agg((classid::bigint << 32) | objid::bigint) from pg_locks where locktype='advisory' and granted and database=(select oid from pg_database where datname=current_database())").Scan(&held); err != nil || slices.Contains(held, AdvisoryID("next")) || !slices.Contains(held, AdvisoryID("first")) {
					t.Errorf("the server has %d, and first is %d, next is %d; %v", held, AdvisoryID("first"), AdvisoryID("next"), err)
				}
			}
			if name == "the Locker is being closed" {
				select {
				case <-a.wire.gone:
				case <-time.After(time.Minute):
					t.Error("the connection stays")
				}
			}
		})
	}
}

// What the answer may still bring to a caller that left is not returned to it.
func TestACallThatIsLeftReturnsNoLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	_, a := advisoryWire(t, db.Pool, nil)
	_ = stall(a.wire)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan []attempt)
	go func() { got <- a.try(ctx, []string{"k"}, a.options()) }()
	queued(t, a.wire, 2)
	if err := a.wire.begin(); err != nil {
		t.Fatal(err)
	}
	cancel()
	attempts := <-got
	if len(attempts) != 1 || attempts[0].lock != nil || !errors.Is(attempts[0].err, context.Canceled) {
		t.Errorf("%v", attempts)
	}
	if err := a.wire.conn.receive(&a.wire.message); err != nil {
		t.Fatal(err)
	}
	a.wire.answered()
	a.wire.pass()
}

// An answerCounter counts the answers that have been taken in wholly.
type answerCounter struct{ answers atomic.Int64 }

func (a *answerCounter) answered(bool, time.Duration) {
	runtime.Gosched()
	a.answers.Add(1)
}

// Who led when the connection broke waits like everybody else from then on: what
// somebody else settles for it is complete when it returns.
func TestWhoHasHandedTheLeadOnWaitsForTheWholeAnswer(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for range 5000 {
		w := &wire{clock: clock.System, connect: func() (*lockConn, error) { return nil, refused }, led: true}
		answers := &answerCounter{}
		c := &lockCall{ctx: t.Context(), asker: answers}
		c.state.Store(callLeads)
		w.queue = append(w.queue, c)
		if !w.await(c, true) {
			t.Fatal("it left, and nothing had ended")
		}
		if answers.answers.Load() != 1 || !errors.Is(c.err, refused) {
			t.Fatalf("it returned after %d answers: %v", answers.answers.Load(), c.err)
		}
	}
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

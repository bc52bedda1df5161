package pgxlock

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// These tests cover the end of a lock session, and the answers that callers who share the
// session read for each other.

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
	for _, got := range []tried{<-first, <-next} { // the grant of the first came too late, so that it has asked again
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
	for _, c := range []<-chan tried{first, next, last} {
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
func TestRoundTripInFlightIsReceivedWithoutFurtherCalls(t *testing.T) {
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

// An answerCounter counts the answers that have been taken in wholly.
type answerCounter struct{ answers atomic.Int64 }

func (a *answerCounter) answered(bool, time.Duration) {
	runtime.Gosched()
	a.answers.Add(1)
}

// Who led when the connection broke waits like everybody else from then on: what
// somebody else settles for it is complete when it returns.
func TestFormerLeaderWaitsForTheWholeAnswer(t *testing.T) {
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

func TestCallerThatJoinsALockBeingLostGetsOneOfTheNextSession(t *testing.T) {
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

// A server that stops at once says why in a warning, and then nothing more.
func TestTheLastWarningOfAServerIsWhyTheSessionEnded(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"57P01", "57P02", "57P04", "57P05", "25P03", "25P04"} {
		for name, read := range map[string]func(*lockConn) error{
			"idle":               (*lockConn).listen,
			"during an exchange": func(c *lockConn) error { return c.receive(&message{}) },
		} {
			client, server := net.Pipe()
			go func() {
				backend := pgproto3.NewBackend(server, server)
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: "01000", Message: "something else"})
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: code, Message: "terminating connection"})
				_ = backend.Flush()
				_ = server.Close()
			}()
			err := read(&lockConn{net: client, frontend: pgproto3.NewFrontend(client, client)})
			if warning, ok := errors.AsType[*pgconn.PgError](err); !ok || warning.Code != code {
				t.Errorf("%s: %v, want SQLSTATE %s", name, err, code)
			}
			_ = client.Close()
		}
	}
}

package advisory

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
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The next message is not sent to a session that the server may have ended meanwhile:
// its answer would never come.
func TestSessionThatWasSilentTooLongBeforeTheNextMessageIsGivenUpAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var later atomic.Int64
	p := newProcess(t, db.Pool, Config{TTL: time.Minute}, func() time.Duration { return clock.System() + time.Duration(later.Load()) })
	warm, err := p.acquire(t.Context(), "warm", hold.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	first := acquiring(t.Context(), p, "first", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	next := acquiring(t.Context(), p, "next", hold.Exclusive)
	queued(t, p.mux, 1)
	receive(t, p.mux)
	later.Store(int64(time.Minute)) // the process was frozen
	session := p.session
	p.mux.answered()
	if !errors.Is(warm.Err(), lockerr.ErrLost) {
		t.Errorf("what it held: %v", warm.Err())
	}
	p.mux.pass()
	for _, got := range []tried{<-first, <-next} { // the grant of the first came too late, so that it has asked again
		if got.err != nil {
			t.Fatal(got.err)
		}
		if err := got.lock.release(); err != nil {
			t.Error(err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == session {
		t.Error("it is the same session")
	}
}

// A leader that hands the lead on leaves the answer in flight to one of the callers that it is for.
func TestAnswerUnderWayIsReadByOneOfThoseItIsFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	first := acquiring(t.Context(), p, "first", hold.Exclusive)
	queued(t, p.mux, 2)
	send(t, p.mux)
	next := acquiring(t.Context(), p, "next", hold.Exclusive)
	queued(t, p.mux, 1)
	receive(t, p.mux)
	p.mux.answered()
	if len(p.mux.batch) != 1 {
		t.Fatalf("%d calls are in flight", len(p.mux.batch))
	}
	own := p.mux.batch[0]
	last := acquiring(t.Context(), p, "last", hold.Exclusive)
	queued(t, p.mux, 1)
	w := &signalledReader{Reader: p.mux.conn.net, blocked: make(chan struct{})}
	p.mux.conn.frontend = pgproto3.NewFrontend(w, p.mux.conn.net)
	p.mux.pass()
	p.mux.mu.Lock()
	leader := p.mux.leader
	p.mux.mu.Unlock()
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

// A round trip is in flight, and no call is queued, when the lead is handed on.
func TestRoundTripInFlightIsReceivedWithoutFurtherCalls(t *testing.T) {
	t.Parallel()
	for name, prepare := range rows(map[string]func(cancel func(), m *mux){
		"its caller waits":           func(func(), *mux) {},
		"its caller has left":        func(cancel func(), _ *mux) { cancel() },
		"the session ends":           func(_ func(), m *mux) { _ = m.conn.net.Close() },
		"the Locker is being closed": func(_ func(), m *mux) { m.mu.Lock(); m.closed = true; m.mu.Unlock() },
	}, "its caller waits", "its caller has left") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			p := connected(t, db.Pool, Config{})
			_ = stall(p.mux)
			first := acquiring(t.Context(), p, "first", hold.Exclusive)
			queued(t, p.mux, 2)
			send(t, p.mux)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			next := acquiring(ctx, p, "next", hold.Exclusive)
			queued(t, p.mux, 1)
			receive(t, p.mux)
			p.mux.answered()
			if len(p.mux.batch) != 1 {
				t.Fatalf("%d calls are in flight", len(p.mux.batch))
			}
			<-first
			prepare(cancel, p.mux)
			if name == "its caller has left" {
				<-next
			}
			p.mux.pass()
			if name != "its caller has left" {
				pgtest.Receive(t, "the answer", next)
			}
			pgtest.Until(t, "there is no leader any more", func() bool {
				p.mux.mu.Lock()
				defer p.mux.mu.Unlock()
				return !p.mux.led || p.mux.idle
			})
			if name == "its caller has left" {
				if lock, err := p.try(t.Context(), "next", hold.Exclusive); err != nil {
					t.Error(err)
				} else if err := lock.release(); err != nil {
					t.Error(err)
				}
				var held []int64
				if err := db.Pool.QueryRow(t.Context(), "select array_agg((classid::bigint << 32) | objid::bigint) from pg_locks where locktype='advisory' and granted and database=(select oid from pg_database where datname=current_database())").Scan(&held); err != nil || slices.Contains(held, numberOf("next")) || !slices.Contains(held, numberOf("first")) {
					t.Errorf("the server has %d, and first is %d, next is %d; %v", held, numberOf("first"), numberOf("next"), err)
				}
			}
			if name == "the Locker is being closed" {
				pgtest.Receive(t, "the end of the connection", p.mux.gone)
			}
		})
	}
}

// An answerCounter counts the answers that were processed to the end.
type answerCounter struct{ answers atomic.Int64 }

func (a *answerCounter) answered(bool, instant) {
	runtime.Gosched()
	a.answers.Add(1)
}

// A caller that led when the connection broke waits like the others from then on: what another
// leader settles for it is complete when it returns.
func TestFormerLeaderWaitsForTheWholeAnswer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	refused := errors.New("refused")
	for range 5000 {
		m := &mux{clock: clock.System, connect: func(context.Context) (*session, error) { return nil, refused }, led: true}
		answers := &answerCounter{}
		c := &call{ctx: t.Context(), asker: answers}
		c.state.Store(callLeads)
		m.queue = append(m.queue, c)
		if !m.await(c, true) {
			t.Fatal("it left, and nothing had ended")
		}
		if answers.answers.Load() != 1 || !errors.Is(c.err, refused) {
			t.Fatalf("it returned after %d answers: %v", answers.answers.Load(), c.err)
		}
	}
}

func TestLossIsToldBeforeTheServerHearsOfIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	lock, err := p.acquire(t.Context(), "k", hold.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	conn, lost, notified := p.mux.conn.conn, p.mux.lost, false
	p.mux.lost = func(why error) {
		p.mux.lost = lost
		lost(why)
		notified = true
		if conn.IsClosed() {
			t.Error("others could have been granted the lock while it was believed in")
		}
	}
	p.mux.end(errSilentTooLong)
	p.mux.pass()
	if !notified || !errors.Is(lock.Err(), lockerr.ErrLost) {
		t.Errorf("notified: %t; %v", notified, lock.Err())
	}
}

func TestCallerThatJoinsALockBeingLostGetsOneOfTheNextSession(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	first, err := p.acquire(t.Context(), "k", hold.Shared)
	if err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	joined := trying(t.Context(), p, "k", hold.Shared)
	queued(t, p.mux, 2)
	lost := p.mux.lost
	p.mux.lost = func(why error) {
		p.mux.lost = lost
		lost(why)
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.held) != 0 {
			t.Error("a later caller could join a lock that no session has")
		}
	}
	p.mux.end(errSilentTooLong)
	p.mux.pass()
	got := <-joined
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.Err(); err != nil || !errors.Is(first.Err(), lockerr.ErrLost) {
		t.Errorf("the first: %v; the one that joined: %v", first.Err(), err)
	}
	if err := got.lock.release(); err != nil {
		t.Error(err)
	}
}

// The request for the other lock must not be granted alone in the next session.
func TestRequestThatJoinsALockBeingLostIsMadeWhollyInTheNextSession(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	if _, err := p.acquire(t.Context(), "k", hold.Shared); err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	joined := make(chan error, 1)
	go func() { joined <- p.tryAll(t.Context(), []string{"k", "other"}, hold.Shared) }()
	queued(t, p.mux, 2)
	p.mux.end(errSilentTooLong)
	p.mux.pass()
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// The next message is sent before callers receive the answers to the one before.
func TestGrantWhoseSessionEndsBeforeItIsToldIsLostOrAskedForAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	_ = stall(p.mux)
	granted := acquiring(t.Context(), p, "granted", hold.Exclusive)
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil || len(p.mux.batch) != 2 {
		t.Fatalf("%d calls were sent: %v", len(p.mux.batch), err)
	}
	next := acquiring(t.Context(), p, "next", hold.Exclusive)
	queued(t, p.mux, 1)
	receive(t, p.mux)
	if err := p.mux.conn.net.Close(); err != nil {
		t.Fatal(err)
	}
	p.mux.answered()
	p.mux.pass()
	// The call saw the grant before the loss, or it has a lock of the next session.
	if got := <-granted; got.err != nil {
		t.Error(got.err)
	} else if err := got.lock.release(); err != nil && !errors.Is(err, lockerr.ErrLost) {
		t.Error(err)
	}
	got := <-next
	if got.err != nil {
		t.Fatal(got.err)
	}
	if err := got.lock.release(); err != nil {
		t.Error(err)
	}
}

// The release of one of several shared holds releases nothing on the server, so that only the
// session shows the loss.
func TestReleaseWhileTheLossIsBeingToldSaysSo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	shared, err := p.acquire(t.Context(), "k", hold.Shared)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.acquire(t.Context(), "k", hold.Shared); err != nil {
		t.Fatal(err)
	}
	_ = stall(p.mux)
	lost, released := p.mux.lost, make(chan error, 1)
	p.mux.lost = func(why error) {
		p.mux.lost = lost
		p.mux.mu.Lock()
		before := len(p.mux.queue)
		p.mux.mu.Unlock()
		go func() { released <- shared.release() }()
		queued(t, p.mux, before+1)
		lost(why)
	}
	p.mux.end(errSilentTooLong)
	p.mux.pass()
	if err := <-released; !errors.Is(err, lockerr.ErrLost) {
		t.Errorf("Release: %v", err)
	}
}

func TestCloseThatGivesUpEndsTheSessionAndItsHoldsAreLost(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{TTL: -1})
	lock, err := p.acquire(t.Context(), "k", hold.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.Close(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Close: %v", err)
	}
	<-p.mux.gone
	if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) {
		t.Errorf("the session has ended, and of the lock it says %v", err)
	}
}

// The server counts from the last statement that set the session up.
func TestSessionThatTookLongToMakeIsNotSilent(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var slow atomic.Int64
	now := func() time.Duration { return clock.System() + time.Duration(slow.Load()) }
	p := newProcess(t, db.Pool, Config{TTL: time.Minute}, now)
	p.mux.connect = func(ctx context.Context) (*session, error) {
		slow.Add(int64(2 * time.Minute))
		return p.connect(ctx)
	}
	lock, err := p.acquire(t.Context(), "k", hold.Exclusive)
	if err == nil {
		err = errors.Join(lock.release(), p.Close(t.Context()))
	}
	if err != nil {
		t.Error(err)
	}
}

// A server that stops immediately says why in a warning, and sends nothing after it.
func TestLastWarningOfAServerIsWhyTheSessionEnded(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"57P01", "57P02", "57P04", "57P05", "25P03", "25P04"} {
		for name, read := range map[string]func(*session) error{
			"idle":               (*session).listen,
			"during an exchange": func(c *session) error { return c.receive(&message{}) },
		} {
			client, server := net.Pipe()
			go func() {
				backend := pgproto3.NewBackend(server, server)
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: "01000", Message: "something else"})
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: code, Message: "terminating connection"})
				_ = backend.Flush()
				_ = server.Close()
			}()
			err := read(&session{net: client, frontend: pgproto3.NewFrontend(client, client)})
			if warning, ok := errors.AsType[*pgconn.PgError](err); !ok || warning.Code != code {
				t.Errorf("%s: %v, want SQLSTATE %s", name, err, code)
			}
			_ = client.Close()
		}
	}
}

// A pipe returns a session whose server sends the messages, and then ends the connection.
func pipe(t *testing.T, messages ...pgproto3.BackendMessage) *session {
	t.Helper()
	client, server := net.Pipe()
	t.Cleanup(func() { _ = client.Close() })
	go func() {
		backend := pgproto3.NewBackend(server, server)
		for _, m := range messages {
			backend.Send(m)
		}
		_ = backend.Flush()
		_ = server.Close()
	}()
	return &session{net: client, frontend: pgproto3.NewFrontend(client, client)}
}

func TestLastErrorOfAServerIsWhyTheSessionEnded(t *testing.T) {
	t.Parallel()
	ended := &pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}
	for name, read := range map[string]func(*session) error{
		"idle":               (*session).listen,
		"during an exchange": func(c *session) error { return c.receive(&message{parts: 1}) },
	} {
		if err := read(pipe(t, ended)); lockerr.SQLState(err) != "57P01" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFirstErrorOfSeveralCallsIsWhyTheirMessageFailed(t *testing.T) {
	t.Parallel()
	ready := &pgproto3.ReadyForQuery{TxStatus: 'I'}
	failure := func(code string) pgproto3.BackendMessage {
		return &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code}
	}
	m := message{batch: true, asked: 3, parts: 3}
	err := pipe(t, failure("53200"), ready, &pgproto3.FunctionCallResponse{Result: []byte{1}}, ready, failure("57014"), ready).receive(&m)
	failed, ended := m.verdict()
	if err != nil || ended != nil || lockerr.SQLState(failed) != "53200" {
		t.Errorf("%v, %v, %v", err, ended, failed)
	}
}

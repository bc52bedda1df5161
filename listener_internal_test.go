package pgxlock

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// warnings counts what is logged.
type warnings struct {
	slog.Handler
	n *atomic.Int32
}

func (w warnings) Handle(context.Context, slog.Record) error { w.n.Add(1); return nil }
func (w warnings) Enabled(context.Context, slog.Level) bool  { return true }

func TestAListenerThatFailsIsNotTriedByEachOfManyShortWaits(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	var dialed, logged atomic.Int32
	config.MaxConnIdleTime = 0
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		dialed.Add(1)
		return errors.New("too many connections")
	}
	l := newLocker(KindLease, clock.System, clock.DefaultBackoff, slog.New(warnings{n: &logged}))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", runs(func(dbconn.Exchange) error { return ErrClosed }), nil, dbconn.Dialer{Config: config})
	l.queue = q
	for range 200 {
		p := l.lines.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive)
		q.stand(p.line)
		p.leave()
		// Long enough for a listener that ends when it is not needed, although it failed.
		for limit := time.Now().Add(2 * time.Millisecond); q.listener.work.Busy() && time.Now().Before(limit); {
			time.Sleep(100 * time.Microsecond)
		}
	}
	if n := dialed.Load(); n > 20 {
		t.Errorf("200 waits connected %d times", n)
	}
	if n := logged.Load(); n != 1 {
		t.Errorf("that it fails was logged %d times", n)
	}
	q.listener.stop()
}

func TestAListenerThatWasNeededBetweenItsLooksIsNotIdle(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConnIdleTime = time.Hour
	l := newLocker(KindLease, clock.System, clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", runs(func(dbconn.Exchange) error { return ErrClosed }), nil, dbconn.Dialer{Config: config})
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens
	listener.needed = time.Now().Add(-2 * time.Hour)
	p := l.lines.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive)
	q.stand(p.line)
	p.leave()
	if listener.idle() {
		t.Error("it is idle, although a call has just waited")
	}
}

func TestAListenerLooksWhetherLeadersWereAskedToStepDownWhileItDidNotListen(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	l, err := NewLeaseLocker(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	looked := make(chan struct{}, 10)
	l.queue.leaders = lookers{l.queue.leaders, looked}
	if err := l.Lead(t.Context(), "k", func(context.Context, *Lock) error {
		select {
		case <-looked:
		case <-time.After(time.Minute):
			t.Error("it listens, and has not looked")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// lookers count how often leaders are made to look.
type lookers struct {
	leaders
	looked chan<- struct{}
}

func (l lookers) look() { l.looked <- struct{}{} }

func TestAListenerEndsOnlyIfNothingNeedsItAndNothingAskedMeanwhile(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConnIdleTime = 0
	l := newLocker(KindLease, clock.System, clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", runs(func(dbconn.Exchange) error { return ErrClosed }), nil, dbconn.Dialer{Config: config})
	l.queue = q
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens

	needs := map[string]struct{ begin, end func() }{
		"a ticket": func() struct{ begin, end func() } {
			var p *waiter
			return struct{ begin, end func() }{
				func() { p = l.lines.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive); q.stand(p.line) },
				func() { p.leave() },
			}
		}(),
		"a leader": func() struct{ begin, end func() } {
			lock := l.newLock("k")
			return struct{ begin, end func() }{
				func() { l.leading.begin(lock, func(error) {}) },
				func() { l.leading.end(lock) },
			}
		}(),
		"a lock session": {func() { listener.listenFor(7) }, func() { listener.listenFor(0) }},
	}
	for name, need := range needs {
		need.begin()
		if listener.idle() {
			t.Errorf("%s: the listener is idle", name)
		}
		need.end()
		if !listener.idle() {
			t.Errorf("%s: it is over, and the listener not idle", name)
		}
		need.begin() // after the look
		if listener.ends() {
			t.Errorf("%s: the listener ends although it was asked to run", name)
		}
		need.end()
		listener.running = true
		if !listener.idle() || !listener.ends() {
			t.Errorf("%s: the listener does not end", name)
		}
		listener.running = true
	}
	l.leading.stop()
	listener.cancel()
	listener.running = false
	listener.start()
	if listener.running {
		t.Error("a listener that was stopped starts again")
	}
}

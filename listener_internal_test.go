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
	l := newLocker(KindLease, clock.System, defaultBackoff, slog.New(warnings{n: &logged}))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", func(dbconn.Exchange) error { return ErrClosed }, func() bool { return true }, dbconn.Dialer{Config: config})
	l.queue = q
	for range 200 {
		p := l.lines.join(lockkey.Name{Key: "k"}, &busyError{}, nil, Exclusive)
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
	l := newLocker(KindLease, clock.System, defaultBackoff, slog.New(slog.DiscardHandler))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", func(dbconn.Exchange) error { return ErrClosed }, func() bool { return true }, dbconn.Dialer{Config: config})
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens
	listener.needed = time.Now().Add(-2 * time.Hour)
	p := l.lines.join(lockkey.Name{Key: "k"}, &busyError{}, nil, Exclusive)
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
	l.queue.stepDown = func() { looked <- struct{}{} }
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

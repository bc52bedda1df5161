package pgxlock

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestAListenerEndsOnlyIfNothingNeedsItAndNothingAskedMeanwhile(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConnIdleTime = 0
	l := newLocker(KindLease, clock.System, defaultBackoff, slog.New(slog.DiscardHandler))
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", func(dbconn.Exchange) error { return ErrClosed }, func() bool { return true }, dbconn.Dialer{Config: config})
	l.queue = q
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens

	needs := map[string]struct{ begin, end func() }{
		"a ticket": func() struct{ begin, end func() } {
			var p *waiter
			return struct{ begin, end func() }{
				func() { p = l.lines.join(lockkey.Name{Key: "k"}, &busyError{}, nil, Exclusive); q.stand(p.line) },
				func() { p.leave() },
			}
		}(),
		"a leader": func() struct{ begin, end func() } {
			lock := l.newLock("k", "me", time.Minute, time.Second)
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

func TestARequestLeavesTimeForARenewalOnTheSameConnection(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	const ttl = 2 * time.Second
	for _, one := range []bool{true, false} {
		l, err := NewLeaseLocker(db.Pool, &LeaseConfig{TTL: ttl, OneConnection: one})
		if err != nil {
			t.Fatal(err)
		}
		table := l.backend.(*leaseTable)
		lock, err := l.Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		var within time.Duration
		if err := table.request(func(ctx context.Context, _ dbconn.Querier, _ bool) error {
			deadline, _ := ctx.Deadline()
			within = time.Until(deadline)
			return nil
		}); err != nil {
			t.Error(err)
		}
		if one && within > ttl/2 {
			t.Errorf("a request may take %s beside leases of %s", within, ttl)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestARenewalGoesBeforeRequestsThatWaitForTheSameConnection(t *testing.T) {
	t.Parallel()
	l, err := NewLeaseLocker(pgtest.New(t).Pool, &LeaseConfig{OneConnection: true})
	if err != nil {
		t.Fatal(err)
	}
	table := l.backend.(*leaseTable)
	table.place.Schema = "s" // nothing of it is asked
	var exchanges sync.WaitGroup
	order := make(chan string, 10)
	exchange := func(run func(dbconn.Exchange) error, name string, before func()) {
		exchanges.Go(func() {
			if err := run(func(context.Context, dbconn.Querier, bool) error {
				before()
				order <- name
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	begun, finish := make(chan struct{}), make(chan struct{})
	exchange(table.request, "under way", func() { close(begun); <-finish })
	<-begun
	for range 4 {
		exchange(table.request, "request", func() {})
	}
	for range 100 {
		runtime.Gosched() // so that most of them wait by now
	}
	exchange(table.renewal, "renewal", func() {})
	for table.sharing.TryRLock() { // until it waits
		table.sharing.RUnlock()
		runtime.Gosched()
	}
	close(finish)
	exchanges.Wait()
	if first, second := <-order, <-order; first != "under way" || second != "renewal" {
		t.Errorf("%s, then %s", first, second)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

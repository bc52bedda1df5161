package pgxlock

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The queue of a semaphore has no lease of its own, so that it always looks free: who was
// woken in vain would be woken again and again.
func TestWhoWaitsForAPermitIsLookedAfterOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	config := db.Pool.Config()
	config.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	newLocker := func() *Locker {
		l, err := NewLeaseLocker(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close(context.Background()) })
		return l
	}
	db.Exec(t, "select acquire_permit('jobs', 'all', 1, 600)")
	waker, waiter := newLocker(), newLocker()
	if _, err := waker.Acquire(t.Context(), "else"); err != nil { // knows where all is
		t.Fatal(err)
	}
	s, err := waiter.Semaphore(1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { _, _ = s.Acquire(ctx, "jobs"); close(ended) }()
	for n := 0; n < 1; time.Sleep(time.Millisecond) {
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_waiters where live_until > clock_timestamp()").Scan(&n); err != nil {
			t.Fatal(err)
		}
	}

	q := waker.queue
	name := lockkey.Name{Key: "jobs#"}
	looks := make(chan bool, 100) // whether there will be another
	run := q.waking.Run
	q.waking.Run = func(batch []wakeUp) error {
		err := run(batch)
		q.lines.mu.Lock()
		_, again := q.woken[name]
		q.lines.mu.Unlock()
		looks <- again
		return err
	}
	q.freed([]lockkey.Name{name})
	if again := <-looks; !again {
		t.Error("nobody looks whether who was woken sleeps")
	}
	again := true
	for more := 0; more < 20 && again; more++ { // who is woken after its turn, because this machine is slow, is looked after once more
		again = <-looks
	}
	if again {
		t.Error("it is looked after for ever")
	}
	cancel()
	<-ended
}

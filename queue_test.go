package pgxlock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
)

// What stands in a batch gets one answer, whatever becomes of the batch.

// A renewal whose caller has left and whose lock has ended stands in a batch that
// then gets no answer from the server.
func TestARenewalThatNobodyWaitsForDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	p, db := proxied(t, migrated(t))
	locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Minute})
	a, b := acquire(t, locks, "a"), acquire(t, locks, "b")
	if err := a.Renew(t.Context()); err != nil { // the connection is there
		t.Fatal(err)
	}
	underWay := p.arm(t, holdReply, renewSQL)
	go func() { _ = a.Renew(context.Background()) }()
	underWay.happened(t)
	for _, lock := range []*pgxlock.Lock{b, a} { // both stand in the queue, and their callers leave
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if err := lock.Renew(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
	}
	if err := b.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	lost := p.arm(t, loseReply, renewSQL)
	p.refuse()
	underWay.resume()
	lost.happened(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := a.Renew(ctx); err == nil || ctx.Err() != nil {
		t.Fatalf("while no connection is to be had: %v", err)
	}
	p.heal()
	for {
		if err := a.Renew(ctx); err == nil {
			return
		} else if ctx.Err() != nil {
			t.Fatalf("no renewal gets through a healthy network: %v", err)
		}
	}
}

// A batch is spoilt by one entry, and the server goes away while each is asked
// alone.
func TestAServerThatGoesWhileASpoiltBatchIsTakenApartIsReportedToAll(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	direct.Exec(t, `create function spoil() returns trigger language plpgsql as $$ begin
		if new.lock_name = 'bad' then raise exception 'bad' using errcode = '22023'; end if; return new; end $$;
		create trigger spoil before insert on distributed_locks for each row execute function spoil()`)
	p, db := proxied(t, direct)
	locks := newLocker(t, db, nil)
	if err := acquire(t, locks, "k").Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	batch := p.arm(t, holdReply, acquireSQL)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := locks.AcquireAll(ctx, []string{"bad", "k", "other"})
		done <- err
	}()
	batch.happened(t)
	p.refuse()
	alone := p.arm(t, loseReply, acquireSQL)
	batch.resume()
	alone.happened(t)
	if err := <-done; err == nil || ctx.Err() != nil {
		t.Errorf("an entry got no answer: %v", err)
	}
}

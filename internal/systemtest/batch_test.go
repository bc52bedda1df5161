package systemtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What stands in a batch gets one answer, whatever becomes of the batch.

// A renewal whose caller has left and whose lock has ended stands in a batch that
// then gets no answer from the server.
func TestRenewalThatNobodyWaitsForDoesNotStopTheOthers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p, db := testkit.Proxied(t, testkit.Migrated(t))
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Minute})
	a, b := testkit.Acquire(t, locks, "a"), testkit.Acquire(t, locks, "b")
	if err := a.Renew(t.Context()); err != nil { // the connection is there
		t.Fatal(err)
	}
	underWay := p.Arm(t, testkit.HoldReply, renewSQL)
	go func() { _ = a.Renew(context.Background()) }()
	underWay.Happened(t)
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
	lost := p.Arm(t, testkit.LoseReply, renewSQL)
	p.Refuse()
	underWay.Resume()
	lost.Happened(t)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience)
	defer cancel()
	if err := a.Renew(ctx); err == nil || ctx.Err() != nil {
		t.Fatalf("while no connection is to be had: %v", err)
	}
	p.Heal()
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
func TestServerThatGoesWhileASpoiltBatchIsTakenApartIsReportedToAll(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	direct := testkit.Migrated(t)
	direct.Exec(t, `create function spoil() returns trigger language plpgsql as $$ begin
		if new.lock_name = 'bad' then raise exception 'bad' using errcode = '22023'; end if; return new; end $$;
		create trigger spoil before insert on distributed_locks for each row execute function spoil()`)
	p, db := testkit.Proxied(t, direct)
	locks := testkit.NewLocker(t, db, nil)
	if err := testkit.Acquire(t, locks, "k").Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	batch := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := locks.AcquireAll(ctx, []string{"bad", "k", "other"})
		done <- err
	}()
	batch.Happened(t)
	p.Refuse()
	alone := p.Arm(t, testkit.LoseReply, testkit.AcquireSQL)
	batch.Resume()
	alone.Happened(t)
	if err := <-done; err == nil || ctx.Err() != nil {
		t.Errorf("an entry got no answer: %v", err)
	}
}

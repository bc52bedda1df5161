package lease

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
)

// countGrants makes the database count the leases that it grants.
func (db batchDB) countGrants(t *testing.T) {
	t.Helper()
	db.Exec(t, `create table grants (n int);
		create function count_grant() returns trigger language plpgsql as $$ begin insert into grants values (1); return new; end $$;
		create trigger count_grant after insert on distributed_locks for each row execute function count_grant()`)
}

// wantNoneLeft waits until the Table has released what no caller received: one grant.
func (db batchDB) wantNoneLeft(t *testing.T, table *Table) {
	t.Helper()
	table.flow.wait()
	table.cleaning.Wait()
	var granted int
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from grants").Scan(&granted); err != nil || granted != 1 {
		t.Fatalf("%d leases were granted, want 1: %v", granted, err)
	}
	db.wantHeld(t, "")
}

func TestGrantThatArrivesAfterItsDeadlineIsReleased(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	db.countGrants(t)
	table := db.table(t, db.Pool)
	var now time.Duration
	table.host.Clock = func() time.Duration { now += time.Hour; return now } // the batch reads it before the request and after the answer
	attempts := []hold.Attempt{{Hold: newHold(table, "k")}}
	table.Try(t.Context(), hold.Request{TTL: time.Hour}, attempts)
	if err := attempts[0].Err; !errors.Is(err, hold.ErrLateGrant) {
		t.Errorf("%v, want %v", err, hold.ErrLateGrant)
	}
	db.wantNoneLeft(t, table)
}

func TestGrantWhoseCallerHasLeftIsReleased(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	db.countGrants(t)
	table := db.table(t, db.Pool)
	ctx, leave := context.WithCancelCause(t.Context())
	enough, left := errors.New("enough"), make(chan struct{})
	table.host.Clock = func() time.Duration { // read when the request is about to be sent
		leave(enough)
		<-left
		return clock.System()
	}
	attempts := []hold.Attempt{{Hold: newHold(table, "k")}}
	table.Try(ctx, hold.Request{TTL: time.Hour}, attempts)
	close(left)
	if err := attempts[0].Err; !errors.Is(err, enough) {
		t.Errorf("%v, want %v", err, enough)
	}
	db.wantNoneLeft(t, table)
}

//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// frozenReport is what that process says: once when it holds the lease, and once
// when it knows that it does not.
type frozenReport struct {
	Token     int64
	LastHeld  time.Time // when the last look began that said "held"
	Unsettled []string  // what did not report the loss at once
	Fenced    string    // SQLSTATE of the fence of a zombie that does not look at all
}

// holdUntilLost holds a lease and does nothing but look at it, so that whenever
// it is stopped, a look is the first thing it does afterwards.
func holdUntilLost(ctx context.Context, url, key string, say func(any) error) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Second, Owner: "frozen"})
	if err != nil {
		return err
	}
	lock, err := acquireInTime(ctx, locks, key)
	if err != nil {
		return err
	}
	work, cancel := lock.Context(ctx)
	defer cancel()
	child, cancelChild := context.WithTimeout(work, time.Hour)
	defer cancelChild()
	report := frozenReport{Token: lock.Token()}
	if err := say(report); err != nil {
		return err
	}
	report.LastHeld = lookUntilLost(work)
	for what, err := range map[string]error{
		"cause":       context.Cause(work),
		"child cause": context.Cause(child),
		"Err":         lock.Err(),
		"Renew":       lock.Renew(ctx),
		"Release":     lock.Release(ctx),
		"Fence":       pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return lock.Fence(ctx, tx) }),
	} {
		if !errors.Is(err, pgxlock.ErrLost) {
			report.Unsettled = append(report.Unsettled, fmt.Sprintf("%s: %v", what, err))
		}
	}
	if err := untilTold(); err != nil { // if it was lost before we were stopped, the server may not know yet
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "select assert_lock_held($1, $2, $3, true)", key, lock.Holder(), lock.Token())
		if err == nil {
			_, err = tx.Exec(ctx, "update written set by = 'zombie' where key = $1", key)
		}
		return err
	})
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		report.Fenced = pgErr.Code
	}
	return say(report)
}

// lookUntilLost looks at a lock's context until it ends, and says when the last
// look began that found the lock held.
func lookUntilLost(work context.Context) (last time.Time) {
	for {
		began := time.Now()
		if work.Err() != nil {
			return last
		}
		last = began
	}
}

func TestSoakFrozenHoldersFirstLookSeesTheLoss(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "create table written (key text primary key, by text not null)")
	rounds := pgtest.Soak(t, 1, 60)
	for i := range 4 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			others := testkit.NewLocker(t, db, nil)
			for round := range rounds {
				freezeAndTakeOver(t, db, others, fmt.Sprintf("key:%d:%d", i, round))
			}
		})
	}
}

// freezeAndTakeOver freezes a holder until somebody else has its lease, and then
// asks it what it saw first.
func freezeAndTakeOver(t *testing.T, db *pgtest.DB, others *pgxlock.Locker, key string) {
	t.Helper()
	db.Exec(t, "insert into written values ($1, 'nobody')", key)
	holder := startChild(t, "hold a lease", db.URL, key)
	var held, lost frozenReport
	holder.report(t, &held)

	holder.freeze(t)
	next, err := others.Acquire(t.Context(), key, pgxlock.MaxWait(pgtest.Patience))
	taken := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	if next.Token() <= held.Token {
		t.Errorf("token %d after %d", next.Token(), held.Token)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if err := next.Fence(t.Context(), tx); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), "update written set by = 'next' where key = $1", key)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	holder.thaw(t)
	holder.tell(t)
	holder.report(t, &lost)
	holder.end(t)
	if lost.LastHeld.After(taken) {
		t.Errorf("%s: a look that began %s after somebody else had the lease said that it is held", key, lost.LastHeld.Sub(taken))
	}
	if len(lost.Unsettled) > 0 {
		t.Errorf("after the first look these did not report the loss: %q", lost.Unsettled)
	}
	if lost.Fenced != "LK001" {
		t.Errorf("the zombie's fence ended with SQLSTATE %q, want LK001", lost.Fenced)
	}
	var by string
	if err := db.Pool.QueryRow(t.Context(), "select by from written where key = $1", key).Scan(&by); err != nil || by != "next" {
		t.Errorf("written by %q, want by the next holder: %v", by, err)
	}
	if err := next.Err(); err != nil {
		t.Errorf("what the zombie did cost the next holder its lease: %v", err)
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

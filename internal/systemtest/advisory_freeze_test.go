//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// frozenAdvisory is what the frozen holder of an advisory lock says: once when it
// has it, and once when it knows that it has not.
type frozenAdvisory struct {
	LastHeld  time.Time // when the last look began that said "held"
	Deadline  time.Time // what that look said to believe until
	Unsettled []string  // what did not report the loss at once
}

// holdAdvisoryUntilLost holds a lock and does nothing but look at it, so that
// whenever it is stopped, a look is the first thing it does afterwards.
func holdAdvisoryUntilLost(ttl time.Duration) func(ctx context.Context, url, key string, say func(any) error) error {
	return func(ctx context.Context, url, key string, say func(any) error) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		locks, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{TTL: ttl, Owner: "frozen " + key})
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
		var report frozenAdvisory
		if err := say(report); err != nil {
			return err
		}
		for began := time.Now(); work.Err() == nil; began = time.Now() {
			report.LastHeld = began
			report.Deadline, _ = lock.Deadline()
		}
		for what, err := range map[string]error{
			"cause":       context.Cause(work),
			"child cause": context.Cause(child),
			"Err":         lock.Err(),
			"Renew":       lock.Renew(ctx),
			"Release":     lock.Release(ctx),
		} {
			if !errors.Is(err, pgxlock.ErrLost) {
				report.Unsettled = append(report.Unsettled, fmt.Sprintf("%s: %v", what, err))
			}
		}
		return say(report)
	}
}

// The server ends the session of a process that is stopped, and the process had
// stopped believing in its locks before.
func TestServerFreesTheAdvisoryLocksOfAFrozenProcess(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	soon, late := startChild(t, "hold an advisory lock", db.URL, "soon"), startChild(t, "hold an advisory lock for long", db.URL, "late")
	var held, lost frozenAdvisory
	soon.report(t, &held)
	late.report(t, &held)
	others := testkit.NewAdvisory(t, db, nil)

	soon.freeze(t)
	late.freeze(t)
	if _, err := others.TryAcquire(t.Context(), "late"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("of a process that was stopped just now: %v", err)
	}
	next := testkit.Acquire(t, others, "soon", pgxlock.MaxWait(pgtest.Patience))
	taken := time.Now()
	for _, holder := range []*child{soon, late} {
		holder.thaw(t)
		if holder == late {
			if _, err := others.TryAcquire(t.Context(), "late"); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("of a process that may be silent for longer: %v", err)
			}
			testkit.Terminate(t, db, "frozen late")
		}
		holder.report(t, &lost)
		holder.end(t)
		if len(lost.Unsettled) > 0 {
			t.Errorf("after the first look these did not report the loss: %q", lost.Unsettled)
		}
		if holder == soon && (lost.LastHeld.After(taken) || !lost.Deadline.Before(taken)) {
			t.Errorf("checked at %s, deadline %s, and somebody else had it at %s", lost.LastHeld, lost.Deadline, taken)
		}
	}
	if err := errors.Join(next.Err(), next.Release(t.Context())); err != nil {
		t.Errorf("what the zombie did cost the next holder its lock: %v", err)
	}
}

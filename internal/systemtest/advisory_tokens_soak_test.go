//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// tokenGrants is the table in which workers record each grant, by the server's clock: when
// they had the lock already; and if they fenced a transaction, when that had been done, and
// when it was about to commit.
const tokenGrants = `create table token_grants (key text not null, shared boolean not null, token bigint not null,
	granted timestamptz not null, fenced timestamptz not null, closing timestamptz not null)`

// fenceAdvisoryLocks is a process whose goroutines acquire and fence advisory locks with
// tokens, on two Lockers. key says for how long.
func fenceAdvisoryLocks(ctx context.Context, url, key string, report func(any) error) error {
	duration, err := time.ParseDuration(key)
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	config.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	lockers := make([]*pgxlock.Locker, 2)
	for i := range lockers {
		if lockers[i], err = pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Tokens: true}); err != nil {
			return err
		}
	}
	end := time.Now().Add(duration)
	working, stop := context.WithTimeout(ctx, duration+pgtest.Patience) // one that fails leaves its lock to Close
	defer stop()
	var workers sync.WaitGroup
	errs := make([]error, 8*len(lockers))
	for i := range errs {
		workers.Go(func() {
			for errs[i] == nil && time.Now().Before(end) {
				if errs[i] = fenceOneAdvisoryLock(working, pool, lockers[i%len(lockers)]); errs[i] != nil {
					stop()
				}
			}
		})
	}
	workers.Wait()
	for _, locks := range lockers {
		errs = append(errs, locks.Close(ctx))
	}
	return errors.Join(append(errs, report(true))...)
}

// fenceOneAdvisoryLock acquires one of a few keys in some way, records that, and releases.
func fenceOneAdvisoryLock(ctx context.Context, pool *pgxpool.Pool, locks *pgxlock.Locker) error {
	key, mode := fmt.Sprint("k", rand.IntN(6)), pgxlock.Exclusive
	if rand.IntN(3) == 0 {
		mode = pgxlock.Shared
	}
	opts := []pgxlock.AcquireOption{mode}
	if rand.IntN(3) == 0 {
		opts = append(opts, pgxlock.NoWait)
	}
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	if rand.IntN(4) == 0 {
		time.AfterFunc(time.Duration(rand.Int64N(int64(5*time.Millisecond))), cancel)
	}
	lock, err := locks.Acquire(wait, key, opts...)
	if errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrUnavailable) {
		return nil // the last is where a machine is too busy to connect in time
	}
	if err != nil {
		return err
	}
	release := func() error {
		if err := lock.Release(ctx); err != nil {
			return fmt.Errorf("a release: %w", err)
		}
		return nil
	}
	if lock.Token() <= 0 {
		return fmt.Errorf("a lock of mode %v has token %d", mode, lock.Token())
	}
	if rand.IntN(2) == 0 {
		return release()
	}
	early := rand.IntN(2) == 0 // the lock is released while the transaction is open
	var released chan error
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := lock.Fence(ctx, tx); err != nil {
			return fmt.Errorf("a healthy holder's fence: %w", err)
		}
		if early {
			released = make(chan error, 1)
			go func() { released <- release() }()
		}
		var fenced time.Time
		if err := tx.QueryRow(ctx, "select clock_timestamp()").Scan(&fenced); err != nil {
			return err
		}
		time.Sleep(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
		_, err := tx.Exec(ctx, "insert into token_grants values ($1, $2, $3, now(), $4, clock_timestamp())", key, mode == pgxlock.Shared, lock.Token(), fenced)
		return err
	})
	if released != nil {
		return errors.Join(err, <-released)
	}
	return errors.Join(err, release())
}

// Of every lock with a token, whichever of many goroutines, Lockers and processes asks for
// it and in whatever way.
func TestSoakAdvisoryTokensGrowAndNoGrantComesBesideAnOpenFence(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, tokenGrants)
	duration := pgtest.Soak(t, 2*time.Second, 30*time.Second).String()
	modes := 0
	for try := 0; try < 10 && modes < 2 && !t.Failed(); try++ { // a slow machine may not get to both
		var processes []*child
		for range 2 {
			processes = append(processes, startChild(t, "fence advisory locks", db.URL, duration))
		}
		if err := fenceAdvisoryLocks(t.Context(), db.URL, duration, func(any) error { return nil }); err != nil {
			t.Error(err)
		}
		for _, p := range processes {
			p.end(t)
		}
		modes = testkit.Query[int](t, db, "select count(distinct shared) from token_grants")
	}
	for what, condition := range map[string]string{
		"tokens that are not greater than an earlier holder's": "a.granted < b.granted and not (a.shared and b.shared) and a.token >= b.token",
		"grants beside an open fenced transaction":             "a.fenced < b.granted and b.granted < a.closing and not (a.shared and b.shared) and a.ctid <> b.ctid",
	} {
		if n := testkit.Query[int](t, db, "select count(*) from token_grants a join token_grants b using (key) where "+condition); n > 0 {
			t.Errorf("%d %s", n, what)
		}
	}
	if modes != 2 {
		t.Error("not both shared locks and exclusive ones were fenced")
	}
	t.Logf("%d fenced transactions", testkit.Query[int](t, db, "select count(*) from token_grants"))
}

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

// maintenance is the database from which others are made.
const maintenance = "postgres"

// A stage is what the ways of one row work on.
type stage struct {
	server   *pgserver.Server
	workers  int
	pools    []*pgxpool.Pool
	daemons  map[*daemon]string // their directories
	pids     map[*daemon]int
	cleanups []func() error
}

// cleanup has f called after the row, the last one first.
func (s *stage) cleanup(f func() error) { s.cleanups = append(s.cleanups, f) }

func newStage(server *pgserver.Server, workers int) *stage {
	return &stage{server: server, workers: workers, daemons: make(map[*daemon]string), pids: make(map[*daemon]int)}
}

// way is one that asks PostgreSQL.
func (s *stage) way(name string, do op) way {
	w := way{name: name, op: do}
	if s.server != nil {
		w.server = s.server.PID()
	}
	return w
}

func (s *stage) clear() error {
	var errs []error
	for len(s.cleanups) > 0 {
		last := len(s.cleanups) - 1
		errs = append(errs, s.cleanups[last]())
		s.cleanups = s.cleanups[:last]
	}
	return errors.Join(errs...)
}

// database makes a new database and returns a pool on it, with a connection for
// each worker, so that none waits for another's. A row that used the tables of an
// earlier one would be measured on their bloat, and on the plans that go with it.
func (s *stage) database(ctx context.Context) (*pgxpool.Pool, error) {
	return s.databaseAt(ctx, s.server.URL)
}

// databaseAt is as database, at the address that url gives for its name.
func (s *stage) databaseAt(ctx context.Context, url func(name string) string) (*pgxpool.Pool, error) {
	name := "bench_" + strings.ToLower(rand.Text())
	admin, err := pgx.Connect(ctx, s.server.URL(maintenance))
	if err != nil {
		return nil, err
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(url(name))
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(s.workers)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	s.pools = append(s.pools, pool)
	s.cleanup(func() error { pool.Close(); return nil })
	return pool, nil
}

// settle does in the row's databases what autovacuum would do within a minute or
// two: plans depend on it, and a row must not depend on when it comes.
func (s *stage) settle(ctx context.Context) error {
	for _, pool := range s.pools {
		if _, err := pool.Exec(ctx, "VACUUM (ANALYZE)"); err != nil {
			return err
		}
	}
	return nil
}

// installed returns a new database with pgxlock and what setup makes there.
func (s *stage) installed(ctx context.Context, setup string) (*pgxpool.Pool, error) {
	pool, err := s.database(ctx)
	if err != nil {
		return nil, err
	}
	if err := migrations.Up(ctx, pool, nil); err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, setup)
	return pool, err
}

// locker returns a Locker, closed after the row.
func (s *stage) locker(pool *pgxpool.Pool, cfg *pgxlock.LeaseConfig) (*pgxlock.Locker, error) {
	locks, err := pgxlock.NewLeaseLocker(pool, cfg)
	if err != nil {
		return nil, err
	}
	return s.closing(locks), nil
}

// closing has a Locker closed after the row.
func (s *stage) closing(locks *pgxlock.Locker) *pgxlock.Locker {
	s.cleanup(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
		defer cancel()
		return locks.Close(ctx)
	})
	return locks
}

// names returns a name for each worker.
func (s *stage) names(prefix string) []string {
	names := make([]string, s.workers)
	for worker := range names {
		names[worker] = fmt.Sprintf("%s:%d", prefix, worker)
	}
	return names
}

// inTx is an op of one transaction, from begin to commit.
func inTx(pool *pgxpool.Pool, do func(ctx context.Context, tx pgx.Tx, worker int) error) op {
	return whole(func(ctx context.Context, worker int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return do(ctx, tx, worker) })
	})
}

// calls is an op of n calls in a transaction, which does not count. It is rolled
// back: a commit that waits for the disk on one side only would give the calls of
// the other workers more of the processors there.
func calls(pool *pgxpool.Pool, n int, call func(ctx context.Context, tx pgx.Tx, worker, i int) error) op {
	return func(ctx context.Context, worker int) (int, time.Duration, error) {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return 0, 0, err
		}
		defer tx.Rollback(ctx)
		begun := time.Now()
		for i := range n {
			if err := call(ctx, tx, worker, i); err != nil {
				return 0, 0, err
			}
		}
		took := time.Since(begun)
		return n, took, tx.Rollback(ctx)
	}
}
